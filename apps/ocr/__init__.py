"""ocr: the documents that registre has stored, read by several workers, on rowmill. See README.md."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``apps.ocr:mill``, when it is asked for: parts of ocr are of use without its settings."""
    if name == "mill":
        from apps.ocr.app import mill

        return mill
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
