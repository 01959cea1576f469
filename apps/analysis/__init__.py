"""Staged analysis of websites by a language model: ``rowmill run apps.analysis:mill``. See README.md beside this."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``mill`` is made when it is asked for, so that the caller reports a wrong setting, and not an import."""
    if name != "mill":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .phases import build
    from .settings import Settings

    made = globals()["mill"] = build(Settings.from_environ())
    return made
