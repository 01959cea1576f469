"""Fixtures for pytest, opt-in: ``pytest_plugins = ["rowmill.pytest"]`` in a conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from .errors import DeclarationError
from .mill import Mill
from .testing import Kit


@pytest.fixture
def kit(tmp_path: Path) -> Callable[..., Kit]:
    """Makes a Kit: ``async with kit(mill) as k``. While it is open the Mill is on a fresh SQLite database, or on the
    ``environments`` that are given, as ``Mill(...)`` takes them; rowmill's own tables are there.
    """

    def make(mill: Mill, environments: str | Mapping[str, str] | None = None, worker_id: str = "test-worker") -> Kit:
        if environments is None:
            try:
                names = list(mill.environments)
            except DeclarationError:  # the URL is set where the application runs
                names = ["default"]
            environments = {name: f"sqlite:///{tmp_path / name}.db" for name in names}
        return Kit(mill, environments=environments, worker_id=worker_id)

    return make
