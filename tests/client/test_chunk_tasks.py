"""Tasks in chunks: each call gives one value, and the handler gets a list of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Dead, DeclarationError, Job, Mill, Snooze, SyncJob, TaskFailed, WrongArguments, fixed, injected
from rowmill.testing import Kit


@dataclass
class Picture:
    """One argument with parts of its own."""

    url: str
    width: int = 100


def states(db: Db) -> dict[str, int]:
    return {row["state"]: row["n"] for row in db.query("select state, count(*) as n from rowmill_jobs group by 1")}


async def drained(mill: Mill) -> None:
    async with asyncio.timeout(60):
        await mill.worker(drain=True).run()


async def test_each_parameter_is_a_list_with_a_value_for_each_job(db: Db) -> None:
    """Issue 23: the results are the jobs', in the same order."""
    mill, calls = Mill(db.url), []

    @mill.task(chunk=4)
    async def embed(texts: list[str], factors: list[int]) -> list[list[float]]:
        calls.append(len(texts))
        return [[len(text) * factor * 1.0] for text, factor in zip(texts, factors, strict=True)]

    handles = [await embed.enqueue("a" * n, factors=n) for n in range(6)]
    await drained(mill)
    assert sorted(calls) == [2, 4]
    assert [await handle.result(60) for handle in handles] == [[float(n * n)] for n in range(6)]
    await mill.close()


