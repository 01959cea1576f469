"""What a handler may use: resources by name, a directory of its own, progress, and a process of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta as td
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from databases import Db
from rowmill import Mill, RowmillError, fixed
from rowmill.engine import resources, shutdown
from rowmill.engine.isolate import _portable
from rowmill.errors import ResourceFailed
from rowmill.testing import Kit
from rows import empty, having, whole
from workers import until, working

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


def table(db: Db, rows: int = 1, more: str = "result text", name: str = "jobs") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table {name} (id integer primary key, status text not null default 'ready', worker text,"
        f" claimed_at {time}, attempts integer default 0, run_after {time}, error text, {more})"
    )
    db.insert(name, [{"id": i} for i in range(1, rows + 1)])


# -- resources


def counted(db: Db, name: str, status: str, where: str = "true") -> int:
    """How many rows are in a state."""
    return int(db.value(f"select count(*) from {name} where status = ? and {where}", status))


async def outcomes(mill: Mill, steps: int) -> list[str]:
    async with Kit(mill) as kit:
        return [(await kit.step()).outcome for _ in range(steps)]


OPTIONS: dict[str, Any] = STATES | {"max_attempts": 9, "backoff": fixed(td(0))}


async def test_resources_of_every_form_are_opened_once_on_first_use_and_closed_in_reverse(lite: Db) -> None:
    """A8; DESIGN, resources: (async) generators, functions, coroutines; one may ask for another by its name."""
    table(lite, 3)
    mill, told = Mill(lite.url), []

    @mill.resource
    async def inner() -> AsyncIterator[str]:
        told.append("inner opened")
        yield "inner"
        told.append("inner closed")

    @mill.resource
    def outer(inner: str) -> Iterator[str]:
        told.append("outer opened")
        yield f"outer of {inner}"
        told.append("outer closed")

    @mill.resource
    def plain() -> str:
        told.append("plain made")
        return "plain"

    @mill.resource(name="awaited")
    async def another() -> str:
        return "awaited"

    @mill.resource
    def unused() -> str:
        raise AssertionError("opened though nobody asked for it")

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any, plain: str, outer: str, awaited: str) -> None:
        told.append(f"{job.id}: {plain}, {outer}, {awaited}")

    assert told == []
    assert await outcomes(mill, 3) == ["done"] * 3
    assert told == [
        "plain made", "inner opened", "outer opened",
        "1: plain, outer of inner, awaited", "2: plain, outer of inner, awaited", "3: plain, outer of inner, awaited",
        "outer closed", "inner closed",
    ]  # fmt: skip


async def test_a_run_whose_resource_cannot_be_opened_costs_its_row_nothing(db: Db) -> None:
    """A8; DESIGN, resources: no row's fault: no attempt, no error, no end; the next run opens it again."""
    table(db)
    mill, tries = Mill(db.url), []

    @mill.resource
    async def browser() -> AsyncIterator[str]:
        tries.append(1)
        if len(tries) < 3:
            raise SystemExit("no browser")
        yield "browser"

    @mill.lane("jobs", **OPTIONS | {"max_attempts": 1})
    async def lane(job: Any, browser: str) -> dict[str, str]:
        return {"result": browser}

    async with Kit(mill) as kit:
        for _ in range(2):
            assert (await kit.step()).outcome == "snooze"
            row = whole(db, "jobs", 1)
            assert (row["status"], row["attempts"], row["error"], row["worker"]) == ("ready", 0, None, None)
            kit.advance(td(seconds=5))
        assert (await kit.step()).outcome == "done"
    assert whole(db, "jobs", 1)["result"] == "browser"


