"""A worker inside a web application: real frameworks, started and stopped with it, also when things go wrong."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from databases import Db
from quick_processes import real_processes
from rowmill import DeclarationError, Job, Mill
from rowmill.engine.hosting.lifespan import Lifespan
from rowmill.engine.worker import Worker
from rowmill.events import logger


def doubling(db: Db) -> Mill:
    mill = Mill(db.url)

    @mill.task
    async def double(n: int) -> int:
        return 2 * n

    return mill


def states(db: Db) -> list[str]:
    return [row["state"] for row in db.query("select state from rowmill_jobs order by id")]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (health is asked, it does not tell)
            await asyncio.sleep(0.01)


def test_a_fastapi_application_works_on_what_its_views_enqueue(db: Db) -> None:
    """E7: the worker starts and stops with the application. Async and plain views; health for the application."""
    mill = doubling(db)
    double = mill.tasks["double"]
    lifespan = mill.lifespan(worker=True, concurrency=2)
    app = FastAPI(lifespan=lifespan)

    @app.post("/double/{n}")
    async def order(n: int) -> int:
        return await (await double.enqueue(n)).result(timeout=60)

    @app.post("/plain/{n}")
    def plain(n: int) -> int:
        return double.enqueue_sync(n).result_sync(timeout=60)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return lifespan.health()

    assert lifespan.health() == {"ok": False, "state": "stopped"}
    for _ in range(2):  # an application may live twice in a process, as in tests
        with TestClient(app) as client:
            assert client.post("/double/4").json() == 8
            assert client.post("/plain/5").json() == 10
            told = client.get("/health").json()
            assert (told["ok"], told["state"], told["environments"]) == (True, "working", {"default": "up"})
            assert told["restarts"] == 0
            assert told["error"] is None
        assert lifespan.health()["state"] == "stopped"
        assert not lifespan.health()["ok"]
    assert states(db) == ["done"] * 4
    assert {row["state"] for row in db.query("select state from rowmill_workers")} == {"stopped"}


def test_without_a_worker_the_tables_are_there_and_nothing_is_worked_on(lite: Db) -> None:
    mill = doubling(lite)
    lifespan = mill.lifespan()

    async def order(request: Any) -> JSONResponse:
        await mill.tasks["double"].enqueue(1)
        return JSONResponse(lifespan.health())

    with TestClient(Starlette(routes=[Route("/", order)], lifespan=lifespan)) as client:
        assert states(lite) == []
        assert client.get("/").json() == {"ok": True, "state": "off"}
    assert states(lite) == ["ready"]


def test_the_applications_own_lifespan_is_around_the_worker_and_may_enqueue(lite: Db) -> None:
    mill, seen = Mill(lite.url), list[str]()
    finished = asyncio.Event()

    @mill.task
    async def uses_what_the_application_opened() -> None:
        seen.append(f"run while {seen[-1]}")
        finished.set()

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        await uses_what_the_application_opened.enqueue()
        assert lifespan.health()["state"] == "stopped"
        seen.append("open")
        yield {"opened": "yes"}
        assert lifespan.health()["state"] == "stopped"
        seen.append("closed")

    lifespan = mill.lifespan(worker=True, lifespan=own)
    app = FastAPI(lifespan=lifespan)

    @app.get("/state")
    async def state(request: Request) -> str:
        await asyncio.wait_for(finished.wait(), 60)
        return str(request.state.opened)

    with TestClient(app) as client:
        assert client.get("/state").json() == "yes"
    assert seen == ["open", "run while open", "closed"]


async def test_on_shutdown_runs_finish_within_the_grace_and_the_others_are_given_back(db: Db) -> None:
    """E7, X2: nothing is left running."""
    mill = Mill(db.url)
    begun, may_end = asyncio.Event(), asyncio.Event()

    @mill.task(concurrency=1)
    async def slow() -> None:
        begun.set()
        await may_end.wait()

    @mill.task(concurrency=1, max_attempts=3)
    async def endless() -> None:
        await asyncio.Event().wait()

    lifespan = mill.lifespan(worker=True, grace=3.0)
    async with lifespan():
        await slow.enqueue_many([{}, {}, {}])
        await endless.enqueue()
        await asyncio.wait_for(begun.wait(), 60)
        await until(lambda: lifespan.health()["busy"] == 2)
        asyncio.get_running_loop().call_later(0.2, may_end.set)
    assert states(db) == ["done", "ready", "ready", "ready"]
    assert db.value("select count(*) from rowmill_jobs where worker is not null and state = 'ready'") == 0


async def test_a_wrong_declaration_keeps_the_application_from_starting(lite: Db) -> None:
    mill = Mill(lite.url)
    states = {"ready": {"s": 1}, "running": {"s": 2}, "done": {"s": 3}}

    @mill.lane("nowhere", **states)
    async def lost(job: Job) -> None: ...

    with pytest.raises(DeclarationError, match="there is no table 'nowhere'"):
        async with mill.lifespan(worker=True)():
            raise AssertionError("it started")
    with pytest.raises(DeclarationError, match="no lane 'lots'"):
        async with mill.lifespan(worker=True, lanes=["lots"])():
            raise AssertionError("it started")


def test_wrong_options_are_refused_at_once(lite: Db) -> None:
    mill = Mill(lite.url)
    with pytest.raises(DeclarationError, match=r"(?s)no option 'concurency'.*did you mean 'concurrency'"):
        mill.lifespan(worker=True, concurency=3)
    with pytest.raises(DeclarationError, match="needs a worker, and this lifespan starts none"):
        mill.lifespan(concurrency=3)


async def test_a_worker_that_crashes_is_told_and_started_again(
    lite: Db, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: the application goes on serving meanwhile; health says what happened."""
    mill, workers = doubling(lite), list[Worker]()
    make = mill.worker

    def kept(**options: Any) -> Worker:
        workers.append(make(**options))
        return workers[-1]

    monkeypatch.setattr(mill, "worker", kept)
    lifespan = mill.lifespan(worker=True, worker_id="web")
    double = mill.tasks["double"]
    async with lifespan():
        assert await (await double.enqueue(1)).result(timeout=60) == 2
        workers[0].fail(ValueError("the engine's own mistake"))
        await until(lambda: lifespan.health()["state"] == "restarting")
        assert not lifespan.health()["ok"]
        assert await (await double.enqueue(2)).result(timeout=60) == 4
        told = lifespan.health()
        assert (told["ok"], told["restarts"], told["completed"]) == (True, 1, 2)
        assert told["error"] == "ValueError: the engine's own mistake"
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "worker_crashed"]
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert len(workers) == 2
    assert states(lite) == ["done", "done"]


