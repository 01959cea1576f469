"""JSON that Python can work with: not nested too deeply, no numbers that are too long."""

from __future__ import annotations

import json
from typing import Any

#: Levels of nested lists and objects. Python's own functions fail with a few hundred.
DEPTH = 100


def too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than ``DEPTH`` levels deep."""
    level = [value]
    for _ in range(DEPTH + 1):
        level = [part for parent in level for part in _parts(parent)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def readable(text: str | bytes) -> Any:
    """The value that JSON text has; the text itself where Python cannot read or show it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if too_deep(value) else value
