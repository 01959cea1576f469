"""``make prices``: sites, an embedded PostgreSQL, workers, coins; and the valuations as they fill. Ends by itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from apps.standins.ending import run
from apps.standins.postgres import postgres
from rowmill import RowmillError
from rowmill.store import Database

from .standin import Sites, serving

_COINS = [
    ("Morgan Dollar", "dollar", "Morgan", 1878, 44), ("Peace Dollar", "dollar", "Peace", 1921, 14),
    ("Walking Liberty Half Dollar", "half dollar", "Walking Liberty", 1916, 31),
    ("Mercury Dime", "dime", "Mercury", 1916, 29), ("Buffalo Nickel", "nickel", "Buffalo", 1913, 25),
    ("Standing Liberty Quarter", "quarter", "Standing Liberty", 1916, 14),
]  # fmt: skip
#: Requests a minute that each site grants; the auction house is out of order for a while.
_RATES = {"listing": 240, "api": 480, "auction": 300}
#: Shorter than in earnest, so that there is something to see within a minute.
_QUICK = {"BASE_DELAY_MINUTES": "0.02", "BREAKER_PAUSE_SECONDS": "4", "POLL_SECONDS": "1", "WORKER_CONCURRENCY": "2",
          "JOB_LOCK_TIMEOUT_SECONDS": "10", "HEARTBEAT_SECONDS": "2", "SWEEP_SECONDS": "2"}  # fmt: skip
_AT_MOST, _TICK, _LINE_EVERY = 240.0, 0.5, 5.0

_OPEN = "select count(*) from scrape_jobs where status not in ('succeeded', 'failed')"
_PAUSED = "select exists (select 1 from sources where name = 'auction' and paused_until is not null)"
_VALUED = """
select i.title, v.value_cents, v.low_cents, v.high_cents,
  coalesce(v.points, 0) as points, coalesce(v.outliers, 0) as outliers,
  count(*) filter (where j.status = 'succeeded') as done, count(*) as jobs
from coin_intakes i left join valuations v on v.intake_id = i.id join scrape_jobs j on j.intake_id = i.id
group by i.id, v.intake_id order by i.id"""


def demo(coins: int, processes: int) -> int:
    """Run it; 0 where every job ended well."""
    console = Console()
    console.print(f"Starting PostgreSQL, three sites and {processes} {'worker' if processes == 1 else 'workers'} ...")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prices-"))
        url = stack.enter_context(postgres())
        # Before the application is imported: it reads its settings then.
        os.environ |= {**_QUICK, "ROWMILL_DATABASE_URL": url, "CACHE_DIR": f"{folder}/cache"}
        sites = stack.enter_context(serving())
        run(_fill(sites, coins))
        workers = stack.enter_context(_workers(processes, Path(folder)))
        return run(_watch(console, sites, workers))


async def _fill(sites: Sites, coins: int) -> None:
    from .schema import add_intake, add_source, setup

    await setup()
    for name, rate in _RATES.items():
        await add_source(name, name, sites.address(name), rate)
    for number in range(coins):
        title, denomination, series, first, years = _COINS[number % len(_COINS)]
        year, mint = first + 7 * number % years, "DSO"[number % 3]
        coin = {"title": f"{year}-{mint} {title}", "year": year, "mintmark": mint, "denomination": denomination,
                "series": series}  # fmt: skip
        await add_intake(coin, ("circulated", "uncirculated")[number % 2])


@contextmanager
def _workers(processes: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Worker processes, ended with the block."""
    started = []
    for number in range(1, processes + 1):
        with (folder / f"worker-{number}.log").open("wb") as log:
            command = [sys.executable, "-m", "apps.prices", "work", "--log", "json"]
            started.append(subprocess.Popen(command, env={**os.environ, "WORKER_ID": f"worker-{number}"}, stderr=log))
    try:
        yield started
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


async def _watch(console: Console, sites: Sites, workers: Sequence[subprocess.Popen[bytes]]) -> int:
    """Show what happens until all jobs are final, then the summary."""
    from .worker import opened

    began, said = time.monotonic(), 0.0
    sites.moods["auction"].failing = True
    async with opened() as database:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while await _one(database, _OPEN):
                seconds = time.monotonic() - began
                if await _one(database, _PAUSED):  # it was noticed: the auction house is well again
                    sites.moods["auction"].failing = False
                if all(worker.poll() is not None for worker in workers):
                    raise RowmillError("the workers have ended before the work", hint="python -m apps.prices work")
                if seconds > _AT_MOST:
                    raise RowmillError(f"not all jobs were final after {_AT_MOST:.0f} s", hint="is the machine busy?")
                live.update(await _view(database, seconds))
                if not console.is_terminal and seconds > said + _LINE_EVERY:
                    said = seconds
                    console.print(f"{seconds:3.0f} s: {await _one(database, _OPEN)} of the jobs not final yet")
                await asyncio.sleep(_TICK)
        console.print(await _view(database, time.monotonic() - began))
        return await _summary(console, database, sites)


async def _one(database: Database, text: str) -> Any:
    return (await database.read(lambda run: run(text, ())))[0][0]


async def _view(database: Database, seconds: float) -> Group:
    table = Table(title=f"Valuations after {seconds:.0f} s", title_justify="left", header_style="bold")
    for name in ("coin", "value", "low", "high", "points", "odd", "asked"):
        table.add_column(name, justify="left" if name == "coin" else "right", no_wrap=name != "coin")
    rows = await database.read(lambda run: run(_VALUED, ()))
    for title, value, low, high, points, outliers, done, jobs in rows:
        table.add_row(title, *map(_money, (value, low, high)), str(points), str(outliers), f"{done}/{jobs}")
    health = Table(title="Sources", title_justify="left", header_style="bold")
    for name in ("source", "failures in a row", "paused for"):
        health.add_column(name, justify="left" if name == "source" else "right")
    text = "select name, failure_streak, extract(epoch from paused_until - now()) from source_health"
    for name, streak, left in await database.read(lambda run: run(text, ())):
        paused = f"{left:.0f} s" if left is not None and left > 0 else ""
        health.add_row(name, str(streak), Text(paused, style="red"))
    return Group(table, health)


async def _summary(console: Console, database: Database, sites: Sites) -> int:
    text = "select status, coalesce(locked_by, ''), count(*) from scrape_jobs group by 1, 2 order by 1, 2"
    rows = await database.read(lambda run: run(text, ()))
    console.print("Jobs by status and worker: " + ", ".join(f"{n} {status} by {who}" for status, who, n in rows))
    for name, rate in _RATES.items():
        seen = sites.seen(name)
        answers = ", ".join(f"{n} times {status}" for status, n in sorted(Counter(s.status for s in seen).items()))
        console.print(f"{name}: {len(seen)} requests ({answers}), {rate} a minute allowed")
    points = await _one(database, "select count(*) from price_points")
    failed = sum(n for status, _, n in rows if status == "failed")
    console.print(f"{points} price points, {await _one(database, 'select count(*) from valuations')} valuations, "
                  f"{failed} jobs failed.")  # fmt: skip
    return 1 if failed else 0


def _money(cents: int | None) -> str:
    return "" if cents is None else f"${cents / 100:,.2f}"
