"""Many databases, and real worker processes over all of them whose handlers record when they start."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from databases import Db
from farm import JOBS
from quick_processes import QuickProcess

#: One write each to a file opened for appending: whole lines, also with other writers, and whatever happens after.
APP = """
import asyncio, json, os, time
from datetime import timedelta as td
from rowmill import Mill, Rate

record = os.open(os.environ["RECORDS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
urls = json.loads(open(os.environ["URLS"]).read())
mill = Mill(lambda: json.loads(open(os.environ["URLS"]).read()), order=os.environ.get("ORDER", "fair"),
            refresh=td(seconds=0.5), max_connections=int(os.environ.get("CONNECTIONS", "40")))

@mill.lane("jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
    dead={"status": "dead"}, gates=eval(os.environ.get("GATES", "[]")),
    concurrency=int(os.environ.get("CONCURRENCY", "20")), poll=td(seconds=float(os.environ.get("POLL", "0.5"))))
async def work(job):
    os.write(record, f"{time.monotonic_ns()} {os.getpid()} {job.environment} {job.id}\\n".encode())
    await asyncio.sleep(float(os.environ.get("TAKES", "0")))

if __name__ == "__main__":
    from rowmill import configure_logs
    configure_logs("json", stream=open(os.environ["EVENTS"], "a", buffering=1))
    mill.run()
"""


def schema_url(url: str, schema: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}search_path={schema}"


def fill(db: Db, rows: int, schema: str | None = None) -> None:
    """The table of a tenant, with ready rows."""
    numbers = (
        f"select null from generate_series(1, {rows})"
        if db.dialect == "postgresql"
        else f"with recursive t(n) as (select 1 union all select n + 1 from t where n < {rows}) select null from t"
    )
    if schema is None:
        db.execute(JOBS[db.dialect])
        db.execute(f"insert into jobs (note) {numbers if rows else 'select null where false'}")
        return
    db.execute(f"create schema {schema}; set search_path to {schema}; {JOBS[db.dialect]}")
    db.execute(f"insert into {schema}.jobs (note) {numbers}")


class TenantFarm:
    """Worker processes over a list of databases, which may change while they work."""

    def __init__(self, folder: Path, urls: Mapping[str, str], **environment: str) -> None:
        self.folder, self.app = folder, folder / "tenants_app.py"
        self.records, self.events, self._urls = folder / "records.log", folder / "events.log", folder / "urls.json"
        self.app.write_text(APP)
        self.records.touch()
        self.events.touch()
        self.environment = {
            **os.environ, "RECORDS": str(self.records), "EVENTS": str(self.events), "URLS": str(self._urls),
            **environment,
        }  # fmt: skip
        self.list(urls)
        self.processes: list[QuickProcess] = []

    def list(self, urls: Mapping[str, str]) -> None:
        """These are the databases from now on."""
        scratch = self._urls.with_suffix(".new")
        scratch.write_text(json.dumps(dict(urls)))
        scratch.rename(self._urls)

    def start(self, count: int = 1) -> list[QuickProcess]:
        """So many worker processes."""
        started = [
            QuickProcess([str(self.app)], errors=self.folder / "errors.log", folder=self.folder,
                         environment=self.environment)
            for _ in range(count)
        ]  # fmt: skip
        self.processes += started
        return started

    def kill(self, process: QuickProcess) -> None:
        """kill -9."""
        process.kill()
        process.wait(timeout=60)

    def stop(self) -> None:
        """Let all that run end in order."""
        alive = [process for process in self.processes if process.poll() is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        for process in alive:
            assert process.wait(timeout=60) in (0, -signal.SIGTERM)  # the latter: not even begun

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=60)

    def starts(self) -> list[tuple[float, int, str]]:
        """When each run started (seconds, of the host's monotonic clock), in which process and environment."""
        lines = [line.split() for line in self.records.read_text().splitlines()]
        return sorted((int(at) / 1e9, int(pid), environment) for at, pid, environment, _ in lines)

    def until(self, starts: int, seconds: float = 120) -> None:
        """Wait until so many runs have started."""
        deadline = time.monotonic() + seconds
        while len(self.records.read_text().splitlines()) < starts:
            assert time.monotonic() < deadline, f"{len(self.starts())} of {starts} have started"
            assert any(process.poll() is None for process in self.processes), self.events.read_text()
            time.sleep(0.02)


def most_within(starts: list[float], seconds: float) -> int:
    """The most starts within any window of so many seconds, one end of which is open."""
    most = first = 0
    for last, at in enumerate(starts):
        while starts[first] <= at - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
