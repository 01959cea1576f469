"""The dashboard over a lane of five million rows: how long each page takes, and what the server was asked for it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg
import httpx
import sqlalchemy as sa

from rowmill import Mill
from rowmill.store import Database
from rowmill.store.own import schema
from rowmill.web.app import application

from ..peers import Peer
from ..server import execute, value
from ..tables import Enrichment
from .part import Column, Context, Figures, Part

ROWS, QUICK_ROWS, TIMES = 5_000_000, 200_000, 15
LANE = "enrichment_jobs"
#: Shares of the table: mostly finished rows, a backlog, some that wait, a few that are dead or running.
_STATES = (("succeeded", 0.9), ("queued", 0.08), ("failed", 0.0198), ("dead", 0.0002))
PAGES = {
    "overview": "/",
    "lane": f"/lane?lane={LANE}",
    "ready": f"/lane?lane={LANE}&state=ready",
    "done": f"/lane?lane={LANE}&state=done",
    "dead": f"/lane?lane={LANE}&state=dead",
    "running": f"/lane?lane={LANE}&state=running",
    "filter": f"/lane?lane={LANE}&col=url&op=eq&val=https://example.org/77",
    "search": f"/lane?lane={LANE}&q=example.org/123456",
    "errors": "/errors",
    "workers": "/workers",
    "health": "/health",
}


#: Millions of random keys go faster into a table without indexes.
_UNINDEXED = (
    f"alter table {LANE} drop constraint {LANE}_pkey",
    f"alter table {LANE} drop constraint {LANE}_link_canonical_id_key",
)
_INDEXED = (
    f"alter table {LANE} add primary key (id)",
    f"alter table {LANE} add unique (link_canonical_id)",
)


def measure(context: Context, peer: Peer) -> Figures:
    rows = QUICK_ROWS if context.quick else ROWS
    with context.server.database("bench_pages") as dsn:
        _fill(dsn, rows)
        figures, plans = asyncio.run(_visit(dsn))
        folder = context.arguments.out
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pages-plans.txt").write_text(plans)
    return figures


def _fill(dsn: str, rows: int) -> None:
    table, first = Enrichment(), 1
    execute(dsn, *table.ddl(), *_UNINDEXED)
    for status, share in _STATES:
        count = max(int(rows * share), 10)
        execute(dsn, table.made(first, count, status))
        first += count
    execute(dsn, *_INDEXED)
    late = "run_after = now() + interval '1 hour', last_error = 'TimeoutError: no answer in 30 s'"
    execute(
        dsn,
        f"update {LANE} set {late} where status = 'failed'",
        f"update {LANE} set last_error = 'ValueError: no title on page ' || left(id::text, 4) where status = 'dead'",
        f"""update {LANE} set status = 'running', locked_by = 'worker-1', locked_at = now(), heartbeat_at = now()
            where id in (select id from {LANE} where status = 'queued' limit 10)""",
    )
    asyncio.run(_own(dsn))
    execute(
        dsn,
        f"""insert into rowmill_minutes (lane, minute, started, done, run_us, t6)
            select '{LANE}', extract(epoch from now())::bigint / 60 - i, 600, 590, 180000000, 590
            from generate_series(0, 1440) i""",
        f"""insert into rowmill_failures (at, lane, row_id, attempt, worker, outcome, class, fingerprint, message)
            select now() - i * interval '1 second', '{LANE}', i::text, 1, 'worker-1', 'retry', 'transient',
                md5((i % 40)::text), 'TimeoutError: no answer in ' || i || ' s from ' || i % 40
            from generate_series(1, 10000) i""",
        f"vacuum analyze {LANE}",
    )


async def _own(dsn: str) -> None:
    database = Database.open(dsn)
    await schema.ensure(database)
    await database.close()


async def _visit(dsn: str) -> tuple[Figures, str]:
    mill = Mill(dsn)
    Enrichment().declare(mill, _handler)
    row = await asyncio.to_thread(value, dsn, f"select id from {LANE} where status = 'failed' limit 1")
    app = application(mill)
    pages = {**PAGES, "row": f"/row?lane={LANE}&id={row}"}
    figures: Figures = {}
    asked: dict[tuple[str, str], tuple[Any, ...]] = {}
    transport = httpx.ASGITransport(app=app)
    headers = {"accept": "text/html"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client,
    ):
        for name, path in pages.items():
            took = []
            for round_ in range(TIMES + 1):
                if hasattr(app.state, "sight"):
                    app.state.cache.forget()  # what is remembered would hide what a page costs
                with _listening(asked, name) if round_ == 0 else _deaf():
                    began = time.monotonic()
                    answer = await client.get(path)
                if answer.status_code != 200:
                    raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:200]}")
                if round_:
                    took.append(time.monotonic() - began)
            figures[name] = statistics.median(took) * 1000
    return figures, await _plans(dsn, asked)


async def _handler(job: Any) -> None: ...


@contextmanager
def _deaf() -> Iterator[None]:
    yield


@contextmanager
def _listening(asked: dict[tuple[str, str], tuple[Any, ...]], page: str) -> Iterator[None]:
    """Note every select that goes to the server."""

    def hear(_: Any, __: Any, statement: str, parameters: Any, ___: Any, ____: Any) -> None:
        if LANE in statement and statement.lstrip().lower().startswith(("select", "with")):
            asked.setdefault((page, statement), tuple(parameters or ()))

    sa.event.listen(sa.Engine, "before_cursor_execute", hear)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", hear)


async def _plans(dsn: str, asked: dict[tuple[str, str], tuple[Any, ...]]) -> str:
    """How the server answers each of them; those that a page's own time limit would cut off are marked."""
    connection = await asyncpg.connect(dsn)
    parts = []
    try:
        await connection.execute("set statement_timeout = 5000")
        for (page, statement), given in asked.items():
            try:
                rows = await connection.fetch(
                    f"explain (analyze, costs off, timing off, summary on) {statement}", *given
                )
                plan = "\n".join(row[0] for row in rows)
            except asyncpg.PostgresError as error:
                plan = f"not explained: {error}"
            parts.append(f"== {page}\n{statement}\n\n{plan}\n")
    finally:
        await connection.close()
    return "\n".join(parts)


PART = Part(
    "pages",
    "The dashboard's pages",
    f"A lane of {ROWS:,} rows (9 of 10 done, 400,000 ready, 99,000 waiting, 1,000 dead), 10,000 failures on record: "
    f"milliseconds until a page is there, nothing remembered from the one before; the median of {TIMES}. "
    "The statements and their plans are in pages-plans.txt.",
    measure,
    ("rowmill",),
    tuple(Column(name, f"{name}, ms") for name in (*PAGES, "row")),
    unit="ms",
    once=True,
    on_request=True,
)
