"""Chunks: one call of the handler for many rows, and each row settled by itself."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections import Counter, UserDict
from collections.abc import Callable
from datetime import timedelta as td
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from databases import Db
from rowmill import (
    Breaker,
    Cancel,
    Concurrency,
    Dead,
    Done,
    Job,
    LostClaim,
    Mill,
    Retry,
    Snooze,
    SyncJob,
    Wait,
    fixed,
)
from rowmill.cli.show import run_name
from rowmill.engine.recovery.running_marks import mark
from rowmill.testing import Kit, Stepped
from workers import until

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead", "canceled")}


def table(db: Db, rows: int, **columns: Any) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', worker text, domain text,"
        f" claimed_at {time}, heartbeat_at {time}, attempts integer not null default 0, run_after {time}, error text,"
        " result text)"
    )
    db.insert("jobs", [{"id": n, **columns} for n in range(1, rows + 1)])


def lane(db: Db, handler: Any, **options: Any) -> Mill:
    mill = Mill(db.url)
    mill.lane("jobs", name="work", **{**STATES, "backoff": fixed(td(0)), "chunk": 8} | options)(handler)
    return mill


async def stepped(db: Db, handler: Any, rows: int = 3, **options: Any) -> list[Stepped]:
    """One chunk of so many rows."""
    table(db, rows)
    async with Kit(lane(db, handler, **options)) as kit:
        return await kit.step_chunk()


def ended(steps: list[Stepped]) -> list[tuple[Any, str, str | None]]:
    return [(step.id, step.outcome, step.error) for step in steps]


def rows(db: Db, column: str = "status") -> dict[Any, int]:
    return {row[column]: row["n"] for row in db.query(f"select {column}, count(*) as n from jobs group by 1")}


async def drained(mill: Mill, seconds: float = 60, **options: Any) -> Any:
    async with asyncio.timeout(seconds):
        return await mill.worker(drain=True, **options).run()


class Refused(Exception):
    """What an HTTP client raises."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers)


# -- what a handler may answer


async def test_a_list_answers_row_by_row_in_the_order_of_the_jobs(db: Db) -> None:
    """Issue 23: each row gets its own outcome."""

    async def work(jobs: list[Job]) -> list[Any]:
        answers: list[Any] = [{"result": f"made {jobs[0].id}"}, None, Dead("no"), Retry("later", after=td(hours=1))]
        return [*answers, Snooze(td(hours=1)), Cancel("off"), ValueError("boom"), Done({"result": f"{jobs[7].id}"})]

    steps = await stepped(db, work, 8)
    assert [step.outcome for step in steps] == [
        "done", "done", "dead", "retry", "snooze", "canceled", "retry", "done",
    ]  # fmt: skip
    found = db.query("select id, status, result, error, attempts from jobs order by id")
    assert [(row["result"], row["error"]) for row in found] == [
        ("made 1", None), (None, None), (None, "no"), (None, "later"), (None, None), (None, "off"),
        (None, "ValueError: boom"), ("8", None),
    ]  # fmt: skip
    assert [row["attempts"] for row in found] == [1, 1, 1, 1, 0, 1, 1, 1], "a snooze costs no attempt"


async def test_a_mapping_answers_by_id_in_any_order(db: Db) -> None:
    """Issue 23."""

    async def work(jobs: list[Job]) -> dict[int, Any]:
        return {job.id: {"result": f"made {job.id}"} for job in reversed(jobs)}

    await stepped(db, work, 5)
    assert [row["result"] for row in db.query("select result from jobs order by id")] == [
        f"made {n}" for n in range(1, 6)
    ]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(None, "done"), (Done({"result": "x"}), "done"), (Snooze(td(hours=1)), "snooze"), (Cancel, "canceled")],
)
async def test_one_outcome_is_for_all(db: Db, answer: Any, outcome: str) -> None:
    async def work(jobs: list[Job]) -> Any:
        return answer

    assert [step.outcome for step in await stepped(db, work)] == [outcome] * 3


async def test_one_row_of_a_chunk_may_wait_for_a_column(db: Db) -> None:
    """``Wait`` is an outcome like the others."""

    async def work(jobs: list[Job]) -> Any:
        return [Wait(until="domain is not null", timeout=td(days=1)) if job.id == 2 else None for job in jobs]

    assert [step.outcome for step in await stepped(db, work)] == ["done", "wait", "done"]
    assert rows(db) == {"done": 2, "ready": 1}


async def test_a_row_without_an_answer_fails_alone(db: Db) -> None:
    """Issue 23: with a message that says what is missing."""

    async def work(jobs: list[Job]) -> dict[int, Any]:
        return {job.id: None for job in jobs if job.id != 2}

    one, two, three = await stepped(db, work)
    assert (one.outcome, two.outcome, three.outcome) == ("done", "retry", "done")
    assert two.error == "the handler returned no outcome for this job: there is none for 2 (int)"


