"""The measurement of chunks beside single rows, small: that it measures what it says. Its figures are bench/'s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from databases import Db

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import chunks


@pytest.mark.parametrize("chunk", [None, chunks.CHUNK])
def test_every_row_gets_its_own_answer(db: Db, chunk: int | None) -> None:
    """Issue 23: with a call for each row, and with one call for a hundred."""
    chunks.prepare(db)
    assert chunks.drain(db, 500, chunk) > 0
    assert db.value("select count(*) from jobs where status = 'done' and result = id and attempts = 1") == 500
