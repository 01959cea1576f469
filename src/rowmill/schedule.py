"""When a cron is due: its expression in its own time zone, over changes of the clock, and what of missed ticks.

The expressions and what a change of the clock means are Debian cron's: a time that does not exist on a day comes right
after the gap, one that comes twice comes once, and jobs of every hour or minute follow the real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from .errors import DeclarationError, did_you_mean

MISSED = ("skip", "once", "all")
#: A tick that is enqueued later than this was missed.
PUNCTUAL = timedelta(minutes=1)
_MOST = 10_000  # ticks that are looked at in one go: every minute of a week


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
        except (KeyError, ValueError, OSError):
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
        passed: list[datetime] = []
        for tick in self.after(since):
            if tick > now or len(passed) >= _MOST:
                break
            passed.append(tick)
        if not passed:
            return [], since
        late = [tick for tick in passed if now - tick > PUNCTUAL]
        timely = passed[len(late) :]
        if self.missed == "all":
            return passed, passed[-1]
        if self.missed == "once" and late and not timely:
            return late[-1:], passed[-1]
        return (timely[-1:] if self.missed == "once" else timely), passed[-1]
