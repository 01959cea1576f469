"""Text that is kept in a file, to be read and reviewed: ``UPDATE_GOLDEN=1`` rewrites the file."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def as_newest(text: str) -> str:
    """As PostgreSQL 18 prints the condition of an index; older servers write the table's name before the column."""
    return text.replace("(scrape_jobs.source_id IN (", "(source_id IN (")


def compare(path: Path, text: str) -> None:
    """Fail with the difference from the file, or, asked to, write the file."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    old = path.read_text() if path.exists() else ""
    difference = difflib.unified_diff(
        old.splitlines(), text.splitlines(), str(path.name), "as it would run now", "", ""
    )
    assert old == text, "\n".join(["UPDATE_GOLDEN=1 rewrites the file", *difference])
