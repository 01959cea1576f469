"""The load: rows that come while the faults do, at a steady rate, until the bout has enough."""

from __future__ import annotations

import random
import sqlite3
import threading
import time

import psycopg

from .books import Books

_EVERY, _MOST, _TRICKLE = 0.1, 5000, 3
#: Shares: a first run that fails, an effect written with the outcome, and runs that take a while.
_RETRY, _FINISH, _LONG = 0.05, 0.05, 0.05


class Feeder(threading.Thread):
    """Adds rows in the background. ``added`` are those whose commit was confirmed."""

    def __init__(self, books: Books, rows: int, rate: float, longest: float = 1.0) -> None:
        super().__init__(name="chaos-feeder", daemon=True)
        self._books, self._rows, self._rate, self._longest = books, rows, rate, longest
        self._next, self._hurried, self._over = 1, threading.Event(), threading.Event()
        self.added: list[int] = []

    def run(self) -> None:
        began = time.monotonic()
        while not self._over.is_set() and not (self._hurried.is_set() and self._next > self._rows):
            chunk = [
                self._row(number) for number in range(self._next, self._next + self._due(time.monotonic() - began))
            ]
            if chunk and self._try(chunk):
                self.added += [row[0] for row in chunk]
                self._next += len(chunk)
            if not self._hurried.is_set():
                self._over.wait(_EVERY)

    def _due(self, seconds: float) -> int:
        """How many to add now. Where all have come and the faults go on, a trickle: a fault's end shows by new rows."""
        left = self._rows - self._next + 1
        if self._hurried.is_set():
            return min(left, _MOST)
        if left <= 0:
            return _TRICKLE
        return min(max(int(seconds * self._rate) - self._next + 1, 0), left, _MOST)

    def _row(self, number: int) -> tuple[int, str, float]:
        kind = random.random()
        what = "retry" if kind < _RETRY else "finish" if kind < _RETRY + _FINISH else "plain"
        return number, what, random.uniform(0.05, self._longest) if random.random() < _LONG else 0.0

    def _try(self, chunk: list[tuple[int, str, float]]) -> bool:
        try:
            self._books.add(chunk)
        except (psycopg.Error, sqlite3.Error):
            self._over.wait(_EVERY)
            return False
        return True

    def finish(self, patience: float = 120.0) -> None:
        """Add what is left at once, and end."""
        self._hurried.set()
        self.join(patience)
        self._over.set()
        if self.is_alive() or len(self.added) < self._rows:
            raise RuntimeError(f"only {len(self.added)} of {self._rows} rows could be added")
