"""Insert many jobs by COPY: the fastest way into ``rowmill_jobs``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any

from ...clock import Clock
from ...declare.call import Call, CallBatch, different
from ..database import Database
from ..json_documents import as_json
from ..postgres_database import AsyncpgPool
from .enqueue import CHANNEL, common_values

#: The common end of a call's lines, by the identity of its task and options.
Common = dict[tuple[int, int], str]
_FROM = 100  # the number of jobs at which COPY is worth its second round trip
#: Jobs in the first part, the growth factor of the parts, and the maximum. A small first part lets the server start
#: early; it takes three times as long to read a part as we take to prepare it.
_PART, _MORE, _MOST = 500, 3, 10_000
#: The column defaults of the table, used for columns that are not sent.
_DEFAULTS = {"queue": "default", "priority": 0, "max_attempts": None, "run_after": None}
#: The sequence is looked up once: a lookup for every id would take longer than the insert.
_RESERVE = """with own as materialized (select pg_get_serial_sequence($1, 'id')::regclass as ids)
select array_agg(nextval(own.ids)), now() from own, generate_series(1, $2)"""


def copies(calls: Sequence[Call]) -> bool:
    """Whether these calls are inserted by COPY: many calls, and none with a key to look up."""
    return len(calls) >= _FROM and not any(call.options.key is not None for call in different(calls))


async def copy(direct: AsyncpgPool, database: Database, clock: Clock, calls: Sequence[Call], wake: bool) -> list[int]:
    """Add jobs and return their ids, which are taken from the sequence first.

    The jobs are sent in parts, all in one transaction: the server reads one part while the next is prepared here.
    """
    async with direct.connection() as connection:
        ids: list[int]
        ids, now = await connection.fetchrow(_RESERVE, database.own("rowmill_jobs"), len(calls))
        columns, common = _in_common(calls, now, clock.shift)
        async with connection.transaction() if len(calls) > _PART else nullcontext(), _Sender() as sender:
            for part in _parts(len(calls)):
                lines = _lines(ids[part], calls[part], common)
                await sender.send(
                    connection.copy_to_table(
                        "rowmill_jobs", source=lines, columns=columns, schema_name=database.schema, format="text"
                    )
                )
            await sender.taken()
            if wake:
                await connection.execute(f"select pg_notify('{CHANNEL}', '')")
    return ids


class _Sender:
    """Sends the parts one after the other. ``send`` waits for the previous part, not for its own."""

    def __init__(self) -> None:
        self._under_way: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> _Sender:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._under_way is not None:
            await asyncio.wait([self._under_way])  # until then the connection is busy
            if not self._under_way.cancelled():
                self._under_way.exception()  # mark it as retrieved: the caller raises the original error

    async def taken(self) -> None:
        """Wait until the server has read the last part."""
        if self._under_way is not None:
            await self._under_way

    async def send(self, copy: Coroutine[Any, Any, Any]) -> None:
        """Start to send a part. Returns when the connection has taken as much as it can at once."""
        try:
            await self.taken()
        except BaseException:
            copy.close()
            raise
        self._under_way = asyncio.ensure_future(copy)
        await asyncio.sleep(0)


def _parts(count: int) -> Iterator[slice]:
    start, size = 0, _PART
    while start < count:
        yield slice(start, start + size)
        start, size = start + size, min(size * _MORE, _MOST)


def _lines(ids: Sequence[int], calls: Sequence[Call], common: Common) -> memoryview:
    """Return jobs as COPY reads them, as text.

    With the binary format the driver builds rows value by value, which takes longer and creates thousands of objects.
    """
    args = [as_json(each) for each in calls.args] if isinstance(calls, CallBatch) else [as_json(c.args) for c in calls]
    if any("\\" in text for text in args):
        args = [_escaped(text) for text in args]
    if len(common) == 1:
        (end,) = common.values()
        lines = [f"{id}\t{text}\t{end}" for id, text in zip(ids, args, strict=True)]
    else:
        ends = [common[id(call.task), id(call.options)] for call in calls]
        lines = [f"{id}\t{text}\t{end}" for id, text, end in zip(ids, args, ends, strict=True)]
    return memoryview("".join(lines).encode())  # bytes would be read as a file name


def _field(value: Any) -> str:
    """A value in COPY's text format."""
    if value is None:
        return "\\N"
    return _escaped(value.isoformat() if isinstance(value, datetime) else str(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


def _in_common(calls: Sequence[Call], now: datetime, shift: timedelta) -> tuple[list[str], Common]:
    """The columns to send, and the values that calls of one task with the same options share."""
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    task = options = None
    for call in different(calls):
        if call.task is not task or call.options is not options:
            task, options = call.task, call.options
            groups[id(task), id(options)] = {**common_values(call), "run_after": _due(call, now, shift)}
    names = [
        name
        for name in ("task", *_DEFAULTS)
        if name == "task" or any(values[name] != _DEFAULTS[name] for values in groups.values())
    ]
    if "run_after" in names:
        for values in groups.values():
            values["run_after"] = values["run_after"] or now
    ends = {alike: "\t".join([_field(values[n]) for n in names]) + "\n" for alike, values in groups.items()}
    return ["id", "args", *names], ends


def _due(call: Call, now: datetime, shift: timedelta) -> datetime | None:
    """When the job is due; None: now, by the database's clock."""
    after = call.options.run_after
    if isinstance(after, datetime):
        return after
    return now + shift + (after or timedelta(0)) if after is not None or shift else None
