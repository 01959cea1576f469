"""Text that a column of the database takes: clean, in its encoding, and bounded in length."""

from __future__ import annotations

ERROR_LENGTH = 2000


def bounded(text: str, most: int = ERROR_LENGTH, encoding: str = "utf-8") -> str:
    """Text that any column of a database of this encoding takes: no NUL, no lone surrogates, not longer than useful."""
    clean = text.replace("\x00", "\\x00").encode(encoding, "replace").decode(encoding)
    return clean if len(clean) <= most else clean[: most - 1] + "…".encode(encoding, "replace").decode(encoding)


def tail(text: str, most: int, encoding: str = "utf-8") -> str:
    """The end of a text, bounded likewise: of a traceback, where it was raised."""
    clean = bounded(text, 4 * len(text) + 1, encoding)
    return clean if len(clean) <= most else "…".encode(encoding, "replace").decode(encoding) + clean[1 - most :]