async def test_the_jobs_come_first_where_they_are_asked_for(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(chunk=10)
    async def embed(jobs: list[Job], pictures: list[Picture]) -> dict[int, Any]:
        return {job.id: picture.url * picture.width for job, picture in zip(jobs, pictures, strict=True)}

    handles = await embed.enqueue_many([(Picture("x", 2),), {"pictures": Picture("y")}])
    await drained(mill)
    assert [await handle.result(60) for handle in handles] == ["xx", "y" * 100]
    await mill.close()


async def test_a_plain_function_with_jobs_alone_and_a_resource(db: Db) -> None:
    mill = Mill(db.url)

    @mill.resource
    def prefix() -> str:
        return "p"

    @mill.task(chunk=3)
    def number(jobs: list[SyncJob], prefix: str = injected) -> Any:
        return [f"{prefix}{job.id}" for job in jobs]

    handles = [await number.enqueue() for _ in range(3)]
    await drained(mill)
    assert [await handle.result(60) for handle in handles] == [f"p{handle.id}" for handle in handles]
    await mill.close()


async def test_a_call_is_checked_as_one_value(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(chunk=3)
    async def embed(texts: list[str]) -> None: ...

    await mill.prepare()
    for args in ([["a"]], [7], [], ["a", "b"]):
        with pytest.raises(WrongArguments, match=r"task 'embed'") as caught:
            await embed.enqueue(*args)
        assert caught.value.hint == "its handler takes (texts: str)"
    await embed.enqueue("a")
    await embed.enqueue(texts="b")
    assert [json.loads(row["args"]) if isinstance(row["args"], str) else row["args"] for row in db.query(
        "select args from rowmill_jobs order by id")] == [{"texts": "a"}, {"texts": "b"}]  # fmt: skip
    await mill.close()


async def test_a_poisoned_job_dies_alone_and_keeps_its_history(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(chunk=8, max_attempts=2, backoff=fixed(td(0)))
    async def embed(texts: list[str]) -> list[str]:
        return [f"{1 / len(text)}" for text in texts]

    handles = await embed.enqueue_many([("a" * n,) for n in range(8)])
    await drained(mill)
    assert states(db) == {"done": 7, "dead": 1}
    with pytest.raises(TaskFailed, match="ZeroDivisionError"):
        await handles[0].result(60)
    status = await handles[0].status()
    assert status is not None
    assert [entry["outcome"] for entry in status.history] == ["retry", "dead"]
    assert db.query("select distinct attempts from rowmill_jobs where state = 'done'") == [{"attempts": 1}]
    await mill.close()


async def test_jobs_whose_arguments_do_not_fit_end_alone_before_the_call(db: Db) -> None:
    """Those of a newer version wait for it; broken ones are dead; the handler never sees them."""
    mill, got = Mill(db.url), []

    @mill.task(chunk=8)
    async def embed(texts: list[str]) -> None:
        got.append(texts)

    await mill.prepare()
    handles = await embed.enqueue_many([(str(n),) for n in range(4)])
    for place, args in ((0, []), (1, {}), (2, {"texts": "2", "more": 1})):
        db.execute("update rowmill_jobs set args = ? where id = ?", json.dumps(args), handles[place].id)
    await mill.close()
    async with Kit(mill, real=True) as kit:
        steps = await kit.step_chunk("embed")
    assert [step.outcome for step in steps] == ["dead", "dead", "release", "done"]
    assert "args is [], and must be an object" in str(steps[0].error)
    assert "it lacks texts" in str(steps[1].error)
    assert got == [["3"]]


async def test_a_list_of_arguments_that_the_handler_changed_settles_no_job(db: Db) -> None:
    """Sorted in place, each job would get another one's result."""
    mill = Mill(db.url)

    @mill.task(chunk=8)
    async def embed(texts: list[str]) -> list[str]:
        texts.sort()
        return texts

    handles = await embed.enqueue_many([("b",), ("a",)])
    await drained(mill)
    assert states(db) == {"dead": 2}
    with pytest.raises(TaskFailed, match="changed the list"):
        await handles[0].result(60)
    await mill.close()


async def test_one_outcome_is_for_all_jobs(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(chunk=8)
    async def poll(batches: list[str]) -> Any:
        return Snooze(td(hours=1))

    await poll.enqueue_many([("b",), ("a",)])
    await mill.close()
    async with Kit(mill, real=True) as kit:
        assert [step.outcome for step in await kit.step_chunk("poll")] == ["snooze"] * 2
    assert db.query("select distinct attempts from rowmill_jobs") == [{"attempts": 0}]


async def test_a_step_of_each_job_is_kept_although_the_call_is_repeated(db: Db) -> None:
    """``job.step`` is the job's own: what it returned stands when the chunk is divided."""
    mill, made = Mill(db.url), []

    @mill.task(chunk=4, max_attempts=1)
    async def embed(jobs: list[Job], texts: list[str]) -> None:
        for job, text in zip(jobs, texts, strict=True):
            await job.step("send", lambda text=text: made.append(text))
        if "c" in texts:
            raise ValueError("poison")

    await embed.enqueue_many([(text,) for text in "abcd"])
    await drained(mill)
    assert sorted(made) == ["a", "b", "c", "d"]
    assert states(db) == {"done": 3, "dead": 1}
    await mill.close()


async def test_spawn_is_refused_in_a_chunk(db: Db) -> None:
    """The call ends for all of its jobs, and they would wait for one job's children."""
    mill = Mill(db.url)

    @mill.task
    async def child() -> None: ...

    @mill.task(chunk=4)
    async def parent(jobs: list[Job]) -> None:
        await jobs[0].spawn(child.call())

    handles = [await parent.enqueue() for _ in range(2)]
    await drained(mill)
    with pytest.raises(TaskFailed, match=r"job\.spawn does not work in a chunk"):
        await handles[0].result(60)
    await mill.close()


async def test_a_queue_in_chunks_has_one_task() -> None:
    mill = Mill("sqlite:///jobs.db")
    mill.queue("embeddings", chunk=64, chunk_wait=td(milliseconds=100))

    @mill.task(queue="embeddings")
    async def embed(texts: list[str]) -> None: ...

    assert embed.chunk == 64
    with pytest.raises(DeclarationError, match="a queue that works in chunks has one task, and 'embeddings' has 'em"):

        @mill.task(queue="embeddings")
        async def other(texts: list[str]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (lambda job, texts: None, "its first parameter is one job"),
        (lambda: None, "needs a parameter for the jobs or their arguments"),
    ],
    ids=["one job", "nothing"],
)
def test_a_signature_that_cannot_be_is_refused_at_the_declaration(handler: Any, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        Mill("sqlite:///jobs.db").task(name="embed", chunk=4)(handler)


async def _text(text: str) -> None: ...
async def _default(texts: list[str] = []) -> None: ...  # noqa: B006
async def _many(*texts: list[str]) -> None: ...


@pytest.mark.parametrize("handler", [_text, _default, _many])
async def test_a_parameter_that_is_not_a_list_is_refused_before_anything_is_enqueued(db: Db, handler: Any) -> None:
    mill = Mill(db.url)
    task = mill.task(name="embed", chunk=4)(handler)
    with pytest.raises(DeclarationError, match="With chunk= each parameter is a list, one value for each job"):
        await task.enqueue("a")
    with pytest.raises(DeclarationError, match="is not a list"):
        mill.worker()


def test_a_cron_has_no_chunk() -> None:
    with pytest.raises(DeclarationError, match="a cron enqueues one job at each tick"):

        @Mill("sqlite:///jobs.db").cron("0 3 * * *", chunk=4)
        async def nightly(jobs: Any) -> None: ...


async def test_dead_for_one_job_of_a_list(db: Db) -> None:
    mill = Mill(db.url)

    @mill.task(chunk=4)
    async def embed(texts: list[str]) -> list[Any]:
        return [text or Dead("empty") for text in texts]

    await embed.enqueue_many([("a",), ("",)])
    await drained(mill)
    assert states(db) == {"done": 1, "dead": 1}
    await mill.close()