async def test_a_worker_that_cannot_be_made_again_at_first_is_tried_on(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill, workers = doubling(lite), list[Worker]()
    make = mill.worker

    def failing_once(**options: Any) -> Worker:
        workers.append(make(**options))
        if len(workers) == 2:
            raise ValueError("not now")
        return workers[-1]

    monkeypatch.setattr(mill, "worker", failing_once)
    lifespan = mill.lifespan(worker=True)
    async with lifespan():
        workers[0].fail(ValueError("the engine's own mistake"))
        await until(lambda: lifespan.health()["restarts"] == 2 and lifespan.health()["ok"])
        assert lifespan.health()["error"] == "ValueError: not now"


async def test_a_handler_that_cannot_be_stopped_is_left_alone_and_the_work_goes_on(lite: Db) -> None:
    mill, may_end = doubling(lite), threading.Event()

    @mill.task(timeout=timedelta(seconds=0.1), concurrency=1)
    def endless() -> None:
        may_end.wait()

    lifespan = mill.lifespan(worker=True, grace=0.2)
    try:
        async with lifespan():
            await endless.enqueue()
            await until(lambda: lifespan.health()["restarts"] == 1)
            assert "could not be stopped" in lifespan.health()["error"]
            assert await (await mill.tasks["double"].enqueue(1)).result(timeout=60) == 2
    finally:
        may_end.set()


async def test_an_application_whose_database_is_away_starts_and_says_so() -> None:
    mill = Mill("postgresql://nobody@127.0.0.1:1/nothing")

    @mill.task
    async def anything() -> None: ...

    lifespan = mill.lifespan(worker=True)
    async with lifespan():
        told = lifespan.health()
        assert (told["ok"], told["state"], told["environments"]) == (False, "working", {"default": "down"})


def logging_of(handlers: list[logging.Handler], monkeypatch: pytest.MonkeyPatch) -> None:
    """The application's own logging; uvicorn sets up its own loggers, and none of others'."""
    for name, value in (("handlers", handlers), ("propagate", False), ("level", logging.NOTSET)):
        monkeypatch.setattr(logger, name, value)


async def test_a_hosted_worker_logs_as_rowmill_run_does(
    lite: Db, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E7, E8: also what is worth a line at level info, each with the row and the reason."""
    logging_of([], monkeypatch)
    mill = Mill(lite.url)

    @mill.task(max_attempts=1)
    async def fetch() -> None:
        raise OSError("the site is down")

    async with mill.lifespan(worker=True, worker_id="web-1")():
        handle = await fetch.enqueue()
        await until(lambda: states(lite) == ["dead"])
    told = capsys.readouterr().err.splitlines()
    assert any(" info    worker_started " in line and "worker=web-1" in line for line in told), told
    (failed,) = [line for line in told if " warning job_failed " in line]
    assert f" id={handle.id} " in failed
    assert "the site is down" in failed


async def test_a_hosted_worker_leaves_the_applications_own_logging_alone(
    lite: Db, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = logging.NullHandler()
    logging_of([own], monkeypatch)
    async with doubling(lite).lifespan(worker=True)():
        pass
    assert logger.handlers == [own]
    assert capsys.readouterr().err == ""


async def _spoken(lifespan: Lifespan, app: Any, stop: Callable[[], Any]) -> list[str]:
    """An ASGI server's side of the lifespan protocol: what the application said, and how the worker was then."""
    said: list[str] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        message = next(messages)
        if message == "lifespan.shutdown":
            await stop()
        return {"type": message}

    async def send(message: dict[str, str]) -> None:
        said.append(f"{message['type'].removeprefix('lifespan.')}, {lifespan.health()['state']}")

    await lifespan.around(app)({"type": "lifespan", "state": {}}, receive, send)
    return said


async def test_any_asgi_application_can_be_wrapped(lite: Db) -> None:
    """One that knows no lifespan, such as Django's; one that has its own; one whose start fails."""
    mill = doubling(lite)
    lifespan = mill.lifespan(worker=True)

    async def knows_none(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("can only handle HTTP")

    async def work() -> None:
        assert await (await mill.tasks["double"].enqueue(3)).result(timeout=60) == 6
        assert lifespan.health()["ok"]

    both = ["startup.complete, working", "shutdown.complete, stopped"]
    assert await _spoken(lifespan, knows_none, work) == both
    assert lifespan.health()["state"] == "stopped"
    seen: list[str] = []

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[None]:
        seen.append(lifespan.health()["state"])
        yield
        seen.append(lifespan.health()["state"])

    assert await _spoken(lifespan, Starlette(lifespan=own), work) == both
    assert seen == ["working", "working"]
    assert lifespan.health()["state"] == "stopped"
    wrong = mill.lifespan(worker=True, lanes=["lots"])
    assert await _spoken(wrong, knows_none, work) == ["startup.failed, stopped"]


def test_the_lifespan_needs_no_framework() -> None:
    code = (
        "import sys, rowmill; rowmill.Mill('sqlite:///x.db').lifespan(worker=True); print('starlette' in sys.modules)"
    )
    with real_processes():  # a forked one has imported it already
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
