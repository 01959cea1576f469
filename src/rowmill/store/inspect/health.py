"""Find what slows a queue down, and say what to do about it. Read only; each query is bounded.

The most important check is the horizon. One transaction that stays open prevents the cleanup of every row that was
settled since, and every claim has to skip those rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ...declare.schedules import Schedules
from ...errors import Busy, DatabaseError, DeclarationError
from ...plural import counted, plural
from ..database import Database, Run
from ..dialect import POSTGRES, SQLITE
from ..jobs.schedule_rows import schedule_list
from ..own import schema
from ..own.workers import WorkersTable
from .indexes import in_words, needed
from .lane_view import LaneView
from .plans import serves, walk
from .why_rules import span

#: Limits (look, bad) in seconds: the age of an open transaction, and the difference between clocks.
_OPEN, _SKEW = (300.0, 1800.0), (2.0, 30.0)
#: Limits (look, bad): pages that a claim's walk touches, dead rows per live row, a table's size relative to what its
#: rows need.
_PAGES, _DEAD, _BLOAT = (200, 2000), (0.2, 1.0), (2.0, 4.0)
_SMALL = 16 * 1024 * 1024
#: Limits (look, bad): polls of idle workers per second, and the share of connections in use.
_POLLS, _USED = (20.0, 100.0), (0.7, 0.9)
_SECONDS = 0.3
#: The most rows that are counted, and the most schedules with a problem that are named.
_MOST, _NAMED = 10_000, 5


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """The result of one check. ``level``: ok, look, bad, or unknown."""

    check: str
    title: str
    level: str
    told: str
    todo: str = ""
    #: The fix: SQL or a command line.
    command: str = ""
    lane: str | None = None

    def value(self) -> dict[str, Any]:
        """The finding as plain values."""
        return asdict(self)


DatabaseCheck = Callable[[Run], list[HealthFinding]]
LaneCheck = Callable[[Run, LaneView], list[HealthFinding]]


async def examine(
    database: Database, views: Sequence[LaneView], schedules: Sequence[Schedules] = (), environment: str = "default"
) -> list[HealthFinding]:
    """Run all checks of one environment."""
    table = WorkersTable(database)
    workers = await table.all() if await table.exists() else None
    of_database, of_table, of_lane = _ONLY[database.sql.name]
    checks: list[tuple[str, Callable[[], Awaitable[list[HealthFinding]]]]] = [
        *((name, partial(database.read_within, check, _SECONDS)) for name, check in of_database.items()),
        ("polls", lambda: _polls(workers, views)),
        ("own_tables", lambda: _own(database)),
    ]
    checks += [("schedules", partial(_schedules, database, source, environment)) for source in schedules]
    for view in {view.binding.table.fullname: view for view in views}.values():  # one lane for each table
        checks += [(name, _of(check, view)) for name, check in of_table.items()]
    for view in views:
        checks.append(("stuck", partial(_stuck, view)))
        checks.append(("workers", partial(_workers, view, workers)))
        checks.append(("indexes", _of(_indexes, view)))
        checks += [(name, _of(check, view)) for name, check in of_lane.items()]
    findings: list[HealthFinding] = []
    for name, check in checks:
        try:
            findings += await check()
        except Busy:
            findings.append(_finding(name, "unknown", "the check took too long"))
        except DatabaseError as error:
            findings.append(_finding(name, "unknown", error.message))
    order = ("bad", "look", "unknown", "ok")
    return sorted(findings, key=lambda finding: order.index(finding.level))


_TITLES = {
    "oldest_transaction": "Oldest transaction", "clock": "Clock", "polls": "Poll load", "bloat": "Bloat",
    "own_tables": "rowmill's tables", "connections": "Connections", "file": "Database file",
    "dead_rows": "Dead tuples", "stuck": "Stuck rows", "workers": "Workers", "indexes": "Indexes",
    "claim_head": "Head of the claim index", "schedules": "Schedules",
}  # fmt: skip


def _level(number: float, bounds: tuple[float, float]) -> str:
    return "ok" if number < bounds[0] else "look" if number < bounds[1] else "bad"


def _finding(
    check: str, level: str, text: str, todo: str = "", command: str = "", lane: str | None = None
) -> HealthFinding:
    fine = level == "ok"
    return HealthFinding(check, _TITLES[check], level, text, "" if fine else todo, "" if fine else command, lane)


def _of(check: LaneCheck, view: LaneView) -> Callable[[], Awaitable[list[HealthFinding]]]:
    return lambda: view.database.read_within(lambda run: check(run, view), _SECONDS)


# -- checks of the environment


def _oldest(run: Run) -> list[HealthFinding]:
    rows = run(
        """select pid, coalesce(application_name, ''), state, extract(epoch from now() - xact_start)::float8
