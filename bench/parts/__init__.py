"""What is measured: one module each, in the order of the report."""

from __future__ import annotations

from . import (
    busy,
    drain,
    enqueue,
    gates,
    growth,
    held,
    idle,
    limit,
    load,
    memory,
    ocr,
    pages,
    pickup,
    recovery,
    sqlite,
    wake,
)
from .part import Part

_ALL = (
    drain.PART,
    drain.WOKEN,
    limit.PART,
    enqueue.PART,
    pickup.PART,
    wake.PART,
    *recovery.PARTS,
    load.PART,
    busy.PART,
    sqlite.PART,
    gates.PART,
    memory.PART,
    idle.PART,
    *growth.PARTS,
    held.PART,
    pages.PART,
    ocr.PART,
)
PARTS = {part.name: part for part in _ALL}


def chosen(words: str | None, *, quick: bool) -> list[Part]:
    """Parts by name (``growth``: all that begin so), in the order of the report; without a word the usual ones."""
    if words is None:
        return [part for part in _ALL if not part.on_request and (part.quick or not quick)]
    names = words.split(",")
    for name in names:
        if not any(_meant(name, part) for part in _ALL):
            raise SystemExit(f"bench: there is no part {name!r}; there are {', '.join(PARTS)}")
    return [part for part in _ALL if any(_meant(name, part) for name in names)]


def _meant(word: str, part: Part) -> bool:
    return part.name == word or part.name.startswith(f"{word}-")
