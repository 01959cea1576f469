"""Whatever a handler leaves or raises ends its own run: not its process, and not later than its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

import safety_app
from databases import Db
from rowmill import Done, Mill
from rowmill.testing import Kit
from rows import having

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


def table(db: Db, rows: int = 1) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', worker text, title text,"
        f" claimed_at {time}, heartbeat_at {time}, error text)"
    )
    db.insert("jobs", [{"id": n} for n in range(1, rows + 1)])


# -- threads

APP = """
import os, threading, time
from rowmill import Mill

mill = Mill(os.environ["DATABASE"])
states = {state: {"status": state} for state in ("ready", "running", "done", "dead")}

@mill.lane("jobs", **states)
async def pages(job):
    threading.Thread(target=time.sleep, args=(600,), name="left-behind").start()
    if os.environ["DIES"] == "1":
        raise ValueError(job.id)
"""


@pytest.mark.parametrize(("dies", "code"), [("0", 0), ("1", 3)])
def test_a_drain_ends_although_a_handler_left_a_thread(db: Db, tmp_path: Path, dies: str, code: int) -> None:
    table(db)
    (tmp_path / "app.py").write_text(APP)
    environment = {**os.environ, "DATABASE": db.url, "DIES": dies, "COLUMNS": "200"}
    command = [sys.executable, "-m", "rowmill", "run", "app:mill", "--drain"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert ended.returncode == code, ended.stderr
    assert "threads_left" in ended.stderr
    assert "left-behind" in ended.stderr
    assert "Drained: " in ended.stderr


# -- what a handler ends with


class Unreadable(dict[str, Any]):
    """Raises when it is read, as a dict that loads its content lazily may."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(title="x")
        self._error = error

    def items(self) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error


def closed(job: Any) -> None:
    raise GeneratorExit("closed")


async def closed_in_loop(job: Any) -> None:
    raise GeneratorExit("closed")


def unreadable(job: Any) -> Any:
    return Unreadable(OSError("gone"))


def exits(job: Any) -> Any:
    return Unreadable(SystemExit("gone"))


async def done_with_unreadable(job: Any) -> Any:
    return Done(Unreadable(OSError("gone")))


ENDS = {
    closed: "RuntimeError: GeneratorExit: closed",
    closed_in_loop: "GeneratorExit: closed",
    unreadable: "cannot read the columns that the handler returned: OSError: gone",
    exits: "cannot read the columns that the handler returned: SystemExit: gone",
    done_with_unreadable: "cannot read the columns that the handler returned: OSError: gone",
}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_a_run_that_ends_in_an_odd_way_ends_its_row_and_not_the_worker(db: Db, end: Any) -> None:
    table(db, 3)
    mill = Mill(db.url)

    if end.__name__ in ("closed_in_loop", "done_with_unreadable"):

        @mill.lane("jobs", **STATES, max_attempts=1)
        async def pages(job: Any) -> Any:
            return await end(job) if job.id == 2 else None

    else:

        @mill.lane("jobs", **STATES, max_attempts=1)
        def pages_in_threads(job: Any) -> Any:
            return end(job) if job.id == 2 else None

    await mill.worker(drain=True).run()
    rows = db.query("select status, title, error from jobs order by id")
    assert [row["status"] for row in rows] == ["done", "dead", "done"]
    assert (rows[1]["title"], rows[1]["error"]) == (None, having(ENDS[end]))


class Odd:
    """Raises whatever is asked of it."""

    @property
    def __class__(self) -> Any:
        raise ValueError("nobody")


@pytest.mark.parametrize("end", [lambda: Unreadable(OSError("gone")), Odd], ids=["dict", "object"])
async def test_a_task_that_returns_what_cannot_be_read_ends_dead_alone(mill: Mill, db: Db, end: Any) -> None:
    @mill.task(max_attempts=1)
    async def send(n: int) -> Any:
        return end() if n == 2 else n

    await send.enqueue_many([{"n": n} for n in (1, 2, 3)])
    await mill.worker(drain=True).run()
    rows = db.query("select state, error from rowmill_jobs order by id")
    assert [row["state"] for row in rows] == ["done", "dead", "done"]
    assert "cannot read the result" in rows[1]["error"]


# -- workdir


@pytest.mark.parametrize("name", ["a/b", "../up", "x" * 400, "é\U0001f600" * 100, "tab\there", "a b'c\"d", "\\", "."])
async def test_workdir_takes_any_lane_name(lite: Db, name: str) -> None:
    table(lite)
    mill = Mill(lite.url)
    made: list[Path] = []

    @mill.lane("jobs", **STATES, name=name)
    async def pages(job: Any) -> None:
        (job.workdir / "page.html").write_text("x")
        made.append(job.workdir)

    async with Kit(mill) as kit:
        assert (await kit.step()).outcome == "done"  # type: ignore[union-attr]
    assert not made[0].exists()


async def test_workdir_takes_any_lane_name_in_a_process_of_its_own(lite: Db) -> None:
    table(lite)
    async with Kit(safety_app.mill, environments=lite.url) as kit:
        step = await kit.step(safety_app.writes_file.name)
    assert step is not None
    assert (step.outcome, step.error) == ("done", None)
    assert not os.path.exists(lite.value("select title from jobs"))  # noqa: ASYNC240


# -- a handler that blocks the event loop


@pytest.mark.parametrize("timed", ["lane", "task"])
async def test_a_handler_that_blocks_the_event_loop_past_its_timeout_is_reported(db: Db, timed: str) -> None:
    """It cannot be stopped while it blocks; so the heartbeat thread says where, and its result does not count."""
    table(db)
    mill, reported = Mill(db.url), threading.Event()
    events: list[Any] = []

    @mill.on_event
    def note(event: Any) -> None:
        if event.name == "loop_blocked":
            events.append(event)
            reported.set()

    def blocks() -> None:
        assert reported.wait(60), "nobody noticed"  # the event loop stands still until then

    if timed == "lane":

        @mill.lane("jobs", **STATES, max_attempts=1, timeout=td(seconds=0.1))
        async def pages(job: Any) -> Any:
            blocks()
            return {"title": "late"}

    else:

        @mill.task(max_attempts=1, timeout=td(seconds=0.1))
        async def send() -> str:
            blocks()
            return "late"

        await send.enqueue()
    await mill.worker(drain=True).run()
    (event,) = events
    lane = "pages" if timed == "lane" else "default"
    assert (event.fields["lane"], event.fields["id"], event.fields["timeout"]) == (lane, 1, 0.1)
    assert event.fields["at"].startswith("test_contained_runs.py:")
    assert event.fields["at"].endswith(" in blocks")
    words = f"timed out after 0.1 s: it blocked the event loop at {event.fields['at']}"
    if timed == "lane":
        assert db.one("select status, title, error from jobs") == {"status": "dead", "title": None, "error": words}
    else:
        row = db.one("select state, result, error, history from rowmill_jobs")
        assert (row["state"], row["result"], row["error"]) == ("dead", None, words)
        assert json.loads(row["history"])[0]["error"] == words
    told = db.query("select row_id, outcome, message from rowmill_failures where lane = ? order by outcome", lane)
    assert [(row["row_id"], row["outcome"]) for row in told] == [("1", "blocked"), ("1", "dead")]
    assert told[0]["message"] == f"blocks the event loop past its timeout of 0.1 s, at {event.fields['at']}"
    await mill.close()
