"""``python -m apps.enrichment``: an import from the upload to its last link, visibly, with nothing to set up.

An embedded PostgreSQL, a small internet on loopback, the web side and two worker processes. Ends by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import uvicorn
from rich.console import Console
from rich.live import Live
from rich.table import Table

from apps.standins import sites
from apps.standins.ending import run, stoppable
from apps.standins.internet import Internet, Site
from apps.standins.postgres import postgres
from rowmill import domain

from . import users, web
from .connect import connect
from .mill import create_tables

AT_MOST, TICK = 240.0, 0.5
WORKERS = 2
_BAR = 30
SETTINGS = {"ENRICHMENT_RETRY_SECONDS": "4", "ENRICHMENT_POLL_SECONDS": "1", "ENRICHMENT_FETCH_SECONDS": "5"}
#: Sites with manners, and what is to be said of them.
MANNERS: dict[str, tuple[str, Site]] = {
    "slow.example": ("takes a second for each page", sites.page(latency=1.0)),
    "tired.example": ("fails once, then answers", sites.failing(1, sites.page())),
    "shut.example": ("answers 403", sites.refusing(403)),
    "guarded.example": ("asks for a captcha", sites.captcha()),
    "rules.example": ("has robots rules", sites.robots("User-agent: *\nDisallow: /private", sites.page())),
    "circle.example": ("redirects in a circle", sites.circling()),
    "endless.example": ("never stops talking", sites.endless()),
    "latin.example": ("says UTF-8 and is not", sites.mislabelled("Café Zürich", "latin-1", "utf-8")),
    "short.example": ("leads to another domain", sites.redirecting("https://slow.example/found")),
    "10-0-0-1.ip.example": ("is a private address", sites.page()),
}
COUNTS = "select status, count(*) from enrichment_jobs group by 1"
RUNNING = "select domain, count(*) from enrichment_jobs where status = 'running' group by 1 order by 2 desc, 1 limit 6"
ENDS = "select last_error, count(*) from enrichment_jobs where status = 'dead' group by 1 order by 1"


def bookmarks() -> str:
    """What a browser would export: folders in folders, some links twice, some that are none."""
    many = [(f"site{n % 40}.example", n) for n in range(320)]
    odd = [(host, n) for host in MANNERS for n in range(6)]
    parts = []
    for name, links in (("Reading", many), ("Odd ones", odd), ("Reading again", many[::4])):
        marks = "".join(
            f'<DT><A HREF="https://{host}/{"private/" if host == "rules.example" and n % 2 else ""}{n}'
            f'?utm_source=tour">{host} {n}</A>\n'
            for host, n in links
        )
        parts.append(f"<DT><H3>{name}</H3>\n<DL><p>\n{marks}</DL><p>\n")
    button = '<DT><A HREF="javascript:void 0">A button</A>'
    return f"<!DOCTYPE NETSCAPE-Bookmark-file-1>\n<DL><p>\n{''.join(parts)}{button}</DL>"


@contextmanager
def served(url: str) -> Iterator[str]:
    """The web side, in a thread."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(web.app(url), log_level="warning", ws="none"))
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def working(url: str, net: Internet, log: Path) -> Iterator[None]:
    """Worker processes, as ``rowmill run`` starts them; what they say goes to a file."""
    environment = {**os.environ, **SETTINGS, "ROWMILL_DATABASE_URL": url, "ENRICHMENT_INTERNET": net.address}
    command = [sys.executable, "-m", "rowmill", "run", "apps.enrichment:mill", "--processes", str(WORKERS)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def view(shown: dict[str, Any], counts: dict[str, int], running: list[Any], seconds: float) -> Table:
    """The import, its links, and who is being asked at this moment."""
    total, done = shown["total_items"], shown["processed_items"]
    filled = round(_BAR * done / total) if total else 0
    table = Table(title=f"import {shown['status']}, {seconds:.0f} s", width=80, show_header=False)
    table.add_row(
        "items", f"[green]{'█' * filled}[/]{'░' * (_BAR - filled)} {done} of {total}, {shown['failed_items']} failed"
    )
    table.add_row("links", "  ".join(f"{status} {counts.get(status, 0)}" for status in
                                      ("queued", "running", "succeeded", "failed", "dead")))  # fmt: skip
    table.add_row("at this moment", ", ".join(f"{name} ({n})" for name, n in running) or "-")
    return table


async def follow(console: Console, address: str, token: str, db: asyncpg.Connection) -> tuple[dict[str, Any], float]:
    """Upload the bookmarks, and show how the import stands until it is over."""
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, trust_env=False) as client:
        made = await client.post("/imports", content=bookmarks().encode())
        made.raise_for_status()
        shown, began = made.json(), time.monotonic()
        with Live(console=console, auto_refresh=False) as live:
            while shown["finished_at"] is None and time.monotonic() - began < AT_MOST:
                await asyncio.sleep(TICK)
                shown = (await client.get(f"/imports/{shown['id']}")).json()
                counts, running = dict(await db.fetch(COUNTS)), await db.fetch(RUNNING)
                live.update(view(shown, counts, running, time.monotonic() - began), refresh=True)
    return shown, time.monotonic() - began


async def summary(
    console: Console, shown: dict[str, Any], seconds: float, db: asyncpg.Connection, net: Internet
) -> None:
    """What came of it."""
    links = await db.fetchval("select count(*) from enrichment_jobs")
    console.print(
        f"\n{shown['status']} in {seconds:.0f} s: {shown['total_items']} bookmarks are {links} links;"
        f" {shown['processed_items']} items are over, {shown['failed_items']} of them failed"
    )
    most = net.most_at_once(lambda host: domain(f"https://{host}"))
    console.print(
        f"{len(net.visits)} requests to {len(most)} domains, never more than {max(most.values())} at once to one"
    )
    candidates = await db.fetch("select domain, reason, refusals from block_candidates order by 1")
    console.print("candidates for blocking: " + ", ".join(f"{name} ({why}, {n} links)" for name, why, n in candidates))
    console.print("why links are dead:")
    for error, n in await db.fetch(ENDS):
        manners = next((words for host, (words, _) in MANNERS.items() if host in error), "")
        console.print(f"  {n} x {error}" + (f"  [dim]({manners})[/]" if manners else ""), highlight=False)


async def tour(url: str, folder: Path) -> int:
    """The whole of it; 0 where the import came to its end."""
    console = Console()
    await create_tables(url)
    db = await connect(url)
    _, token = await users.add(db, "ada")
    everywhere = {host: site for host, (_, site) in MANNERS.items()}
    try:
        with Internet(everywhere, default=sites.page(latency=0.15)) as net, served(url) as address:
            console.print(
                f"web side at {address}, {WORKERS} workers, an internet of {40 + len(MANNERS)} hosts at {net.address}"
            )
            with working(url, net, folder / "workers.log"):
                shown, seconds = await follow(console, address, token, db)
            await summary(console, shown, seconds, db, net)
    finally:
        await db.close()
    if shown["status"] != "succeeded":
        console.print((folder / "workers.log").read_text()[-3000:], highlight=False, markup=False)
    return 0 if shown["status"] == "succeeded" else 1


def demo() -> int:
    """Run the tour in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, postgres() as url:
        return run(tour(url, Path(folder)))


def main() -> int:
    """The exit code."""
    print(f"Starting PostgreSQL, an internet, the web side and {WORKERS} workers ...", flush=True)
    return stoppable(demo)


if __name__ == "__main__":
    sys.exit(main())
