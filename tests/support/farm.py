"""Real worker processes over a real database, for the tests that kill, pause and count."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from databases import Db
from quick_processes import QuickProcess

JOBS = {
    "postgresql": """
create table jobs (
  id bigint generated always as identity primary key, status text not null default 'queued', worker text,
  claimed_at timestamptz, heartbeat_at timestamptz, attempts integer not null default 0, error text,
  run_after timestamptz not null default now(), finished_at timestamptz, note text);
create index on jobs (run_after, id) where status = 'queued';
create table runs (job_id bigint not null, worker text, attempt integer not null);
""",
    "sqlite": """
create table jobs (
  id integer primary key, status text not null default 'queued', worker text,
  claimed_at datetime, heartbeat_at datetime, attempts integer not null default 0, error text,
  run_after datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), finished_at datetime, note text);
create index jobs_ready on jobs (run_after, id) where status = 'queued';
create table runs (job_id integer not null, worker text, attempt integer not null);
""",
}

#: ``runs`` is written in the transaction that settles; the log file by the handlers themselves, whatever happens.
APP = """
import asyncio, os, time
from datetime import timedelta as td
import sqlalchemy as sa
from rowmill import Mill, Dead, fixed

mill = Mill(os.environ["DATABASE"])
LEASE = float(os.environ.get("LEASE", "300"))
log = os.open(os.environ["STARTS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

def started(job):
    os.write(log, f"{job.id}\\n".encode())

OPTIONS = dict(
    ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"}, dead={"status": "dead"},
    lease=td(seconds=LEASE), sweep_every=td(seconds=max(LEASE / 3, 0.2)), poll=td(seconds=1),
    concurrency=int(os.environ.get("CONCURRENCY", "50")), max_attempts=100, max_reclaims=1000,
    backoff=fixed(td(seconds=0.1)),
)
"""

PLAIN = """
@mill.lane("jobs", name="jobs", **OPTIONS)
async def work(job):
    started(job)
    await asyncio.sleep(float(os.environ.get("TAKES", "0")))

@work.on_settled
async def record(tx, settled):
    rows = [{"j": s.id, "w": s["worker"], "a": s.attempt} for s in settled if s.outcome == "done"]
    if rows:
        await tx.execute(sa.text("insert into runs (job_id, worker, attempt) values (:j, :w, :a)"), rows)
"""

MAIN = """
import sys
if __name__ == "__main__":
    from rowmill import configure_logs
    configure_logs("json", stream=open(os.environ["EVENTS"], "a", buffering=1))
    mill.run(worker_id=os.environ.get("WORKER"), drain="drain" in sys.argv)
"""


class Farm:
    """An application file, its database, and the worker processes started over it."""

    def __init__(self, folder: Path, db: Db, lanes: str = PLAIN, **environment: str) -> None:
        self.folder, self.db = folder, db
        self.app, self.starts, self.events = folder / "app.py", folder / "starts.log", folder / "events.log"
        self.errors = folder / "errors.log"
        self.app.write_text(APP + lanes + MAIN)
        self.starts.touch()
        self.events.touch()
        self.environment = {
            **os.environ, "DATABASE": db.url, "STARTS": str(self.starts), "EVENTS": str(self.events), **environment,
        }  # fmt: skip
        self.processes: list[QuickProcess] = []
        db.execute(JOBS[db.dialect])

    def fill(self, count: int) -> None:
        """Ready rows, a millisecond apart, in the past."""
        if self.db.dialect == "postgresql":
            past = f"now() - interval '1 hour' + g * interval '{min(3000 / count, 1000):.6f} milliseconds'"
            self.db.execute(f"insert into jobs (run_after) select {past} from generate_series(1, {count}) g")
        else:
            self.db.execute(
                f"with recursive g(n) as (select 1 union all select n + 1 from g where n < {count})"
                " insert into jobs (run_after) select"
                f" strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 hour', '+' || (n * 3.0 / {count}) || ' seconds') from g"
            )

    def start(self, worker: str, *, drain: bool = False, **environment: str) -> QuickProcess:
        environment = {**self.environment, "WORKER": worker, **environment}
        words = [str(self.app), *(["drain"] if drain else [])]
        process = QuickProcess(words, errors=self.errors, folder=self.folder, environment=environment)
        self.processes.append(process)
        return process

    def counts(self) -> dict[str, int]:
        return {row["status"]: row["n"] for row in self.db.query("select status, count(*) as n from jobs group by 1")}

    def started(self) -> Counter[int]:
        """How often each job's handler was started."""
        return Counter(int(line) for line in self.starts.read_text().split())

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(timeout=60)