async def test_nothing_is_claimed_while_a_resource_cannot_be_opened(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A8: the lane is held back and says why; the lane beside it goes on; both end when the resource is there."""
    monkeypatch.setattr(resources, "_OPEN_AGAIN", (0.01, 0.02))
    table(db, 3)
    table(db, 3, name="others")
    mill, tries, claimed, told = Mill(db.url), [], [], []
    mill.on_event(lambda event: claimed.append(event.fields["lane"]) if event.name == "batch_claimed" else None)
    mill.on_event(lambda event: told.append(event.fields) if event.name == "resource_failed" else None)
    there = False

    @mill.resource
    def browser() -> str:
        tries.append(1)
        if not there:
            raise RowmillError("there is no browser", hint="install one")
        return "browser"

    @mill.resource
    def page(browser: str) -> str:
        return f"page of a {browser}"

    @mill.lane("jobs", poll=td(milliseconds=20), **OPTIONS | {"max_attempts": 1})
    async def first(job: Any, page: str) -> dict[str, str]:
        return {"result": page}

    @mill.lane("others", priority=1, **OPTIONS | {"max_attempts": 1})
    async def second(job: Any) -> None: ...

    async with working(mill):
        await until(lambda: len(tries) > 3 and counted(db, "others", "done") == 3)
        assert counted(db, "jobs", "ready", "attempts = 0 and error is null") == 3
        assert set(claimed) == {"second"}
        assert told[0]["lane"] == "first"
        assert told[0]["error"] == "the resource 'browser' cannot be opened: there is no browser"
        assert told[0]["hint"] == "install one"
        there = True
        await until(lambda: counted(db, "jobs", "done", "result = 'page of a browser' and attempts = 1") == 3)
    assert len(claimed) == 1 + claimed.count("second")


async def test_an_idle_worker_opens_nothing(db: Db) -> None:
    """A8: on first use: when a row is ready, and not before."""
    table(db, 0)
    mill, opened = Mill(db.url), []

    @mill.resource
    def browser() -> str:
        opened.append(1)
        return "browser"

    @mill.lane("jobs", poll=td(milliseconds=20), **OPTIONS)
    async def lane(job: Any, browser: str) -> None: ...

    async with working(mill) as idle:
        await asyncio.wait_for(idle.started.wait(), 60)
        assert opened == []
        db.insert("jobs", [{"id": 1}])
        await until(lambda: counted(db, "jobs", "done") == 1)
    assert opened == [1]


async def test_a_lane_waits_for_the_resource_of_the_one_above_it(lite: Db) -> None:
    """A2: strictly by priority, also while the first row's resource is being opened."""
    table(lite, 2)
    lite.execute("update jobs set status = 'later' where id = 1")
    mill, order = Mill(lite.url), []

    @mill.resource
    async def browser() -> str:
        await asyncio.sleep(0.2)
        return "browser"

    @mill.lane("jobs", **OPTIONS)
    async def first(job: Any, browser: str) -> None:
        order.append(job.lane)

    @mill.lane("jobs", priority=1, **OPTIONS | {"ready": {"status": "later"}, "running": {"status": "runs later"}})
    async def second(job: Any) -> None:
        order.append(job.lane)

    async with Kit(mill):
        await mill.worker(drain=True, concurrency=1).run()
    assert order == ["first", "second"]


async def test_a_task_whose_resource_cannot_be_opened_waits_and_keeps_no_other_waiting(db: Db) -> None:
    """DESIGN, resources, tasks: a queue has tasks that do without; the job costs no attempt and leaves no history."""
    mill, ran = Mill(db.url), []

    @mill.resource
    def browser() -> str:
        raise ConnectionError("no browser")

    @mill.task
    async def browse(browser: str) -> None: ...

    @mill.task
    async def count() -> None:
        ran.append(1)

    async with Kit(mill) as kit:
        handle = await browse.enqueue()
        await count.enqueue()
        assert [(await kit.step()).outcome for _ in range(2)] == ["snooze", "done"]
        status = await handle.status()
    assert (status.state, status.attempts, status.error, status.history) == ("ready", 0, None, [])
    await mill.close()


def test_that_a_resource_failed_comes_over_from_a_process_of_its_own() -> None:
    """Issue, run: isolation="process": the parent knows it from a failure of the run."""
    _, error = _portable(("raised", ResourceFailed("the resource 'browser' cannot be opened", hint="install one")))
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ResourceFailed)
    assert str(copy) == "the resource 'browser' cannot be opened\nTry: install one"


