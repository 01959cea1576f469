"""Every error a user of rowmill can meet.

    RowmillError
    ├── DeclarationError      a lane, a table, a column or a value in a declaration is wrong
    ├── AppError              the application named on the command line cannot be loaded
    ├── WorkerIdTaken         another live worker has the configured id
    ├── ResourceFailed        a resource that handlers ask for cannot be opened: no row's fault
    ├── LostClaim             the row is no longer this run's: its lease ran out and was taken back
    ├── InputsChanged         the row's inputs changed during the run, so its finish block was rolled back
    ├── UnreadableValue       a column holds a value that Python cannot
    ├── WrongArguments        a task was called with arguments that its handler does not take
    ├── WrongResult           a handler returned a column or a value that cannot be written
    ├── WrongAnswer           the handler of a chunk did not answer for each of its rows
    ├── KeyTaken              a job with this key is there already
    ├── TaskFailed            the job whose result was asked for is dead
    │   └── TaskCanceled      ... or was canceled
    └── DatabaseError
        ├── Unreachable       no connection, or it broke; what was under way may have been committed
        │   └── TooManyConnections  the server or pooler is up and gives no further connection
        ├── Busy              the database is there, but could not serve in time; nothing was written
        └── Refused           the database said no to a value or a statement
            ├── UnreadableReply  its reply holds a value that Python cannot; what was written is committed
            └── Unserved         the statement cannot run as things are (table altered, right missing): no row's fault

Each message says what is wrong and where. ``hint`` says what to do, and is printed behind ``Try:``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RowmillError(Exception):
    """Base of all errors raised by rowmill."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nTry: {self.hint}" if self.hint else self.message


class DeclarationError(RowmillError):
    """A declaration cannot work. Nothing was claimed under it."""


class AppError(RowmillError):
    """The application reference (``module:mill``) does not lead to a Mill."""


class WorkerIdTaken(RowmillError):
    """Another live worker already uses this id."""


class ResourceFailed(RowmillError):
    """A resource could not be opened: its lanes are held back, and no row is to blame."""


class LostClaim(RowmillError):
    """The claim of this run was lost; its writes were rolled back."""


class InputsChanged(RowmillError):
    """An input of the row changed while it was worked on; its writes were rolled back, and the row is ready again."""


class UnreadableValue(RowmillError):
    """A handler asked for a column whose value Python cannot hold: a year beyond 9999, a date BC, 24:00."""


class WrongArguments(RowmillError):
    """A task's arguments do not fit its handler; nothing was enqueued."""


class WrongResult(RowmillError):
    """A handler returned a column or a value that cannot be written; the run fails and nothing is written."""


class WrongAnswer(RowmillError):
    """What a chunk's handler returned has no outcome for this row, or not one for each: nothing is written of it."""


class KeyTaken(RowmillError):
    """A job of this task with this key already exists. Nothing was enqueued."""

    def __init__(self, message: str, *, id: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.id = id


class TaskFailed(RowmillError):
    """The job is dead. ``error`` is its last error, ``traceback`` where that was raised, in the worker."""

    def __init__(self, message: str, *, error: str | None = None, traceback: str | None = None) -> None:
        super().__init__(message)
        self.error, self.traceback = error, traceback

    def __str__(self) -> str:
        return f"{self.message}\n\nIn the worker:\n{self.traceback}" if self.traceback else self.message


class TaskCanceled(TaskFailed):
    """The job was canceled before it was done."""


class DatabaseError(RowmillError):
    """An error of the database, or of the connection to it."""


class Unreachable(DatabaseError):
    """The connection failed, or broke during a statement."""


class TooManyConnections(Unreachable):
    """The server, a pooler, or a limit of the role or database gives no further connection."""


class Busy(DatabaseError):
    """A lock was not available in time; the statement did nothing."""


class Refused(DatabaseError):
    """The database rejected a value or a statement. ``in_the_way``: because of another row (a unique constraint)."""

    in_the_way = False


class UnreadableReply(Refused):
    """A reply holds a value that Python cannot hold, so the driver could not decode it."""


class Unserved(Refused):
    """The statement cannot run as things are: the table was altered, a right is missing, a disk failed.

    No row and no value is at fault, so no row ends by it. ``altered``: looking at the table again may help.
    """

    altered = False


def no_such_table(
    table: str, database: str, known: Iterable[str], *, where: str = "", hint: str | None = None
) -> DeclarationError:
    """The error for a table that is not there. ``place``: where it was looked for; ``known``: tables that are there;
    ``where``: the declaration that names it.
    """
    others = sorted(known)
    close = did_you_mean(table.rpartition(".")[2], others) if others else "create the table first"
    named = f"{where}: there is" if where else "there is"
    return DeclarationError(f"{named} no table {table!r}{database}", hint=hint or close)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or all of them if none is close."""
    words = sorted(known)
    close = difflib.get_close_matches(wrong.lower(), [w.lower() for w in words], n=1, cutoff=0.6)
    if close:
        best = next(w for w in words if w.lower() == close[0])
        return f"did you mean {best!r}?"
    if len(words) == 1:
        return f"{words[0]!r}, the only one"
    return f"one of {', '.join(words)}" if words else "there are none"
