"""What handlers log through ``job.log``: kept with its run, within bounds, after the outcome, and never at its cost."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta as td
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from command import Command
from databases import Db, as_time
from rowmill import Cancel, Dead, Mill, Retry, Snooze, fixed
from rowmill.engine.records.run_log import RunLines, RunLogWriter
from rowmill.errors import DatabaseError, DeclarationError, Refused, Unreachable
from rowmill.events import Events
from rowmill.store import Database
from rowmill.store.own import run_logs
from rowmill.store.own.run_logs import LINE_BYTES, LINES, RUN_BYTES, RUNS, RunLogs
from workers import STATES, add, events_of, jobs, until, working

LANE: dict[str, Any] = {**STATES, "max_attempts": 3, "backoff": fixed(td(0)), "concurrency": 1}


def lane(db: Db, handler: Any, **options: Any) -> Mill:
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", **{**LANE, **options})(handler)
    return mill


async def drained(mill: Mill) -> None:
    await asyncio.wait_for(mill.worker(drain=True, worker_id="w-1").run(), 60)


async def kept(db: Db, row: Any = 1, lane: str = "jobs") -> list[dict[str, Any]]:
    database = Database.open(db.url)
    try:
        return await RunLogs(database).of_row(lane, str(row))
    finally:
        await database.close()


def texts(run: dict[str, Any]) -> list[tuple[str, str]]:
    return [(line["level"], line["text"]) for line in run["lines"]]


def stored(db: Db) -> int:
    return int(db.value("select count(*) from rowmill_run_logs"))


async def test_what_a_run_logs_is_kept_with_its_outcome_and_times(db: Db) -> None:
    jobs(db)

    async def work(job: Any) -> None:
        job.log.info("attempt %s of %s", job.attempt, "three")
        job.log.debug("not kept: this is not logged either")
        if job.attempt < 3:
            try:
                1 / 0  # noqa: B018
            except ZeroDivisionError:
                job.log.exception("cannot divide")
            raise Retry("again")
        job.log.warning("at last")

    await drained(lane(db, work))
    runs = await kept(db)
    assert [(r["run"], r["attempt"], r["outcome"], r["worker"], r["dropped"]) for r in runs] == [
        (1, 3, "done", "w-1", 0), (2, 2, "retry", "w-1", 0), (3, 1, "retry", "w-1", 0),
    ]  # fmt: skip
    assert texts(runs[0]) == [("info", "attempt 3 of three"), ("warning", "at last")]
    level, text = texts(runs[1])[1]
    assert level == "error"
    assert text.startswith("cannot divide\nTraceback")
    assert "in work" in text
    assert "execute.py" not in text, "the engine's own frames are the same in every traceback"
    assert text.endswith("ZeroDivisionError: division by zero")
    now = "now()" if db.dialect == "postgresql" else "strftime('%Y-%m-%d %H:%M:%f', 'now')"
    age = (as_time(db.value(f"select {now}")) - as_time(runs[2]["lines"][0]["at"])).total_seconds()
    assert 0 <= age < 60, "the database's time"
    assert runs[2]["lines"][0]["at"] <= runs[2]["at"] <= runs[1]["at"]


async def test_every_way_a_run_may_end_keeps_its_log(db: Db) -> None:
    jobs(db, 5)
    ends = {1: Dead("no"), 2: Cancel("no"), 3: Snooze(td(days=1)), 4: ValueError("x"), 5: None}

    async def work(job: Any) -> None:
        job.log.info("row %s", job.id)
        if (end := ends[job.id]) is not None:
            raise end

    await drained(lane(db, work, max_attempts=1, canceled={"status": "off"}))
    ended = {n: [run["outcome"] for run in await kept(db, n)] for n in ends}
    assert ended == {1: ["dead"], 2: ["canceled"], 3: ["snooze"], 4: ["dead"], 5: ["done"]}


async def test_a_run_that_times_out_or_ends_in_a_finish_block_keeps_its_log(db: Db) -> None:
    jobs(db, 3)

    async def work(job: Any) -> None:
        job.log.info("begun")
        if job.id == 1:
            await asyncio.Event().wait()
        async with job.finish() as tx:
            tx.set(note="by itself")
        job.log.info("after the end")
        if job.id == 3:
            raise ValueError("too late to matter")

    await drained(lane(db, work, timeout=td(seconds=0.2), max_attempts=1))
    assert [(run["outcome"], len(run["lines"])) for run in await kept(db, 1)] == [("dead", 1)]
    assert [(run["outcome"], len(run["lines"])) for run in await kept(db, 2)] == [("done", 2)]
    assert [(run["outcome"], len(run["lines"])) for run in await kept(db, 3)] == [("done", 2)]


async def test_a_run_that_lost_its_row_keeps_its_log(db: Db) -> None:
    jobs(db)

    async def work(job: Any) -> None:
        job.log.info("begun")
        db.execute("update jobs set status = 'done' where id = 1")

    await drained(lane(db, work))
    assert [run["outcome"] for run in await kept(db)] == ["lost"]


async def test_a_run_that_is_stopped_keeps_its_log(db: Db) -> None:
    jobs(db)
    begun = asyncio.Event()

    async def work(job: Any) -> None:
        job.log.info("begun")
        begun.set()
        await asyncio.Event().wait()

    mill = lane(db, work)
    async with working(mill, grace=0.1):
        await asyncio.wait_for(begun.wait(), 60)
    assert db.value("select status from jobs") == "queued"
    assert [run["outcome"] for run in await kept(db)] == ["release"]


async def test_a_handler_in_a_thread_and_the_threads_it_starts_may_log(db: Db) -> None:
    jobs(db, 2)

    def work(job: Any) -> None:
        job.log.info("in %s", "a thread")

    await drained(lane(db, work))
    assert texts((await kept(db, 2))[0]) == [("info", "in a thread")]


async def test_a_run_that_logs_nothing_costs_no_statement(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs(db, 30)
    added: list[int] = []
    add = RunLogs.add

    async def counted(self: RunLogs, logs: Any, now: float) -> None:
        added.append(len(logs))
        await add(self, logs, now)

    monkeypatch.setattr(RunLogs, "add", counted)

    async def silent(job: Any) -> None: ...

    mill = lane(db, silent)
    worker = mill.worker(drain=True)
    await asyncio.wait_for(worker.run(), 60)
    assert added == []
    db.execute("update jobs set status = 'queued'")

    async def speaks(job: Any) -> None:
        if job.id <= 20:
            job.log.info("x")

    await drained(lane(db, speaks, concurrency=10))
    assert sum(added) == 20
    assert len(added) <= 5, "in batches"


@pytest.mark.parametrize("told", [False, None])
async def test_a_lane_may_keep_no_logs(db: Db, told: Any, caplog: pytest.LogCaptureFixture) -> None:
    jobs(db)

    async def work(job: Any) -> None:
        job.log.warning("only in the worker's own log")

    if told is False:
        with pytest.raises(DeclarationError, match="keep_logs must be a positive timedelta, not False"):
            lane(db, work, keep_logs=False)
        return
    with caplog.at_level(logging.WARNING, "rowmill.job"):
        await drained(lane(db, work, keep_logs=None))
    assert stored(db) == 0
    assert "only in the worker's own log" in caplog.text


async def test_the_workers_own_log_still_names_the_handlers_line(db: Db, caplog: pytest.LogCaptureFixture) -> None:
    jobs(db)

    async def work(job: Any) -> None:
        job.log.info("here")

    with caplog.at_level(logging.INFO, "rowmill.job"):
        await drained(lane(db, work))
    record: Any = next(record for record in caplog.records if record.message == "here")
    assert (record.funcName, record.filename) == ("work", Path(__file__).name)
    assert record.fields["id"] == 1


# -- bounds


async def test_of_a_run_the_last_lines_are_kept_within_bounds(db: Db) -> None:
    jobs(db, 3)

    async def work(job: Any) -> None:
        if job.id == 1:
            for n in range(LINES + 50):
                job.log.info("line %s", n)
        elif job.id == 2:
            for n in range(100):
                job.log.info("%s %s", n, "word " * 300)
        else:
            job.log.info("begin %s end", "ä " * 5000)
            job.log.info("x" * 10_000_000)

    await drained(lane(db, work))
    many, wide, long = [(await kept(db, n))[0] for n in (1, 2, 3)]
    assert [many["lines"][0]["text"], many["lines"][-1]["text"]] == ["line 50", f"line {LINES + 49}"]
    assert (len(many["lines"]), many["dropped"]) == (LINES, 50)
    size = sum(len(line["text"].encode()) for line in wide["lines"])
    assert RUN_BYTES - LINE_BYTES < size <= RUN_BYTES
    assert wide["lines"][-1]["text"].startswith("99 ")
    assert wide["dropped"] == 100 - len(wide["lines"])
    assert all(len(line["text"].encode()) <= LINE_BYTES for line in long["lines"])
    assert long["lines"][0]["text"].startswith("begin ä")
    assert " … " in long["lines"][0]["text"] or long["lines"][0]["text"].endswith("…")


def test_a_run_that_logs_without_end_holds_no_more_memory_than_its_bound() -> None:
    lines = RunLines()
    for _ in range(10_000):
        lines.add("info", "x" * LINE_BYTES, clean=False)
    held, dropped = lines.all()
    assert sum(len(line.text) for line in held) <= 2 * RUN_BYTES
    assert len(held) + dropped == 10_000


async def test_only_the_last_runs_of_a_row_are_kept(db: Db) -> None:
    jobs(db, 2)

    async def work(job: Any) -> None:
        job.log.info("attempt %s", job.attempt)
        if job.attempt < RUNS + 4 and job.id == 1:
            raise Retry

    await drained(lane(db, work, max_attempts=99))
    runs = await kept(db, 1)
    assert [run["attempt"] for run in runs] == list(range(RUNS + 4, 4, -1))
    assert len(await kept(db, 2)) == 1
    assert stored(db) == RUNS + 1


async def test_old_logs_are_deleted_in_small_batches_also_where_nothing_is_logged_any_more(
    db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_logs, "PRUNE", 10)
    monkeypatch.setattr(run_logs, "MOST", 40)
    jobs(db, 60)

    async def work(job: Any) -> None:
        job.log.info("x")

    await drained(lane(db, work, keep_logs=td(days=3), concurrency=10))
    kept_for = "extract(epoch from min(kept_until - at))" if db.dialect == "postgresql" else (
        "round((julianday(min(kept_until)) - julianday(min(at))) * 86400)")  # fmt: skip
    assert abs(float(db.value(f"select {kept_for} from rowmill_run_logs")) - 3 * 86400) < 60
    database = Database.open(db.url)
    try:
        await RunLogs(database).prune()
        assert stored(db) == 40
        past = "now() - interval '1 second'" if db.dialect == "postgresql" else (
            "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 seconds')")  # fmt: skip
        last = db.value("select max(id) from rowmill_run_logs")
        db.execute(f"update rowmill_run_logs set kept_until = {past} where id < {last - 4}")
        sizes: list[int] = []
        write = database.write

        async def watched(verb: Any, **options: Any) -> Any:
            answer = await write(verb, **options)
            sizes.append(len(answer))
            return answer

        monkeypatch.setattr(database, "write", watched)
        await RunLogs(database).prune()
        assert stored(db) == 5
        assert max(sizes) == 10
    finally:
        await database.close()


async def test_a_worker_prunes_where_nothing_is_logged_any_more(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs(db)

    async def work(job: Any) -> None:
        job.log.info("x")

    await drained(lane(db, work))
    db.execute("update rowmill_run_logs set kept_until = at")
    monkeypatch.setattr("rowmill.engine.counters._WRITE_EVERY", 0.01)
    monkeypatch.setattr("rowmill.engine.counters._PRUNE_EVERY", 0.01)
    mill = lane(db, work)
    async with working(mill):
        await until(lambda: stored(db) == 0)


# -- secrets


async def test_secrets_are_taken_out_also_where_a_long_line_is_cut(db: Db) -> None:
    jobs(db)
    token = "ghp_" + "a1B2c3D4e5F6" * 3

    async def work(job: Any) -> None:
        job.log.info("sent to ann@example.org with password=%s", "hunter22")
        for pad in range(LINE_BYTES // 2 - 60, LINE_BYTES // 2 + 20, 7):  # across the place where a line is cut
            job.log.info('%s"token":"%s"%s', "a b " * (pad // 4), token, " c d" * 400)
        job.log.info('%s "token":"%s', "é " * (4 * LINE_BYTES // 2 - 20), token * 200)
        raise Dead("over")

    await drained(lane(db, work))
    (run,) = await kept(db)
    assert run["lines"][0]["text"] == "sent to [email] with password=[secret]"
    raw = db.value("select lines from rowmill_run_logs")
    assert "hunter22" not in raw
    assert "a1B2" not in raw
    assert "ghp_" not in raw


async def test_a_line_that_cannot_be_formatted_fails_no_run(db: Db) -> None:
    jobs(db)

    class Broken:
        def __str__(self) -> str:
            raise ValueError("cannot be shown")

    async def work(job: Any) -> None:
        job.log.info("%s and %s", 1)
        job.log.info("%s", Broken())
        job.log.info({"not": "text"})
        job.log.info("nul \x00, half \ud800, %")

    logging.getLogger("rowmill.job").disabled = True  # its own handlers print such errors
    try:
        await drained(lane(db, work))
    finally:
        logging.getLogger("rowmill.job").disabled = False
    (run,) = await kept(db)
    assert run["outcome"] == "done"
    assert [line["text"] for line in run["lines"]] == [
        "'%s and %s' (its arguments do not fit)", "'%s' (its arguments do not fit)", "{'not': 'text'}",
        "nul \x00, half ?, %",
    ]  # fmt: skip


# -- the outcome comes first


async def test_no_log_is_written_before_its_outcome_stands(db: Db) -> None:
    """A log that says "done" of a row that is not done would mislead."""
    jobs(db, 0)
    refuse = True

    async def work(job: Any) -> None:
        job.log.info("x")

    mill = lane(db, work)
    worker = mill.worker(worker_id="w-1")
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(worker.started.wait(), 60)
    state = worker.lane_states[0]
    settle, tried = state.store.settle, asyncio.Event()

    async def away(batch: Any) -> Any:
        if refuse:
            tried.set()
            raise Refused("not now")
        return await settle(batch)

    state.store.settle = away  # type: ignore[method-assign]
    add(db)
    worker.environments[0].wake()
    await asyncio.wait_for(tried.wait(), 60)
    assert state.run_logs is not None
    assert not state.run_logs._waiting
    assert state.run_logs._task is None
    refuse = False
    await until(lambda: stored(db) == 1)
    assert db.value("select status from jobs") == "done"
    worker.stop()
    await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("error", [Refused("no right"), Unreachable("away")])
async def test_where_the_log_cannot_be_written_the_outcome_stands_and_one_event_says_so(
    db: Db, error: DatabaseError, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs(db, 20)

    async def no(self: RunLogs, logs: Any, now: float) -> None:
        raise error

    monkeypatch.setattr(RunLogs, "add", no)

    async def work(job: Any) -> None:
        job.log.info("x")

    mill = lane(db, work)
    said = events_of(mill)
    await drained(mill)
    assert db.value("select count(*) from jobs where status = 'done'") == 20
    told = [event for event in said if event.name in ("logs_off", "logs_dropped")]
    assert [event.name for event in told] == ["logs_off" if isinstance(error, Refused) else "logs_dropped"]
    assert isinstance(error, Refused) or told[0].fields["count"] == 20


async def test_logs_that_come_faster_than_they_can_be_written_are_dropped_and_counted_once(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a bound of memory; one event at first, and one at the end."""
    monkeypatch.setattr("rowmill.engine.records.run_log._HELD", 100)
    jobs(lite, 50)

    async def work(job: Any) -> None:
        job.log.info("x" * 20)

    mill = lane(lite, work)
    said = events_of(mill)
    await drained(mill)
    counts = [event.fields["count"] for event in said if event.name == "logs_dropped"]
    assert 1 <= len(counts) <= 2
    assert sum(counts) + stored(lite) == 50
    assert stored(lite) >= 5


