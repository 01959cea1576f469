"""Time is the database's. A clock only says whether a test has moved it."""

from __future__ import annotations

from datetime import timedelta


class Clock:
    """The database's own time, or, in tests, that time moved forward.

    ``shift`` is what every statement adds to the database's ``now()``. It is zero outside tests, and then the
    statements carry no trace of it.
    """

    def __init__(self) -> None:
        self.shift = timedelta(0)

    def advance(self, by: timedelta) -> None:
        """Move the time that all further statements see."""
        self.shift += by
