"""Failures on record and in families: what is written down, how it is grouped, and what is done to one family alone."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from farm import JOBS
from rowmill import Cancel, Dead, Mill, Retry, Snooze, fixed
from rowmill.engine.counters import users_traceback
from rowmill.engine.records import background_writer
from rowmill.engine.records.failure_log import FailureLog
from rowmill.errors import Busy
from rowmill.events import Events
from rowmill.store import Database
from rowmill.store.inspect import failure_families
from rowmill.store.inspect.failure_families import errors
from rowmill.store.inspect.lane_view import view_lane
from rowmill.store.own import failures as store_failures
from rowmill.store.own import schema
from rowmill.store.own.failures import Failure, Failures
from rowmill.store.own.fingerprint import fingerprint, shape

STATES: dict[str, Any] = {
    "ready": {"status": "queued"}, "running": {"status": "running"}, "done": {"status": "done"},
    "dead": {"status": "dead"}, "canceled": {"status": "off"}, "max_attempts": 2, "backoff": fixed(td(0)),
}  # fmt: skip
LANE = (
    "mill.lane('jobs', name='jobs', ready={'status': 'queued'}, running={'status': 'running'}, done={'status': 'done'},"
    " dead={'status': 'dead'}, canceled={'status': 'off'}, max_attempts=2)(handler)"
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def jobs(db: Db, *notes: str) -> None:
    db.execute(JOBS[db.dialect])
    for note in notes:
        db.execute("insert into jobs (note) values (?)", note)


def failing(db: Db, **options: Any) -> Mill:
    """A lane whose rows say in their note how they end."""
    mill = Mill(db.url)

    @mill.lane("jobs", name="jobs", **{**STATES, **options})
    async def work(job: Any) -> None:
        match job["note"]:
            case "forbidden":
                raise Dead(f"forbidden for customer {job.id}")
            case "flaky":
                raise ConnectionError(f"no answer from 10.0.0.{job.id}")
            case "recovers" if job.attempt == 1:
                raise Retry("busy")
            case "other" if job.attempt == 1:
                raise ConnectionError(f"no answer from 10.0.0.{job.id}")
            case "other":
                raise ValueError("something else")
            case "unwanted":
                raise Cancel("no longer wanted")
            case "later":
                raise Snooze(td(days=1))

    return mill


async def recorded(db: Db, **options: Any) -> Any:
    database = Database.open(db.url)
    mill = failing(db)
    try:
        view = await view_lane(mill.lanes["jobs"], "default", database, mill.clock)
        return await errors([view], **options)
    finally:
        await database.close()


async def test_every_run_that_does_not_end_well_is_on_record(db: Db) -> None:
    """C11, D10: with lane, row, attempt, worker, time, outcome, class, message and traceback."""
    jobs(db, "fine", "forbidden", "flaky", "recovers", "unwanted")
    await failing(db).worker(drain=True, worker_id="w-1").run()
    rows = db.query("select * from rowmill_failures order by row_id, id")
    assert [(r["row_id"], r["attempt"], r["outcome"], r["class"]) for r in rows] == [
        ("2", 1, "dead", "permanent"),
        ("3", 1, "retry", "transient"),
        ("3", 2, "dead", "transient"),
        ("4", 1, "retry", "transient"),
        ("5", 1, "canceled", None),
    ]
    assert {(r["lane"], r["worker"]) for r in rows} == {("jobs", "w-1")}
    assert rows[0]["message"] == db.value("select error from jobs where id = 2")
    assert "in work" in rows[1]["traceback"]
    assert "ConnectionError" in rows[1]["traceback"]
    later = "extract(epoch from now() - max(at))" if db.dialect == "postgresql" else (
        "(julianday('now') - julianday(max(at))) * 86400")  # fmt: skip
    assert 0 <= db.value(f"select {later} from rowmill_failures") < 60, "the database's time"


async def test_rows_that_are_taken_back_are_on_record_and_poison_is_a_class(db: Db) -> None:
    """B7, D3: a sweep names the holder from which it took the row."""
    jobs(db, "fine", "fine")
    db.execute("update jobs set status = 'running', worker = 'gone', claimed_at = '2020-01-01 00:00:00Z',"
               " heartbeat_at = '2020-01-01 00:00:00Z', attempts = case id when 1 then 9 else 1 end")  # fmt: skip
    await failing(db, max_reclaims=0, lease=td(seconds=5)).worker(drain=True).run()
    rows = db.query("select row_id, worker, outcome, class from rowmill_failures order by row_id")
    assert [tuple(r.values()) for r in rows] == [("1", "gone", "dead", "poison"), ("2", "gone", "swept", "transient")]
    (family,) = [f for f in (await recorded(db)).families if f.word == "poison"]
    assert family.unrecorded == 0, "what stands in the row is the family that is on record"


async def test_what_goes_well_costs_the_log_nothing(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: no statement, no task, not even a word of it."""
    told: list[Any] = []
    monkeypatch.setattr(FailureLog, "_add", lambda self, *entry: told.append(entry))
    jobs(lite, *["fine"] * 30, "later")
    await failing(lite).worker(drain=True).run()
    assert lite.value("select count(*) from jobs where status = 'done'") == 30
    assert told == []


