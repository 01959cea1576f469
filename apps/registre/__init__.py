"""registre: documents from a land registry, searches in two registers, on rowmill. See README.md."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``apps.registre:mill``, when it is asked for: the tables are of use to others without a browser."""
    if name == "mill":
        from .lanes import mill

        return mill
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
