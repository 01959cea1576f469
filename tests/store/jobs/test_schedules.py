"""Schedules as rows of a user's table: each tick once, by what the row says at that moment."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from databases import Db, as_time
from rowmill import DeclarationError, Mill, Snooze, next_tick
from rowmill.engine.cron_scheduler import Scheduler
from rowmill.ops.check import check_mill
from rowmill.ops.directory import LaneDirectory
from rowmill.ops.overview import tasks
from rowmill.ops.questions import health
from rowmill.store.jobs.cron_ticks import Scheduled, Ticks
from rowmill.store.jobs.schedule_rows import ScheduleTable
from rowmill.testing import Kit
from workers import until

td = timedelta


def make(db: Db, more: str = "") -> None:
    args, on = ("jsonb", "true") if db.dialect == "postgresql" else ("text", "1")
    db.execute(
        f"create table schedules (id integer primary key, expression text, tz text, task text, args {args},"
        f" enabled boolean default {on}{more})"
    )


def add(
    db: Db, id: int, expression: str = "0 * * * *", task: str = "report", args: str | None = None, **more: Any
) -> None:
    values = {"id": id, "expression": expression, "task": task, "args": args, **more}
    marks = ", ".join("?" for _ in values)
    db.execute(f"insert into schedules ({', '.join(values)}) values ({marks})", *values.values())


def declared(db: Db, **options: Any) -> Mill:
    mill = Mill(db.url)

    @mill.task
    async def report(to: str = "a@example.org") -> None: ...

    @mill.task
    async def other() -> None: ...

    mill.schedules("schedules", **options)
    return mill


def jobs(db: Db) -> list[tuple[str, Any, str]]:
    rows = db.query("select task, args, run_after from rowmill_jobs order by run_after, id")
    return [(row["task"], str(row["args"]).replace(" ", ""), f"{as_time(row['run_after']):%H:%M}") for row in rows]


class Looks:
    """One worker's scheduler, at times that the test says."""

    def __init__(self, mill: Mill, kit: Kit, begin: str = "2027-03-01T09:30+00:00") -> None:
        self.mill = mill
        self.reported: list[tuple[str, str]] = []
        mill.on_event(lambda event: self._heard(event.name, event.fields))
        database = dict(kit._databases)["default"]
        self.scheduler = Scheduler(database, mill.clock, mill.events, list(mill.tasks.values()), mill.schedule_tables)
        mill.clock.advance(datetime.fromisoformat(begin) - datetime.now(UTC))

    def _heard(self, name: str, fields: dict[str, Any]) -> None:
        if name.startswith("schedule"):
            self.reported.append((str(fields.get("id", fields.get("table"))), str(fields["error"])))

    async def at(self, time: str) -> float:
        now = datetime.now(UTC) + self.mill.clock.shift
        hours, minutes = map(int, time.split(":"))
        self.mill.clock.advance(now.replace(hour=hours, minute=minutes, second=5) - now)
        return await self.scheduler.tick()


async def test_each_tick_of_a_row_is_enqueued_once_with_its_arguments(db: Db) -> None:
    """Issue 23: a row is a cron; the job knows the tick that it is of."""
    make(db)
    mill = declared(db)
    await mill.prepare()
    add(db, 1, args='{"to": "b@example.org"}')
    add(db, 2, "30 10 * * *", "other")
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        for time in ("09:30", "09:59", "10:00", "10:00", "10:20", "10:30", "10:31", "11:00"):
            await looks.at(time)
    to = '{"to":"b@example.org"}'
    assert jobs(db) == [("report", to, "10:00"), ("other", "{}", "10:30"), ("report", to, "11:00")]
    await mill.close()