from pg_stat_activity
where xact_start is not null and pid <> pg_backend_pid() and datname = current_database()
  and backend_type = 'client backend'
order by xact_start limit 1""", (),
    )  # fmt: skip
    prepared = run(
        "select gid, extract(epoch from now() - prepared)::float8 from pg_prepared_xacts order by 2 desc", ()
    )
    if prepared and (not rows or prepared[0][1] > rows[0][3]):
        gid, seconds = prepared[0]
        text = f"prepared transaction {gid}, open for {span(seconds)}"
        return [_finding("oldest_transaction", _level(seconds, _OPEN), text, _HORIZON, f"rollback prepared '{gid}'")]
    if not rows:
        return [_finding("oldest_transaction", "ok", "no transaction is open")]
    pid, application, state, seconds = rows[0]
    text = f"open for {span(seconds)}: pid {pid}{f', {application}' if application else ''}, {state}"
    level = _level(seconds, _OPEN)
    return [_finding("oldest_transaction", level, text, _HORIZON, f"select pg_terminate_backend({pid})")]


_HORIZON = (
    "End it, or let it commit. While it is open, vacuum cannot remove newer dead rows, and claims slow down."
    " To prevent this, set idle_in_transaction_session_timeout for the role."
)


def _clock(run: Run) -> list[HealthFinding]:
    before = time.time()
    theirs = float(run("select extract(epoch from clock_timestamp())::float8", ())[0][0])
    skew = abs(theirs - (before + time.time()) / 2)
    text = f"this machine and the database are {skew:.2f} s apart"
    todo = "Sync both with the same time server. rowmill uses the database's clock; log lines use this machine's."
    return [_finding("clock", _level(skew, _SKEW), text, todo, "timedatectl status")]


def _connections(run: Run) -> list[HealthFinding]:
    used, most = run("select (select count(*) from pg_stat_activity), current_setting('max_connections')::int", ())[0]
    todo = "Use a pooler in transaction mode, or run fewer processes with more slots each."
    return [_finding("connections", _level(used / most, _USED), f"{used} of {most} in use", todo)]


def _file(run: Run) -> list[HealthFinding]:
    path = str(run("pragma database_list", ())[0][2])
    pages, free, mode = (run(f"pragma {name}", ())[0][0] for name in ("page_count", "freelist_count", "journal_mode"))
    wal = os.path.getsize(f"{path}-wal") if os.path.exists(f"{path}-wal") else 0
    text = f"{_bytes(os.path.getsize(path))}, write-ahead log {_bytes(wal)}, {free * 100 // max(pages, 1)} % free pages"
    level = "look" if wal > 4 * _SMALL or (free > pages / 2 and pages * 4096 > _SMALL) or mode != "wal" else "ok"
    todo = "A long-running reader prevents a checkpoint of the write-ahead log. VACUUM returns free pages."
    return [_finding("file", level, text, todo, "vacuum")]


async def _polls(workers: Sequence[dict[str, Any]] | None, views: Sequence[LaneView]) -> list[HealthFinding]:
    if workers is None:
        return [_finding("polls", "unknown", "unknown, because the table rowmill_workers does not exist")]
    polls = {view.lane.name: view.lane.poll_seconds for view in views}
    alive = [worker for worker in workers if worker["alive"]]
    rate = sum(1 / min(mine) for worker in alive if (mine := [polls[ln] for ln in worker["lanes"] if ln in polls]))
    text = f"{rate:.2g} queries a second when idle, from {counted(len(alive), 'worker')}"
    todo = "Raise poll. NOTIFY wakes workers at once, so polling is only the fallback."
    return [_finding("polls", _level(rate, _POLLS), text, todo, "poll=timedelta(seconds=30)")]


async def _own(database: Database) -> list[HealthFinding]:
    own = await schema.taken(database)
    missing = [step.what.partition(":")[0] for step in schema.STEPS if not own.has(step)]
    if not missing:
        return [_finding("own_tables", "ok", "all present")]
    todo = "A worker creates them if its role may. Otherwise run this once with a role that may create tables."
    return [_finding("own_tables", "look", f"missing: {', '.join(missing)}", todo, "rowmill migrate APP --apply")]


async def _schedules(database: Database, source: Schedules, environment: str) -> list[HealthFinding]:
    try:
        rows = await schedule_list(source, environment, database)
    except DeclarationError as error:
        return [_finding("schedules", "bad", error.message, error.hint or "")]
    findings = [
        _finding("schedules", "bad", f"{source}, row {row['id']}, is not enqueued: {row['problem']}", row["hint"] or "")
        for row in rows
        if row["enabled"] and row["problem"] is not None
    ]
    coming = min((row["next_tick"] for row in rows if row["next_tick"] is not None), default=None)
    on = sum(row["enabled"] for row in rows)
    told = f"{source}: {counted(on, 'row')} on{f', next at {coming}' if coming else ''}"
    return findings[:_NAMED] or [_finding("schedules", "ok", told)]


# -- checks of a table or a lane


async def _stuck(view: LaneView) -> list[HealthFinding]:
    lane = view.lane.name
    counts, slow = await view.counted(["stuck"], _MOST, _SECONDS, _SECONDS)
    if slow:
        return [_finding("stuck", "unknown", "counting took too long", lane=lane)]
    number = counts.get("stuck", (0, None))[0]
    if not number:
        return [_finding("stuck", "ok", "no row is stuck", lane=lane)]
    are = f"{_bounded(number)} {plural(number, 'row is', 'rows are')} stuck"
    text = (
        f"{are}: running, without a sign of life for longer than the lease of {span(view.lane.lease.total_seconds())}"
    )
    todo = "Keep a worker running: its next sweep takes them back. rowmill stuck lists them."
    return [_finding("stuck", "bad", text, todo, f"rowmill release APP --lane {lane} --stuck", lane)]


async def _workers(view: LaneView, workers: Sequence[dict[str, Any]] | None) -> list[HealthFinding]:
    """Check that a worker serves the lane, and that no dead worker still holds its rows."""
    lane = view.lane.name
    serving = [worker for worker in workers or () if lane in worker["lanes"]]
    alive = {worker["id"] for worker in serving if worker["alive"]}
    silent = {worker["id"]: worker["silent_for"] for worker in serving if worker["state"] != "stopped"}
    dead = silent.keys() - alive
    findings = []
    for holder in await view.holders(_SECONDS) if dead else ():
        if holder.worker in dead:
            text = (
                f"worker {holder.worker} died {span(silent[holder.worker])} ago and holds {counted(holder.rows, 'row')}"
            )
            todo = "Keep a worker running: it takes them back. rowmill stuck says when."
            findings.append(_finding("workers", "look", text, todo, "rowmill stuck APP", lane))
    if not alive:
        counts, slow = await view.counted(["ready"], _MOST, _SECONDS, _SECONDS)
        number = counts.get("ready", (0, None))[0]
        if number or slow:
            many = "many rows are" if slow else f"{_bounded(number)} {plural(number, 'row is', 'rows are')}"
            text = f"no live worker serves the lane, and {many} ready"
            # Without the workers table, there is no way to know whether workers run.
            level = "bad" if workers is not None else "look"
            findings.append(_finding("workers", level, text, "Start a worker.", "rowmill run APP", lane))
    if findings:
        return findings
    text = counted(len(alive), "live worker") if alive else "no live worker serves the lane, and no row is ready"
    return [_finding("workers", "ok", text, lane=lane)]


def _bounded(number: int) -> str:
    return f"{number:,}" if number < _MOST else f"{_MOST:,} or more"


def _dead(run: Run, view: LaneView) -> list[HealthFinding]:
    rows = run(
        f"""select n_live_tup, n_dead_tup,
  extract(epoch from now() - greatest(last_vacuum, last_autovacuum))::float8
