"""Price collection for coins: sources behind rates and breakers, price points, valuations. See README.md."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``mill``, when it is asked for: the settings are read then, and the caller reports a wrong one."""
    if name == "mill":
        from .worker import mill

        return mill
    raise AttributeError(name)
