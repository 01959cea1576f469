"""How a run ends: a closed set of five.

An outcome may be returned or raised by a handler. Returning a dict or None is ``Done``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal


def _delay(who: str, after: Any) -> Any:
    """A number is seconds; anything else but a timedelta is a mistake to be told where it is made."""
    if after is None or isinstance(after, timedelta):
        return after
    if isinstance(after, (int, float)) and not isinstance(after, bool):
        return timedelta(seconds=after)
    raise TypeError(f"{who} takes a timedelta, not {after!r}")


class Outcome(Exception):
    """Base of the five outcomes. An exception only so that it can be raised from deep inside a handler."""

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
    """The run failed and may be tried again, after ``after`` or the lane's backoff. Costs an attempt."""

    name = "retry"

    def __init__(self, reason: str | None = None, *, after: timedelta | None = None) -> None:
        # ``Retry(td(seconds=3))`` reads naturally; a delay is never a reason.
        if isinstance(reason, timedelta):
            reason, after = None, reason
        super().__init__(reason)
        self.after = _delay("Retry", after)


class Snooze(Outcome):
    """Not now: the row is ready again after ``after``, and no attempt is spent.

    ``closes=True``: the others of its key are held back as long, for every worker, where the lane has gates;
    ``closes="lane"``: all rows of the lane.
    """

    name = "snooze"

    def __init__(self, after: timedelta, reason: str | None = None, *, closes: bool | Literal["lane"] = False) -> None:
        super().__init__(reason)
        self.after = _delay("Snooze", after)
        if closes not in (True, False, "lane"):
            raise TypeError(f'Snooze: closes is True (the key) or "lane", not {closes!r}')
        self.closes = closes


class Dead(Outcome):
    """The row cannot be done; it is not tried again."""

    name = "dead"

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)


class Cancel(Outcome):
    """The work is no longer wanted."""

    name = "canceled"

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)


class Release(Outcome):
    """The engine's own: the row goes back as if it had not been claimed (shutdown, unused prefetch)."""

    name = "release"


#: The ways in which a claim may end, as they are written.
KINDS = tuple(outcome.name for outcome in (Done, Dead, Cancel, Retry, Snooze, Release))


class NotForThisVersion(Release):
    """The engine's own: a job with arguments that this version of its task does not take goes back untouched."""
