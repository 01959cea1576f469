"""Many bookmarks over many hosts, worked on by real worker processes: what was seen, beside what was possible.

``python -m apps.enrichment.tests.crowd`` runs it once on an embedded PostgreSQL and prints the report.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps.standins import sites
from apps.standins.internet import Internet, Request
from databases import Db, Server
from rowmill import domain
from waiting import eventually

SCHEMA = Path(__file__).parents[1] / "schema.sql"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Crowd:
    """So many bookmarks over so many hosts; a few of the hosts have more and slower pages than the others. Every tenth
    bookmark of the others is one that another folder has, too.
    """

    bookmarks: int = 5_000
    hosts: int = 300
    heavy: int = 4
    per_heavy: int = 48
    slow: float = 0.5
    quick: float = 0.05
    limit: int = 2
    concurrency: int = 100
    marks: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        marks = [
            (f"heavy {h}", f"https://heavy{h}.example/{n}") for n in range(self.per_heavy) for h in range(self.heavy)
        ]
        light = self.hosts - self.heavy
        for n in range(self.bookmarks - len(marks)):
            again = n % 10 == 9
            at = n - 9 if again else n
            words = "?utm_source=again#top" if again else ""
            marks.append((f"folder {n % 50}", f"https://host{at % light}.example/{at}{words}"))
        object.__setattr__(self, "marks", marks)

    def html(self) -> str:
        folders: dict[str, list[str]] = {}
        for folder, url in self.marks:
            folders.setdefault(folder, []).append(f'<DT><A HREF="{url}">{url}</A>')
        inner = "\n".join(f"<DT><H3>{name}</H3><DL><p>{''.join(marks)}</DL><p>" for name, marks in folders.items())
        return f"<!DOCTYPE NETSCAPE-Bookmark-file-1>\n<DL><p>{inner}</DL><p>"

    def internet(self) -> Internet:
        slow, quick = sites.page(latency=self.slow), sites.page(latency=self.quick)

        def answer(request: Request) -> Any:
            return (slow if request.host.startswith("heavy") else quick)(request)

        return Internet(default=answer)

    def links(self) -> set[str]:
        return {url.partition("?")[0] for _, url in self.marks}

    def bound(self) -> float:
        """The least time in which it can be done: for each domain its pages one after the other, two at once."""
        seconds: Counter[str] = Counter()
        for url in self.links():
            seconds[domain(url) or ""] += self.slow if "//heavy" in url else self.quick
        return max(seconds.values()) / self.limit


@dataclass
class Seen:
    """How it went."""

    seconds: float
    bound: float
    standing: dict[str, Any]
    pages: Counter[tuple[str, str]]
    most_at_once: dict[str, int]

    @property
    def report(self) -> str:
        return (
            f"{len(self.pages)} links in {self.seconds:.1f} s, the bound is {self.bound:.1f} s:"
            f" {self.seconds / self.bound:.2f} times; at most {max(self.most_at_once.values())} at once per domain"
        )


#: A worker without its supervisor: one process, which may be killed.
WORKER = "import sys; from apps.enrichment import mill; mill.run(worker_id=sys.argv[1])"


#: Runs a command and tells of its memory: the test's own process has had other children before.
_MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


class Workers:
    """Worker processes over a database and an internet."""

    def __init__(self, db: Db, net: Internet, **settings: Any) -> None:
        given = {f"ENRICHMENT_{name.upper()}": str(value) for name, value in settings.items()}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.environment = {
            **os.environ, "PYTHONPATH": path, "ROWMILL_DATABASE_URL": db.url, "ENRICHMENT_INTERNET": net.address,
        } | given  # fmt: skip
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", WORKER, name], env=self.environment, cwd=ROOT)
        self.processes.append(process)
        return process

    def drain(self, *options: str) -> subprocess.CompletedProcess[str]:
        """``rowmill run`` as an operator would start it, until nothing is ready. What its largest process took is
        the last line of its output, in kilobytes.
        """
        command = [sys.executable, "-m", "rowmill", "run", "apps.enrichment:mill", "--drain", "--log", "json", *options]
        return subprocess.run(
            [sys.executable, "-c", _MEASURED, *command],
            env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=230,
        )  # fmt: skip

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=60)


def work(crowd: Crowd, db: Db, processes: int = 2, patience: float = 120) -> Seen:
    """Import the crowd's bookmarks with so many worker processes, and wait for the end of the import."""
    db.execute(SCHEMA.read_text())
    with crowd.internet() as net:
        # A page that comes late on a busy machine is no failure, which would be tried again after five minutes.
        workers = Workers(db, net, concurrency=crowd.concurrency, poll_seconds=1, fetch_seconds=60)
        try:
            for n in range(processes):
                workers.start(f"worker-{n + 1}")
            eventually(lambda: alive(db) == processes, seconds=60, every=0.3)
            begun = time.monotonic()
            id = upload(db, crowd.html())
            over = "select count(*) from import_jobs where finished_at is not null"
            eventually(lambda: db.value(over) == 1, seconds=patience, every=0.5)
            seconds = time.monotonic() - begun
        finally:
            workers.close()
        pages = Counter((v.host, v.path) for v in net.visits if v.path != "/robots.txt")
        most = net.most_at_once(lambda host: domain(f"https://{host}"))
    return Seen(seconds, crowd.bound(), db.one("select * from import_jobs where id = ?", id), pages, most)


def upload(db: Db, content: str) -> Any:
    """An import of a new user, as the web side makes it."""
    user = db.value("insert into users (name, token_hash) values ('x', sha256(random()::text::bytea)) returning id")
    return db.value(
        "with i as (insert into import_jobs (user_id) values (?) returning id), f as (insert into import_files"
        " select id, ? from i) select id from i",
        user, content.encode(),
    )  # fmt: skip


def alive(db: Db) -> int:
    if not db.value("select to_regclass('rowmill_workers') is not null"):
        return 0
    return int(db.value("select count(*) from rowmill_workers"))


if __name__ == "__main__":
    with Server() as server:
        print(work(Crowd(), Db(server.create_database("crowd"))).report)
