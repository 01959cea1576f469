"""Fixtures: ``office`` on both databases; no variable of the machine's own gets into a test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apps.ocr.tests.office import Office
from databases import Db


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    monkeypatch.setenv("STORAGE_URL", "")  # so that what a test sets is taken back
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def make_office(tmp_path: Path) -> Callable[..., Office]:
    def make(db: Db, **settings: Any) -> Office:
        return Office(db, tmp_path, **settings)

    return make


@pytest.fixture
def office(db: Db, make_office: Callable[..., Office]) -> Office:
    return make_office(db)
