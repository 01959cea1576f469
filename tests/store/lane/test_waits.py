"""Wait: a row that waits for a condition over its own columns, which anybody's UPDATE brings about."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db, as_time
from rowmill import Mill, Wait
from rowmill.ops.directory import LaneDirectory
from rowmill.ops.row_actions import Operator, Selection
from rowmill.store.inspect.why import inquire
from rowmill.store.inspect.why_rules import why
from rowmill.testing import Kit
from workers import until

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
APPROVED = "approved_at is not null"


def make(db: Db, count: int = 1, more: str = "", key: str = "id integer primary key") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table posts ({key}, status text not null default 'ready', worker text, claimed_at {time},"
        f" run_after {time}, attempts integer default 0, last_error text, finished_at {time}, approved_at {time},"
        f" draft text{more})"
    )
    if key.startswith("id"):
        for id in range(1, count + 1):
            db.execute("insert into posts (id) values (?)", id)


def approve(db: Db, id: int = 1) -> None:
    """A second ago: ``:now`` is whole milliseconds on SQLite, and a time of this millisecond may be later as text."""
    db.execute("update posts set approved_at = ? where id = ?", datetime.now(UTC) - td(seconds=1), id)


def row(db: Db, id: int = 1) -> dict[str, Any]:
    return db.one("select * from posts where id = ?", id)


def waiting(mill: Mill, **options: Any) -> Any:
    """A lane whose rows wait for an approval, and are done when they have it."""
    given: dict[str, Any] = {"timeout": td(days=2)} | options

    async def publish(job: Any) -> Wait | None:
        if job["approved_at"] is None and not await job.timed_out():
            return Wait(given.get("until", APPROVED), **{k: v for k, v in given.items() if k != "until"})
        return None

    return mill.lane("posts", name="posts", **{**STATES, "canceled": {"status": "canceled"}})(publish)


async def outcomes(kit: Kit) -> list[str]:
    found = []
    while (stepped := await kit.step()) is not None:
        found.append(stepped.outcome)
        assert len(found) < 100, "rows that wait are claimed over and over"
    return found


async def test_a_waiting_row_is_claimed_when_its_condition_is_true_and_not_before(db: Db, mill: Mill) -> None:
    """Issue 23: it holds no lease, costs no attempt, and the handler sees the new values."""
    make(db, 2)
    waiting(mill)
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait", "wait"]
        one = row(db)
        assert (one["status"], one["worker"], one["claimed_at"], one["attempts"]) == ("ready", None, None, 0)
        assert await kit.look() == []
        approve(db, 2)
        assert await kit.look() == [2]
        assert await outcomes(kit) == ["done"]
        assert (row(db, 2)["status"], row(db, 1)["status"]) == ("done", "ready")
        assert await kit.look() == []
        assert db.value("select count(*) from rowmill_waits") == 1


async def test_at_the_timeout_the_row_is_dead_with_the_reason(db: Db, mill: Mill) -> None:
    make(db, 2)
    waiting(mill)
    async with Kit(mill) as kit:
        await outcomes(kit)
        kit.advance(td(days=1, hours=23))
        assert await kit.look() == []
        kit.advance(td(hours=2))
        assert await outcomes(kit) == [], "no claim takes it before the look has ended it"
        assert await kit.look() == [1, 2]
    one = row(db)
    assert (one["status"], one["last_error"]) == ("dead", f"the wait timed out: {APPROVED}")
    assert one["finished_at"] is not None
    assert db.value("select count(*) from rowmill_waits") == 0


async def test_rows_time_out_each_at_its_own_time(db: Db, mill: Mill) -> None:
    make(db, 3)
    hours = {1: td(hours=1), 2: td(hours=3), 3: td(hours=1)}

    async def publish(job: Any) -> Wait:
        return Wait(APPROVED, timeout=hours[job.id], then="run" if job.id == 3 else "dead")

    mill.lane("posts", name="posts", **STATES)(publish)
    async with Kit(mill) as kit:
        await outcomes(kit)
        kit.advance(td(hours=2))
        assert await kit.look() == [1]
        kit.advance(td(hours=2))
        assert await kit.look() == [2]
    assert [row(db, id)["status"] for id in (1, 2, 3)] == ["dead", "dead", "ready"]


async def test_with_then_run_the_handler_runs_at_the_timeout_and_is_told(db: Db, mill: Mill) -> None:
    make(db)
    waiting(mill, then="run")
    async with Kit(mill) as kit:
        await outcomes(kit)
        left = as_time(row(db)["run_after"]) - datetime.now(UTC)
        assert td(days=1, hours=23) < left <= td(days=2)
        kit.advance(td(days=2, minutes=1))
        assert await kit.look() == []
        assert await outcomes(kit) == ["done"]
        store = await kit.store()
        assert store.waits is not None
        await store.waits.forget()
    assert db.value("select count(*) from rowmill_waits") == 0


async def test_timed_out_is_false_for_a_run_that_the_condition_began(db: Db, mill: Mill) -> None:
    make(db)
    told: list[bool] = []

    async def publish(job: Any) -> Wait | None:
        told.append(await job.timed_out())
        return Wait(APPROVED, timeout=td(hours=1), then="run") if job["approved_at"] is None else None

    mill.lane("posts", name="posts", **STATES)(publish)
    async with Kit(mill) as kit:
        await outcomes(kit)
        approve(db)
        await kit.look()
        await outcomes(kit)
    assert told == [False, False]


async def test_a_condition_that_is_true_already_lets_the_row_run_at_once(db: Db, mill: Mill) -> None:
    make(db)
    seen: list[Any] = []

    async def publish(job: Any) -> Wait | None:
        seen.append(job["approved_at"])
        if len(seen) == 1:
            approve(db)
            return Wait(APPROVED, timeout=td(hours=1))
        return None

    mill.lane("posts", name="posts", **STATES)(publish)
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait", "done"]
    assert db.value("select count(*) from rowmill_waits") == 0


async def test_columns_are_written_when_the_row_begins_to_wait(db: Db, mill: Mill) -> None:
    make(db)

    async def publish(job: Any) -> Any:
        if job["approved_at"] is None:
            raise Wait(APPROVED, timeout=td(hours=1), columns={"draft": "Dear reader"})
        return {"draft": job["draft"] + "!"}

    mill.lane("posts", name="posts", **STATES)(publish)
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait"]
        assert row(db)["draft"] == "Dear reader"
        approve(db)
        await kit.look()
        assert await outcomes(kit) == ["done"]
    assert row(db)["draft"] == "Dear reader!"


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("aproved_at is not null", "aproved_at"),
        ("approved_at is is null", ""),
        ("length(nothing(id)) > 1", "nothing"),
        ("id = $1", ""),
    ],
)
async def test_a_bad_condition_ends_its_row_with_the_reason_and_hurts_no_other(
    db: Db, mill: Mill, condition: str, words: str
) -> None:
    make(db, 3)

    async def publish(job: Any) -> Wait:
        return Wait(condition if job.id == 2 else APPROVED, timeout=td(hours=1))

    mill.lane("posts", name="posts", **STATES)(publish)
    async with Kit(mill) as kit:
        await kit.drain()
    assert [row(db, id)["status"] for id in (1, 2, 3)] == ["ready", "dead", "ready"]
    assert words in row(db, 2)["last_error"]
    assert db.value("select count(*) from rowmill_waits") == 2


@pytest.mark.parametrize(
    "condition", ["", "  ", "a; drop table posts", "true) or (true", "a -- b", "a /* b", "f(a", "'a", 7, "x" * 10_001]
)
def test_a_text_that_is_no_condition_is_refused_where_it_is_written(condition: Any) -> None:
    with pytest.raises(TypeError, match="until must be an SQL condition"):
        Wait(condition, timeout=td(hours=1))


def test_what_a_wait_needs() -> None:
    with pytest.raises(TypeError, match="timeout"):
        Wait("true", timeout=td(0))
    with pytest.raises(TypeError, match="then"):
        Wait("true", timeout=td(1), then="go")  # type: ignore[arg-type]
    assert Wait("note = 'a;b -- (' and f(a)", timeout=td(1)).until == "note = 'a;b -- (' and f(a)"


async def test_a_condition_that_fails_for_one_row_later_is_told_and_wakes_the_others(pg: Db) -> None:
    """The condition is asked of waiting rows alone, and row by row where it fails."""
    mill = Mill(pg.url)
    name = pg.value("select current_database()")
    for way in ("nestloop", "indexscan", "bitmapscan", "mergejoin"):  # a plan that would look at other rows first
        pg.execute(f"alter database {name} set enable_{way} = off")
    make(pg, 4, ", answer text default '1'")
    waiting(mill, until="cast(answer as integer) = 7")
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait"] * 4
        pg.execute("insert into posts (id, answer, run_after) values (5, 'not waiting', now() + interval '1 day')")
        pg.execute("update posts set answer = '7' where id in (1, 3)")
        assert await kit.look() == [1, 3], "a row that does not wait is not asked"
        pg.execute("update posts set answer = 'seven' where id = 2")
        pg.execute("update posts set answer = '7' where id = 4")
        store = await kit.store()
        assert store.waits is not None
        ended = await store.waits.look()
    assert ended.woken == [4]
    ((_, words, id),) = ended.refused
    assert id == "2"
    assert "invalid input syntax" in words
    await mill.close()


async def test_a_condition_over_a_column_that_is_gone_is_told_and_others_go_on(db: Db, mill: Mill) -> None:
    make(db, 2, ", other integer")

    async def publish(job: Any) -> Wait:
        return Wait("other = 1" if job.id == 1 else APPROVED, timeout=td(hours=1))

    mill.lane("posts", name="posts", **STATES)(publish)
    async with Kit(mill) as kit:
        await outcomes(kit)
    db.execute("alter table posts drop column other")
    async with Kit(mill) as kit:  # as a worker does that finds the table altered
        approve(db, 2)
        store = await kit.store()
        assert store.waits is not None
        ended = await store.waits.look()
        assert (ended.woken, [id for *_, id in ended.refused]) == ([2], [None])
        kit.advance(td(hours=2))
        assert (await store.waits.look()).timed_out == [1]


# -- somebody else writes the row meanwhile


async def test_a_row_that_is_given_another_time_waits_no_more(db: Db, mill: Mill) -> None:
    """A reset by plain SQL, and ``rowmill retry``, set run_after: that is the end of the wait."""
    make(db)
    waiting(mill)
    async with Kit(mill) as kit:
        await outcomes(kit)
        db.execute("update posts set run_after = ?", datetime.now(UTC) + td(hours=1))
        approve(db)
        assert await kit.look() == [], "a row that was put off is not hastened by an old wait"
        store = await kit.store()
        assert store.waits is not None
        await store.waits.forget()
        assert db.value("select count(*) from rowmill_waits") == 0
        db.execute("update posts set run_after = null")
        assert await outcomes(kit) == ["done"]


async def test_a_row_on_hold_is_neither_woken_nor_ended_and_goes_on_when_it_is_back(db: Db, mill: Mill) -> None:
    make(db, 2)
    waiting(mill)
    async with Kit(mill) as kit:
        await outcomes(kit)
        db.execute("update posts set status = 'on hold'")
        approve(db, 1)
        kit.advance(td(days=2, minutes=1))
        store = await kit.store()
        assert store.waits is not None
        await store.waits.forget()
        assert await kit.look() == []
        db.execute("update posts set status = 'ready'")
        assert await kit.look() == [1, 2]
    assert [row(db, id)["status"] for id in (1, 2)] == ["ready", "dead"]


@pytest.mark.parametrize("change", ["delete from posts", "update posts set status = 'canceled'"])
async def test_a_row_that_is_gone_or_has_ended_is_forgotten(db: Db, mill: Mill, change: str) -> None:
    make(db)
    waiting(mill)
    async with Kit(mill) as kit:
        await outcomes(kit)
        db.execute(change)
        await kit.look()
        assert db.value("select count(*) from rowmill_waits") == 1
        store = await kit.store()
        assert store.waits is not None
        await store.waits.forget()
        assert db.value("select count(*) from rowmill_waits") == 0


async def test_a_lost_claim_writes_no_wait(db: Db, mill: Mill) -> None:
    make(db)
    waiting(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim("posts")
        db.execute("update posts set status = 'done'")
        report = await kit.settle(claim, Wait(APPROVED, timeout=td(hours=1)))
        assert report.lost
    assert db.value("select count(*) from rowmill_waits") == 0


# -- what operators see and do


async def test_why_says_what_a_row_waits_for_and_until_when(db: Db, mill: Mill) -> None:
    make(db)
    waiting(mill)
    async with Kit(mill) as kit:
        await outcomes(kit)
    async with LaneDirectory(mill) as directory:
        view = await directory.view("default", "posts")
        found = why(await (await inquire(view, (1,))).facts((), ()))
        (reason,) = [reason for reason in found.reasons if reason.code in ("wait", "run_after")]
        day = datetime.now(UTC) + td(days=2)
        assert reason.text == f"waits for {APPROVED} until {day:%Y-%m-%d %H:%M} UTC; then it is dead"
        counts = await view.count()
        assert (counts.states["waiting"], counts.states["ready"]) == (1, 0)
        assert (await view.rows("waiting"))[0].id == 1


@pytest.mark.parametrize(("verb", "left"), [("retry", "ready"), ("cancel", "canceled"), ("schedule", "ready")])
async def test_what_an_operator_does_ends_the_wait(db: Db, mill: Mill, verb: str, left: str) -> None:
    make(db)
    waiting(mill)
    async with Kit(mill) as kit:
        await outcomes(kit)
        async with LaneDirectory(mill) as directory:
            operator = Operator(await directory.view("default", "posts"))
            chosen = Selection(("waiting", "dead"), ((1,),))
            does = {
                "retry": lambda: operator.retry(chosen),
                "cancel": lambda: operator.cancel(chosen, "no"),
                "schedule": lambda: operator.schedule(chosen, 3600),
            }
            assert [key async for keys in does[verb]() for key in keys] == [(1,)]
        approve(db)
        assert await kit.look() == []
        assert row(db)["status"] == left
        store = await kit.store()
        assert store.waits is not None
        await store.waits.forget()
    assert db.value("select count(*) from rowmill_waits") == 0


@pytest.mark.parametrize(
    "condition",
    [
        "draft like 'b%' and draft <> ':x ? $1' and approved_at is not null",
        "approved_at <= :now",
        "(select count(*) from posts p where p.draft = posts.draft) > 1",
        "exists (select 1 from other o where o.post = posts.id)",
    ],
)
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.bare
async def test_a_condition_may_be_any_sql_over_the_row(db: Db, mill: Mill, condition: str, hook: bool) -> None:
    """Also where no table of rowmill's own was there before the test kit, and with a hook in the same transaction."""
    make(db)
    db.execute("create table other (post integer)")

    async def publish(job: Any) -> Wait | None:
        return None if job["draft"] else Wait(condition, timeout=td(days=1), columns={"draft": "b 100%"})

    lane = mill.lane("posts", name="posts", **STATES)(publish)
    heard: list[str] = []
    if hook:

        @lane.on_settled
        async def listen(tx: Any, settled: Any) -> None:
            heard.extend(one.outcome for one in settled)

    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait"]
        assert await kit.look() == []
        approve(db)
        db.execute("insert into other values (1)")
        db.execute("insert into posts (id, status, draft) values (2, 'other', 'b 100%')")
        assert await kit.look() == [1]
        assert await outcomes(kit) == ["done"]
    assert heard == (["wait", "done"] if hook else [])


