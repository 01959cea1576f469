"""Runs DDL on a live database without blocking traffic, and continues after a crash.

A statement that needs the table for a moment waits for it at most the lock timeout, gives way, and tries again. An
index is built concurrently; it is noted before the build begins and confirmed after, so that the next run
knows a build that failed, or one that still goes on, from one that is done.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ..declare.states import UNFINISHED
from ..errors import Busy, DatabaseError, Refused
from ..store.database import Database, Run, runner
from ..store.driver_errors import translated
from ..store.jobs.job_rows import listed
from ..store.lane.sql_literals import mentions
from ..store.own import schema
from ..store.own.ddl_ledger import BEGUN, MADE, Ledger, Record
from .ddl import SchemaChange, index_state, settings, targets

_LOCK = 7_077_201_456  # of the advisory lock: one migration at a time in a database
_PAUSE, _LONGEST_PAUSE, _TICK = 0.5, 10.0, 0.5
#: Told about each thing that happens: a line, and whether it only stands until the next one.
Tell = Callable[[str, bool], None]


class Builder:
    """Applies changes, or removes them, in one environment."""

    def __init__(self, database: Database, tell: Tell, lock_timeout: timedelta, patience: timedelta) -> None:
        self.database, self.tell = database, tell
        self.lock_timeout, self.patience = lock_timeout, patience.total_seconds()
        self.ledger = Ledger(database)
        self._session: AsyncConnection | None = None

    async def apply(self, changes: Sequence[SchemaChange]) -> None:
        """Apply all changes in order. Raises at one that fails; the next run continues from there."""
        own = await schema.ensure(self.database)
        if not own.has(schema.DDL):
            raise Refused(
                f"rowmill's own tables cannot be created: {own.refused}",
                hint="use a role that may create tables here, or Mill(schema=...) with an existing schema",
            )
        for change in changes:
            if change.kind == "own":
                self.tell(f"done: {change.what}", False)
        await self._alone(lambda: self._apply([c for c in changes if c.kind != "own"]))

    async def detach(self, records: Sequence[Record], *, own: bool = True) -> None:
        """Remove what was added, the last first, and then rowmill's ``own`` tables."""
        await self._alone(lambda: self._detach(records, own))

    async def _alone(self, work: Callable[[], Any]) -> None:
        if self.database.sql.one_writer:
            await work()
            return
        self.database.needs_sessions("an index cannot be built through one")
        async with self.database.session() as session:
            self._session = session
            await self._run("set statement_timeout = 0")
            await self._run("set lock_timeout = 0")
            await self._take_turn()
            try:
                await work()
            finally:
                self._session = None

    async def _run(self, text: str) -> Sequence[Any]:
        assert self._session is not None
        with translated(self.database):
            return await self._session.run_sync(lambda c: runner(c)(text, ()))

    async def _take_turn(self) -> None:
        """Allow one migration at a time; wait until the server has ended the statement of a killed one."""
        deadline = time.monotonic() + self.patience
        while not (await self._run(f"select pg_try_advisory_lock({_LOCK})"))[0][0]:
            progress = await self.database.read(_progress)
            if time.monotonic() > deadline:
                raise Busy(
                    f"another migration is running in this database{progress}",
                    hint="wait for it, and run this again; pg_stat_activity shows it",
                )
            self.tell(f"another migration is running here{progress}; waiting", True)
            await asyncio.sleep(_TICK)

    # -- forward

    async def _apply(self, changes: Sequence[SchemaChange]) -> None:
        for change in changes:
            if change.kind == "index" and change.steps:
                await self._build_parts(change)
            elif change.kind == "index" and change.concurrent:
                await self._build(change)
            else:
                await self._step(change)
            self.tell(f"done: {change.what} on {change.relation}", False)
        analysed = {change.relation for change in changes if change.kind == "statistics"}
        for relation in analysed:
            await self._run(f"analyze {relation}")
            self.tell(f"done: analyze {relation}", False)

    async def _step(self, change: SchemaChange) -> None:
        """Run statements that lock the table only briefly, and their records, in one transaction."""

        def work(run: Run) -> None:
            for step in change.steps or (change.statement,):
                run(step, ())
            for record in change.records:
                self.ledger.write(run, record)

        await self._briefly(change.what, change.relation, work)

    async def _briefly(self, what: str, relation: str, work: Callable[[Run], None]) -> None:
        """Get the lock within the lock timeout, or try again, for as long as patience lasts."""
        if self.database.sql.one_writer:
            await self.database.write(work)
            return
        deadline, pause = time.monotonic() + self.patience, _PAUSE

        def timed(run: Run) -> None:
            run(f"set local lock_timeout = '{max(1, int(self.lock_timeout.total_seconds() * 1000))}ms'", ())
            run("set local statement_timeout = 0", ())
            work(run)

        while True:
            try:
                return await self.database.long_transaction(timed)
            except Busy as error:
                if time.monotonic() + pause > deadline:
                    raise Busy(
                        f"{what}: {relation} stayed in use: {error.message}",
                        hint="run this again: it continues where it stopped. --patience SECONDS waits longer",
                    ) from error
            holder = await self.database.read(lambda run: _holder(run, relation))
            self.tell(f"{what}: {relation} is in use{holder}; again in {pause:.1f} s", True)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _build(self, change: SchemaChange) -> None:
        """Build an index concurrently: record the start, build, confirm."""
        (record,) = change.records
        await self._note(record, BEGUN)
        for attempt in (1, 2, 3):
            state = await self._state(record)
            if state == "invalid":
                self.tell(f"index {record.name}: a failed build left it unusable; rebuilding it", False)
                await self._drop(record)
            elif state == "valid":
                break
            try:
                await self._watched(change.statement, f"index {record.name}")
                break
            except Busy as error:  # a deadlock with another build: what it left is replaced
                if attempt == 3:
                    raise
                self.tell(f"index {record.name}: {error.message}; trying again", False)
        await self._note(record, MADE)

    async def _build_parts(self, change: SchemaChange) -> None:
        """Build an index of a partitioned table: the parent's, then each partition's concurrently; then attach them."""
        for record in change.records:
            await self._note(record, BEGUN)
        parts = {record.made: record for record in change.records}
        for step in change.steps:
            part = parts.get(step)
            if part is None:  # attach; a second time is no harm
                await self._briefly(change.what, change.relation, _saying(step))
            elif "concurrently" in step:
                await self._build(SchemaChange("index", part.relation, step, change.why, (part,), True))
                self.tell(f"done: index {part.name} on {part.relation}", False)
            elif await self._state(part) is None:
                await self._briefly(change.what, part.relation, _saying(step))
        for record in change.records:
            await self._note(record, MADE)

    async def _note(self, record: Record, state: str) -> None:
        await self.database.write(lambda run: self.ledger.write(run, replace(record, state=state)))

    async def _forget(self, record: Record) -> None:
        await self.database.write(lambda run: self.ledger.erase(run, record))

    async def _state(self, record: Record) -> str | None:
        return await self.database.read(lambda run: index_state(run, self.database.sql, record.relation, record.name))

    async def _drop(self, record: Record) -> None:
        await self._watched(record.undo, f"index {record.name}")

    async def _watched(self, statement: str, what: str) -> None:
        """Run something long, and report its progress."""
        task = asyncio.ensure_future(self._run(statement))
        last = ""
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_TICK)
                if not task.done():
                    try:
                        progress = await self.database.read(_progress)
                    except DatabaseError:
                        continue
                    if progress != last:
                        last = progress
                        self.tell(f"{what}{progress}", True)
        finally:
            if not task.done():
                task.cancel()
        await task

    # -- back

    async def _detach(self, records: Sequence[Record], own: bool) -> None:
        for record in undo_order(records):
            changed = await self.database.read(functools.partial(self._changed, record=record))
            if changed is not None:
                self.tell(f"left alone: {record.kind} {record.name} on {record.relation}: {changed}", False)
                await self._forget(record)
                continue
            if record.kind == "index" and "concurrently" in record.undo:
                await self._drop(record)
                await self._forget(record)
            else:

                def work(run: Run, record: Record = record) -> None:
                    run(record.undo, ())
                    self.ledger.erase(run, record)

                await self._briefly(f"{record.kind} {record.name}", record.relation, work)
            self.tell(f"removed: {record.kind} {record.name} on {record.relation}", False)
        if own:
            await self._drop_own()

    def _changed(self, run: Run, record: Record) -> str | None:
        """Why something differs from what was added; None if it does not."""
        if not self.database.sql.has_catalog or record.kind in ("function", "sequence"):
            return None  # they stay behind where their table is gone
        if not run("select to_regclass($1::text) is not null", (record.relation,))[0][0]:
            return "the table no longer exists"
        if record.kind == "column":
            text = (
                "select 1 from pg_attribute where attrelid = to_regclass($1::text) and attname = $2::text"
                " and not attisdropped"
            )
            return None if run(text, (record.relation, record.name)) else "it no longer exists"
        if record.kind not in ("storage", "statistics"):
            return None
        there: dict[str, Any] = dict((settings if record.kind == "storage" else targets)(run, record.relation))
        if str(there.get(record.name)) != record.value:
            return f"it is {there.get(record.name, 'not set')} now, and not the {record.value} that rowmill set"
        return None

    async def _drop_own(self) -> None:
        texts = await self.database.read(lambda run: own_drops(self.database, run))

        def work(run: Run) -> None:
            for text in texts:
                run(text, ())

        if texts:
            await self._briefly("rowmill's own tables", "rowmill_schema", work)
            self.tell("removed: rowmill's own tables", False)


