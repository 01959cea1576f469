"""Many databases as one mill: how soon small tenants start beside a large one, and a rate over eight databases.

Fifty schemas, of which one has a million ready rows. In fair order ten rows that come to each of the 49 others start
within a second; in strict order none before the large one is done. It is told, too, how long the first row of each
takes where the worker has never opened it. The worker keeps to its bound of connections, and databases come and
go. Then a rate of 100 a second over eight databases and four processes, of which one is killed: never exceeded over any
second, and at least 0.9 of it used. Ends with 1 where one of these is not so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from databases import Db
from quick_processes import install
from tenant_farm import TenantFarm, fill, most_within, schema_url

from .server import Server

SMALL, EACH, CONNECTIONS, WANTED = 49, 10, 40, 1.0
TENANTS, PROCESSES, RATE, USED = 8, 4, 100, 0.9
_STRICT = 10.0  # seconds after which strict order has shown what it does
_TAKES, _SLOTS = "0.02", "40"  # seconds that a run takes, and how many run at once: 490 rows take a quarter of a second
_BUSY = 200  # runs of the large tenant before the small ones get rows


class Connections(threading.Thread):
    """Counts the connections to a database while it runs."""

    def __init__(self, db: Db) -> None:
        super().__init__(daemon=True)
        self._db, self._over, self.most = db, threading.Event(), 0

    def run(self) -> None:
        text = (
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            " and backend_type = 'client backend'"
        )
        while not self._over.wait(0.05):
            self.most = max(self.most, self._db.value(text))

    def stop(self) -> int:
        """The most that were open at once."""
        self._over.set()
        self.join()
        return self.most


@contextmanager
def farm(urls: dict[str, str], **environment: str) -> Iterator[TenantFarm]:
    """Workers over these databases, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="rowmill-tenants-") as folder:
        made = TenantFarm(Path(folder), urls, **environment)
        try:
            yield made
        finally:
            made.close()


def small_tenants(server: Server, rows: int, order: str) -> bool:
    """The time until the rows of every small tenant have started, and what it cost in connections."""
    small = [f"small{n}" for n in range(SMALL)]
    with server.database("tenants") as url:
        db = Db(url)
        for name in ("large", *small):
            fill(db, rows if name == "large" else 0, name)
        db.execute("analyze")
        urls = {name: schema_url(url, name) for name in ("large", *small)}
        watch = Connections(db)
        print(f"order={order!r}, {rows:,} rows in one of {len(urls)} schemas, worker with {CONNECTIONS} connections")
        with farm(urls, ORDER=order, CONNECTIONS=str(CONNECTIONS), TAKES=_TAKES, CONCURRENCY=_SLOTS) as workers:
            watch.start()
            workers.start()
            workers.until(_BUSY)
            _pulse(workers, db, small, 1, "that were never opened before", order)
            worst = _pulse(workers, db, small, EACH, "that are open", order)
            workers.stop()
        most = watch.stop() - 1  # the one that inserts
    print(f"  at most {most} connections", flush=True)
    return most <= CONNECTIONS and (order != "fair" or worst < WANTED)


def _pulse(workers: TenantFarm, db: Db, small: list[str], each: int, which: str, order: str) -> float:
    """So many rows for each small tenant; the seconds until the last of them has started."""
    before, began = len(workers.starts()), time.monotonic()
    rows = f"select null from generate_series(1, {each})"
    db.execute(";".join(f"insert into {name}.jobs (note) {rows}" for name in small))
    patience = 120.0 if order == "fair" else _STRICT
    while True:
        waited: dict[str, list[float]] = {name: [] for name in small}
        for at, _, environment in workers.starts()[before:]:
            if environment in waited:
                waited[environment].append(at - began)
        done = sorted(max(times) for times in waited.values() if len(times) >= each)
        if len(done) == len(small) or time.monotonic() - began > patience:
            break
        time.sleep(0.2)
    times = f": {statistics.median(done):.2f} s (median), {done[-1]:.2f} s (worst)" if done else ""
    print(f"  tenants {which}, {each} rows each: {len(done)} of {len(small)} have started all{times}", flush=True)
    return done[-1] if len(done) == len(small) else float("inf")


def come_and_go(server: Server) -> bool:
    """Databases that are added and dropped while a worker serves others."""
    with server.database("stays") as stays, server.database("comes") as comes:
        fill(Db(stays), 20_000)
        fill(Db(comes), EACH)
        with farm({"stays": stays}, TAKES="0.01") as workers:
            workers.start()
            workers.until(_BUSY)
            workers.list({"stays": stays, "comes": comes})
            added = time.monotonic()
            _until(lambda: sum(name == "comes" for _, _, name in workers.starts()) == EACH)
            began = max(at for at, _, name in workers.starts() if name == "comes") - added
            workers.list({"stays": stays})
            removed, here = time.monotonic(), "select count(*) from pg_stat_activity where datname = 'comes'"
            _until(lambda: Db(stays).value(here) == 0)
            closed = time.monotonic() - removed
            Db(stays).execute("drop database comes")
            before = len(workers.starts())
            _until(lambda: len(workers.starts()) > before + _BUSY)
            workers.stop()
    print(f"a database that is added: all of its rows started after {began:.2f} s")
    print(f"one that is removed: could be dropped after {closed:.2f} s, and the others went on", flush=True)
    return True


def _until(condition: object, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit("bench: it did not come true in time")
        time.sleep(0.05)


def shared_rate(server: Server, seconds: float) -> bool:
    """The most starts in any second, and the part of the rate that was used, before and after a process is killed."""
    addresses = [server.database(f"tenant{n}") for n in range(TENANTS)]
    control = server.database("control")
    urls = {f"tenant{n}": address.__enter__() for n, address in enumerate(addresses)}
    try:
        for url in urls.values():
            fill(Db(url), int(RATE * seconds))
        gates = f'[Rate({RATE}, per=td(seconds=1), shared="{control.__enter__()}")]'
        with farm(urls, GATES=gates) as workers:
            workers.start(PROCESSES)
            workers.until(2 * RATE)
            began = time.monotonic()
            time.sleep(seconds / 2)
            killed = time.monotonic()
            workers.kill(workers.processes[0])
            time.sleep(seconds / 2)
            ended = time.monotonic()
            workers.stop()
            starts = [at for at, _, _ in workers.starts()]
    finally:
        for address in (*addresses, control):
            address.__exit__(None, None, None)
    most = most_within(starts, 1.0)
    before = sum(began <= at < killed for at in starts) / (killed - began) / RATE
    after = sum(killed <= at < ended for at in starts) / (ended - killed) / RATE
    print(
        f"a rate of {RATE} a second over {TENANTS} databases and {PROCESSES} processes, {len(starts):,} starts: at most"
    )
    print(f"  {most} in any second; used {before:.3f}, and {after:.3f} after one process was killed", flush=True)
    return most <= RATE and min(before, after) >= USED


def main() -> int:
    """All parts, unless some are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.tenants", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="ready rows of the large tenant")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the rate is measured")
    parser.add_argument("--part", choices=("fair", "strict", "come-and-go", "rate"), action="append")
    given = parser.parse_args()
    parts = given.part or ("fair", "strict", "come-and-go", "rate")
    install()
    good = []
    with Server() as server:
        for part in parts:
            if part == "rate":
                good.append(shared_rate(server, given.seconds))
            elif part == "come-and-go":
                good.append(come_and_go(server))
            else:
                good.append(small_tenants(server, given.rows, part))
    print(f"load of the machine over the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