async def test_what_a_row_says_now_counts(db: Db) -> None:
    """A changed expression counts from its change on; a row that is off or gone is not enqueued."""
    make(db)
    mill = declared(db, missed="all")
    await mill.prepare()
    add(db, 1)
    add(db, 2)
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        await looks.at("09:30")
        db.execute("update schedules set expression = '15 * * * *', args = '{\"to\": \"c\"}' where id = 1")
        db.execute("update schedules set enabled = false where id = 2")
        for time in ("09:45", "10:01", "10:15", "11:14"):
            await looks.at(time)
        assert jobs(db) == [("report", '{"to":"c"}', "10:15")]
        db.execute("update schedules set enabled = true where id = 2")
        await looks.at("12:30")
        await looks.at("13:00")
        db.execute("delete from schedules")
        await looks.at("14:30")
    assert [time for *_, time in jobs(db)] == ["10:15", "11:15", "12:15", "13:00"], (
        "nothing is made up for a row that was off"
    )
    assert db.value("select count(*) from rowmill_crons") == 0
    await mill.close()


async def test_a_row_with_the_id_of_a_deleted_one_counts_from_its_insert(db: Db) -> None:
    make(db)
    mill = declared(db, missed="all")
    await mill.prepare()
    add(db, 1)
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        await looks.at("09:30")
        db.execute("delete from schedules")
        await looks.at("10:30")
        add(db, 1)
        await looks.at("12:30")
        await looks.at("13:00")
    assert [time for *_, time in jobs(db)] == ["13:00"]
    await mill.close()


@pytest.mark.parametrize(
    ("missed", "wanted"), [("skip", []), ("once", ["12:00"]), ("all", ["10:00", "11:00", "12:00"])]
)
async def test_ticks_without_a_worker_are_as_for_crons(db: Db, missed: str, wanted: list[str]) -> None:
    make(db, ", missed text")
    mill = declared(db, roles={"missed": "missed"})
    await mill.prepare()
    add(db, 1, missed=missed)
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        await looks.at("09:30")
        await looks.at("12:30")
    assert [time for *_, time in jobs(db)] == wanted
    await mill.close()


async def test_a_row_that_cannot_be_used_is_reported_once_and_stops_no_other(db: Db) -> None:
    make(db)
    mill = declared(db)
    await mill.prepare()
    add(db, 1, "61 * * * *")
    add(db, 2, tz="Europe/Atlantis")
    add(db, 3, task="reprot")
    add(db, 4, args="[1]")
    add(db, 5, args='{"too": 1}')
    add(db, 6, args='{"to": 1}')
    add(db, 7, expression=None)
    add(db, 8)
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        for time in ("09:30", "10:00", "10:01"):
            await looks.at(time)
        assert [id for id, _ in looks.reported] == ["1", "2", "3", "4", "5", "7"]
        words = [
            "cannot be read",
            "no time zone",
            "no task 'reprot'",
            "must be a JSON object",
            "takes no 'too'",
            "cannot be read",
        ]
        assert all(word in error for word, (_, error) in zip(words, looks.reported, strict=True))
        db.execute("update schedules set expression = '0 * * * *' where id = 1")
        await looks.at("10:30")
        db.execute("update schedules set expression = '99 * * * *' where id = 1")
        await looks.at("10:31")
        assert [id for id, _ in looks.reported][6:] == ["1"]
    assert [time for *_, time in jobs(db)] == ["10:00", "10:00"]
    await mill.close()


async def test_of_two_that_read_the_same_row_one_enqueues_and_none_after_a_change(db: Db) -> None:
    """The statement that enqueues asks the row again: what was read may be old by then."""
    make(db)
    mill = declared(db, missed="all")
    await mill.prepare()
    add(db, 1)
    databases = [(await mill._client.connection()).database for _ in range(2)]
    tables = [ScheduleTable(mill.schedule_tables[0], "default", database) for database in databases]
    ticks = [Ticks(database, mill.clock) for database in databases]

    async def read(n: int) -> Scheduled:
        (row,) = await tables[n].read()
        assert row.cron is not None
        assert row.task is not None
        return Scheduled(row.name, row.cron, row.task, row.args, *tables[n].unchanged(row))

    one, other = [await read(n) for n in range(2)]
    await ticks[0].register([one])
    now, last = await ticks[0].now(None)
    later, since = now + td(hours=3), last[one.name]
    assert [await t.enqueue(s, s.cron, since, later) for t, s in zip(ticks, (one, other), strict=True)] == [3, 0]
    _, last = await ticks[0].now(None)
    for change in ("expression = '1 * * * *'", "enabled = false", 'args = \'{"to": "x"}\'', "task = 'other'"):
        stale = await read(0)
        db.execute(f"update schedules set {change}")
        assert await ticks[0].enqueue(stale, stale.cron, last[one.name], later + td(hours=5)) == 0, change
    fresh = await read(1)
    assert await ticks[1].enqueue(fresh, fresh.cron, last[one.name], later + td(hours=5)) in (5, 6)
    await mill.close()


