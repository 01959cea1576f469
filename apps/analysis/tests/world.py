"""The world of these tests: sites, a model, a database with the application's tables, and settings that hurry."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from apps.analysis import tables
from apps.analysis.phases import build
from apps.analysis.settings import Settings
from apps.standins import sites
from apps.standins.internet import Internet
from apps.standins.model import Model
from databases import Db, Row
from rowmill import Mill
from rowmill.store import Database
from waiting import eventually

ROOT = Path(__file__).parents[3]
#: Times of a test, in which nothing waits for a minute.
HURRIED = Settings(
    pace_starts=500, pace_seconds=1, poll_seconds=0.2, untouched_seconds=0.01, stuck_seconds=2.5, sweep_seconds=0.5,
    backoff_seconds=0.2, health_seconds=0.5, model_key="secret",
)  # fmt: skip
FAR = datetime(2999, 1, 1, tzinfo=UTC)
_numbers = itertools.count(1)


def settings_of(net: Internet, model: Model, base: Settings = HURRIED, **others: Any) -> Settings:
    """Settings that lead to the stand-ins."""
    openai = others.get("provider", "openai") == "openai"
    url = f"{model.url}/v1" if openai else model.url
    return replace(base, internet=net.address, model_url=url, model_key="secret", **others)


def calm(settings: Settings) -> Settings:
    """The same stand-ins, with the times of the specification."""
    stand_ins = {
        name: getattr(settings, name) for name in ("internet", "model_url", "model_key", "model_name", "provider")
    }
    return replace(Settings(), **stand_ins)


def page(name: str, latency: float = 0.0, body: str = "") -> sites.Site:
    """A site with main content, signs of what it is made with, and contacts."""
    head = '<script src="/wp-content/jquery.min.js"></script><meta name="generator" content="WordPress 6.5">'
    words = f"<main><p>{name} sells garden chairs in every colour. </p>{body}</main><nav>Home Imprint</nav>"
    contacts = f'<a href="mailto:info@{name}">Write</a><a href="tel:+1-555-0100">Call</a>'
    return sites.page(latency, head=head, body=words + contacts)


def create(db: Db) -> None:
    """The application's tables."""

    async def make() -> None:
        database = Database.open(db.url)
        try:
            await tables.create(database)
        finally:
            await database.close()

    asyncio.run(make())


def insert(db: Db, count: int = 1, url: str = "https://site{n}.example/", **columns: Any) -> list[str]:
    """Jobs as a day ago, a second apart, in the order of their ids; ``status`` sets ``currentStep`` too."""
    if "status" in columns:
        columns = {"currentStep": columns["status"], **columns}
    born = datetime.now(UTC) - timedelta(days=1)
    rows = []
    for i in range(count):
        at = born + timedelta(seconds=next(_numbers))
        rows.append(
            {"id": f"job-{next(_numbers):05}", "url": url.format(n=i), "createdAt": at, "updatedAt": at} | columns
        )
    return db.insert("AnalysisJob", rows)


def row(db: Db, key: str) -> Row:
    """A job's row, with its JSON read."""
    found = db.one('select * from "AnalysisJob" where id = ?', key)
    info = found["extractedInfo"]
    return found | {
        "extractedInfo": json.loads(info) if isinstance(info, str) else info, "inProgress": bool(found["inProgress"]),
    }  # fmt: skip


def counts(db: Db) -> dict[str, int]:
    """Jobs by status."""
    return {r["status"]: r["n"] for r in db.query('select status, count(*) as n from "AnalysisJob" group by 1')}


def mill_on(db: Db, settings: Settings) -> Mill:
    """The application on a database."""
    return build(settings, db.url)


class Workers:
    """Real worker processes, as an operator starts them: ``rowmill run apps.analysis:mill``."""

    def __init__(self, db: Db, settings: Settings, log: Path) -> None:
        self.log = log
        self._environ = {**os.environ, **settings.environ(), "ROWMILL_DATABASE_URL": db.url}
        self._environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: set[int] = set()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        # In order first: the supervisor of a worker that is killed leaves it to end by itself.
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=60)

    def start(self, name: str, processes: int = 1) -> None:
        """A supervisor with so many workers under it, named ``{name}-{n}``."""
        command = [sys.executable, "-m", "rowmill", "run", "apps.analysis:mill"]
        with self.log.open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*command, "--worker-id", name, "--processes", str(processes)],
                env=self._environ, cwd=ROOT, stdout=log, stderr=log,
            )  # fmt: skip

    @staticmethod
    def up(db: Db) -> int:
        """How many have begun to work."""
        if db.dialect == "postgresql" and not db.value("select to_regclass('rowmill_workers') is not null"):
            return 0
        return int(db.value("select count(*) from rowmill_workers"))

    def pid(self, db: Db, name: str) -> int:
        """The process that works under a name: not its supervisor, and not one that was killed."""
        wanted = "select pid from rowmill_workers where id = ?"
        eventually(lambda: db.value(wanted, name) not in self.killed, 60, every=0.1)
        return int(db.value(wanted, name))

    def stop(self) -> None:
        """In order, all of them."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            process.wait(timeout=60)

    def events(self, name: str) -> Sequence[str]:
        """Log lines with that event."""
        return [line for line in self.log.read_text().splitlines() if name in line]
