"""What slows a queue down before anybody notices, and what to do about it. Read only, and each question bounded.

The first is the horizon: one transaction that stays open keeps every row that was settled since from being cleaned up,
and every claim walks past them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import Busy, DatabaseError
from ...plural import counted
from ..database import Database, Run, Sqlite
from ..own import schema
from ..own.workers import WorkersTable
from .indexes import in_words, needed
from .lane_view import LaneView
from .plans import serves, walk
from .why_rules import span

#: Seconds that a transaction may be open, and that clocks may differ: above the first it is worth a look.
_OPEN, _SKEW = (300.0, 1800.0), (2.0, 30.0)
#: Pages that a claim's walk may touch, dead rows beside one live one, a table's size beside what its rows need.
_PAGES, _DEAD, _BLOAT = (200, 2000), (0.2, 1.0), (2.0, 4.0)
_SMALL = 16 * 1024 * 1024
#: Polls of idle workers a second, and the share of connections in use.
_POLLS, _USED = (20.0, 100.0), (0.7, 0.9)
_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One thing that was looked at. ``level``: ok, look, bad, or unknown."""

    check: str
    title: str
    level: str
    told: str
    todo: str = ""
    #: Something to run, in SQL or on a command line.
    command: str = ""
    lane: str | None = None

    def value(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


async def examine(database: Database, views: Sequence[LaneView]) -> list[HealthFinding]:
    """All checks of one environment."""
    fleet = WorkersTable(database)
    workers = await fleet.all() if await fleet.exists() else None
    checks: list[tuple[str, Callable[[], Awaitable[list[HealthFinding]]]]] = [
        ("polls", lambda: _polls(workers, views)),
        ("own_tables", lambda: _own(database)),
    ]
    if database.dialect.name == "postgresql":
        checks.insert(0, ("oldest_transaction", lambda: _asked(database, _oldest)))
        checks += [
            ("clock", lambda: _asked(database, _clock)),
            ("connections", lambda: _asked(database, _connections)),
        ]
    elif isinstance(database, Sqlite):
        checks.insert(0, ("file", lambda: _asked(database, lambda run: _file(run, database.path))))
    for view in _tables(views):
        if view.postgres:
            checks += [("dead_rows", _of(_dead, view)), ("bloat", _of(_bloat, view))]
    for view in views:
        checks.append(("indexes", _of(_indexes, view)))
        if view.postgres:
            checks.append(("claim_head", _of(_head, view)))
    found: list[HealthFinding] = []
    for name, check in checks:
        try:
            found += await check()
        except Busy:
            found.append(HealthFinding(name, _TITLES[name], "unknown", "looking took too long"))
        except DatabaseError as error:
            found.append(HealthFinding(name, _TITLES[name], "unknown", error.message))
    order = ("bad", "look", "unknown", "ok")
    return sorted(found, key=lambda finding: order.index(finding.level))


_TITLES = {
    "oldest_transaction": "Oldest transaction", "clock": "Clock", "polls": "Poll load", "own_tables": "Own tables",
    "connections": "Connections", "file": "Database file", "dead_rows": "Dead rows", "bloat": "Bloat",
    "indexes": "Indexes", "claim_head": "Head of the claim index",
}  # fmt: skip


def _level(number: float, bounds: tuple[float, float]) -> str:
    return "ok" if number < bounds[0] else "look" if number < bounds[1] else "bad"


def _finding(
    check: str, level: str, told: str, todo: str = "", command: str = "", lane: str | None = None
) -> HealthFinding:
    fine = level == "ok"
    return HealthFinding(check, _TITLES[check], level, told, "" if fine else todo, "" if fine else command, lane)


async def _asked(database: Database, verb: Callable[[Run], list[HealthFinding]]) -> list[HealthFinding]:
    return await database.read_within(verb, _SECONDS)


def _of(
    check: Callable[[Run, LaneView], list[HealthFinding]], view: LaneView
) -> Callable[[], Awaitable[list[HealthFinding]]]:
    return lambda: view.database.read_within(lambda run: check(run, view), _SECONDS)


def _tables(views: Sequence[LaneView]) -> list[LaneView]:
    """One lane of every table."""
    return list({view.binding.table.fullname: view for view in views}.values())


# -- of the environment


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
        told = f"prepared transaction {gid}, open for {span(seconds)}"
        return [_finding("oldest_transaction", _level(seconds, _OPEN), told, _HORIZON, f"rollback prepared '{gid}'")]
    if not rows:
        return [_finding("oldest_transaction", "ok", "no transaction is open")]
    pid, application, state, seconds = rows[0]
    told = f"open for {span(seconds)}: pid {pid}{f', {application}' if application else ''}, {state}"
    level = _level(seconds, _OPEN)
    return [_finding("oldest_transaction", level, told, _HORIZON, f"select pg_terminate_backend({pid})")]


_HORIZON = (
    "End it, or let it commit: while it is open no row that was settled since can be cleaned up, and claims slow down."
    " For the long run set idle_in_transaction_session_timeout for the role."
)


def _clock(run: Run) -> list[HealthFinding]:
    before = time.time()
    theirs = float(run("select extract(epoch from clock_timestamp())::float8", ())[0][0])
    skew = abs(theirs - (before + time.time()) / 2)
    told = f"this machine and the database are {skew:.2f} s apart"
    todo = "Let both follow the same time server. rowmill itself goes by the database's time; logs do not."
    return [_finding("clock", _level(skew, _SKEW), told, todo, "timedatectl status")]


def _connections(run: Run) -> list[HealthFinding]:
    used, most = run("select (select count(*) from pg_stat_activity), current_setting('max_connections')::int", ())[0]
    todo = "Put a pooler in transaction mode in between, or run fewer processes with more slots each."
    return [_finding("connections", _level(used / most, _USED), f"{used} of {most} in use", todo)]


def _file(run: Run, path: str) -> list[HealthFinding]:
    pages, free, mode = (run(f"pragma {name}", ())[0][0] for name in ("page_count", "freelist_count", "journal_mode"))
    wal = os.path.getsize(f"{path}-wal") if os.path.exists(f"{path}-wal") else 0
    told = f"{_bytes(os.path.getsize(path))}, write-ahead log {_bytes(wal)}, {free * 100 // max(pages, 1)} % free pages"
    level = "look" if wal > 4 * _SMALL or (free > pages / 2 and pages * 4096 > _SMALL) or mode != "wal" else "ok"
    todo = "A reader that stays open keeps the log from being folded in; vacuum gives free pages back."
    return [_finding("file", level, told, todo, "vacuum")]


async def _polls(workers: Sequence[dict[str, Any]] | None, views: Sequence[LaneView]) -> list[HealthFinding]:
    if workers is None:
        return [HealthFinding("polls", _TITLES["polls"], "unknown", "there is no rowmill_workers that would tell")]
    polls = {view.lane.name: view.lane.poll.total_seconds() for view in views}
    alive = [worker for worker in workers if worker["alive"]]
    rate = sum(1 / min(mine) for worker in alive if (mine := [polls[ln] for ln in worker["lanes"] if ln in polls]))
    told = f"{rate:.2g} a second when idle, from {counted(len(alive), 'worker')}"
    todo = "Raise poll: a wake-up comes by NOTIFY at once, so a poll is only the upper bound."
    return [_finding("polls", _level(rate, _POLLS), told, todo, "poll=timedelta(seconds=30)")]


async def _own(database: Database) -> list[HealthFinding]:
    own = await schema.taken(database)
    missing = [step.what.partition(":")[0] for step in schema.STEPS if not own.has(step)]
    if not missing:
        return [_finding("own_tables", "ok", "all there")]
    todo = "A worker makes them where its role may; else somebody who may create tables has to, once."
    return [_finding("own_tables", "look", f"not there: {', '.join(missing)}", todo, "rowmill migrate APP --apply")]


# -- of a table, of a lane


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
    told = f"{dead:,} dead beside {live:,} live ones, {when}"
    table = view.statements.table
    todo = (
        "Vacuum it; if they stay, the oldest transaction holds them. rowmill migrate proposes settings for autovacuum."
    )
    return [_finding("dead_rows", level, f"{view.binding.table.fullname}: {told}", todo, f"vacuum (verbose) {table}")]


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
        return [
            HealthFinding(
                "bloat", _TITLES["bloat"], "unknown", f"{name}: never analysed", "Analyse it.", f"analyze {table}"
            )
        ]
    # What the rows need: their columns, a header and a line pointer each, pages nine tenths full.
    need = max(count * (width + 32) / 0.9, 8192.0)
    ratio = size / need
    level = _level(ratio, _BLOAT)
    told = f"{name}: {_bytes(size)}, ≈ {ratio:.1f} times what its rows need; indexes {_bytes(indexes)}"
    todo = (
        "pg_repack rewrites it beside the traffic; vacuum full does so under a lock. Then see why it grew: dead rows."
    )
    return [_finding("bloat", level, told, todo, f"reindex table concurrently {table}")]


def _indexes(run: Run, view: LaneView) -> list[HealthFinding]:
    say, lane = view.statements, view.lane
    if lane.own:
        return []
    lacking = [need for need in needed(view.binding, say) if serves(run, say, need) is None]
    if not lacking:
        return [_finding("indexes", "ok", "every statement of the lane has its index", lane=lane.name)]
    full = view.binding.table.fullname
    made = ";\n".join(in_words(n, say, n.name(lane.name, full), concurrently=True) for n in lacking)
    told = f"missing: {', '.join(need.purpose for need in lacking)} ({'; '.join(need.why for need in lacking)})"
    return [
        _finding(
            "indexes", "look", told, "rowmill migrate APP --apply builds them beside the traffic.", made, lane.name
        )
    ]


def _head(run: Run, view: LaneView) -> list[HealthFinding]:
    """The claim's walk, really walked: pages beyond what its rows need are dead entries at the head of its index."""
    rows = run(f"explain (analyze, buffers, timing off, format json) {walk(view.statements)}", ())
    document = json.loads(rows[0][0]) if isinstance(rows[0][0], str) else rows[0][0]
    root = document[0]["Plan"]
    pages = int(root.get("Shared Hit Blocks", 0)) + int(root.get("Shared Read Blocks", 0))
    got, took = int(root["Actual Rows"]), float(document[0]["Execution Time"])
    told = f"a claim's walk of {counted(got, 'row')} touches {counted(pages, 'page')} in {took:.1f} ms"
    todo = (
        "Entries of settled rows stand before the ready ones: end the oldest transaction, then vacuum."
        " Where an index is missing, the walk reads the table."
    )
    command = f"vacuum (index_cleanup on) {view.statements.table}"
    return [_finding("claim_head", _level(pages, _PAGES), told, todo, command, view.lane.name)]


def _quoted(view: LaneView) -> str:
    return view.statements.table.replace("'", "''")


def _bytes(number: float) -> str:
    for size, unit in ((2**30, "GB"), (2**20, "MB"), (2**10, "kB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"