async def test_columns_may_be_called_otherwise_and_keys_may_be_anything(db: Db) -> None:
    db.execute(
        'create table "My Plans" (tenant text, "no" integer, "when" text, what text, task text,'
        ' primary key (tenant, "no"))'
    )
    mill = Mill(db.url)

    @mill.task
    async def report() -> None: ...

    mill.schedules('"My Plans"', roles={"expression": "when", "task": "what", "enabled": None})
    await mill.prepare()
    db.execute("insert into \"My Plans\" values ('o''neil', 1, '0 * * * *', 'report', 'unused')")
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        for time in ("09:30", "10:00", "10:00"):
            await looks.at(time)
        assert looks.reported == []
    assert len(jobs(db)) == 1
    assert db.value("select name from rowmill_crons") == "My Plans o'neil,1"
    await mill.close()


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        (None, "no table"),
        ("create table schedules (id integer primary key, task text)", "no column has the role expression"),
        ("create table schedules (expression text, task text)", "no primary key"),
    ],
)
async def test_a_table_that_cannot_be_used_is_reported_until_it_can(db: Db, ddl: str | None, words: str) -> None:
    mill = declared(db)
    await mill.prepare()
    if ddl:
        db.execute(ddl)
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        await looks.at("09:30")
        await looks.at("09:31")
        ((_, error),) = looks.reported
        assert words in error
        db.execute("drop table if exists schedules")
        make(db)
        add(db, 1)
        await looks.at("09:32")
        await looks.at("10:00")
        db.execute("alter table schedules rename column expression to cron")
        await looks.at("10:30")
        await looks.at("10:31")
        await looks.at("11:00")
    assert [time for *_, time in jobs(db)] == ["10:00", "11:00"]
    await mill.close()


@pytest.mark.parametrize(
    "options", [{"roles": {"expresion": "x"}}, {"roles": {"task": None}}, {"tz": "x"}, {"missed": "x"}]
)
def test_a_wrong_declaration_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError):
        Mill("sqlite:///x.db").schedules("schedules", **options)


async def test_a_worker_sees_a_new_row_and_a_change_within_seconds(db: Db) -> None:
    """On SQLite the file rings; on PostgreSQL ``mill.wake()`` or any NOTIFY does."""
    make(db)
    mill = declared(db)
    await mill.prepare()
    enqueued: list[Any] = []
    mill.on_event(lambda event: enqueued.append(event.fields["schedule"]) if event.name == "cron_enqueued" else None)
    worker = mill.worker()
    mill.clock.advance(-td(seconds=(datetime.now(UTC) + td(seconds=2)).second))  # to the beginning of a minute
    running = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.started.wait(), 60)
        add(db, 1, "* * * * *")
        await mill.wake()
        await until(lambda: db.value("select count(*) from rowmill_crons") == 1)
        mill.clock.advance(td(minutes=1))
        await mill.wake()
        await until(lambda: enqueued)
        await until(lambda: db.value("select count(*) from rowmill_jobs where state = 'done'") >= 1)
        db.execute("update schedules set enabled = false")
        await mill.wake()
        await until(lambda: db.value("select count(*) from rowmill_crons") == 0)
    finally:
        worker.stop()
        await running
    assert set(enqueued) == {"schedules 1"}
    await mill.close()


