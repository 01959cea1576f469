"""Text that is kept in a file, to be read and reviewed: ``UPDATE_GOLDEN=1`` rewrites the file."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


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
