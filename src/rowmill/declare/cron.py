"""When a cron is due: its expression in its own time zone, daylight saving time, and missed ticks.

Expressions and daylight saving time work as in Debian's cron. A time that does not exist on a day comes right after the
gap. A time that occurs twice counts once. Hourly and more frequent jobs follow real time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from ..errors import DeclarationError, did_you_mean

MISSED = ("skip", "once", "all")
#: A tick counts as missed if it is enqueued later than this.
PUNCTUAL = timedelta(minutes=1)
#: The most ticks that are enqueued at once: every minute of a week.
MOST = 10_000
_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True)
class Cron:
    """An expression, its time zone, and what happens to ticks missed while no worker ran: ``skip`` them, run ``once``
    for all of them, or run ``all``.
    """

    expression: str
    tz: str = "UTC"
    missed: str = "skip"

    def __post_init__(self) -> None:
        try:
            ZoneInfo(self.tz)
        except (KeyError, ValueError, OSError, TypeError):
            raise DeclarationError(
                f"cron {self.expression!r}: there is no time zone {self.tz!r}", hint='tz="America/Montreal", tz="UTC"'
            ) from None
        try:
            next(CronSim(self.expression, datetime(2024, 1, 1, tzinfo=UTC)), None)
        except (CronSimError, AttributeError, TypeError) as error:
            raise DeclarationError(
                f"cron {self.expression!r} cannot be read: {error}",
                hint='minute, hour, day of month, month, day of week: "0 3 * * *" is every day at three',
            ) from None
        if self.missed not in MISSED:
            raise DeclarationError(
                f"cron {self.expression!r}: missed={self.missed!r} is not valid",
                hint=did_you_mean(str(self.missed), MISSED),
            )

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The ticks after a moment, in order, in UTC."""
        for tick in CronSim(self.expression, moment.astimezone(ZoneInfo(self.tz))):
            if tick.astimezone(UTC) > moment:  # in the repeated hour, CronSim returns the first of the two
                yield tick.astimezone(UTC)

    def next(self, moment: datetime) -> datetime | None:
        """The first tick after a moment; None if there is none for decades."""
        return next(self.after(moment), None)

    def due(self, since: datetime, now: datetime) -> tuple[list[datetime], datetime]:
        """Return the ticks to enqueue after ``since`` and up to ``now``, and the time up to which all is handled."""
        # After a long downtime, ticks that are skipped or replaced by one need not be counted one by one.
        begin = since if self.missed == "all" else max(since, now - PUNCTUAL - _INSTANT)
        passed = list(itertools.islice(itertools.takewhile(lambda tick: tick <= now, self.after(begin)), MOST))
        if self.missed == "skip" or not passed:
            last = passed[-1] if passed else self._last(since, now)
            if last is None:
                return [], since
            return (passed if self.missed == "skip" or passed else [last]), last
        return (passed[-1:] if self.missed == "once" else passed), passed[-1]

    def _last(self, since: datetime, now: datetime) -> datetime | None:
        """The last tick after ``since`` and up to ``now``, found in growing windows before ``now``."""
        window = timedelta(hours=1)
        while True:
            begin = max(since, now - window) if window < now - since else since
            last = None
            for tick in itertools.takewhile(lambda tick: tick <= now, self.after(begin)):
                last = tick
            if last is not None or begin == since:
                return last
            window *= 4


def next_tick(expression: str, *, tz: str = "UTC", after: datetime | None = None) -> datetime:
    """The next time at which a cron expression is due: ``Snooze(until=next_tick("0 3 * * *"))``.

    ``after``: the result is also later than this time, such as the time at which a row was due. Otherwise a row that
    runs a moment early by this machine's clock would be due again at once.
    """
    moment = max(datetime.now(UTC), after.astimezone(UTC)) if after is not None else datetime.now(UTC)
    coming = Cron(expression, tz).next(moment)
    if coming is None:
        raise DeclarationError(f"cron {expression!r} is never due")
    return coming