async def test_logs_that_are_dropped_after_a_failed_write_leave_their_room_to_others(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowmill.engine.records.background_writer._PAUSE", 0.0)
    monkeypatch.setattr("rowmill.engine.records.background_writer._AGAIN", 0.0)
    monkeypatch.setattr(RunLogWriter, "most", 2)
    database = Database.open(lite.url)
    writer = RunLogWriter(database, Events(), "default")

    def log(text: str) -> None:
        lines = RunLines()
        lines.add("info", text, clean=True)
        claim = SimpleNamespace(lane="jobs", id=1, attempt=1, lines=lines)
        writer.ended(claim, "w", "done", td(days=1))  # type: ignore[arg-type]

    tries: list[int] = []

    async def away(entries: Any, now: float) -> None:
        tries.append(len(entries))
        if len(tries) == 1:
            log("x" * 30)
            log("x" * 40)
            raise Unreachable("away")

    monkeypatch.setattr(writer._table, "add", away)
    monkeypatch.setattr(writer, "prune", AsyncMock())
    log("x" * 10)
    log("x" * 20)
    await until(lambda: len(tries) >= 2 and not writer._waiting and not writer._under_way)
    assert tries == [2, 2]
    assert writer._held == 0
    await writer.close()
    await database.close()


@pytest.mark.bare
async def test_without_the_table_the_work_goes_on_and_it_is_said(pg: Db) -> None:
    jobs(pg)
    pg.execute(
        "revoke create on schema public from public; create role quiet login; grant select, update on jobs to quiet"
    )

    async def work(job: Any) -> None:
        job.log.info("x")

    try:
        mill = lane(Db(pg.url.replace("postgres:", "quiet:", 1)), work)
        said = events_of(mill)
        await drained(mill)
        assert [event.name for event in said].count("logs_off") == 1
        assert pg.value("select status from jobs") == "done"
    finally:
        pg.execute("drop owned by quiet; drop role quiet")


# -- chunks, tasks, processes


async def test_each_row_of_a_chunk_gets_what_the_chunk_logged(db: Db) -> None:
    jobs(db, 4)

    async def work(chunk: list[Any]) -> None:
        for job in chunk:
            job.log.info("looked at")
        if len(chunk) > 1 and any(job.id == 3 for job in chunk):
            raise ValueError("one of them")

    await drained(lane(db, work, chunk=4, max_attempts=1))
    for n in range(1, 5):
        (run,) = await kept(db, n)
        assert {line["id"] for line in run["lines"]} == {"1", "2", "3", "4"}, "in whatever call"
        assert run["outcome"] == "done"


async def test_a_chunk_that_logs_nothing_costs_no_statement(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs(lite, 4)

    async def work(chunk: list[Any]) -> None:
        if any(job.id == 1 for job in chunk):
            chunk[0].log.info("of this chunk alone")

    added: list[str] = []
    monkeypatch.setattr(RunLogs, "add", lambda self, logs, now: noted(added, logs))
    await drained(lane(lite, work, chunk=2, batch=4))
    assert sorted(added) == ["1", "2"]


async def noted(added: list[str], logs: Any) -> None:
    added += [log.row_id for log in logs]


async def test_a_task_keeps_its_log_and_its_queue_may_keep_none(db: Db) -> None:
    mill = Mill(db.url)
    mill.queue("quiet", keep_logs=None)

    @mill.task
    async def report(job: Any, to: str) -> None:
        job.log.info("to %s", to)

    @mill.task(queue="quiet")
    async def other(job: Any) -> None:
        job.log.info("x")

    first = await report.enqueue(to="Ann")
    await other.enqueue()
    await mill.close()
    await drained(mill)
    (run,) = await kept(db, first.id, "default")
    assert texts(run) == [("info", "to Ann")]
    assert stored(db) == 1


ISOLATED = """
import os, threading
from datetime import timedelta
from rowmill import Mill, fixed
from workers import STATES
mill = Mill({url!r})

@mill.lane("jobs", name="jobs", **STATES, max_attempts=1, isolation="process", concurrency=1,
           timeout=timedelta(seconds={timeout}))
def work(job):
    job.log.info("row %s", job.id)
    threads = [threading.Thread(target=job.log.info, args=("x" * 1500,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.log.warning("password=hunter22")
    if job.id == 2:
        os._exit(9)
    if job.id == 3:
        threading.Event().wait()
"""


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("isolated_logs", None)


async def test_a_handler_in_its_own_process_keeps_its_log_also_if_it_dies(db: Db, importable: Path) -> None:
    jobs(db, 3)
    (importable / "isolated_logs.py").write_text(dedent(ISOLATED).format(url=db.url, timeout=4))
    importlib.invalidate_caches()
    await drained(importlib.import_module("isolated_logs").mill)
    for row, outcome in ((1, "done"), (2, "dead"), (3, "dead")):
        (run,) = await kept(db, row)
        assert run["outcome"] == outcome
        assert len(run["lines"]) == 6, row
        assert texts(run)[0] == ("info", f"row {row}")
        assert texts(run)[-1] == ("warning", "password=[secret]")


# -- to be read


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def run_two(db: Db) -> None:
    async def work(job: Any) -> None:
        job.log.info("attempt %s: [b]%s[/b]", job.attempt, "two\nlines")
        if job.attempt == 1:
            raise Retry

    asyncio.run(drained(lane(db, work)))


def test_the_command_shows_the_last_runs_of_a_row(db: Db, command: Command) -> None:
    jobs(db, 2)
    db.execute("update jobs set status = 'done' where id = 2")
    run_two(db)
    command.app(
        db.url, "mill.lane('jobs', name='jobs', ready={'status': 'queued'}, running={'status': 'running'},"
        " done={'status': 'done'})(handler)"
    )  # fmt: skip
    out = command("logs", "1").out
    assert "attempt 2: done (w-1)" in out
    assert "info    attempt 1: [b]two\n   lines[/b]" in out
    assert out.index("attempt 2: done") < out.index("attempt 1: retry")
    document = command.json("logs", "jobs", "1", "--run", "2")
    assert [(run["run"], run["outcome"]) for run in document["runs"]] == [(2, "retry")]
    assert command("logs", "2").code == 4
    none = command("logs", "99")
    assert none.code == 4
    assert "no row of lane 'jobs'" in none.err
    db.execute("delete from jobs where id = 1")
    assert command("logs", "1").code == 0, "of a row that was deleted, too"