async def test_a_worker_enqueues_only_for_its_own_queues(db: Db) -> None:
    make(db)
    mill = declared(db)

    @mill.task(queue="mail")
    async def mail() -> None: ...

    await mill.prepare()
    add(db, 1)
    add(db, 2, task="mail")
    async with Kit(mill) as kit:
        looks = Looks(mill, kit)
        database = dict(kit._databases)["default"]
        looks.scheduler = Scheduler(
            database, mill.clock, mill.events, list(mill.tasks.values()), mill.schedule_tables, served={"mail"}
        )
        await looks.at("09:30")
        await looks.at("10:00")
        assert looks.reported == []
    assert [task for task, *_ in jobs(db)] == ["mail"]
    await mill.close()


async def test_operators_see_schedules_with_their_next_tick_and_their_problems(db: Db) -> None:
    make(db)
    mill = declared(db, tz="America/Montreal")
    await mill.prepare()
    add(db, 1)
    add(db, 2, "61 * * * *")
    add(db, 3, enabled=False)
    async with Kit(mill) as kit:
        await kit.tick()
    checked, _ = await check_mill(mill)
    findings = [finding for each in checked for finding in each.findings if finding.code == "schedule"]
    assert [finding.level for finding in findings] == ["warning"]
    assert "row 2, is not enqueued" in findings[0].text
    async with LaneDirectory(mill) as directory:
        told = (await health(directory))["environments"][0]["findings"]
        assert [(f["level"], "row 2" in f["told"]) for f in told if f["check"] == "schedules"] == [("bad", True)]
        shown = (await tasks(directory))["environments"][0]["schedules"]
        assert [(row["id"], row["enabled"], row["next_tick"] is not None) for row in shown] == [
            ("1", True, True), ("2", True, False), ("3", False, False),
        ]  # fmt: skip
        assert shown[0]["tz"] == "America/Montreal"
        hidden = directory.narrowed(sees=lambda lane: lane == "mail")
        assert (await tasks(hidden))["environments"][0]["schedules"] == []
    db.execute("drop table schedules")
    checked, _ = await check_mill(mill)
    assert [f.level for each in checked for f in each.findings if f.code == "schedules"] == ["error"]
    await mill.close()


async def test_a_lane_that_snoozes_to_the_next_tick_runs_once_a_tick(db: Db) -> None:
    """A row with its own cron: a few lines of a handler."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table feeds (id integer primary key, status text default 'ready', worker text, claimed_at {time},"
        f" run_after {time}, cron text)"
    )
    db.execute("insert into feeds (id, cron) values (1, '0 * * * *')")
    mill, ran = Mill(db.url), list[int]()

    @mill.lane("feeds", **{state: {"status": state} for state in ("ready", "running", "done", "dead")})
    async def feed(job: Any) -> Snooze:
        ran.append(job.id)
        return Snooze(until=next_tick(job["cron"], after=job["run_after"]))

    async with Kit(mill) as kit:
        assert (await kit.step()) is not None
        assert (await kit.step()) is None
        due = as_time(db.value("select run_after from feeds"))
        assert (due.minute, due.second) == (0, 0)
        mill.clock.advance(due - datetime.now(UTC) + td(seconds=1))
        assert (await kit.step()) is not None
    assert ran == [1, 1]


def test_a_snooze_is_until_a_time_or_for_a_time() -> None:
    with pytest.raises(TypeError):
        Snooze()
    with pytest.raises(TypeError):
        Snooze(td(1), until=datetime.now(UTC))
    with pytest.raises(TypeError, match="time zone"):
        Snooze(until=datetime(2027, 1, 1))
    with pytest.raises(DeclarationError):
        next_tick("61 * * * *")
    moment = datetime(2126, 3, 1, 10, 0, tzinfo=UTC)
    assert next_tick("0 * * * *", after=moment) == moment + td(hours=1)
