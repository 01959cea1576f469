"""The application in tests: a database with its tables, the stand-in sites, workers as processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import waiting
from apps.prices import schema, standin, worker
from databases import Db, Row, Server

ROOT = Path(__file__).parents[3]
_numbers = itertools.count(1)
#: Settings of worker processes that would else take minutes.
QUICK = {
    "POLL_SECONDS": "0.5", "BASE_DELAY_MINUTES": "0.01", "CACHE_ENABLED": "false", "HTTP_TIMEOUT_SECONDS": "60",
}  # fmt: skip


@dataclass
class App:
    """One installation of the application."""

    db: Db
    sites: standin.Sites
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def source(self, kind: str, rate: int | None = None, **columns: Any) -> int:
        """A source of a kind at its stand-in."""
        row = {"name": kind, "kind": kind, "base_url": self.sites.address(kind), "rate_limit_per_minute": rate}
        return self.db.insert("sources", [row | columns])[0]

    def coins(self, count: int, first: int = 0) -> list[int]:
        """Intakes of coins that are all different, with a job for each source."""
        rows = [{"title": coin(n)["title"], "condition": "circulated"} for n in range(first, first + count)]
        ids = self.db.insert("coin_intakes", rows)
        for source in self.db.query("select id from sources order by id"):
            jobs = [
                {"intake_id": each, "source_id": source["id"], "query_params": coin(n)}
                for n, each in enumerate(ids, first)
            ]
            self.db.insert("scrape_jobs", jobs)
        return ids

    def job(self, source_id: int, number: int = 0, **columns: Any) -> int:
        """One job by hand, with an intake of its own unless one is given."""
        if "intake_id" not in columns:
            columns["intake_id"] = self.db.insert("coin_intakes", [{"title": coin(number)["title"]}])[0]
        row = {"source_id": source_id, "query_params": coin(number), "locked_by": None} | columns
        return self.db.insert("scrape_jobs", [row])[0]

    def row(self, job_id: int) -> Row:
        return self.db.one("select * from scrape_jobs where id = ?", job_id)

    def statuses(self) -> dict[str, int]:
        return {r["status"]: r["n"] for r in self.db.query("select status, count(*) as n from scrape_jobs group by 1")}

    # -- processes

    def environment(self, **settings: str) -> dict[str, str]:
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        return {**os.environ, **paths, **QUICK, "ROWMILL_DATABASE_URL": self.db.url, **settings}

    def start(self, worker_id: str, *words: str, **settings: str) -> subprocess.Popen[bytes]:
        """A worker process."""
        command = [sys.executable, "-m", "apps.prices", "work", "--log", "json", *words]
        with (self.folder / f"{worker_id}.log").open("ab") as log:
            environment = self.environment(WORKER_ID=worker_id, **settings)
            self.processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log))
        return self.processes[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the workers logged under a name."""
        lines = [line for log in self.folder.glob("*.log") for line in log.read_text().splitlines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event["event"] == name]

    def all_final(self, seconds: float = 200) -> None:
        """Wait until no job is left."""
        text = "select count(*) from scrape_jobs where status not in ('succeeded', 'failed')"
        eventually(lambda: self.db.value(text) == 0, seconds)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(60)


def coin(number: int) -> dict[str, Any]:
    """One of many coins."""
    year, mint = 1878 + number % 40, "DSO"[number % 3]
    return {"title": f"{year}-{mint} Morgan Dollar No {number}", "year": year, "mintmark": mint,
            "denomination": "dollar", "series": "Morgan"}  # fmt: skip


def eventually(look: Callable[[], bool], seconds: float = 120) -> None:
    """Processes of others give no signal that could be waited for. Each look is a connection: not too often."""
    waiting.eventually(look, seconds, every=0.25)


@pytest.fixture(scope="session")
def all_sites() -> Iterator[standin.Sites]:
    with standin.serving() as sites:
        yield sites


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    """A database that is set up, to be copied: the setup starts a process of its own."""
    name = f"prices_template_{os.getpid()}"
    url = server.create_database(name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ROWMILL_DATABASE_URL", url)
        patched.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        patched.chdir(ROOT)
        asyncio.run(schema.setup())
    return name


@pytest.fixture
def app(
    server: Server, template: str, all_sites: standin.Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """The application on a fresh database, with sites in a good mood and a cache of its own, switched off."""
    name = f"prices_{next(_numbers)}"
    server._admin(f'create database "{name}" template "{template}"')
    url = server._postgres.get_uri(database=name)
    monkeypatch.setenv("ROWMILL_DATABASE_URL", url)
    monkeypatch.setattr(
        worker, "settings", replace(worker.settings, cache_enabled=False, cache_dir=str(tmp_path / "cache"))
    )
    all_sites.log.clear()
    all_sites.moods = {kind: standin.Mood() for kind in all_sites.moods}
    app = App(Db(url), all_sites, tmp_path)
    try:
        yield app
    finally:
        worker.mill.clock.shift = timedelta(0)
        app.close()
        server.drop(name)