async def test_ids_as_text_are_not_the_ids_of_the_rows(db: Db) -> None:
    """As they come back from JSON: no row is settled by a guess."""

    async def work(jobs: list[Job]) -> dict[str, Any]:
        return {str(job.id): None for job in jobs}

    steps = await stepped(db, work)
    assert [step.outcome for step in steps] == ["retry"] * 3
    assert steps[1].error == (
        "the handler returned no outcome for this job: there is none for 2 (int); it returned some for ids that are not"
        " in the chunk: '1' (str), '2' (str), '3' (str)"
    )


async def test_an_unknown_id_settles_no_row(db: Db) -> None:
    """A row that waits, or that another worker holds, is not settled by a chunk that it is not in."""

    async def work(jobs: list[Job]) -> dict[int, Any]:
        return {1: None, 2: None, 3: None}

    table(db, 3)
    async with Kit(lane(db, work, chunk=2)) as kit:
        steps = await kit.step_chunk()
    assert [(step.id, step.outcome) for step in steps] == [(1, "done"), (2, "done")]
    assert db.one("select status, attempts from jobs where id = 3") == {"status": "ready", "attempts": 0}


class Twice(UserDict[int, Any]):
    """A mapping of several values by key."""

    def items(self) -> Any:
        return [*self.data.items(), (2, Dead("no"))]


async def test_a_row_that_is_answered_twice_fails(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        return Twice({1: None, 2: None, 3: None})

    one, two, three = await stepped(db, work)
    assert (one.outcome, two.outcome, three.outcome) == ("done", "retry", "done")
    assert two.error == "the handler returned 2 outcomes for this job: 2 (int)"


async def test_true_is_not_the_id_1(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        return {True: {"result": "wrong"}, 2: None}

    one, two = await stepped(db, work, 2)
    assert (one.outcome, two.outcome) == ("retry", "done")


@pytest.mark.parametrize("count", [2, 4])
async def test_a_list_of_the_wrong_length_settles_no_row_by_it(db: Db, count: int) -> None:
    """Issue 23: nobody can say whose outcome is whose; with one row there is still no right number of them."""

    async def work(jobs: list[Job]) -> list[Any]:
        return [{"result": f"{n}"} for n in range(count)] if len(jobs) == 3 else []

    steps = await stepped(db, work, max_attempts=1)
    assert [step.outcome for step in steps] == ["dead"] * 3
    assert steps[0].error == "the handler returned 0 outcomes for 1 job, so outcomes cannot be matched to jobs"
    assert rows(db, "result") == {None: 3}


async def test_a_provider_that_leaves_out_one_row_costs_that_row_alone(db: Db) -> None:
    """A list that is too short is asked for again in halves."""

    async def work(jobs: list[Job]) -> list[Any]:
        return [{"result": f"{job.id}"} for job in jobs if job.id != 6]

    steps = await stepped(db, work, 8)
    assert {step.id: step.outcome for step in steps} == {n: "retry" if n == 6 else "done" for n in range(1, 9)}
    assert all(row["result"] == str(row["id"]) for row in db.query("select id, result from jobs where id <> 6"))


def generator(jobs: Any) -> Any:
    return ({"result": f"{job.id}"} for job in jobs)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(generator, "generator"), (lambda jobs: "done", "str"), (lambda jobs: {1, 2, 3}, "set"), (len, "int")],
    ids=["generator", "text", "set", "number"],
)
async def test_an_answer_of_another_kind_ends_every_row_with_a_message(
    db: Db, answer: Callable[[Any], Any], said: str
) -> None:
    """As in any lane: the next attempt would return the same. The handler is called once."""
    calls = []

    async def work(jobs: list[Job]) -> Any:
        calls.append(len(jobs))
        return answer(jobs)

    steps = await stepped(db, work)
    assert calls == [3]
    message = (
        f"the handler returned {said}; a chunk ends with a list of outcomes in the order of its jobs, a mapping by"
        " job.id, one outcome for all, or None"
    )
    assert [(step.outcome, step.error) for step in steps] == [("dead", message)] * 3


