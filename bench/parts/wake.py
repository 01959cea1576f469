"""What the wake trigger of ``rowmill migrate --wake`` costs writers, and how soon rows of plain SQL start."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import asyncpg

from rowmill import Mill
from rowmill.ops.migrate import migrate

from ..peers import Peer
from ..server import execute, value
from .part import Column, Context, Figures, Part
from .pickup import told

_RATE, _WRITERS, _EVERY = 2000, 8, 0.02
_TABLE = (
    "create table jobs (id bigint generated always as identity primary key, status text not null default 'queued',"
    " run_after timestamptz, worker text, claimed_at timestamptz, note text)",
    "create index on jobs (id) where status = 'queued'",
)
_INSERT = "insert into jobs (note) values ('x') returning id"
_NOTIFYING = f"with one as ({_INSERT}) select id, pg_notify('rowmill', '') from one"


def measure(context: Context, peer: Peer) -> Figures:
    seconds, rounds = (4, 1) if context.quick else (8, 3)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        for trigger in rates:
            with context.server.database() as dsn:
                _prepare(dsn, trigger == "with")
                rates[trigger].append(_written(context, dsn, seconds))
    figures = {trigger: sum(many) / len(many) for trigger, many in rates.items()}
    picked = {}
    for trigger, insert in (("without", _NOTIFYING), ("with", _INSERT)):
        with context.server.database() as dsn:
            mill, began = _prepare(dsn, trigger == "with")
            picked[trigger] = sorted(asyncio.run(_pickups(mill, began, dsn, insert, 100 if context.quick else 500)))
    notified = told(picked["without"])["p50"]
    return {**figures, "ratio": figures["with"] / figures["without"], "notified": notified, **told(picked["with"])}


def _prepare(dsn: str, trigger: bool) -> tuple[Mill, dict[int, float]]:
    """The table, with or without the trigger; a lane over it that hardly polls, and when each row began."""
    execute(dsn, *_TABLE)
    mill, began = Mill(dsn), dict[int, float]()

    @mill.lane("jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
               dead={"status": "dead"}, poll=timedelta(minutes=10))  # fmt: skip
    async def handler(job: Any) -> None:
        began[job.id] = time.monotonic()

    if trigger:
        times = (timedelta(seconds=10), timedelta(seconds=60))
        asyncio.run(migrate(mill, None, lambda *_: None, apply=True, detach=False, times=times, wake=True))
        assert value(dsn, "select count(*) from pg_trigger where tgname like 'rowmill_wake%'") == 2
    return mill, began


def _written(context: Context, dsn: str, seconds: int) -> float:
    """Rows a second that the writers get into the table, each in a transaction; one session listens."""
    program = context.server.tool("pgbench")
    if program is None:
        raise FileNotFoundError("there is no pgbench here")
    listener = asyncio.new_event_loop()
    connection = listener.run_until_complete(asyncpg.connect(dsn))
    listener.run_until_complete(connection.add_listener("rowmill", lambda *_: None))
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(f"{_INSERT};\n")
        script.flush()
        words = [program, "-n", "-M", "prepared", "-c", str(_WRITERS), "-j", "2", "-R", str(_RATE), "-T", str(seconds)]
        said = subprocess.run([*words, "-f", script.name, dsn], check=True, capture_output=True, text=True).stdout
    listener.run_until_complete(connection.close())
    listener.close()
    rate = re.search(r"tps = ([\d.]+)", said)
    assert rate is not None, said
    return float(rate.group(1))


async def _pickups(mill: Mill, began: dict[int, float], dsn: str, insert: str, count: int) -> list[float]:
    """Milliseconds from before a plain insert to the start of its handler, on an idle worker."""
    worker = mill.worker()
    task = asyncio.create_task(worker.run())
    await worker.started.wait()
    await asyncio.sleep(1)
    sent: dict[int, float] = {}
    thread = threading.Thread(target=lambda: asyncio.run(_insert(dsn, insert, count, sent)))
    thread.start()
    while thread.is_alive() or len(began) < len(sent):  # noqa: ASYNC110 - another thread sends
        await asyncio.sleep(0.05)
    worker.stop()
    await task
    return [(began[number] - before) * 1000 for number, before in sent.items()]


async def _insert(dsn: str, insert: str, count: int, sent: dict[int, float]) -> None:
    connection = await asyncpg.connect(dsn)
    for _ in range(count):
        before = time.monotonic()
        sent[await connection.fetchval(insert)] = before
        await asyncio.sleep(_EVERY)
    await connection.close()


PART = Part(
    "wake",
    "Rows of plain SQL, with the wake trigger",
    "Eight connections insert 2,000 rows a second, each in a transaction of its own, into a user's table without and "
    "with the trigger of `rowmill migrate --wake`, in turn; a session listens. Then one idle worker that hardly polls: "
    "one INSERT every 20 ms, from before the statement to the start of its handler; with `pg_notify` in the statement "
    "and no trigger, and plain with the trigger.",
    measure,
    ("rowmill",),
    (
        Column("without", "rows/s without"),
        Column("with", "rows/s with"),
        Column("ratio", "ratio", 2),
        Column("notified", "pickup by pg_notify, median, ms", 2),
        Column("p50", "by the trigger, median, ms", 2),
        Column("p99", "99th percentile, ms", 2),
        Column("max", "longest, ms", 1),
    ),
    unit="ms",
)
