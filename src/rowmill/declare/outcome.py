"""How a run ends: a closed set of six.

An outcome may be returned or raised by a handler. Returning a dict or None is ``Done``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal


def _delay(who: str, after: Any) -> Any:
    """A number is seconds; anything else but a timedelta is a mistake to be told where it is made."""
    if after is None or isinstance(after, timedelta):
        return after
    if isinstance(after, (int, float)) and not isinstance(after, bool):
        return timedelta(seconds=after)
    raise TypeError(f"{who} takes a timedelta, not {after!r}")


class Outcome(Exception):
    """Base of the outcomes of a run. A handler can return one, or raise it from deep inside."""

    name: str = ""

    def __init__(self, reason: str | None = None, columns: Mapping[str, object] | None = None) -> None:
        super().__init__(reason or self.name)
        self.reason = reason
        self.columns: Mapping[str, object] = columns or {}

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is copied by its message alone; a Snooze made of that would be refused for want of its delay.
        return _copied, (type(self), self.args, vars(self))


def _copied(kind: type[Outcome], args: tuple[Any, ...], state: dict[str, Any]) -> Outcome:
    """An outcome as it was, on the other side of a pipe."""
    copy = kind.__new__(kind, *args)
    vars(copy).update(state)
    return copy


class Done(Outcome):
    """The work is done; ``columns`` are written with the outcome in one statement."""

    name = "done"

    def __init__(self, columns: Mapping[str, object] | None = None) -> None:
        super().__init__(None, columns)


class Retry(Outcome):
    """Retry the row after ``after``, or after the lane's backoff. Costs an attempt."""

    name = "retry"

    def __init__(self, reason: str | None = None, *, after: timedelta | None = None) -> None:
        # ``Retry(td(seconds=3))`` reads naturally; a delay is never a reason.
        if isinstance(reason, timedelta):
            reason, after = None, reason
        super().__init__(reason)
        self.after = _delay("Retry", after)


class Snooze(Outcome):
    """Run the row again after ``after``, or at the time ``until``. Costs no attempt.

    ``closes=True``: the others of its key are held back as long, for every worker, where the lane has gates;
    ``closes="lane"``: all rows of the lane.
    """

    name = "snooze"

    def __init__(
        self,
        after: timedelta | None = None,
        reason: str | None = None,
        *,
        until: datetime | None = None,
        closes: bool | Literal["lane"] = False,
    ) -> None:
        super().__init__(reason)
        self.after, self.until = _delay("Snooze", after), until
        if (after is None) == (until is None):
            raise TypeError("Snooze takes a timedelta, or until= a time")
        if until is not None and (not isinstance(until, datetime) or until.tzinfo is None):
            raise TypeError(f"Snooze: until must be a datetime with a time zone, not {until!r}")
        if closes not in (True, False, "lane"):
            raise TypeError(f'Snooze: closes must be True (the key) or "lane", not {closes!r}')
        self.closes = closes


class Wait(Outcome):
    """Make the row wait until an SQL condition on its columns is true. Any program's UPDATE may make it true.

    The row holds no slot and no lease, and no attempt is spent. When the condition is true, the handler runs again from
    its beginning. After ``timeout`` the row is dead, or with ``then="run"`` the handler runs anyway, and
    ``job.timed_out()`` tells it. ``columns`` are written to the row when it begins to wait.
    """

    name = "wait"

    def __init__(
        self,
        until: str,
        *,
        timeout: timedelta,
        then: Literal["dead", "run"] = "dead",
        columns: Mapping[str, object] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(reason, columns)
        self.until, self.timeout, self.then = until, _delay("Wait", timeout), then
        if not isinstance(until, str) or (problem := unreadable(until)):
            problem = problem if isinstance(until, str) else f"it is {until!r}"
            raise TypeError(
                f'Wait: until must be an SQL condition on the row, such as "approved_at is not null": {problem}'
            )
        if self.timeout is None or self.timeout <= timedelta(0):
            raise TypeError(f"Wait: timeout must be a positive timedelta, not {timeout!r}")
        if then not in ("dead", "run"):
            raise TypeError(f'Wait: then must be "dead" or "run", not {then!r}')


#: What ends a statement, or begins a comment; what stands in quotes is passed over.
_TOKENS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|;|--|/\*|\0|[()'"]""")
_LONGEST = 10_000


def unreadable(condition: str) -> str | None:
    """Why a text cannot be one condition, as far as that shows without a database; None: it may be one."""
    if not condition.strip():
        return "it is empty"
    if len(condition) > _LONGEST:
        return f"it is longer than {_LONGEST:,} characters"
    depth = 0
    for token in _TOKENS.findall(condition):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token in (";", "--", "/*", "\0"):
            return f"it contains {token!r}"
        if token in ("'", '"'):
            return "a quote is not closed"
        if depth < 0:
            break
    return "its parentheses do not match" if depth else None


class Dead(Outcome):
    """Give the row up: it is dead, and rowmill does not retry it."""

    name = "dead"

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)


class Cancel(Outcome):
    """Cancel the row, because the work is no longer wanted."""

    name = "canceled"

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)


class Release(Outcome):
    """The engine's own: the row goes back as if it had not been claimed (shutdown, unused prefetch)."""

    name = "release"


#: The ways in which a claim may end, as they are written. A wait is written by a statement of its own.
KINDS = tuple(outcome.name for outcome in (Done, Dead, Cancel, Retry, Snooze, Release))


class NotForThisVersion(Release):
    """The engine's own: a job with arguments that this version of its task does not take goes back untouched."""