def _saying(text: str) -> Callable[[Run], None]:
    def work(run: Run) -> None:
        run(text, ())

    return work


#: The kinds of records that make up a wake trigger, and all kinds, in the order in which they are removed.
WAKE = ("trigger", "function", "sequence")
_ORDER = (*WAKE, "index", "statistics", "storage", "column")


def undo_order(records: Sequence[Record]) -> list[Record]:
    """Records in the order of removal."""
    return sorted(records, key=lambda record: (_ORDER.index(record.kind), -record.position))


def own_drops(database: Database, run: Run, gone: Sequence[Record] = ()) -> list[str]:
    """What removes rowmill's own tables and functions, and its schema where rowmill made it and it is empty then.

    ``gone``: what is removed before.
    """
    names = [name for name in schema.own_tables() if schema.exists(database, run, name)]
    tables = [f"drop table {database.own(name)}" for name in names]
    if not database.sql.has_functions:
        return tables
    schema_name = database.schema
    functions = run(
        "select p.oid::regprocedure::text, p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        " where p.proname = any($1::text[]) and n.nspname = coalesce($2::text, current_schema()) order by 1",
        (schema.own_functions(), schema_name),
    )
    texts = [*(f"drop function {row[0]}" for row in functions), *tables]
    if "rowmill_schema" not in names or schema_name is None:
        return texts
    before = [record.name.rpartition(".")[2] for record in gone]
    made = run(f"select 1 from {database.own('rowmill_schema')} where step = {schema.SCHEMA_MADE}", ())
    others = run(
        "select 1 from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = $1::text and c.relkind in ('r', 'v', 'm', 'S', 'f', 'p') and c.relname <> all($2::text[])"
        # The sequence of an identity column goes with its table.
        " and not exists (select 1 from pg_depend d where d.objid = c.oid and d.classid = 'pg_class'::regclass"
        " and d.deptype in ('a', 'i'))"
        " union all select 1 from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname = $1::text and p.proname <> all($3::text[])",
        (schema_name, [*names, *before], [*schema.own_functions(), *before]),
    )
    if made and not others:
        texts.append(f"drop schema {database.dialect.identifier_preparer.quote(schema_name)}")
    return texts


