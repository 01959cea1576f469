"""Every setting, read from the environment; README.md lists them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from rowmill import RowmillError

PREFIX = "ENRICHMENT_"


@dataclass(frozen=True)
class Settings:
    """What may be set from outside. Each is ``ENRICHMENT_`` and its name in capitals."""

    batch: int = 10  # rows per claim
    concurrency: int = 10  # links worked on at once in a process
    per_domain: int = 2  # of one domain at once, over all processes
    lease_seconds: float = 600.0  # until a row whose worker gave no sign is taken back
    retry_seconds: float = 300.0  # from the first failure to the second try
    poll_seconds: float = 5.0  # how long an idle worker waits at most
    fetch_seconds: float = 20.0  # for a page with all its redirects
    fetch_bytes: int = 1_000_000  # of a page that are read; what comes behind is not looked at
    redirects: int = 5  # until a link counts as leading nowhere
    user_agent: str = "rowmill-enrichment/0.1 (+https://example.org/bot)"
    robots_seconds: float = 3600.0  # how long a site's robots rules are believed
    allow_private: bool = False  # also fetch from addresses that are not public: for links inside a company
    internet: str = ""  # "127.0.0.1:40123": a stand-in that answers for every host
    upload_bytes: int = 50_000_000  # of a bookmarks file

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """As the environment says; a value that does not fit is told by its name."""
        given = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            if name in environment:
                given[field.name] = _as(type(field.default), name, environment[name])
        return cls(**given)


def _as(kind: type, name: str, text: str) -> object:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise RowmillError(f"{name}={text!r} is neither true nor false", hint=f"{name}=true")
        return text.lower() in ("true", "1")
    if kind is str:
        return text
    try:
        value = kind(text)
    except ValueError:
        raise RowmillError(f"{name}={text!r} is not a number", hint=f"{name}=10") from None
    if not 0 < value < float("inf"):
        raise RowmillError(f"{name}={text!r} must be more than 0", hint=f"{name}=10")
    return value
