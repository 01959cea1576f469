"""The web application: its worker lives with it, and its page tells how things stand, in a real browser."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from playwright.async_api import async_playwright

from apps.analysis import tables, web
from apps.analysis.settings import Settings
from apps.analysis.statistics import Statistics, health
from apps.analysis.tests import world
from apps.standins import sites
from apps.standins.internet import Internet
from databases import Db
from rowmill.store import Database
from rowmill.testing import Kit
from waiting import eventually


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The application on a real server, until the block ends; then it has shut down."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.to_thread(eventually, lambda: server.started or serving.done(), 30)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        await serving


async def test_workers_start_and_stop_with_the_web_application(db: Db, settings: Settings, net: Internet) -> None:
    """E7: a job that is ordered over HTTP is analysed in the same process; at shut-down what runs goes back."""
    net.sites["slow.example"] = sites.page(latency=60)
    mill = world.mill_on(db, settings)  # no tables yet: the application makes them
    async with served(web.create_app(mill, settings, worker_id="web-1", grace=0.2)) as client:
        refused = await client.post("/analyses", json={"url": "ftp://chairs.example"})
        assert refused.status_code == 422
        made = await client.post("/analyses", json={"url": "https://chairs.example"})
        assert made.status_code == 202
        key = made.json()["id"]
        completed = lambda: world.row(db, key)["status"] == "completed"  # noqa: E731
        await asyncio.to_thread(eventually, completed, 30, 0.1)
        told = (await client.get(f"/analyses/{key}")).json()
        assert (told["status"], told["analysis"]["category"]) == ("completed", "business")
        assert told["website"]["contacts"]["emails"] == ["info@chairs.example"]
        for nobodys in ("none", "%00", "%ff", "../../etc/passwd"):
            assert (await client.get(f"/analyses/{nobodys}")).status_code == 404
        assert (await client.get("/health")).json()["ok"]
        slow = (await client.post("/analyses", json={"url": "https://slow.example"})).json()["id"]
        await asyncio.to_thread(eventually, lambda: world.row(db, slow)["inProgress"], 30, 0.1)
    found = world.row(db, slow)
    assert (found["inProgress"], found["status"], found["retryCount"]) == (False, "not-started", 0)
    assert db.value("select state from rowmill_workers where id = 'web-1'") == "stopped"


async def test_several_may_make_the_tables_at_once(pg: Db) -> None:
    """E7: web applications that start together on an empty database."""
    databases = [Database.open(pg.url) for _ in range(6)]
    await asyncio.gather(*(tables.create(database) for database in databases))
    for database in databases:
        await database.close()
    assert pg.value('select count(*) from "AnalysisJob"') == 0


async def test_the_web_application_can_be_without_a_worker(lite: Db, settings: Settings) -> None:
    """E7: it creates and shows, and others work."""
    settings = replace(settings, worker=False)
    async with served(web.create_app(world.mill_on(lite, settings), settings)) as client:
        key = (await client.post("/analyses", json={"url": "https://chairs.example"})).json()["id"]
        told = (await client.get("/statistics")).json()
        assert (await client.get("/health")).json() == {"ok": True, "state": "off"}
    assert world.row(lite, key)["status"] == "not-started"
    assert told["health"] == {"ok": False, "problems": ["no worker is alive"]}
    assert told["queues"][0]["phase"] == "website-analysis"


async def test_the_statistics_tell_queues_processors_health_and_tokens(
    jobs: Db, settings: Settings, net: Internet
) -> None:
    """E8: queue sizes by phase, what every processor does, whether all is well; E6: exhausted rows show as dead."""
    net.sites["slow.example"] = sites.page(latency=60)
    (slow,) = world.insert(jobs, url="https://slow.example/")
    (done,) = world.insert(jobs)
    world.insert(jobs, 2, retryCount=3, status="prompt-forming")
    world.insert(jobs, 3, runAfter=world.FAR, status="model-analysis")
    mill = world.mill_on(jobs, replace(settings, stuck_seconds=100))
    statistics = Statistics(mill, settings)
    worker = mill.worker(worker_id="w1", grace=0.1)
    working = asyncio.create_task(worker.run())
    reported = "select count(*) from \"AnalysisWorker\" where cast(report as text) like '%busy%'"
    try:
        await asyncio.to_thread(eventually, lambda: world.row(jobs, done)["status"] == "completed", 30, 0.1)
        await asyncio.to_thread(eventually, lambda: jobs.value(reported), 30, 0.1)
        # What a processor does is reported now and then: until the others' last runs are no longer in the report.
        for _ in range(300):
            told = await statistics.gather()
            if sum(processor["state"] == "busy" for processor in told["processors"]) == 1:
                break
            await asyncio.sleep(0.1)
    finally:
        worker.stop()
        await working
        await statistics.close()
    sizes = {
        queue["phase"]: {k: v for k, v in queue.items() if k not in ("phase", "oldest")} for queue in told["queues"]
    }
    none = dict.fromkeys(("ready", "waiting", "running", "stuck", "dead"), 0)
    assert sizes == {
        "website-analysis": none | {"running": 1}, "prompt-forming": none | {"dead": 2},
        "model-analysis": none | {"waiting": 3},
    }  # fmt: skip
    assert told["completed"] == 1
    assert len(told["processors"]) == 30
    (busy,) = [processor for processor in told["processors"] if processor["state"] == "busy"]
    assert (busy["job"], busy["phase"], busy["worker"]) == (slow, "website-analysis", "w1")
    assert told["health"] == {"ok": True, "problems": []}
    assert 100 < told["tokens"]["day"]["used"] == told["tokens"]["minute"]["used"] < 1000
    assert told["tokens"]["minute"]["limit"] == settings.tokens_per_minute


async def test_a_row_without_a_sign_of_life_makes_the_system_unwell(jobs: Db, settings: Settings) -> None:
    """E8: what hangs is told before it is released."""
    world.insert(jobs)
    mill = world.mill_on(jobs, settings)
    statistics = Statistics(mill, settings)
    async with Kit(mill) as kit:
        await kit.claim("website-analysis")
        kit.advance(settings.seconds("stuck") * 2)
        told = await statistics.gather()
    await statistics.close()
    assert told["queues"][0]["stuck"] == 1
    assert "website-analysis: 1 in progress without a sign of life" in told["health"]["problems"]


def test_health_says_what_is_wrong_in_words() -> None:
    """E8: no worker, a phase that nobody serves, processors that are all in error, a stuck one."""
    queue: dict[str, Any] = {"phase": "a", "stuck": 0}
    worker = {"worker": "w1", "check": {"stuck": ["a-processor-1"]}}
    error = {"phase": "a", "state": "error"}
    assert health([queue], [worker | {"check": None}], [error | {"state": "idle"}]) == {"ok": True, "problems": []}
    assert health([queue], [], [])["problems"] == ["no worker is alive"]
    assert health([queue], [worker], [])["problems"] == ["a: no worker serves it", "w1: stuck: a-processor-1"]
    assert health([queue], [worker | {"check": None}], [error])["problems"] == ["a: all processors are in error"]


async def test_the_page_shows_it_all_in_a_browser_without_outside_assets(
    lite: Db, settings: Settings, net: Internet
) -> None:
    """E8: live: it changes without a reload; what a site put into an error is text, never markup."""
    net.sites["bad.example"] = sites.refusing(500)
    settings = replace(settings, backoff_seconds=60, health_seconds=60)
    chromium = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    asked: list[str] = []
    app = web.create_app(world.mill_on(lite, settings), settings, worker_id="<b>w1</b>")
    async with served(app) as client, async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(str(client.base_url))
        await page.get_by_text("All is well").wait_for()
        assert await page.locator(".pool li.idle").count() == 30
        await client.post("/analyses", json={"url": "https://good.example"})
        await page.get_by_text("1 completed").wait_for(timeout=30_000)
        await client.post("/analyses", json={"url": "https://bad.example"})
        await page.locator(".pool li.error").wait_for(timeout=30_000)
        assert "500" in str(await page.locator(".pool li.error").get_attribute("title"))
        assert await page.locator("b").count() == 0
        assert await page.get_by_text("<b>w1</b>: ").count() == 1
        await browser.close()
    assert {url.split("/")[2] for url in asked if not url.startswith("data:")} == {client.base_url.netloc.decode()}
    assert errors == []