_READERS = """select distinct case v.relkind when 'v' then 'view ' when 'm' then 'materialized view ' end
  || v.oid::regclass::text, pg_describe_object(d.classid, d.objid, d.objsubid), a.attname
from pg_depend d join pg_attribute a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
  left join pg_rewrite r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid
  left join pg_class v on v.oid = r.ev_class
where d.refclassid = 'pg_class'::regclass and d.refobjid = to_regclass($1::text) and a.attname = any($2::text[])
  and d.deptype = 'n' order by 1, 2, 3"""


def readers(database: Database, run: Run, records: Sequence[Record]) -> dict[str, set[str]]:
    """Views and other objects that read columns to be dropped, with those columns: they would make the drop fail."""
    columns_by_reader: dict[str, set[str]] = {}
    columns: dict[str, list[str]] = {}
    for record in records:
        if record.kind == "column":
            columns.setdefault(record.relation, []).append(record.name)
    for relation, names in columns.items():
        if database.sql.has_catalog:
            for view, other, column in run(_READERS, (relation, names)):
                columns_by_reader.setdefault(view or other, set()).add(column)
            continue
        table = relation.strip('"').replace('""', '"')
        for name, text in run("select name, sql from sqlite_master where type = 'view'", ()):
            used = {column for column in names if mentions(text, column)} if mentions(text, table) else set()
            if used:
                columns_by_reader[f"view {database.dialect.identifier_preparer.quote(name)}"] = used
    return columns_by_reader


def unfinished_jobs(database: Database, run: Run) -> int:
    """Unfinished jobs in rowmill's own table, which would be lost if it were dropped."""
    if not schema.exists(database, run, "rowmill_jobs"):
        return 0
    return int(
        run(f"select count(*) from {database.own('rowmill_jobs')} where state in ({listed(UNFINISHED)})", ())[0][0]
    )


def _progress(run: Run) -> str:
    """The progress of a build, in words; empty if there is none."""
    rows = run(
        "select p.phase, p.blocks_total, p.blocks_done, p.tuples_total, p.tuples_done, p.lockers_total, p.lockers_done,"
        " p.current_locker_pid, extract(epoch from now() - a.xact_start)::int"
        " from pg_stat_progress_create_index p left join pg_stat_activity a on a.pid = p.current_locker_pid"
        " where p.datname = current_database() limit 1",
        (),
    )
    if not rows:
        return ""
    phase, blocks, blocks_done, rows_all, rows_done, lockers, lockers_done, pid, seconds = rows[0]
    if pid:
        since = f", open for {seconds} s" if seconds is not None else ""
        return f": {phase}: {lockers_done} of {lockers}, now for process {pid}{since}"
    done, total = (blocks_done, blocks) if blocks else (rows_done, rows_all)
    return f": {phase}" + (f": {100 * done // total} %" if total else "")


def _holder(run: Run, relation: str) -> str:
    """Who has held the table for longest, in words."""
    rows = run(
        "select a.pid, a.state, extract(epoch from now() - a.xact_start)::int from pg_locks l"
        " join pg_stat_activity a on a.pid = l.pid where l.relation = to_regclass($1::text) and l.granted"
        " and a.pid <> pg_backend_pid() order by a.xact_start limit 1",
        (relation,),
    )
    if not rows:
        return ""
    pid, state, seconds = rows[0]
    return f" (process {pid}, {state}, for {seconds} s)"
