"""The rows that a worker process is running, in memory that outlives the process.

A supervisor keeps the file. The next process with the same worker id reads which rows were running when the last one
died. Rows that were claimed but not started go back without counting an attempt.
"""

from __future__ import annotations

import mmap
import os
import uuid
import zlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import asyncpg.pgproto.pgproto

_CELL = 8
_UUIDS = (uuid.UUID, asyncpg.pgproto.pgproto.UUID)
if TYPE_CHECKING:
    Cells = array[int] | memoryview[int]


def mark(key: tuple[Any, ...], salt: int) -> int:
    """A number for a row, the same in every process. ``salt`` distinguishes the rows of different tables."""
    first = key[0]
    kind = first.__class__
    if len(key) > 1 or (kind is not int and kind not in _UUIDS):
        return zlib.crc32(first.encode() if kind is str and len(key) == 1 else repr(key).encode()) ^ salt
    return hash(first) ^ salt  # the hash of numbers, and so of UUIDs, is the same in every process


def salt(*place: str) -> int:
    """A number for the place where rows are stored."""
    return zlib.crc32("\0".join(place).encode()) << 30


def running_now(file: int) -> frozenset[int] | None:
    """The marks of the rows that run, or ran when the process died; None if no process has written any yet."""
    size = os.fstat(file).st_size
    return frozenset(array("q", os.pread(file, size - size % _CELL, 0))) - {0} if size else None


class RunningMarks:
    """A cell for every slot of a process: the mark of its running row, or 0."""

    def __init__(self, file: int, counts: Sequence[int]) -> None:
        #: The rows that the previous process was running when it died; None if there was none.
        self.before = running_now(file)
        os.ftruncate(file, 0)
        os.ftruncate(file, max(sum(counts), 1) * _CELL)
        cells = memoryview(mmap.mmap(file, 0)).cast("q")
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.cells = [cells[end - count : end] for end, count in zip(ends, counts, strict=True)]