from pg_stat_all_tables where relid = '{_quoted(view)}'::regclass""", (),
    )  # fmt: skip
    if not rows:
        return []
    live, dead, since = rows[0]
    share = dead / max(live, 1)
    level = _level(share, _DEAD) if dead > 10_000 else "ok"
    when = f"vacuumed {span(since)} ago" if since is not None else "never vacuumed"
    text = f"{dead:,} dead tuples beside {live:,} live rows, {when}"
    table = view.statements.table
    todo = "Vacuum it. If they stay, the oldest transaction keeps them. rowmill migrate proposes autovacuum settings."
    return [_finding("dead_rows", level, f"{view.binding.table.fullname}: {text}", todo, f"vacuum (verbose) {table}")]


def _bloat(run: Run, view: LaneView) -> list[HealthFinding]:
    rows = run(
        f"""select pg_relation_size(c.oid), c.reltuples::float8,
  (select sum((1 - null_frac) * avg_width)::float8 from pg_stats s
    where s.schemaname = n.nspname and s.tablename = c.relname),
  pg_indexes_size(c.oid)
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = '{_quoted(view)}'::regclass""", (),
    )  # fmt: skip
    if not rows:
        return []
    size, count, width, indexes = rows[0]
    name, table = view.binding.table.fullname, view.statements.table
    if size <= _SMALL:
        return [_finding("bloat", "ok", f"{name}: {_bytes(size)}, too small to matter")]
    if not width or count is None or count < 0:
        return [_finding("bloat", "unknown", f"{name}: never analysed", "Analyse it.", f"analyze {table}")]
    # The space that the rows need: columns, a header and a line pointer each, pages filled to nine tenths.
    need = max(count * (width + 32) / 0.9, 8192.0)
    ratio = size / need
    level = _level(ratio, _BLOAT)
    text = f"{name}: {_bytes(size)}, ≈ {ratio:.1f} times what its rows need; indexes {_bytes(indexes)}"
    todo = "pg_repack rewrites the table online; VACUUM FULL locks it. Then find out why it grew: see Dead tuples."
    return [_finding("bloat", level, text, todo, f"reindex table concurrently {table}")]


def _indexes(run: Run, view: LaneView) -> list[HealthFinding]:
    statements, lane = view.statements, view.lane
    if lane.own:
        return []
    lacking = [need for need in needed(view.binding, statements) if serves(run, statements, need) is None]
    if not lacking:
        return [_finding("indexes", "ok", "every statement of the lane has its index", lane=lane.name)]
    full = view.binding.table.fullname
    made = ";\n".join(in_words(n, statements, n.name(lane.name, full), concurrently=True) for n in lacking)
    text = f"{counted(len(lacking), 'index', 'indexes')} missing: {'; '.join(f'one {need.why}' for need in lacking)}"
    todo = "rowmill migrate APP --apply builds what is missing, without blocking writes."
    return [_finding("indexes", "look", text, todo, made, lane.name)]


def _head(run: Run, view: LaneView) -> list[HealthFinding]:
    """Run the claim's walk: pages beyond what its rows need are dead entries at the start of its index."""
    rows = run(f"explain (analyze, buffers, timing off, format json) {walk(view.statements)}", ())
    document = json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0]
    root = document[0]["Plan"]
    pages = int(root.get("Shared Hit Blocks", 0)) + int(root.get("Shared Read Blocks", 0))
    got, took = int(root["Actual Rows"]), float(document[0]["Execution Time"])
    text = f"claiming {counted(got, 'row')} reads {counted(pages, 'page')} in {took:.1f} ms"
    todo = (
        "Index entries of finished rows come before the ready ones. End the oldest transaction, then vacuum."
        " If an index is missing, the claim scans the table."
    )
    command = f"vacuum (index_cleanup on) {view.statements.table}"
    return [_finding("claim_head", _level(pages, _PAGES), text, todo, command, view.lane.name)]


def _quoted(view: LaneView) -> str:
    return view.statements.table.replace("'", "''")


def _bytes(number: float) -> str:
    for size, unit in ((2**30, "GB"), (2**20, "MB"), (2**10, "kB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


#: The checks that only one dialect has: of the database, of each table, of each lane.
_ONLY: dict[str, tuple[dict[str, DatabaseCheck], dict[str, LaneCheck], dict[str, LaneCheck]]] = {
    POSTGRES.name: (
        {"oldest_transaction": _oldest, "clock": _clock, "connections": _connections},
        {"dead_rows": _dead, "bloat": _bloat},
        {"claim_head": _head},
    ),
    SQLITE.name: ({"file": _file}, {}, {}),
}
