"""``python -m apps.analysis``: the application at work, on stand-ins and an embedded PostgreSQL, for all to see.

Some sites go through the three phases with two worker processes. One of them is killed on the way, the model throttles,
and some sites are broken. It ends by itself, with a summary that is read from the table and the model's own log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa
from rich.console import Console
from rich.live import Live

from apps.standins import sites
from apps.standins.ending import run, stoppable
from apps.standins.internet import Internet
from apps.standins.model import Model, throttling
from apps.standins.postgres import postgres

from . import tables, view
from .phases import build
from .settings import Settings
from .statistics import Statistics

BAD = {"gone.example": sites.refusing(404), "broken.example": sites.refusing(500), "circle.example": sites.circling()}
_PATIENCE = 180.0
console = Console()


def shop(latency: float = 0.3) -> Internet:
    """Every host is a shop, but for some that are broken."""
    body = (
        "<main><p>Chairs and tables of solid oak, made to measure.</p></main><a href='mailto:shop@oak.example'>Mail</a>"
    )
    return Internet(BAD, default=sites.page(latency, head='<script src="/_next/app.js"></script>', body=body))


@contextmanager
def workers(environ: dict[str, str], log: Path) -> Iterator[None]:
    """Two worker processes as an operator starts them, stopped in order when the block ends."""
    command = [
        sys.executable,
        "-m",
        "rowmill",
        "run",
        "apps.analysis:mill",
        "--processes",
        "2",
        "--worker-id",
        "worker",
    ]
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


async def fill(statistics: Statistics, count: int) -> None:
    """Sites to be analysed, the broken ones among them."""
    urls = [f"https://{host}/" for host in BAD] + [f"https://shop{n}.example/" for n in range(count - len(BAD))]
    async with statistics.database.begin() as connection:
        await connection.execute(sa.insert(tables.jobs), [{"url": url} for url in urls])


async def watch(statistics: Statistics, model: Model, count: int) -> None:
    """Show how it goes until all have ended; in the middle a worker is killed."""
    killed, said, deadline = "", "", time.monotonic() + _PATIENCE
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while time.monotonic() < deadline:
            told = await statistics.gather()
            if console.is_terminal:
                live.update(view.screen(told, model, killed), refresh=True)
            elif (line := view.line(told, killed)) != said:
                console.print(said := line, soft_wrap=True)
            ended = told["completed"] + sum(queue["dead"] for queue in told["queues"])
            if ended == count:
                return
            busy = [worker for worker in told["workers"] if worker["worker"] == "worker-1" and worker["busy"]]
            if busy and not killed and told["completed"] >= count // 5:
                os.kill(busy[0]["pid"], signal.SIGKILL)
                killed = f"worker-1 (process {busy[0]['pid']}) was killed, with {busy[0]['busy']} jobs in its hands"
            await asyncio.sleep(0.5 if console.is_terminal else 2.0)
    raise SystemExit(f"Not done after {_PATIENCE:.0f} s. Try: python -m apps.analysis --sites 20")


async def show(settings: Settings, url: str, model: Model, count: int, log: Path) -> int:
    """All of it; the exit code."""
    statistics = Statistics(build(settings, url), settings)
    try:
        await tables.create(statistics.database)
        await fill(statistics, count)
        environ = {**os.environ, **settings.environ(), "ROWMILL_DATABASE_URL": url}
        began = time.monotonic()
        with workers(environ, log):
            await watch(statistics, model, count)
        async with statistics.database.begin() as connection:
            rows = (await connection.execute(sa.select(tables.jobs).order_by(tables.jobs.c.url))).all()
            answers = (await connection.execute(sa.select(tables.answers))).all()
        console.print(view.summary(rows, answers, model, settings, time.monotonic() - began), soft_wrap=True)
    finally:
        await statistics.close()
    return 0 if model.most_within(settings.minute_seconds) <= settings.tokens_per_minute else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m apps.analysis", description=__doc__)
    parser.add_argument("--sites", type=int, default=60, help="how many sites (60)")
    count = parser.parse_args().sites
    if count <= len(BAD):
        parser.error(f"--sites {count}: at least {len(BAD) + 1}")
    return stoppable(lambda: demo(count))


def demo(count: int) -> int:
    """Stand-ins, a database and two workers, for as long as it takes; the exit code."""
    with ExitStack() as stack:
        console.print("Starting PostgreSQL, an internet, a model and two workers ...")
        net = stack.enter_context(shop())
        model = stack.enter_context(Model(behave=throttling(every=12, after=1, latency=0.4)))
        url = stack.enter_context(postgres())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(
            internet=net.address, model_url=f"{model.url}/v1", model_key="none needed", prompt_tokens=1000,
            pace_starts=6, pace_seconds=1, poll_seconds=0.5, untouched_seconds=0.5, stuck_seconds=6, sweep_seconds=1,
            backoff_seconds=0.5, health_seconds=3, tokens_per_minute=6000, minute_seconds=5, answer_tokens=200,
        )  # fmt: skip
        return run(show(settings, url, model, count, folder / "workers.log"))


if __name__ == "__main__":
    sys.exit(main())