async def test_a_row_of_a_partitioned_table_waits(pg: Db) -> None:
    make(pg, 0, ") partition by list (id", key="id integer primary key")
    pg.execute("create table posts_default partition of posts default; insert into posts (id) values (1)")
    mill = Mill(pg.url)
    waiting(mill)
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait"]
        approve(pg)
        assert await kit.look() == [1]
        assert await outcomes(kit) == ["done"]
    await mill.close()


# -- what it takes


async def test_keys_and_names_may_be_anything(db: Db, mill: Mill) -> None:
    """A composite key of any types, and columns that rowmill's own table has, too."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    day = "date" if db.dialect == "postgresql" else "text"
    db.execute(
        f'create table "Odd Posts" (lane text, "Day" {day}, n bigint, status text default \'ready\', worker text,'
        f' claimed_at {time}, run_after {time}, condition text, due text, key text, primary key (lane, "Day", n))'
    )
    db.execute("insert into \"Odd Posts\" (lane, \"Day\", n) values ('o''neil, \"x\"', '2026-01-02', 9007199254740993)")
    db.execute("insert into \"Odd Posts\" (lane, \"Day\", n) values ('o''neil, \"x\"', '2026-01-02', 9007199254740994)")

    async def handle(job: Any) -> Wait | None:
        return (
            Wait("condition = 'it''s: ok' and \"Odd Posts\".lane is not null", timeout=td(1))
            if not job["key"]
            else None
        )

    mill.lane('"Odd Posts"', name="odd 'lane'", **STATES)(handle)
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["wait", "wait"]
        db.execute("update \"Odd Posts\" set condition = 'it''s: ok', key = 'x' where n = 9007199254740993")
        assert [id[2] for id in await kit.look()] == [9007199254740993]
        assert await outcomes(kit) == ["done"]


async def test_without_a_due_time_a_wait_ends_its_row_with_the_reason(db: Db, mill: Mill) -> None:
    db.execute("create table posts (id integer primary key, status text default 'ready', worker text, last_error text)")
    db.execute("insert into posts (id) values (1)")

    async def handle(job: Any) -> Wait:
        return Wait("true", timeout=td(1))

    mill.lane("posts", name="posts", **STATES)(handle)
    async with Kit(mill) as kit:
        assert await outcomes(kit) == ["dead"]
    assert "needs a column with the role run_after" in db.value("select last_error from posts")


async def test_a_tasks_job_cannot_wait(db: Db, mill: Mill) -> None:
    @mill.task
    async def work() -> Any:
        return Wait("true", timeout=td(1))

    handle = await work.enqueue()
    async with Kit(mill) as kit:
        await kit.step()
    status = await handle.status()
    assert status is not None
    assert status.state == "dead"
    assert "no columns of yours" in str(status.error)
    await mill.close()


async def test_hooks_hear_of_waits_and_of_timeouts_in_the_same_transaction(db: Db, mill: Mill) -> None:
    make(db, 2)
    lane = waiting(mill)
    heard: list[Any] = []

    @lane.on_settled
    async def hook(tx: Any, settled: Any) -> None:
        heard.extend((one.id, one.outcome) for one in settled)
        if any(one.id == 2 and one.outcome == "dead" for one in settled):
            raise RuntimeError("not this one")

    async with Kit(mill) as kit:
        await outcomes(kit)
        assert heard == [(1, "wait"), (2, "wait")]
        kit.advance(td(days=2, minutes=1))
        store = await kit.store()
        assert store.waits is not None
        ended = await store.waits.look()
    assert ended.timed_out == [1]
    assert [(id, "not this one" in words) for _, words, id in ended.refused] == [(2, True)]
    assert [row(db, id)["status"] for id in (1, 2)] == ["dead", "ready"]


async def test_a_row_that_may_not_be_woken_holds_no_other_up(db: Db, mill: Mill) -> None:
    make(db, 2, ", check (id <> 1 or approved_at is null or status <> 'ready' or run_after > '2000-01-01')")
    waiting(mill, until="approved_at is not null or draft = 'x'")
    async with Kit(mill) as kit:
        await outcomes(kit)
        db.execute("update posts set approved_at = ?, draft = 'x' where id = 2", datetime.now(UTC))
        assert await kit.look() == [2]


async def test_workers_wake_rows_after_any_update(db: Db, mill: Mill) -> None:
    """On SQLite the file rings; on PostgreSQL ``mill.wake()`` does, or the poll."""
    make(db, 3)
    waiting(mill)
    told: list[str] = []
    mill.on_event(lambda event: told.append(event.name))
    workers = [mill.worker() for _ in range(2)]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        await until(lambda: db.value("select count(*) from rowmill_waits") == 3)
        for id in (2, 1):
            approve(db, id)
            await mill.wake()
            await until(lambda id=id: row(db, id)["status"] == "done")  # type: ignore[misc]
        assert row(db, 3)["status"] == "ready"
        approve(db, 3)
        await until(lambda: row(db, 3)["status"] == "done")  # by the poll, on PostgreSQL
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
    assert told.count("rows_woken") == 3
    assert "wait_refused" not in told


async def test_two_looks_at_once_wake_a_row_once(db: Db, mill: Mill) -> None:
    make(db, 50)
    waiting(mill)
    async with Kit(mill) as kit:
        await kit.drain()
        db.execute("update posts set approved_at = ?", datetime.now(UTC))
        store = await kit.store()
        assert store.waits is not None
        found = await asyncio.gather(*(store.waits.look() for _ in range(4)))
    woken = [id for ended in found for id in ended.woken]
    assert sorted(woken) == list(range(1, 51))


async def test_an_environment_that_rests_is_opened_when_a_row_waits_no_more(db: Db) -> None:
    """Many databases in fair order: an idle one is closed, and its waiting rows are looked after all the same."""
    make(db, 2)
    mill = Mill({"one": db.url}, order="fair", rest_after=td(seconds=2))

    async def publish(job: Any) -> Wait | None:
        timeout = td(seconds=1) if job.id == 2 else td(days=2)
        return Wait(APPROVED, timeout=timeout) if job["approved_at"] is None else None

    mill.lane("posts", name="posts", poll=td(seconds=0.2), **STATES)(publish)
    told: list[str] = []
    mill.on_event(lambda event: told.append(event.name))
    worker = mill.worker()
    running = asyncio.create_task(worker.run())
    try:
        await until(lambda: row(db, 2)["status"] == "dead")
        await until(lambda: "environment_idle" in told)
        approve(db)
        await until(lambda: row(db)["status"] == "done")
    finally:
        worker.stop()
        await running


# -- beside other features of a lane


async def test_rows_of_a_chunk_may_wait(db: Db, mill: Mill) -> None:
    make(db, 3)

    async def publish(jobs: list[Any]) -> list[Any]:
        return [Wait(APPROVED, timeout=td(hours=1)) if job.id < 3 and not job["approved_at"] else None for job in jobs]

    mill.lane("posts", name="posts", chunk=10, **STATES)(publish)
    async with Kit(mill) as kit:
        await kit.drain()
        assert [row(db, id)["status"] for id in (1, 2, 3)] == ["ready", "ready", "done"]
        approve(db)
        await kit.drain()
    assert [row(db, id)["status"] for id in (1, 2, 3)] == ["done", "ready", "done"]


async def test_a_row_whose_inputs_changed_meanwhile_waits_and_sees_them_afterwards(db: Db, mill: Mill) -> None:
    """Never stale: a wait is not final, as a snooze is not; the handler runs again with the newest values."""
    make(db)
    runs: list[Any] = []

    async def publish(job: Any) -> Any:
        runs.append(job["draft"])
        if len(runs) == 1:
            db.execute("update posts set draft = 'changed'")
            return Wait(APPROVED, timeout=td(hours=1))
        return Wait(APPROVED, timeout=td(hours=1)) if job["approved_at"] is None else None

    mill.lane("posts", name="posts", inputs=["draft"], **STATES)(publish)
    async with Kit(mill) as kit:
        await kit.drain()
        assert row(db)["status"] == "ready"
        assert db.value("select count(*) from rowmill_waits") == 1
        approve(db)
        await kit.drain()
    assert row(db)["status"] == "done"
    assert runs == [None, "changed"]
