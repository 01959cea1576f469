"""What a handler logs through ``job.log``: kept in memory while it runs, written once its outcome stands."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ...events import Events
from ...scrub import scrubbed
from ...store import Database
from ...store.lane.claim import Claim
from ...store.lane.row_keys import written
from ...store.own.run_logs import LINE_BYTES, LINES, RUN_BYTES, Line, RunLog, RunLogs, cut
from ..counters import users_traceback
from .background_writer import BackgroundWriter

#: Of a run twice its bound is held until secrets are taken out, which makes lines shorter. Of one line so many
#: characters are read: this takes some milliseconds, and happens where the handler runs.
_RUN, _LINE = 2 * RUN_BYTES, 4 * LINE_BYTES
#: Characters of all runs that wait to be written.
_HELD = 16_000_000


class RunLines:
    """The lines of one run, or of all runs of a chunk: the last ones, within bounds. Any thread may add to them."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque()
        self._dropped = self._size = 0
        self._lock = threading.Lock()

    def add(self, level: str, text: str, clean: bool, row_id: str | None = None) -> None:
        """One more line; the oldest ones make room for it."""
        line = Line(time.monotonic(), level, text, clean, row_id)
        with self._lock:
            self._lines.append(line)
            self._size += len(line.text)
            while len(self._lines) > LINES or self._size > _RUN:
                self._size -= len(self._lines.popleft().text)
                self._dropped += 1

    def all(self) -> tuple[list[Line], int]:
        """The lines so far, and how many before them were dropped."""
        with self._lock:
            return list(self._lines), self._dropped


class JobLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that says which job speaks, and keeps what it is told: from INFO on, and DEBUG where that is logged."""

    def __init__(self, fields: Mapping[str, Any], keep: Callable[[str, str, bool], None]) -> None:
        """``keep``: called with the level and the text of a line, and whether secrets were taken out of it."""
        super().__init__(logging.getLogger("rowmill.job"), {"fields": fields})
        self._keep = keep

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line and keep it."""
        if level >= logging.INFO or self.isEnabledFor(level):
            self._keep(logging.getLevelName(level).lower(), *_bounded(_text(msg, args, kwargs.get("exc_info"))))
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the line that is named is the handler's
        super().log(level, msg, *args, **kwargs)


def _text(msg: object, args: Sequence[Any], exc_info: Any) -> str:
    """A line as a formatter would write it. A wrong line is no reason to fail a run."""
    try:
        record = logging.LogRecord("", 0, "", 0, msg, tuple(args), None)
        text = record.getMessage()
    except Exception:
        text = f"{msg!r} (its arguments do not fit)"
    error = _raised(exc_info)
    shown = users_traceback(error) if error is not None else None
    if not shown:
        return text
    if len(shown) > _LINE // 2:  # where it was raised is at the end
        shown = "…\n" + shown[-_LINE // 2 :].partition("\n")[2]
    return f"{text[: _LINE // 2]}\n{shown.rstrip()}"


def _bounded(text: str) -> tuple[str, bool]:
    """A line of bounded length, and whether secrets were taken out: before it is cut, so that no part is left."""
    if len(text) <= LINE_BYTES:
        return text, False
    if len(text) <= _LINE:
        return cut(scrubbed(text), LINE_BYTES), True
    return scrubbed(text[:_LINE])[: LINE_BYTES - 3] + "…", True


def _raised(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1] if len(exc_info) > 1 else None
    return sys.exc_info()[1] if exc_info else None


class RunLogWriter(BackgroundWriter[RunLog]):
    """The logs of one environment's runs that are to be written to ``rowmill_run_logs``."""

    most, batch = 20_000, 500
    off = "logs_off", "rowmill logs shows nothing new until this role may write to rowmill_run_logs"
    dropped = "logs_dropped", "these runs' logs are lost; the rows themselves are correct"

    def __init__(self, database: Database, events: Events, environment: str) -> None:
        super().__init__(events, environment)
        self._table = RunLogs(database)
        #: Characters of the lines that are not written yet.
        self._held = 0

    def ended(self, claim: Claim, worker: str, outcome: str, keep: timedelta) -> None:
        """A run is over, and its outcome stands."""
        lines, dropped = claim.lines.all()
        if not lines:
            return
        size = sum([len(line.text) for line in lines])
        if self._held + size > _HELD or len(self._waiting) == self.most:  # they cannot be written as fast as they come
            self._dropped += 1
            self._tell()
        else:
            self._held += size
            run = (claim.lane, written(claim.id), claim.attempt, worker, outcome)
            self._add(RunLog(*run, time.monotonic(), keep, lines, dropped))

    async def _store(self, entries: Sequence[RunLog]) -> None:
        await self._table.add(entries, time.monotonic())
        self._held -= _characters(entries)

    def _drop(self, entries: Sequence[RunLog]) -> None:
        super()._drop(entries)
        self._held -= _characters(entries)

    async def prune(self) -> None:
        """Delete logs that are past their retention, or too many."""
        await self._table.prune()


def _characters(logs: Sequence[RunLog]) -> int:
    return sum([len(line.text) for log in logs for line in log.lines])