async def test_failures_that_say_the_same_are_one_family(db: Db) -> None:
    """D10: counted over time, with the first and the last, a class and an example."""
    jobs(db, "flaky", "flaky", "forbidden", "fine")
    await failing(db).worker(drain=True).run()
    found = await recorded(db, hours=6, buckets=6)
    assert found.recorded
    assert found.unknown == []
    by_shape = {family.shape: family for family in found.families}
    flaky = by_shape["ConnectionError: no answer from <address>"]
    assert (flaky.count, flaky.rows, flaky.word, flaky.unrecorded) == (4, 2, "transient", 0)
    assert flaky.buckets == [0, 0, 0, 0, 0, 4]
    assert flaky.first_seen is not None
    assert flaky.last_seen is not None
    assert flaky.first_seen <= flaky.last_seen
    assert flaky.example["row_id"] in ("1", "2")
    assert "Traceback" in flaky.example["traceback"]
    assert by_shape["forbidden for customer <n>"].fingerprint == fingerprint("forbidden for customer 7")
    past = "now() - interval '3 hours'" if db.dialect == "postgresql" else (
        "strftime('%Y-%m-%d %H:%M:%f', 'now', '-3 hours')")  # fmt: skip
    db.execute(f"update rowmill_failures set at = {past} where fingerprint = '{flaky.fingerprint}' and row_id = '1'")
    (moved,) = [f for f in (await recorded(db, hours=6, buckets=6)).families if f.fingerprint == flaky.fingerprint]
    assert moved.buckets == [0, 0, 2, 0, 0, 2]
    (recent,) = [f for f in (await recorded(db, hours=1)).families if f.fingerprint == flaky.fingerprint]
    assert recent.count == 2


async def test_rows_that_died_before_there_was_a_record_show_their_failure_themselves(db: Db) -> None:
    """D10: a sample of them, in the same families; also where rowmill has no table at all."""
    jobs(db, "a", "b", "c")
    db.execute("update jobs set status = 'dead', error = 'forbidden for customer ' || id where id < 3")
    bare = await recorded(db)
    assert not bare.recorded
    (family,) = bare.families
    assert (family.count, family.unrecorded, family.example["message"][:22]) == (0, 2, "forbidden for customer")
    db.execute("update jobs set note = 'forbidden' where id = 3")
    await failing(db).worker(drain=True).run()
    (family,) = (await recorded(db)).families
    assert (family.count, family.unrecorded) == (1, 2), "one on record, two that are not"


async def test_a_family_tells_how_many_of_its_rows_are_dead_now(db: Db, command: Command) -> None:
    """D10: failures are the past; what is left to retry is what is dead now."""
    jobs(db, "flaky", "flaky", "forbidden")
    await failing(db).worker(drain=True).run()
    db.execute("update jobs set status = 'done' where id = 2")
    by_shape = {family.shape: family.dead for family in (await recorded(db)).families}
    assert by_shape == {"ConnectionError: no answer from <address>": 1, "forbidden for customer <n>": 1}
    command.app(db.url, LANE)
    shown = _in_thread(command, "errors").out
    assert "Dead now" in shown
    assert "No failures" not in shown


