"""Fixtures of the analysis tests: sites, a model, and databases with the application's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from apps.analysis.settings import Settings
from apps.analysis.tests import world
from apps.standins.internet import Internet
from apps.standins.model import Model
from databases import Db


@pytest.fixture
def net() -> Iterator[Internet]:
    """An internet in which every host is a shop; a test names those that are not."""
    with Internet(default=lambda request: world.page(request.host)(request)) as net:
        yield net


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as model:
        yield model


@pytest.fixture
def settings(net: Internet, model: Model) -> Settings:
    return world.settings_of(net, model)


@pytest.fixture(params=["sqlite", "postgresql"])
def jobs(request: pytest.FixtureRequest, fresh: Callable[[str], Db]) -> Db:
    """A database with the tables, once of each kind."""
    made = fresh(request.param)
    world.create(made)
    return made


@pytest.fixture
def pg_jobs(pg: Db) -> Db:
    world.create(pg)
    return pg
