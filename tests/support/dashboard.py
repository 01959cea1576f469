"""The dashboard as a user has it: served over a real database, looked at in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta as td
from typing import Any

import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from databases import Db
from rowmill import Breaker, Concurrency, Dead, Mill, fixed
from rowmill.web.app import application

DOCUMENTS = {
    "postgresql": """create table documents (
  id bigint generated always as identity primary key, title text, domain text, status text not null default 'new',
  worker text, claimed_at timestamptz, heartbeat_at timestamptz, attempts integer not null default 0, error text,
  run_after timestamptz not null default now(), created_at timestamptz not null default now(),
  finished_at timestamptz, meta jsonb)""",
    "sqlite": """create table documents (
  id integer primary key, title text, domain text, status text not null default 'new',
  worker text, claimed_at datetime, heartbeat_at datetime, attempts integer not null default 0, error text,
  run_after datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')),
  created_at datetime not null default (strftime('%Y-%m-%d %H:%M:%f', 'now')), finished_at datetime, meta json)""",
}
HOSTILE = '<script>window.hit=1</script><img src=x onerror="window.hit=1">\'"><svg onload=window.hit=1>{{7*7}}'
PAGES = ("/", "/errors", "/workers", "/health", "/tasks", "/lane?lane=extract", "/lane?lane=ocr&state=dead",
         "/lane?lane=default")  # fmt: skip


def declare(mill: Mill) -> Mill:
    """Two phases over one table, with gates by domain, and tasks; what a row's title says happens to it."""
    options: dict[str, Any] = {"max_attempts": 2, "backoff": fixed(td(hours=1)), "poll": td(seconds=0.2)}

    @mill.lane(
        "documents", name="extract", ready={"status": "new"}, running={"status": "extracting"},
        done={"status": "extracted"}, dead={"status": "extract_failed"},
        gates=[Concurrency(2, by="domain"), Breaker(50, cooldown=td(minutes=5), by="domain")], **options,
    )  # fmt: skip
    async def extract(job: Any) -> None:
        title = job["title"] or ""
        if title.startswith("fails"):
            raise ConnectionError(f"no answer from 10.0.0.{job.id % 250} after {job.id} ms")
        if title.startswith("dies"):
            job.log.info("looked for %s", title)
            job.log.warning("page %s: not there", job.id)
            raise Dead(f"page {job.id} is not there {title[5:]}")

    @mill.lane(
        "documents", name="ocr", ready={"status": "extracted"}, running={"status": "reading"}, done={"status": "read"},
        dead={"status": "ocr_failed"}, canceled={"status": "canceled"}, **options,
    )  # fmt: skip
    async def ocr(job: Any) -> None: ...

    @mill.task
    async def report(to: str) -> str:
        return to

    @mill.cron("0 3 * * *", tz="America/Montreal")
    async def nightly() -> None: ...

    return mill


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run something to its end beside the browser, whose own loop is running in this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result(timeout=60)


class Site:
    """A served Mill."""

    def __init__(self, mill: Mill, db: Db, **options: Any) -> None:
        self.mill, self.db = mill, db
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(application(mill, **options), log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._listening = listening
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)

    def __enter__(self) -> Site:
        self._thread.start()
        for _ in range(3000):
            if self._server.started:
                return self
            threading.Event().wait(0.02)
        raise AssertionError("the server did not start")

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=60)
        self._listening.close()

    def drain(self, lanes: list[str] | None = None) -> None:
        """Work until nothing is left."""
        run(self.mill.worker(lanes=lanes, drain=True).run())

    def add(self, title: str, count: int = 1, **columns: Any) -> list[Any]:
        """Rows of the table."""
        return self.db.insert("documents", [{"title": title, "domain": "a.example", **columns}] * count)

    def status(self, key: Any) -> str:
        """A row's status."""
        return str(self.db.value("select status from documents where id = ?", key))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield chromium
        finally:
            chromium.close()


class Visitor:
    """A page in the browser that minds what goes wrong in it."""

    def __init__(self, page: Page, site: Site) -> None:
        self.page, self.site = page, site
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda said: said.type == "error" and self.wrong.append(f"console: {said.text}"))
        page.on("dialog", lambda dialog: self.wrong.append("a dialog") or dialog.dismiss())
        page.on("request", lambda asked: asked.url.startswith(site.url) or self.wrong.append(f"asked: {asked.url}"))
        page.set_default_timeout(60_000)

    def open(self, path: str) -> Visitor:
        """Go to a page; it must be there."""
        answer = self.page.goto(self.site.url + path, wait_until="domcontentloaded")
        assert answer is not None
        assert answer.status == 200, f"{path}: {answer.status} {self.page.inner_text('body')[:300]}"
        return self

    def text(self, where: str = "main") -> str:
        """What stands there."""
        return self.page.inner_text(where)

    def notice(self) -> str:
        """What an action said."""
        return self.page.inner_text("p.notice[role=status]")

    def click(self, name: str, inside: str = "main") -> Visitor:
        """Press a button, and wait for the page it leads to."""
        with self.page.expect_navigation(wait_until="domcontentloaded"):
            self.page.locator(inside).get_by_role("button", name=name).first.click()
        return self

    def serious(self) -> list[str]:
        """What axe finds that is serious or worse."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{v['id']}: {[node['target'] for node in v['nodes']][:3]}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ]

    def overflows(self) -> bool:
        """Whether the page is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth + 1"))
