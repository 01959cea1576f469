"""The settings: environment variables, read once, checked, each with a default that works."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from rowmill import RowmillError

_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Settings:
    """What can be set; a field's variable is its name in capitals."""

    #: The name of this worker: it stands in ``locked_by``. None: one is made up.
    worker_id: str | None = None
    #: Runs at once in a process.
    worker_concurrency: int = 4
    #: A running job without a heartbeat for this long is taken back.
    job_lock_timeout_seconds: float = 300.0
    heartbeat_seconds: float = 20.0
    sweep_seconds: float = 60.0
    #: How long an idle worker waits at most.
    poll_seconds: float = 5.0
    #: The first retry comes after this; each further one after twice the time, up to a day.
    base_delay_minutes: float = 1.0
    max_retries: int = 5
    #: Failures in a row that pause a source, and for how long.
    breaker_failures: int = 5
    breaker_pause_seconds: float = 300.0
    cache_enabled: bool = True
    cache_ttl_seconds: float = 3600.0
    cache_dir: str = str(Path.home() / ".cache" / "rowmill-prices")
    http_timeout_seconds: float = 15.0
    #: What a found item must have in common with the coin to be kept, from 0 to 1.
    min_match: float = 0.5

    @property
    def lock_timeout(self) -> timedelta:
        return timedelta(seconds=self.job_lock_timeout_seconds)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """From the environment; an empty variable counts as not set."""
        given: dict[str, Any] = {}
        for field in fields(cls):
            name = field.name.upper()
            if text := environ.get(name, "").strip():
                given[field.name] = _value(name, str(field.type), text)
        settings = cls(**given)
        settings.check()
        return settings

    def check(self) -> None:
        """Refuse what could not work, by name."""
        for name in ("job_lock_timeout_seconds", "heartbeat_seconds", "sweep_seconds", "poll_seconds",
                     "base_delay_minutes", "breaker_pause_seconds", "cache_ttl_seconds", "http_timeout_seconds",
                     "worker_concurrency", "breaker_failures"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise _wrong(name.upper(), f"{getattr(self, name)} is not above 0", "leave it out for the default")
        if self.max_retries < 0:
            raise _wrong("MAX_RETRIES", f"{self.max_retries} is below 0", "0 for no retry at all")
        if not 0 <= self.min_match <= 1:
            raise _wrong("MIN_MATCH", f"{self.min_match} is not between 0 and 1", "0.5")
        if self.heartbeat_seconds * 2 > self.job_lock_timeout_seconds:
            raise _wrong(
                "HEARTBEAT_SECONDS",
                f"{self.heartbeat_seconds} s is too long for a lock of {self.job_lock_timeout_seconds} s",
                "at most half of JOB_LOCK_TIMEOUT_SECONDS: one lost heartbeat must not cost a job",
            )


def _value(name: str, kind: str, text: str) -> Any:
    if kind.startswith("str"):
        return text
    if kind == "bool":
        if text.lower() not in _FLAGS:
            raise _wrong(name, f"{text!r} is neither true nor false", f"{name}=false")
        return _FLAGS[text.lower()]
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(name, f"{text!r} is not a {'whole ' if kind == 'int' else ''}number", "leave it out")
    return number


def _wrong(name: str, what: str, hint: str) -> RowmillError:
    return RowmillError(f"setting {name}: {what}", hint=hint)
