"""Every setting of ocr, from environment variables, checked once when the application is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta as td
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Self

from rowmill.errors import RowmillError


class SettingError(RowmillError):
    """An environment variable has a value that cannot be used."""


def _of(variable: str, default: Any, least: float | None = None) -> Any:
    return field(default=default, metadata={"variable": variable, "least": least})


@dataclass(frozen=True)
class Settings:
    """How ocr works. The defaults are those of an installation without any variable set."""

    worker_count: int = _of("OCR_WORKER_COUNT", 2, 1)
    #: worker-1, worker-2, ...; a second host over the same database needs another name.
    worker_name: str = _of("OCR_WORKER_NAME", "worker")
    #: Where each worker has its own temporary directory.
    temp: str = _of("OCR_TEMP", str(Path(gettempdir()) / "ocr"))
    #: Dots per inch that pages are rendered with, and how many dots a page may have at most.
    dpi: int = _of("OCR_DPI", 150, 36)
    max_pixels: int = _of("OCR_MAX_PIXELS", 25_000_000, 10_000)
    #: The longer side of the image in which the local engine looks for lines; they are read at full resolution.
    detect_side: int = _of("OCR_DETECT_SIDE", 960, 320)
    #: Threads of the local engine in each worker: two workers on two cores are faster than two threads of one.
    threads: int = _of("OCR_THREADS", 1, 1)
    timeout_minutes: float = _of("OCR_TIMEOUT_MINUTES", 60.0, 0.01)
    #: The stale monitor.
    lease_seconds: float = _of("OCR_LEASE_SECONDS", 600.0, 1)
    sweep_seconds: float = _of("OCR_SWEEP_SECONDS", 300.0, 0.1)
    max_reclaims: int = _of("OCR_MAX_RECLAIMS", 3, 0)
    #: The wait after the first failure; it doubles with each.
    retry_seconds: float = _of("OCR_RETRY_SECONDS", 15.0, 0)
    #: So many failures in a row of the storage or of Gemini, and nothing is taken for so long.
    breaker_failures: int = _of("OCR_BREAKER_FAILURES", 5, 1)
    breaker_minutes: float = _of("OCR_BREAKER_MINUTES", 5.0, 0.01)
    #: Gemini is used where a key is set.
    gemini_key: str = _of("GEMINI_API_KEY", "")
    gemini_model: str = _of("GEMINI_MODEL", "gemini-2.5-flash")
    gemini_url: str = _of("GEMINI_BASE_URL", "")
    gemini_timeout: float = _of("GEMINI_TIMEOUT_SECONDS", 120.0, 1)
    #: What all workers together may ask of Gemini.
    gemini_per_minute: int = _of("GEMINI_REQUESTS_PER_MINUTE", 60, 1)
    gemini_per_day: int = _of("GEMINI_REQUESTS_PER_DAY", 10_000, 1)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """As the variables say; one that is not set, or empty, has its default."""
        given: dict[str, Any] = {}
        for each in fields(cls):
            variable = each.metadata["variable"]
            if text := environ.get(variable, "").strip():
                given[each.name] = _read(variable, text, type(each.default), each.metadata["least"])
        return cls(**given)

    @property
    def lease(self) -> td:
        """Time without a sign of life before a document is taken back."""
        return td(seconds=self.lease_seconds)

    @property
    def sweep_every(self) -> td:
        """How often that is looked for."""
        return td(seconds=self.sweep_seconds)


def _read(variable: str, text: str, kind: type, least: float | None) -> Any:
    if kind is str:
        return text
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise SettingError(f"{variable}={text!r} is not {what}", hint=f"{variable}={_example(least)}") from None
    if least is not None and not value >= least:
        raise SettingError(f"{variable}={text!r} is less than {least:g}", hint=f"{variable}={_example(least)} or more")
    return value


def _example(least: float | None) -> str:
    return f"{least or 1:g}"