async def test_on_a_narrow_terminal_the_text_of_a_family_stands_below_its_numbers(lite: Db, command: Command) -> None:
    """D10: names of lanes and families stay whole, so that they can be copied."""
    jobs(lite, "flaky", "forbidden")
    await failing(lite).worker(drain=True).run()
    command.app(lite.url, LANE)
    command.terminal(80)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in _in_thread(command, "errors").out.splitlines()]
    assert max(map(len, lines)) <= 80
    (at,) = [n for n, line in enumerate(lines) if line == "  ConnectionError: no answer from <address>"]
    assert re.match(r"jobs  [0-9a-f]{12}  transient +\d+ +1 +1 +\d+ s ago$", lines[at - 1]), lines
    assert "No failures." not in lines


async def test_no_failures_is_said_only_where_there_are_none(lite: Db, command: Command) -> None:
    jobs(lite, "fine")
    await failing(lite).worker(drain=True).run()
    command.app(lite.url, LANE)
    assert _in_thread(command, "errors").out.strip() == "No failures."
    unknown = _in_thread(command, "errors", "--error", "nope")
    assert (unknown.out, unknown.code) == ("", 4)
    assert "no failures of the family 'nope'" in unknown.err


async def test_dead_now_is_a_lower_bound_where_not_all_dead_rows_were_read(
    db: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: also the family that the sample does not hold, or holds only in part, may have more."""
    jobs(db, "flaky", "flaky", "forbidden")
    await failing(db).worker(drain=True).run()
    assert not any(family.dead_at_least for family in (await recorded(db)).families)
    monkeypatch.setattr(failure_families, "SAMPLE", 2)
    families = (await recorded(db)).families
    assert [family.dead_at_least for family in families] == [True, True]
    assert sum(family.dead or 0 for family in families) == 2, "one row was not read"
    command.app(db.url, LANE)
    shown = _in_thread(command, "errors").out
    assert "+" in shown
    assert "at least this many; only" in shown


async def test_a_stored_traceback_begins_in_the_users_code(db: Db) -> None:
    """D10: the engine's own call of the handler is the same for every failure, and nobody's business."""
    jobs(db, "flaky")
    await failing(db).worker(drain=True).run()
    stored = db.value("select traceback from rowmill_failures limit 1")
    assert "test_failures.py" in stored
    assert "rowmill/engine" not in stored
    assert stored.startswith("Traceback (most recent call last):")


def test_a_traceback_keeps_every_frame_after_the_first_of_the_user() -> None:
    """D10: also what the user called, and what caused it; one of the engine alone stays whole."""

    def handler() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no page") from error

    with ThreadPoolExecutor(1) as pool:
        shown = users_traceback(pool.submit(handler).exception()) or ""
        of_library = users_traceback(pool.submit(json.loads, "{").exception()) or ""
    assert "json/decoder.py" in shown
    assert shown.count("test_failures.py") == 2
    assert "thread.py" not in shown
    assert shown.endswith("RuntimeError: no page\n")
    assert "json/decoder.py" in of_library
    assert users_traceback(ValueError("never raised")) is None


async def test_a_family_is_retried_and_no_other_row(db: Db, command: Command) -> None:
    """D10: by its latest failure: a row that failed this way once and died of something else is not of it."""
    jobs(db, "flaky", "other", "forbidden", "flaky", "fine")
    db.execute(
        "insert into jobs (note, status, error) values ('old', 'dead', 'ConnectionError: no answer from 10.9.9.9')"
    )
    await failing(db).worker(drain=True).run()
    command.app(db.url, LANE)
    document = _in_thread(command.json, "errors")
    (place,) = document["environments"]
    family = next(f for f in place["families"] if "no answer" in f["shape"])
    assert (family["count"], family["rows"], family["unrecorded"]) == (5, 3, 1)
    done = _in_thread(command.json, "retry", "--error", family["fingerprint"])
    assert done["count"] == 3
    assert [r["id"] for r in db.query("select id from jobs where status = 'queued' order by id")] == [1, 4, 6]
    again = _in_thread(command, "retry", "--error", family["fingerprint"])
    assert again.code == 4, "none of them is dead now"
    assert _in_thread(command, "retry", "--error", "nosuchfamily").code == 4


async def test_a_family_is_buried_and_no_other_row(db: Db, command: Command) -> None:
    """D10: rows that wait to be tried again are not; also more of them than one statement takes."""
    jobs(db, *["flaky"] * 3, "recovers")
    mill = failing(db, backoff=fixed(td(hours=1)))
    async with _stopped_when(mill, db, "select count(*) from jobs where status = 'queued' and error is not null", 4):
        pass
    command.app(db.url, LANE)
    family = fingerprint("ConnectionError: no answer from 10.0.0.1")
    assert _in_thread(command.json, "cancel", "--error", family)["count"] == 3
    assert Counter(r["status"] for r in db.query("select status from jobs")) == {"off": 3, "queued": 1}


async def test_many_rows_of_a_family_are_not_changed_by_a_slip_of_the_hand(lite: Db, command: Command) -> None:
    """D10: more than a hundred need a word of consent; those that have gone on since do not count."""
    jobs(lite)
    lite.execute(
        "insert into jobs (status, error)"
        " with recursive n(i) as (select 1 union all select i + 1 from n where i < 1500)"
        " select 'dead', 'forbidden for customer ' || i from n"
    )
    command.app(lite.url, LANE)
    family = fingerprint("forbidden for customer 1")
    refused = _in_thread(command, "retry", "--error", family)
    assert refused.code == 1
    assert "more than 100 rows" in refused.err
    assert "--yes" in refused.err
    assert _in_thread(command.json, "retry", "--error", family, "--yes")["count"] == 1500


async def test_what_is_old_or_too_much_is_forgotten(db: Db) -> None:
    """C11: by age and by number, without counting."""
    database = Database.open(db.url)
    await prepare(db)
    log = Failures(database)
    made = [Failure("jobs", str(n), 1, "w", "dead", "permanent", "x", ago=n * 86400.0) for n in range(10)]
    await log.add(made)
    await log.prune(days=7.5)
    assert db.value("select count(*) from rowmill_failures") == 8
    await log.prune(most=3)
    assert db.value("select count(*) from rowmill_failures") == 3
    await database.close()


async def test_a_hostile_message_is_kept_as_it_can_be(db: Db) -> None:
    """C11: whatever a handler raises: no NUL, no lone surrogate, no end."""
    database = Database.open(db.url)
    await prepare(db)
    said = "a\x00b\ud800'\"\\{}%s $1 ?" + "é" * 5000
    await Failures(database).add([Failure("jobs", "1", 1, None, "dead", None, said, "trace\x00" + "x" * 9000)])
    row = db.one("select message, traceback from rowmill_failures")
    assert row["message"].startswith("a\\x00b?'\"\\{}%s $1 ?é")
    assert len(row["message"]) == 2000
    assert len(row["traceback"]) == 4000
    (told,) = await Failures(database).of_row("jobs", "1")
    assert told["outcome"] == "dead"
    await database.close()


@pytest.mark.local("it gives a role rights in the schema public")
async def test_where_the_table_may_not_be_made_the_work_goes_on_and_it_is_said(pg: Db) -> None:
    """C11: a role with no more rights than the lane needs; also one that lost the right to write the log."""
    jobs(pg, "forbidden", "forbidden")
    pg.execute(
        "revoke create on schema public from public; create role lowly_log login;"
        "grant select, update on jobs to lowly_log"
    )
    try:
        said: list[Any] = []
        mill = failing(Db(pg.url.replace("postgres:", "lowly_log:", 1)))
        mill.on_event(said.append)
        tally = await mill.worker(drain=True).run()
        assert tally.died == 2
        assert next(e.fields["error"] for e in said if e.name == "failures_off").startswith("permission denied")
        pg.execute("update jobs set status = 'queued'")
        await prepare(pg)
        pg.execute("grant select, insert, update, delete on all tables in schema public to lowly_log;"
                   " revoke insert on rowmill_failures from lowly_log")  # fmt: skip
        said.clear()
        assert (await mill.worker(drain=True).run()).died == 2
        assert [e.name for e in said].count("failures_off") == 1
    finally:
        pg.execute("drop owned by lowly_log; drop role lowly_log")


async def test_questions_about_a_family_use_an_index(pg: Db) -> None:
    """D10: cheap with the log full, and with millions of rows in the lane."""
    jobs(pg)
    await prepare(pg)
    pg.execute(
        "insert into rowmill_failures (at, lane, row_id, attempt, outcome, class, fingerprint, message)"
        " select now() - n * interval '1 second', 'jobs', n, 1, 'dead', 'permanent', 'family-' || n % 100, 'x'"
        " from generate_series(1, 20000) n"
    )
    pg.execute("analyze rowmill_failures")
    database = Database.open(pg.url)
    log = Failures(database)
    texts: list[tuple[str, Any]] = []
    real = log._read

    async def spy(text: str, values: Any) -> Any:
        texts.append((text, values))
        return await real(text, values)

    log._read = spy  # type: ignore[method-assign]
    assert len(await log.members("jobs", "family-7")) == 200
    assert len(await log.of_row("jobs", "7")) == 1
    assert await log.recorded(["jobs"], ["7", "x"]) == {"7"}
    await database.close()
    for text, values in texts:
        for number, value in enumerate(values, 1):
            given = "{" + ",".join(value) + "}" if isinstance(value, list) else value
            text = text.replace(f"${number}", f"'{given}'")
        plan = json.dumps(pg.query("explain (format json) " + text)[0]["QUERY PLAN"])
        assert "rowmill_failures_family" in plan or "rowmill_failures_row" in plan, text


# -- what these tests need


async def prepare(db: Db) -> None:
    mill = failing(db)
    await mill.prepare()
    await mill.close()


def _in_thread(work: Any, *words: str) -> Any:
    """A command has an event loop of its own, and a test has one already."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *words).result()


def _stopped_when(mill: Mill, db: Db, question: str, answer: int) -> Any:
    """A worker that works until the database answers so."""
    import asyncio
    import time
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def work() -> Any:
        worker = mill.worker()
        task = asyncio.create_task(worker.run())
        deadline = time.monotonic() + 60
        while db.value(question) != answer:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        worker.stop()
        await asyncio.wait_for(task, 60)
        yield

    return work()


async def test_a_flood_is_put_into_words_beside_the_loop_and_what_is_lost_at_the_end_is_told(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: a long message takes milliseconds to be told from others; a worker's loop has its runs to serve."""
    where: set[bool] = set()

    def told(text: str | None) -> str:
        where.add(threading.current_thread() is threading.main_thread())
        return fingerprint(text)

    monkeypatch.setattr(store_failures, "fingerprint", told)
    jobs(lite, *["flaky"] * 40)
    await failing(lite).worker(drain=True).run()
    assert where == {False}
    assert lite.value("select count(*) from rowmill_failures") == 80

    async def stands(self: Failures, failures: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(Failures, "add", stands)
    monkeypatch.setattr(background_writer, "_LAST", 0.2)
    lite.execute("update jobs set status = 'queued', attempts = 0")
    events: list[Any] = []
    mill = failing(lite)
    mill.on_event(events.append)
    await mill.worker(drain=True).run()
    assert sum(event.fields["count"] for event in events if event.name == "failures_dropped") == 80


async def test_what_was_written_down_is_not_written_again_when_nothing_can_be_pruned(
    lite: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: a database that is busy for a moment makes no failure count twice."""

    async def busy(self: Failures) -> None:
        raise Busy("locked")

    jobs(lite)
    database = Database.open(lite.url)
    await schema.ensure(database)
    monkeypatch.setattr(Failures, "prune", busy)
    log = FailureLog(database, Events(), "default")
    log._add_failure(Failure("jobs", "1", 1, "w", "retry", "transient", "no answer"), None)
    for _ in range(500):
        if lite.value("select count(*) from rowmill_failures"):
            break
        await asyncio.sleep(0.02)
    await asyncio.sleep(0)
    await log.close()
    await database.close()
    assert lite.value("select count(*) from rowmill_failures") == 1


def test_a_long_word_without_an_address_is_quickly_told_from_others() -> None:
    """D10: text without an address is not searched for one from each of its letters on."""

    def took(text: str) -> float:
        began = time.process_time()
        for _ in range(50):
            fingerprint(text)
        return time.process_time() - began

    plain, addressed = (min(took(text) for _ in range(3)) for text in ("x" * 3900, "x" * 3900 + " a@b.example"))
    assert plain < addressed / 2
    assert shape("from ann%40example.org and bob@example.org") == "from <email> and <email>"