async def test_a_dict_of_columns_is_not_the_answer_for_all(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        return {"result": "x"}

    steps = await stepped(db, work)
    assert [step.outcome for step in steps] == ["retry"] * 3
    assert "not in the chunk: 'result' (str)" in str(steps[0].error)


async def test_a_list_in_the_order_of_a_list_that_the_handler_changed_settles_no_row(db: Db) -> None:
    """Sorting the jobs in place would give each row another one's outcome."""

    async def work(jobs: list[Job]) -> list[Any]:
        jobs.sort(key=lambda job: -job.id)
        return [{"result": f"{job.id}"} for job in jobs]

    steps = await stepped(db, work)
    assert [step.outcome for step in steps] == ["dead"] * 3
    assert "the handler changed the list that it was given" in str(steps[0].error)
    assert rows(db, "result") == {None: 3}


async def test_a_handler_may_empty_its_list_and_answer_by_id(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        answers = {}
        while jobs:
            job = jobs.pop()
            answers[job.id] = {"result": f"{job.id}"}
        return answers

    await stepped(db, work)
    assert [row["result"] for row in db.query("select result from jobs order by id")] == ["1", "2", "3"]


class Broken(UserDict[int, Any]):
    def items(self) -> Any:
        raise RuntimeError("closed")


async def test_an_answer_that_cannot_be_read_fails_its_rows(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        return Broken()

    steps = await stepped(db, work, 2)
    assert [(step.outcome, step.error) for step in steps] == [("retry", "RuntimeError: closed")] * 2


# -- an error of the whole call


@pytest.mark.parametrize(
    "error", [ValueError("poison"), Refused(400), SystemExit(3), asyncio.CancelledError()], ids=str
)
async def test_a_poisoned_row_costs_the_others_nothing(db: Db, error: BaseException) -> None:
    """Issue 23: the call is repeated in halves, within the attempt."""
    calls: list[list[int]] = []

    async def work(jobs: list[Job]) -> None:
        calls.append([job.id for job in jobs])
        if any(job.id == 11 for job in jobs):
            raise error

    steps = await stepped(db, work, 16, chunk=16, max_attempts=2)
    assert {step.id for step in steps if step.outcome != "done"} == {11}
    assert len(calls) == 1 + 2 * 4, "two calls for each time that the chunk was divided"
    assert all(call == sorted(call) for call in calls), "each in the lane's order"
    assert db.query("select distinct attempts from jobs") == [{"attempts": 1}]


async def test_one_poisoned_row_in_10_000_costs_no_other_row_an_attempt(db: Db) -> None:
    """Issue 23: no more than one extra attempt, also where rows have only one: none here."""
    table(db, 10_000)

    async def work(jobs: list[Job]) -> None:
        if any(job.id == 4711 for job in jobs):
            raise ValueError("poison")

    await drained(lane(db, work, chunk=100, max_attempts=1))
    assert rows(db) == {"done": 9_999, "dead": 1}
    assert rows(db, "attempts") == {1: 10_000}
    assert db.one("select id, error from jobs where status = 'dead'") == {"id": 4711, "error": "ValueError: poison"}


async def test_a_chunk_of_10_000_rows_finds_its_poisoned_row(db: Db) -> None:
    table(db, 10_000)
    calls = []

    async def work(jobs: list[Job]) -> None:
        calls.append(len(jobs))
        if any(job.id == 4711 for job in jobs):
            raise ValueError("poison")

    await drained(lane(db, work, chunk=10_000, max_attempts=1, concurrency=1))
    assert calls[0] == 10_000
    assert len(calls) <= 1 + 2 * 14
    assert rows(db) == {"done": 9_999, "dead": 1}


async def test_many_poisoned_rows_end_alone(db: Db) -> None:
    """A tenth of all, with one attempt each."""
    table(db, 300)

    async def work(jobs: list[Job]) -> None:
        if any(job.id % 10 == 0 for job in jobs):
            raise ValueError("poison")

    await drained(lane(db, work, chunk=50, max_attempts=1))
    assert rows(db) == {"done": 270, "dead": 30}
    assert {row["id"] % 10 for row in db.query("select id from jobs where status = 'dead'")} == {0}


async def test_an_error_that_is_everybodys_is_found_out_with_a_few_calls(db: Db) -> None:
    """A mistake in the handler: not two calls for each row of every chunk."""
    calls = []

    async def work(jobs: list[Job]) -> None:
        calls.append(len(jobs))
        raise KeyError("column")

    steps = await stepped(db, work, 256, chunk=256)
    assert [step.outcome for step in steps] == ["retry"] * 256
    assert len(calls) < 20


async def test_no_row_dies_by_a_call_that_it_shared(db: Db) -> None:
    """On its last attempt each is called alone, before the error counts as its own."""
    calls: Counter[tuple[int, ...]] = Counter()

    async def work(jobs: list[Job]) -> None:
        calls[tuple(job.id for job in jobs)] += 1
        raise ValueError("always")

    await stepped(db, work, 16, chunk=16, max_attempts=1)
    assert all(calls[n,] == 1 for n in range(1, 17))


@pytest.mark.parametrize(
    ("error", "outcome", "attempts"),
    [
        (Retry("again"), "retry", 1),
        (Snooze(td(hours=1)), "snooze", 0),
        (Dead("no"), "dead", 1),
        (Cancel("off"), "canceled", 1),
        (Refused(429, **{"Retry-After": "60"}), "retry", 1),
        (Refused(503), "retry", 1),
        (Refused(502), "retry", 1),
        (ConnectionResetError("gone"), "retry", 1),
        (TimeoutError("no answer"), "retry", 1),
    ],
    ids=str,
)
async def test_an_end_that_is_for_all_is_not_asked_for_in_halves(
    db: Db, error: Exception, outcome: str, attempts: int
) -> None:
    """Issue 23: outcomes, rate limits and errors of the connection say nothing of a single row."""
    calls = []

    async def work(jobs: list[Job]) -> None:
        calls.append(len(jobs))
        raise error

    steps = await stepped(db, work, 8, max_attempts=3)
    assert calls == [8]
    assert [step.outcome for step in steps] == [outcome] * 8
    assert rows(db, "attempts") == {attempts: 8}


async def test_retry_after_holds_every_row_back(db: Db) -> None:
    async def work(jobs: list[Job]) -> None:
        raise Refused(429, **{"Retry-After": "3600"})

    table(db, 4)
    async with Kit(lane(db, work, max_attempts=3)) as kit:
        await kit.step_chunk()
        assert await kit.step_chunk() == []
        kit.advance(td(seconds=3601))
        assert len(await kit.step_chunk()) == 4


@pytest.mark.parametrize(
    ("verdict", "calls"),
    [("transient", 1), ("rate", 1), (("rate", td(seconds=5)), 1), (Dead, 1), (Snooze(td(1)), 1), ("permanent", 7),
     (None, 7)],
    ids=str,
)  # fmt: skip
async def test_classify_says_whether_an_error_is_everybodys(db: Db, verdict: Any, calls: int) -> None:
    made = []

    async def work(jobs: list[Job]) -> None:
        made.append(len(jobs))
        raise ValueError("who knows")

    await stepped(db, work, 4, max_attempts=3, classify=lambda error: verdict)
    assert len(made) == calls


async def test_an_error_of_the_connection_is_not_everybodys_the_second_time(db: Db) -> None:
    """A provider that answers 500 to one row: it may take its chunk along once, not twice."""

    async def work(jobs: list[Job]) -> None:
        if any(job.id == 3 for job in jobs):
            raise Refused(500)

    table(db, 8)
    await drained(lane(db, work, max_attempts=3))
    assert rows(db) == {"done": 7, "dead": 1}
    assert rows(db, "attempts") == {2: 7, 3: 1}


async def test_an_error_of_the_connection_does_not_use_up_the_last_attempt_of_others(db: Db) -> None:
    async def work(jobs: list[Job]) -> None:
        if any(job.id == 3 for job in jobs):
            raise Refused(500)

    steps = await stepped(db, work, 8, max_attempts=1)
    assert {step.id for step in steps if step.outcome != "done"} == {3}


async def test_a_rate_limit_while_a_chunk_is_divided_ends_the_chunk(db: Db) -> None:
    """What waits would be told the same: it is not asked for."""
    calls = []

    async def work(jobs: list[Job]) -> None:
        calls.append(len(jobs))
        raise ValueError("poison") if len(calls) == 1 else Refused(429)

    steps = await stepped(db, work, 8, max_attempts=3)
    assert calls == [8, 4]
    assert [step.outcome for step in steps] == ["retry"] * 8


async def test_rows_that_have_ended_are_settled_while_others_of_the_chunk_run(db: Db) -> None:
    """The good half is not kept waiting for the bad one."""
    table(db, 4)
    let_go, calls = asyncio.Event(), []

    async def work(jobs: list[Job]) -> None:
        calls.append(len(jobs))
        if calls == [4]:
            raise ValueError("poison")
        if calls == [4, 2, 2]:
            await let_go.wait()

    worker = lane(db, work).worker(drain=True)
    running = asyncio.create_task(worker.run())
    await until(lambda: rows(db).get("done") == 2)
    let_go.set()
    await asyncio.wait_for(running, 60)
    assert rows(db) == {"done": 4}


# -- the rows' own claims


async def test_a_lost_row_does_not_disturb_the_others(db: Db) -> None:
    """Issue 23: ``job.lost`` tells the handler, and the outcome of that row alone is dropped."""
    table(db, 3)
    told: dict[int, bool] = {}

    async def work(jobs: list[Job]) -> Any:
        db.execute("update jobs set status = 'ready', worker = 'another' where id = 2")
        await until(lambda: jobs[1].lost)
        told.update({job.id: job.lost for job in jobs})
        return [{"result": "mine"} for _ in jobs]

    mill = lane(db, work, heartbeat=td(milliseconds=50), where="worker is null")
    counters = await drained(mill)
    assert told == {1: False, 2: True, 3: False}
    assert counters.losses == 1
    assert [row["result"] for row in db.query("select result from jobs order by id")] == ["mine", None, "mine"]


async def test_a_call_that_has_lost_all_of_its_rows_is_cancelled(db: Db) -> None:
    table(db, 2)
    cancelled = asyncio.Event()

    async def work(jobs: list[Job]) -> Any:
        db.execute("update jobs set status = 'ready', worker = 'another'")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    counters = await drained(lane(db, work, heartbeat=td(milliseconds=50), where="worker is null"))
    assert cancelled.is_set()
    assert counters.losses == 2


async def test_finish_ends_its_row_and_the_others_get_their_answer(db: Db) -> None:
    """``job.finish()`` in a chunk: its own writes and that row's outcome commit together, once."""
    table(db, 3)
    db.execute("create table effects (job integer)")
    calls = []

    async def work(jobs: list[Job]) -> Any:
        calls.append([job.id for job in jobs])
        if len(calls) == 1:
            async with jobs[0].finish() as tx:
                await tx.execute("insert into effects values (:id)", {"id": jobs[0].id})
                tx.set(result="finished")
            raise ValueError("after that")
        return {job.id: {"result": "answered"} for job in jobs}

    await drained(lane(db, work))
    assert calls[0] == [1, 2, 3]
    assert sorted(id for call in calls[1:] for id in call) == [2, 3], "the finished row is not called for again"
    assert [row["result"] for row in db.query("select result from jobs order by id")] == [
        "finished", "answered", "answered",
    ]  # fmt: skip
    assert db.query("select job from effects") == [{"job": 1}]


async def test_an_answer_for_a_finished_row_is_left_out(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        async with jobs[1].finish() as tx:
            tx.set(result="finished")
        return [{"result": "listed"}] * 3

    steps = await stepped(db, work)
    assert [step.outcome for step in steps] == ["done"] * 3
    assert [row["result"] for row in db.query("select result from jobs order by id")] == [
        "listed", "finished", "listed",
    ]  # fmt: skip


async def test_a_finish_block_of_a_lost_row_does_not_fail_the_others(db: Db) -> None:
    table(db, 3)
    calls = []

    async def work(jobs: list[Job]) -> Any:
        calls.append([job.id for job in jobs])
        if len(calls) == 1:
            db.execute("update jobs set status = 'ready', worker = 'another' where id = 2")
            async with jobs[1].finish():
                pass
        return None

    async with Kit(lane(db, work)) as kit:
        steps = await kit.step_chunk()
    assert calls == [[1, 2, 3], [1, 3]], "called again without it, and not in halves"
    assert [step.outcome for step in steps] == ["done", "lost", "done"]


async def test_a_finish_block_of_a_row_whose_inputs_changed_does_not_fail_the_others(db: Db) -> None:
    """That row is ready again; the others are called again without it, and not in halves."""
    table(db, 4)
    calls = []

    async def work(jobs: list[Job]) -> Any:
        calls.append([job.id for job in jobs])
        if len(calls) == 1:
            db.execute("update jobs set domain = 'new' where id = 2")
            async with jobs[1].finish():
                pass
        return None

    async with Kit(lane(db, work, inputs=["domain"])) as kit:
        steps = await kit.step_chunk()
    assert calls == [[1, 2, 3, 4], [1, 3, 4]]
    assert [step.outcome for step in steps] == ["done", "stale", "done", "done"]
    assert db.one("select status, attempts from jobs where id = 2") == {"status": "ready", "attempts": 0}


async def test_of_a_chunk_only_rows_whose_inputs_changed_are_ready_again(db: Db) -> None:
    """Never stale: row by row, by the settling itself."""
    table(db, 3)

    async def work(jobs: list[Job]) -> Any:
        db.execute("update jobs set domain = 'new' where id = 2")
        return [{"result": str(job["domain"])} for job in jobs]

    async with Kit(lane(db, work, inputs=["domain"])) as kit:
        assert [step.outcome for step in await kit.step_chunk()] == ["done", "stale", "done"]
        (again,) = await kit.step_chunk()
    assert (again.id, again.outcome, again.columns) == (2, "done", {"result": "new"})


async def test_a_lost_claim_of_another_kind_is_an_error_like_any_other(db: Db) -> None:
    async def work(jobs: list[Job]) -> Any:
        raise LostClaim("of something else")

    assert [step.outcome for step in await stepped(db, work, 2)] == ["retry"] * 2


async def test_marks_tell_the_rows_of_the_call_under_way(db: Db) -> None:
    """What a supervisor reads when the process dies: rows that wait for their call had not started."""
    table(db, 8)
    seen: list[tuple[set[int], set[int]]] = []

    async def work(jobs: list[Job]) -> None:
        cells = worker.slots["work"].running_marks
        assert cells is not None
        seen.append((set(cells) - {0}, {mark((job.id,), jobs[0]._lane_state.salt) for job in jobs}))
        if any(job.id == 5 for job in jobs):
            raise ValueError("poison")

    worker = lane(db, work, concurrency=2, max_attempts=1).worker(drain=True)
    worker.slots["work"].running_marks = array("q", [0] * worker.slots["work"].rows)
    async with asyncio.timeout(60):
        await worker.run()
    assert len(seen) == 7
    assert all(marked == called for marked, called in seen)
    assert set(worker.slots["work"].running_marks) == {0}


# -- threads, timeouts, shutdown


async def test_a_plain_function_gets_its_chunk_in_a_thread(db: Db) -> None:
    threads = []

    def work(jobs: list[SyncJob]) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        with jobs[0].finish() as tx:
            tx.set(result="finished")
        jobs[1].progress(0.5, "half")
        return [None, {"result": "listed"}]

    steps = await stepped(db, work, 2)
    assert threads == [False]
    assert [step.outcome for step in steps] == ["done"] * 2
    assert rows(db, "result") == {"finished": 1, "listed": 1}


async def test_a_call_that_never_ends_is_cut_off_and_its_row_found(db: Db) -> None:
    """The timeout is for the call. One row that hangs costs the others nothing."""
    table(db, 8)

    async def work(jobs: list[Job]) -> None:
        if any(job.id == 5 for job in jobs):
            await asyncio.Event().wait()

    await drained(lane(db, work, timeout=td(seconds=0.3), max_attempts=1))
    assert rows(db) == {"done": 7, "dead": 1}
    assert db.value("select error from jobs where id = 5") == "timed out after 0.3 s"


async def test_without_renewal_the_calls_of_a_chunk_share_the_lease(db: Db) -> None:
    """A call does not begin when the lease could run out under it."""
    table(db, 8)
    began = []

    async def work(jobs: list[Job]) -> None:
        began.append(len(jobs))
        if any(job.id == 5 for job in jobs):
            await asyncio.Event().wait()

    options = {"timeout": td(seconds=0.5), "lease": td(seconds=20), "heartbeat": td(seconds=1)}
    async with Kit(lane(db, work, renew="none", **options)) as kit:
        steps = await kit.step_chunk()
    assert began == [8]
    assert {step.outcome for step in steps} == {"retry"}


async def test_a_stop_gives_back_what_waits_for_its_call(db: Db) -> None:
    """A chunk that is divided at that moment: what runs may end, the rest goes back untouched."""
    table(db, 8)
    running, let_go = asyncio.Event(), asyncio.Event()

    async def work(jobs: list[Job]) -> None:
        if len(jobs) == 8:
            raise ValueError("poison")
        running.set()
        await let_go.wait()

    worker = lane(db, work).worker()
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(running.wait(), 60)
    worker.stop()
    let_go.set()
    await asyncio.wait_for(task, 60)
    assert rows(db) == {"done": 4, "ready": 4}
    assert rows(db, "attempts") == {1: 4, 0: 4}


async def test_a_hurried_stop_cancels_the_call_and_gives_all_rows_back(db: Db) -> None:
    table(db, 8)
    running = asyncio.Event()

    async def work(jobs: list[Job]) -> None:
        running.set()
        await asyncio.Event().wait()

    worker = lane(db, work).worker()
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(running.wait(), 60)
    worker.stop()
    worker.stop()
    await asyncio.wait_for(task, 60)
    assert rows(db) == {"ready": 8}
    assert rows(db, "attempts") == {0: 8}


# -- how chunks fill


async def sizes(db: Db, **options: Any) -> list[int]:
    made: list[int] = []

    async def work(jobs: list[Job]) -> None:
        made.append(len(jobs))
        await asyncio.sleep(0)

    await drained(lane(db, work, **options))
    return made


async def test_chunks_are_as_full_as_the_rows_allow(db: Db) -> None:
    table(db, 1000)
    made = await sizes(db, chunk=64, concurrency=3)
    assert sorted(made) == [1000 % 64, *[64] * (1000 // 64)]


async def test_a_batch_is_cut_to_whole_chunks(db: Db) -> None:
    table(db, 200)
    made = await sizes(db, chunk=20, batch=50, concurrency=2)
    assert made == [20] * 10


async def test_a_slot_holds_a_chunk(db: Db) -> None:
    """``concurrency`` counts calls."""
    table(db, 60)
    running: list[int] = []
    most = [0, 0]

    async def work(jobs: list[Job]) -> None:
        running.append(len(jobs))
        most[:] = max(most[0], len(running)), max(most[1], sum(running))
        await asyncio.sleep(0.02)
        running.pop()

    await drained(lane(db, work, chunk=10, concurrency=2))
    assert most == [2, 20]


async def test_a_limit_over_all_lanes_counts_calls(db: Db) -> None:
    table(db, 40)
    running: list[int] = []
    most = [0]

    async def work(jobs: list[Job]) -> None:
        running.append(len(jobs))
        most[0] = max(most[0], len(running))
        await asyncio.sleep(0.01)
        running.pop()

    await drained(lane(db, work, chunk=10, concurrency=4), concurrency=1)
    assert most == [1]
    assert rows(db) == {"done": 40}


async def test_gates_make_chunks_smaller(db: Db) -> None:
    """A chunk takes what its gates allow."""
    table(db, 0)
    db.insert("jobs", [{"id": n, "domain": f"d{n % 3}"} for n in range(30)])
    held: list[list[str]] = []

    async def work(jobs: list[Job]) -> None:
        held.append([job["domain"] for job in jobs])

    await drained(lane(db, work, chunk=20, concurrency=1, gates=[Concurrency(2, by="domain")]))
    assert rows(db) == {"done": 30}
    assert all(max(Counter(domains).values()) <= 2 for domains in held)
    assert max(map(len, held)) > 2


async def test_a_breaker_learns_row_by_row(db: Db) -> None:
    table(db, 6, domain="bad")

    async def work(jobs: list[Job]) -> Any:
        return [ValueError("no")] * len(jobs)

    async with Kit(lane(db, work, gates=[Breaker(3, td(hours=1), by="domain")], max_attempts=5)) as kit:
        assert len(await kit.step_chunk(count=4)) == 4
        assert await kit.step_chunk() == []


async def test_a_chunk_waits_for_more_rows(db: Db) -> None:
    """``chunk_wait``: rows that come in meanwhile go along, and a full chunk starts at once."""
    table(db, 1)
    made: list[tuple[int, float]] = []
    began = time.monotonic()

    async def work(jobs: list[Job]) -> None:
        made.append((len(jobs), time.monotonic() - began))

    worker = lane(db, work, chunk=5, chunk_wait=td(seconds=60), poll=td(milliseconds=50), concurrency=1).worker()
    task = asyncio.create_task(worker.run())
    await until(lambda: rows(db).get("running") == 1)
    assert made == []
    db.insert("jobs", [{"id": n} for n in range(2, 6)])
    await until(lambda: rows(db).get("done") == 5)
    assert [count for count, _ in made] == [5]
    worker.stop()
    await asyncio.wait_for(task, 60)


async def test_a_chunk_that_is_not_full_starts_when_its_wait_is_over(db: Db) -> None:
    table(db, 7)
    made: list[tuple[int, float]] = []
    began = time.monotonic()

    async def work(jobs: list[Job]) -> None:
        made.append((len(jobs), time.monotonic() - began))

    await drained(lane(db, work, chunk=5, chunk_wait=td(seconds=0.4), concurrency=2, poll=td(seconds=30)))
    assert sorted(count for count, _ in made) == [2, 5]
    assert min(at for count, at in made if count == 2) >= 0.4


async def test_rows_are_looked_for_once_more_before_the_wait_is_over(db: Db) -> None:
    """Where nothing wakes the worker, and the next poll is far."""
    table(db, 2)
    made: list[int] = []

    async def work(jobs: list[Job]) -> None:
        made.append(len(jobs))

    options = {"chunk": 5, "chunk_wait": td(seconds=2), "poll": td(seconds=60), "lease": td(seconds=60)}
    worker = lane(db, work, concurrency=1, **options).worker()
    task = asyncio.create_task(worker.run())
    await until(lambda: rows(db).get("running") == 2)
    db.insert("jobs", [{"id": 8}])
    await until(lambda: bool(made))
    assert made == [3]
    worker.stop()
    await asyncio.wait_for(task, 60)


async def test_a_stop_gives_back_a_chunk_that_waits(db: Db) -> None:
    table(db, 2)

    async def work(jobs: list[Job]) -> None:
        raise AssertionError("it was not to start")

    worker = lane(db, work, chunk=5, chunk_wait=td(seconds=60)).worker()
    task = asyncio.create_task(worker.run())
    await until(lambda: rows(db).get("running") == 2)
    worker.stop()
    await asyncio.wait_for(task, 60)
    assert rows(db) == {"ready": 2}
    assert rows(db, "attempts") == {0: 2}


@pytest.mark.parametrize("order", [{}, {"order": "fair"}], ids=["strict", "fair"])
async def test_a_chunk_is_of_one_environment(db: Db, tmp_path: Any, order: dict[str, Any]) -> None:
    """Also where environments take turns at the slots: then chunks may be smaller."""
    table(db, 10)
    other = Db(f"sqlite:///{tmp_path}/other.db")
    table(other, 10)
    mill = Mill({"a": db.url, "b": other.url}, **order)
    made: list[set[str]] = []

    async def work(jobs: list[Job]) -> None:
        made.append({job.environment for job in jobs})

    mill.lane("jobs", name="work", **{**STATES, "chunk": 7, "chunk_wait": td(seconds=0.2), "concurrency": 1})(work)
    await drained(mill)
    assert {len(environments) for environments in made} == {1}
    assert rows(db) == rows(other) == {"done": 10}
    assert len(made) >= 4 if order else len(made) == 4


async def test_every_job_has_its_own_budget_resource_and_progress(db: Db) -> None:
    """Resources are injected once for the call; ``spend`` counts by job, and puts the whole chunk off."""
    table(db, 4)
    mill = Mill(db.url)
    mill.budget("model", tokens=(4, td(hours=1)))
    got: list[Any] = []

    @mill.resource
    def client() -> str:
        return "a client"

    @mill.lane("jobs", name="work", chunk=2, **STATES)
    async def work(jobs: list[Job], client: str) -> None:
        got.append(client)
        for job in jobs:
            await job.spend("model", tokens=2, wait=td(0))
            await job.progress(1.0, "all")

    async with Kit(mill) as kit:
        assert [step.outcome for step in await kit.step_chunk()] == ["done"] * 2
        assert [step.outcome for step in await kit.step_chunk()] == ["snooze"] * 2
    assert got == ["a client"] * 2
    assert rows(db, "attempts") == {1: 2, 0: 2}


async def test_a_row_has_its_share_of_the_call_in_the_counts(db: Db) -> None:
    """Busy seconds are those of the calls, not as many times that as a chunk has rows."""
    table(db, 10)

    async def work(jobs: list[Job]) -> None:
        await asyncio.sleep(0.2)

    counters = await drained(lane(db, work, chunk=10))
    assert 0.2 <= counters.lanes["work"]["job_duration_us"] / 1e6 < 1.9


@pytest.mark.parametrize("key", ["uuid primary key", "integer", "text primary key"])
async def test_a_mapping_goes_by_any_key(pg: Db, key: str) -> None:
    """A UUID, a text, and a key of two columns: ``job.id`` as the handler has it."""
    table(pg, 0)
    pg.execute("alter table jobs drop column id")
    pg.execute(f"alter table jobs add column id {key}, add column part integer not null default 1")
    if key == "integer":
        pg.execute("alter table jobs add primary key (id, part)")
    ids = [str(UUID(int=n)) for n in range(4)] if "uuid" in key else [7, 8, 9, 10] if key == "integer" else ["a", "b"]
    pg.insert("jobs", [{"id": id} for id in ids])
    seen: list[Any] = []

    async def work(jobs: list[Job]) -> Any:
        seen.extend(job.id for job in jobs)
        return {job.id: {"result": str(job["id"])} for job in reversed(jobs)}

    await drained(lane(pg, work))
    assert rows(pg) == {"done": len(ids)}
    assert all(str(row["id"]) == row["result"] for row in pg.query("select id, result from jobs"))
    assert {type(id) for id in seen} == ({tuple} if key == "integer" else {type(seen[0])})


async def test_a_backfill_works_in_chunks_too(db: Db) -> None:
    """Its pace may bring fewer rows than a chunk has."""
    table(db, 12)
    db.execute("alter table jobs add column version integer")
    db.execute("update jobs set status = 'done'")
    made: list[int] = []

    async def work(jobs: list[Job]) -> Any:
        made.append(len(jobs))
        return [{"result": "new"} for _ in jobs]

    options: dict[str, Any] = {"version": 2, "version_column": "version", "backfill_pace": (4, td(milliseconds=50))}
    await drained(lane(db, work, **options))
    assert rows(db, "result") == {"new": 12}
    assert max(made) <= 4


async def test_a_claim_whose_renewal_moves_the_fence_is_settled_row_by_row(db: Db) -> None:
    """``renew="claimed_at"``: renewals go on while the call runs."""
    table(db, 6)

    async def work(jobs: list[Job]) -> Any:
        await asyncio.sleep(0.3)
        return [{"result": f"{job.id}"} for job in jobs]

    counters = await drained(lane(db, work, renew="claimed_at", heartbeat=td(milliseconds=50)))
    assert rows(db) == {"done": 6}
    assert counters.losses == 0


async def test_a_worker_shows_a_chunk_as_one_run_with_its_rows(db: Db) -> None:
    """What ``rowmill workers`` prints, and ``why`` counts as one slot."""
    table(db, 5)
    facts: list[dict[str, Any]] = []

    async def work(jobs: list[Job]) -> Any:
        await jobs[1].progress(0.5, "half")
        facts.extend(worker.slots["work"].facts(time.monotonic()))

    worker = lane(db, work).worker(drain=True)
    async with asyncio.timeout(60):
        await worker.run()
    (run,) = facts
    assert (run["slot"], run["id"], run["rows"], run["progress"]) == ("work-1", "1", 5, (0.5, "half"))
    assert run_name(run) == "1 and 4 more rows"
    assert run_name({"id": 3}) == "3"


async def test_lanes_with_and_without_chunks_share_the_places_of_a_worker(db: Db) -> None:
    """A limit over all lanes; the lane of higher priority goes first."""
    table(db, 50)
    db.execute("update jobs set domain = 'single' where id > 40")
    mill = Mill(db.url)
    running, most, made = [0], [0], list[Any]()

    async def run(what: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        made.append(what)
        await asyncio.sleep(0.005)
        running[0] -= 1

    @mill.lane("jobs", name="single", priority=0, where="domain = 'single'", **STATES)
    async def single(job: Job) -> None:
        await run(job.id)

    @mill.lane("jobs", name="many", chunk=10, priority=1, where="domain is null", **STATES)
    async def many(jobs: list[Job]) -> None:
        await run([job.id for job in jobs])

    await drained(mill, concurrency=2)
    assert most == [2]
    assert rows(db) == {"done": 50}
    assert [len(what) for what in made if isinstance(what, list)] == [10] * 4
    assert all(isinstance(what, int) for what in made[:9])