async def test_a_drain_ends_with_the_error_of_a_resource_that_cannot_be_opened(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: it does not wait for ever for rows that cannot be worked on."""
    monkeypatch.setattr(resources, "_OPEN_AGAIN", (0.01, 4.0))
    table(db)
    mill = Mill(db.url)

    @mill.resource
    def browser() -> str:
        raise RowmillError("there is no browser", hint="install one")

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any, browser: str) -> None: ...

    monkeypatch.setattr(shutdown, "_GIVE_UP", 0.02)
    with pytest.raises(
        RowmillError, match=r"lane 'lane': the resource 'browser' cannot be opened(.|\n)*Try: install one"
    ):
        await mill.worker(drain=True).run()
    assert whole(db, "jobs", 1)["status"] == "ready"


async def test_a_worker_stops_while_a_resource_is_being_opened(lite: Db) -> None:
    """A8: what never opens keeps nobody from stopping."""
    table(lite)
    mill, opening = Mill(lite.url), asyncio.Event()

    @mill.resource
    async def browser() -> None:
        opening.set()
        await asyncio.Event().wait()

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any, browser: str) -> None: ...

    async with working(mill) as stuck:
        await asyncio.wait_for(opening.wait(), 60)
        stuck.stop()
    assert whole(lite, "jobs", 1)["status"] == "ready"


async def test_a_resource_that_is_no_longer_healthy_is_closed_and_opened_again(lite: Db) -> None:
    """A8; DESIGN, resources: healthy= is asked before each use; one that cannot be closed is left."""
    table(lite, 4)
    mill, told = Mill(lite.url), []

    async def healthy(value: dict[str, Any]) -> bool:
        return bool(value["works"])

    @mill.resource(healthy=healthy)
    async def browser() -> AsyncIterator[dict[str, Any]]:
        told.append("opened")
        yield {"works": True, "n": told.count("opened")}
        told.append("closed")
        raise RuntimeError("crashed on the way out")

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any, browser: dict[str, Any]) -> dict[str, str]:
        browser["works"] = job.id != 2
        return {"result": str(browser["n"])}

    assert await outcomes(mill, 4) == ["done"] * 4
    assert [r["result"] for r in lite.query("select result from jobs order by id")] == ["1", "1", "2", "2"]
    assert told == ["opened", "closed", "opened", "closed"]


async def test_what_was_built_on_a_broken_resource_is_built_anew(lite: Db) -> None:
    """DESIGN, resources: a page of a browser that was opened again is a page of the new one."""
    table(lite, 3)
    mill, opened = Mill(lite.url), []

    @mill.resource(healthy=lambda browser: browser["works"])
    def browser() -> dict[str, Any]:
        opened.append("browser")
        return {"works": True}

    @mill.resource
    def page(browser: dict[str, Any]) -> dict[str, Any]:
        opened.append("page")
        return {"of": browser}

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any, page: dict[str, Any]) -> None:
        assert page["of"]["works"]
        page["of"]["works"] = job.id != 1

    assert await outcomes(mill, 3) == ["done"] * 3
    assert opened == ["browser", "page"] * 2


# -- a directory of its own, and progress


@pytest.mark.parametrize("fails", [False, True])
async def test_a_run_has_a_directory_of_its_own_that_is_gone_after_it(lite: Db, fails: bool) -> None:
    """B1: each run its own temporary directory, cleaned after each document, also after a failure."""
    table(lite, 2)
    mill, places = Mill(lite.url), []

    @mill.lane("jobs", **OPTIONS)
    def lane(job: Any) -> None:
        assert job.workdir == job.workdir
        (job.workdir / "page.png").write_text("x")
        (job.workdir / "deep").mkdir()
        places.append(job.workdir)
        if fails:
            raise ValueError("no text")

    await outcomes(mill, 2)
    assert len(set(places)) == 2
    assert not any(place.exists() for place in places)


PROGRESS: dict[str, tuple[str, Any]] = {
    "text": ("text", "40% page 2 of 5"),
    "narrow text": ("varchar(8)", having("40%")),
    "integer": ("integer", 40),
    "smallint": ("smallint", 40),
    "double": ("double precision", 0.4),
    "real": ("real", 0.4),
    "json": ("json", {"fraction": 0.4, "note": "page 2 of 5"}),
}


@pytest.mark.parametrize("kind", PROGRESS)
async def test_progress_is_written_in_the_columns_own_form(db: Db, kind: str) -> None:
    """A14, DESIGN job.progress: text, whole numbers as percent, fractions, JSON."""
    of, expected = PROGRESS[kind]
    table(db, 1, f"progress {of}")
    mill, seen = Mill(db.url), []

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any) -> None:
        await job.progress(0.4, "page 2 of 5")
        seen.append(whole(db, "jobs", 1)["progress"])
        await job.progress(1.0)

    assert await outcomes(mill, 1) == ["done"], whole(db, "jobs", 1)["error"]
    found = json.loads(seen[0]) if of == "json" else seen[0]
    assert found == (pytest.approx(expected, abs=1e-6) if isinstance(expected, float) else expected)


async def test_progress_in_a_thread_is_written_without_await_and_at_most_once_a_second(db: Db) -> None:
    """A14, X4: a handler may report every page; the table is written now and then, and at the end."""
    table(db, 1, "progress integer")
    mill, seen = Mill(db.url), []

    @mill.lane("jobs", **OPTIONS)
    def lane(job: Any) -> None:
        for fraction in (0.1, 0.2, 0.3, 1.0):
            job.progress(fraction)
            seen.append(whole(db, "jobs", 1)["progress"])

    assert await outcomes(mill, 1) == ["done"]
    assert seen == [10, 10, 10, 100]


async def test_progress_of_a_lost_run_is_not_written(db: Db) -> None:
    """X1: progress is fenced like everything else."""
    table(db, 1, "progress integer")
    mill = Mill(db.url)

    @mill.lane("jobs", **OPTIONS)
    async def lane(job: Any) -> None:
        db.execute("update jobs set worker = 'another'")
        await job.progress(0.5)

    async with Kit(mill) as kit:
        assert (await kit.step()).outcome == "lost"
    assert whole(db, "jobs", 1)["progress"] is None


# -- a process of its own

APP = """
import os, time
from datetime import timedelta as td
from rowmill import Dead, Mill, Snooze, fixed

mill = Mill({url!r})

@mill.resource
def model():
    return "model of another process"

@mill.lane("jobs", ready={{"status": "ready"}}, running={{"status": "running"}}, done={{"status": "done"}},
           dead={{"status": "dead"}}, isolation="process", timeout=td(seconds={timeout}), max_attempts=9,
           backoff=fixed(td(0)), concurrency=1)
def lane(job, model):
    (job.workdir / "x").write_text("x")
    how = job["result"]
    if how == "columns":
        job.progress(0.5, "half")
        return {{"result": f"{{model}} {{job.id}} {{job.attempt}} {{os.getpid() != {pid}}} {{job.workdir}}"}}
    if how == "dead":
        raise Dead("no such document")
    if how == "snooze":
        raise Snooze(td(minutes=3), "not now")
    if how == "error":
        raise LookupError("nowhere")
    if how == "odd":
        class Local(Exception):
            pass
        raise Local("cannot be pickled")
    if how == "exit":
        os._exit(3)
    if how.startswith("leaves "):
        if (grandchild := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        with open(how.removeprefix("leaves "), "w") as file:
            file.write(str(grandchild))
        os._exit(3)
    if how == "sys.exit":
        raise SystemExit(4)
    if how == "hang":
        time.sleep(600)
    if how == "lambda":
        return {{"result": lambda: 1}}
    if how == "finish":
        with job.finish():
            pass
"""


def isolated(db: Db, tmp_path: Path, name: str, timeout: float = 60.0) -> Mill:
    """A Mill in a module of its own, as another process can import it. With a heartbeat, so that the time which a
    process takes to start is not the handler's.
    """
    table(db, more="result text, heartbeat_at datetime")
    source = dedent(APP).format(url=db.url, timeout=timeout, pid=os.getpid())
    (tmp_path / f"{name}.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    mill: Mill = importlib.import_module(name).mill
    return mill


def there(path: str) -> bool:
    return Path(path).exists()


@pytest.fixture
def importable() -> Iterator[None]:
    """Modules that a test writes and imports are gone after it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("isolated_"):
            del sys.modules[name]


@pytest.mark.usefixtures("importable")
async def test_a_handler_in_a_process_of_its_own_ends_like_any_other(lite: Db, tmp_path: Path) -> None:
    """Issue, run: isolation="process": columns, outcomes and errors come back; a process that dies is a failure."""
    mill = isolated(lite, tmp_path, "isolated_ends")
    ends = {
        "columns": ("done", None),
        "dead": ("dead", "no such document"),
        "error": ("dead", "LookupError: nowhere"),
        "odd": ("dead", having("cannot be pickled")),
        "lambda": ("dead", having("column 'result': expected data that a column can hold, got function")),
        "finish": ("dead", having("job.finish()")),
        "exit": ("dead", "the handler's process died (exit code 3)"),
        "sys.exit": ("dead", having("4")),
    }
    lite.execute("delete from jobs")
    lite.insert("jobs", [{"id": i, "result": how, "attempts": 8} for i, how in enumerate(ends)])
    async with Kit(mill) as kit:
        tally = await kit.drain()
    rows = lite.query("select * from jobs order by id")
    assert dict(zip(ends, [(r["status"], r["error"]) for r in rows], strict=True)) == ends
    assert (tally.completed, tally.died) == (1, 7)
    words = rows[0]["result"]
    assert words.startswith("model of another process 0 9 True ")
    assert not there(words.split()[-1])


@pytest.mark.usefixtures("importable")
async def test_a_process_that_dies_is_noticed_at_once_whatever_it_left_running(lite: Db, tmp_path: Path) -> None:
    """What its handler forked holds its end of the pipe open: the row must not wait for its timeout."""
    mill, left = isolated(lite, tmp_path, "isolated_leaves", timeout=1200), tmp_path / "left"
    lite.execute("update jobs set attempts = 8, result = ?", f"leaves {left}")
    try:
        async with Kit(mill) as kit:
            step = await asyncio.wait_for(kit.step(), 60)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert step is not None
    assert (step.outcome, step.error) == ("dead", "the handler's process died (exit code 3)")


@pytest.mark.usefixtures("importable")
async def test_a_handler_in_a_process_of_its_own_may_put_its_row_off(lite: Db, tmp_path: Path) -> None:
    """DESIGN, outcomes: Snooze costs no attempt, wherever the handler runs."""
    mill = isolated(lite, tmp_path, "isolated_snoozes")
    lite.execute("update jobs set result = 'snooze'")
    async with Kit(mill) as kit:
        step = await kit.step()
    assert step is not None
    assert (step.outcome, step.error) == ("snooze", None)
    assert lite.value("select attempts from jobs") == 0


@pytest.mark.usefixtures("importable")
async def test_a_handler_that_hangs_is_killed_at_its_timeout(lite: Db, tmp_path: Path) -> None:
    """Issue, run: a run past its timeout is killed, the worker lives on."""
    mill = isolated(lite, tmp_path, "isolated_hangs", timeout=2.5)
    lite.execute("update jobs set result = 'hang'")
    async with Kit(mill) as kit:
        step = await kit.step()
        assert step is not None
        assert (step.outcome, step.error) == ("retry", "timed out after 2.5 s")
        lite.execute("update jobs set result = 'columns'")
        assert (await kit.step()).outcome == "done"
