"""Real worker processes over a gated table, whose handlers record when they start and end."""

from __future__ import annotations

import bisect
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gated
from databases import Db
from quick_processes import QuickProcess

#: One write each to a file opened for appending: whole lines, also with other writers, and whatever happens after.
APP = """
import asyncio, os, random, sys, time
from datetime import timedelta as td
from rowmill import Breaker, Concurrency, Mill, Rate, fixed

mill = Mill(os.environ["DATABASE"])
LEASE, TAKES = float(os.environ.get("LEASE", "300")), float(os.environ.get("TAKES", "0.02"))
DOWN = os.environ.get("DOWN", "")
record = os.open(os.environ["RECORDS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

def note(what, job):
    key = job["domain"] if job["domain"] is not None else "-"
    os.write(record, f"{what} {os.getpid()} {time.time_ns()} {job.id} {key}\\n".encode())

@mill.lane("pages", name="crawl",
    ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"}, dead={"status": "dead"},
    lease=td(seconds=LEASE), sweep_every=td(seconds=max(LEASE / 3, 0.2)), poll=td(seconds=1),
    concurrency=int(os.environ.get("CONCURRENCY", "50")), max_attempts=1000, max_reclaims=1000,
    backoff=fixed(td(seconds=float(os.environ.get("BACKOFF", "0.1")))),
    gates=eval(os.environ.get("GATES", "[]")), pace=eval(os.environ.get("PACE", "None")))
async def crawl(job):
    note("start", job)
    try:
        await asyncio.sleep(TAKES * random.random() * 2)
        if DOWN and os.path.exists(DOWN):
            raise RuntimeError("down")
    finally:
        note("end", job)

if __name__ == "__main__":
    from rowmill import configure_logs
    configure_logs("json", stream=open(os.environ["EVENTS"], "a", buffering=1))
    mill.run(worker_id=os.environ.get("WORKER"), drain="drain" in sys.argv)
"""


class GateFarm:
    """An application over the gated pages, and the worker processes started over it."""

    def __init__(self, folder: Path, db: Db, gates: str, **environment: str) -> None:
        self.db, self.folder, self.app = db, folder, folder / "app.py"
        self.records, self.events, self.down = folder / "records.log", folder / "events.log", folder / "down"
        self.app.write_text(APP)
        self.records.touch()
        self.events.touch()
        self.environment = {
            **os.environ, "DATABASE": db.url, "RECORDS": str(self.records), "EVENTS": str(self.events),
            "DOWN": str(self.down), "GATES": gates, **environment,
        }  # fmt: skip
        self.processes: list[QuickProcess] = []
        #: When each process was killed, by its pid, in nanoseconds: no run of it goes on after that.
        self.killed: dict[int, int] = {}
        gated.make(db)

    def fill(self, count: int, keys: int) -> None:
        """Ready rows, of each key one after the other."""
        if self.db.dialect == "postgresql":
            source = f"generate_series(1, {count}) n"
        else:
            source = (
                f"(with recursive g(n) as (select 1 union all select n + 1 from g where n < {count}) select n from g)"
            )
        self.db.execute(f"insert into pages (domain, source_id) select 'd' || (n % {keys}), n % 7 from {source}")

    def start(self, worker: str, *, drain: bool = False) -> QuickProcess:
        words = [str(self.app), *(["drain"] if drain else [])]
        environment = {**self.environment, "WORKER": worker}
        process = QuickProcess(words, errors=self.folder / "errors.log", folder=self.folder, environment=environment)
        self.processes.append(process)
        return process

    def kill(self, process: QuickProcess) -> None:
        """kill -9."""
        process.kill()
        process.wait(timeout=60)
        self.killed[process.pid] = time.time_ns()

    def stop(self) -> None:
        """Let all that run end in order."""
        alive = [process for process in self.processes if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        for process in alive:
            assert process.wait(timeout=60) in (0, -signal.SIGTERM)  # the latter: not even begun

    def counts(self) -> dict[str, int]:
        return {row["status"]: row["n"] for row in self.db.query("select status, count(*) as n from pages group by 1")}

    def working(self) -> set[int]:
        """The processes that have begun a run, by their pids."""
        return {int(line.split(" ", 2)[1]) for line in self.records.read_text().splitlines()}

    def cut_off(self) -> bool:
        """Whether a process was killed in the middle of a run."""
        open_runs = set[tuple[str, str]]()
        for line in self.records.read_text().splitlines():
            what, pid, _, row, _ = line.split(" ", 4)
            (open_runs.add if what == "start" else open_runs.discard)((pid, row))
        return any(int(pid) in self.killed for pid, _ in open_runs)

    def runs(self, by: str = "key") -> list[tuple[str, int, int]]:
        """Key (or id), start and end of every run; one that was cut off ended when its process was killed."""
        found, begun = [], dict[tuple[str, str], tuple[str, int]]()
        for line in self.records.read_text().splitlines():
            what, pid, at, row, key = line.split(" ", 4)
            if what == "start":
                assert (pid, row) not in begun, "one process has one row twice"
                begun[pid, row] = row if by == "id" else key, int(at)
            else:
                key, start = begun.pop((pid, row))
                found.append((key, start, int(at)))
        return found + [(key, start, self.killed[int(pid)]) for (pid, _), (key, start) in begun.items()]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=60)


def most_at_once(runs: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """For each key the largest number of runs that went on at one instant."""
    edges = defaultdict(list)
    for key, start, end in runs:
        edges[key] += [(start, 1), (end, -1)]
    found = {}
    for key, several in edges.items():
        now = most = 0
        for _, step in sorted(several):  # at the same nanosecond ends go first
            now += step
            most = max(most, now)
        found[key] = most
    return found


def excess(starts: Iterable[float], n: float, burst: int) -> float:
    """By how much the starts (seconds) exceed ``burst + n * window``, over the window where they do so most.

    A window holds most when it begins and ends at a start; with x(i) = i - n * t(i) that is the largest rise of x.
    """
    found, lowest = -float(burst), float("inf")
    for i, at in enumerate(sorted(starts)):
        lowest = min(lowest, i - n * at)
        found = max(found, i - n * at - lowest + 1 - burst)
    return found


def within(starts: list[float], begin: float, end: float) -> int:
    """How many started in that time."""
    ordered = sorted(starts)
    return bisect.bisect_left(ordered, end) - bisect.bisect_left(ordered, begin)


def events(path: Path) -> list[dict[str, Any]]:
    """What the workers told."""
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]
