"""Fixtures: ``db`` runs a test on both databases, ``pg`` and ``lite`` on one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databases import Db, Server

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The session's PostgreSQL. Never stop this one: a test of outages makes a ``Server()`` of its own."""
    with Server() as server:
        yield server


@pytest.fixture
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Db]]:
    """Makes a fresh database of a dialect, as often as a test asks; for tests with several environments."""
    dropped_later: list[str] = []

    def make(dialect: str) -> Db:
        name = f"test_{next(_numbers)}"
        if dialect == "sqlite":
            return Db(f"sqlite:///{tmp_path / name}.db")
        # The server is asked for here, not as an argument: a run of SQLite tests alone starts none.
        url = request.getfixturevalue("server").create_database(name)
        dropped_later.append(name)
        return Db(url)

    yield make
    for name in dropped_later:
        request.getfixturevalue("server").drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, fresh: Callable[[str], Db]) -> Db:
    """A fresh database, once of each kind."""
    return fresh(request.param)


@pytest.fixture
def pg(fresh: Callable[[str], Db]) -> Db:
    """A fresh PostgreSQL database."""
    return fresh("postgresql")


@pytest.fixture
def lite(fresh: Callable[[str], Db]) -> Db:
    """A fresh SQLite database."""
    return fresh("sqlite")
