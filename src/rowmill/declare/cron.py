"""When a cron is due: its expression in its own time zone, over changes of the clock, and what of missed ticks.

The expressions and what a change of the clock means are Debian cron's: a time that does not exist on a day comes right
after the gap, one that comes twice comes once, and jobs of every hour or minute follow the real time.
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
#: A tick that is enqueued later than this was missed.
PUNCTUAL = timedelta(minutes=1)
#: Ticks that are enqueued in one go: every minute of a week.
MOST = 10_000
_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True)
class Cron:
    """An expression, its time zone, and what happens to ticks at which no worker was there: ``skip`` them, run
    ``once`` for all of them, or run ``all``.
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
                f"cron {self.expression!r}: missed={self.missed!r}", hint=did_you_mean(str(self.missed), MISSED)
            )

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Its ticks after a moment, in order, in UTC."""
        for tick in CronSim(self.expression, moment.astimezone(ZoneInfo(self.tz))):
            if tick.astimezone(UTC) > moment:  # asked in an hour that comes again, it answers with the first of the two
                yield tick.astimezone(UTC)

    def next(self, moment: datetime) -> datetime | None:
        """Its first tick after a moment; None where none comes within decades."""
        return next(self.after(moment), None)

    def due(self, since: datetime, now: datetime) -> tuple[list[datetime], datetime]:
        """The ticks to enqueue of those after ``since`` and up to ``now``, and up to where that settles the matter."""
        # However long nobody was there: what is left out, or made up for once, need not be counted through.
        begin = since if self.missed == "all" else max(since, now - PUNCTUAL - _INSTANT)
        passed = list(itertools.islice(itertools.takewhile(lambda tick: tick <= now, self.after(begin)), MOST))
        if self.missed == "skip" or not passed:
            last = passed[-1] if passed else self._last(since, now)
            if last is None:
                return [], since
            return (passed if self.missed == "skip" or passed else [last]), last
        return (passed[-1:] if self.missed == "once" else passed), passed[-1]

    def _last(self, since: datetime, now: datetime) -> datetime | None:
        """Its last tick after ``since`` and up to ``now``: looked for in ever longer stretches before ``now``."""
        stretch = timedelta(hours=1)
        while True:
            begin = max(since, now - stretch) if stretch < now - since else since
            last = None
            for tick in itertools.takewhile(lambda tick: tick <= now, self.after(begin)):
                last = tick
            if last is not None or begin == since:
                return last
            stretch *= 4
