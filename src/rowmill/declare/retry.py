"""Retry policy: backoffs, what an exception means, and how a run's end becomes what is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from ..errors import UnreadableValue, WrongResult
from .outcome import Outcome

Backoff = Callable[[int], timedelta]
#: What ``classify`` may answer: a word, a word with a delay, or an outcome.
Verdict = str | tuple[str, timedelta] | Outcome

LONGEST = timedelta(days=36500)
TRANSIENT, PERMANENT, RATE = "transient", "permanent", "rate"
#: HTTP statuses that ask to slow down, and the 4xx that another try may change. All other 4xx are permanent.
THROTTLED, PASSING = (429, 503), (408, 409, 425)
#: Errors of the connection, in the words of HTTP and model clients (httpx, aiohttp, requests, urllib, openai).
_CONNECTION = {
    "APIConnectionError", "ClientConnectionError", "ConnectionError", "Timeout", "TransportError", "URLError",
    "gaierror",
}  # fmt: skip


@dataclass(frozen=True)
class Fixed:
    """The same delay after every failure."""

    delay: timedelta

    def __call__(self, attempt: int) -> timedelta:
        return self.delay


@dataclass(frozen=True)
class Exponential:
    """``base * 2 ** (attempt - 1)``, at most ``cap``; with jitter, between half of that and all of it."""

    base: timedelta
    cap: timedelta = timedelta(hours=24)
    jitter: bool = True

    def __call__(self, attempt: int) -> timedelta:
        seconds = self.base.total_seconds()
        for _ in range(max(attempt, 1) - 1):
            if seconds >= self.cap.total_seconds():
                break
            seconds *= 2
        seconds = min(seconds, self.cap.total_seconds())
        return timedelta(seconds=seconds * random.uniform(0.5, 1.0) if self.jitter else seconds)


def fixed(delay: timedelta) -> Backoff:
    """Wait ``delay`` after every failure."""
    return Fixed(delay)


def exponential(
    base: timedelta = timedelta(seconds=15), cap: timedelta = timedelta(hours=24), jitter: bool = True
) -> Backoff:
    """Double the wait with every failure: ``base``, twice that, four times that, up to ``cap``."""
    return Exponential(base, cap, jitter)


def classify(error: BaseException) -> Verdict:
    """What an exception means when a lane does not say.

    HTTP 429 and 503 are a rate limit, with the server's own delay where it gave one. Any other 4xx but 408, 409 and 425
    is permanent, and so is a value that cannot be written. All else is transient: tried again by the retry policy.
    """
    if isinstance(error, (UnreadableValue, WrongResult)):
        return PERMANENT  # the next attempt would meet the same
    status, headers = _http(error)
    if status in THROTTLED:
        delay = retry_after(headers)
        return (RATE, delay) if delay is not None else RATE
    return PERMANENT if status is not None and 400 <= status < 500 and status not in PASSING else TRANSIENT


def is_passing(error: BaseException) -> bool:
    """Whether an error is known to be one of the connection or of the server, which says nothing about what was sent:
    HTTP 408, 409, 425, 429 and 5xx, timeouts, and connections that cannot be made or break.
    """
    status, _ = _http(error)
    if status is not None:
        return status in (*THROTTLED, *PASSING) or 500 <= status < 600
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    return any(kind.__name__ in _CONNECTION for kind in type(error).__mro__)


def retry_after(headers: Any) -> timedelta | None:
    """The Retry-After header as a delay: seconds, or a date compared with the response's own Date."""
    get = getattr(headers, "get", None)
    if get is None:
        return None
    value = get("Retry-After") or get("retry-after")
    if value is None:
        return None
    text = str(value).strip()
    try:
        if text.isascii() and text.isdigit():
            return bounded_delay(int(text))
        until = parsedate_to_datetime(text)
        sent = parsedate_to_datetime(get("Date")) if get("Date") else datetime.now(UTC)
        return bounded_delay(until - sent)
    except (TypeError, ValueError, OverflowError):
        return None


def bounded_delay(delay: Any) -> timedelta | None:
    """A delay every database can add to its time: a timedelta or seconds, from now to a century on. None if neither."""
    if isinstance(delay, (int, float)) and not isinstance(delay, bool) and delay == delay:
        delay = timedelta(seconds=min(max(delay, 0), LONGEST.total_seconds()))
    return min(max(delay, timedelta(0)), LONGEST) if isinstance(delay, timedelta) else None


def _http(error: BaseException) -> tuple[int | None, Any]:
    """Status and headers of an HTTP error, whichever client raised it (httpx, requests, aiohttp, urllib)."""
    if isinstance(error, SystemExit):
        return None, None  # its code is the process's
    response = getattr(error, "response", None)
    for carrier, name in (
        (response, "status_code"),
        (error, "status"),
        (error, "status_code"),
        (error, "code"),
    ):
        status = getattr(carrier, name, None)
        if isinstance(status, int):
            return status, getattr(carrier, "headers", None)
    return None, None
