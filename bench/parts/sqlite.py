"""Drains on one SQLite file."""

from __future__ import annotations

from . import drain
from .part import Part

PART = Part(
    "sqlite",
    "Drain on SQLite",
    "As above, on a file. `rowmill-sqlite` works on the same `enrichment_jobs`, keeps its rows, and commits with WAL "
    "and synchronous = normal. `huey-sqlite` deletes a job when it is taken. `bare-sqlite` is a plain sqlite3 loop "
    "over the same table in batches of 500, without fence, lease, heartbeat or wake-up: the most there is to get.",
    drain.measure,
    ("rowmill-sqlite", "huey-sqlite", "bare-sqlite"),
    tuple(column for column in drain.COLUMNS if "server" not in column.key),
)
