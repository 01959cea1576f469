"""Numbers with their noun, as people say them."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 row``, ``1,000 rows``. ``many``: the plural where it is not made with an s."""
    return f"{number:,} {plural(number, one, many)}"


def plural(number: float | None, one: str, many: str | None = None) -> str:
    """The noun alone: ``plural(2, "row is", "rows are")``."""
    return one if number == 1 else many or f"{one}s"
