"""Any table: orders, time columns, models, partitions, and columns that are narrower than one would like."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from databases import Db, as_time
from rowmill import Cancel, Dead, Mill, Retry, Snooze
from rowmill.engine.execute import decide
from rowmill.testing import Kit
from rows import after, empty, whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


async def never(job: Any) -> None:
    raise AssertionError("no handler runs here: claims are settled by hand")


def table(db: Db, columns: str, name: str = "jobs") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    columns = f"id integer primary key, status text not null default 'ready', {columns}"
    db.execute(f"create table {name} ({columns.replace('$time', time)})")


def lane(db: Db, table: Any = "jobs", handler: Any = never, **options: Any) -> Mill:
    mill = Mill(db.url)
    mill.lane(table, name="lane", **STATES | options)(handler)
    return mill


async def order_of(mill: Mill, rows: int) -> list[Any]:
    """The order in which rows are taken: one after the other, and again all at once; the two must agree."""
    async with Kit(mill) as kit:
        claims = [(await kit.claim())[0] for _ in range(rows)]
        for claim in claims:
            await kit.settle(claim, Snooze(td(0)))
        at_once = [claim.id for claim in await kit.claim(count=rows)]
        assert at_once == [claim.id for claim in claims]
        return at_once


ORDERS: dict[str, tuple[Any, list[tuple[Any, Any]], list[int]]] = {
    "up": (["a"], [(3, 0), (1, 0), (2, 0)], [2, 3, 1]),
    "down": (["a desc"], [(3, 0), (1, 0), (2, 0)], [1, 3, 2]),
    "down with a minus": ("-a", [(3, 0), (1, 0), (2, 0)], [1, 3, 2]),
    "in one text": ("a desc, b", [(1, 9), (2, 2), (2, 1)], [3, 2, 1]),
    "key last": (["a"], [(1, 0), (1, 0), (0, 0)], [3, 1, 2]),
    "null last": (["a"], [(None, 0), (2, 0), (1, 0)], [3, 2, 1]),
    "null last, down": (["a desc"], [(None, 0), (1, 0), (2, 0)], [3, 2, 1]),
    "null in the second column": (["a", "b"], [(2, 1), (1, None), (1, 5)], [3, 2, 1]),
    "null in the first or the second": (["a", "b"], [(None, 1), (1, None), (None, None)], [2, 1, 3]),
    "null in the second, down": (["a", "b desc"], [(1, None), (1, 5), (1, 7)], [3, 2, 1]),
    "one up, one down": (["a", "b desc"], [(2, 1), (1, 1), (1, 2)], [3, 2, 1]),
}


@pytest.mark.parametrize("order", ORDERS)
async def test_rows_are_taken_in_the_lanes_order_with_null_last(db: Db, order: str) -> None:
    """A3, E2; issue: a NULL in order_by goes last on both databases, whichever way the order goes."""
    order_by, rows, taken = ORDERS[order]
    table(db, "worker text, claimed_at $time, a integer, b integer")
    db.insert("jobs", [{"id": i, "a": a, "b": b} for i, (a, b) in enumerate(rows, 1)])
    assert await order_of(lane(db, order_by=order_by), len(rows)) == taken


async def test_a_priority_column_goes_before_the_order(db: Db) -> None:
    """Issue, claim: order is the priority column where there is one, then order_by, then the key."""
    table(db, "worker text, claimed_at $time, priority integer, created_at $time")
    now = datetime.now(UTC)
    rows = [(5, 0), (1, 0), (None, 5), (1, 9)]
    db.insert("jobs", [{"id": i, "priority": p, "created_at": now - td(hours=h)} for i, (p, h) in enumerate(rows, 1)])
    assert await order_of(lane(db), 4) == [4, 2, 1, 3]
    db.execute("update jobs set status = 'ready'")
    assert await order_of(lane(db, roles={"priority": None}), 4) == [4, 3, 1, 2]


# -- time

WITHOUT_ZONE = (
    "worker text, claimed_at timestamp, heartbeat_at timestamp, attempts integer default 0,"
    " run_after timestamp, error text, finished_at timestamp, updated_at timestamp"
)


@pytest.mark.parametrize("session", ["UTC", "America/Montreal"])
async def test_times_without_a_zone_are_utc_whatever_the_sessions_zone(pg: Db, session: str) -> None:
    """DESIGN: columns without a time zone are UTC."""
    table(pg, WITHOUT_ZONE)
    pg.execute("insert into jobs (id) values (1), (2)")
    mill = lane(pg, untouched_for=td(seconds=30))
    mill._given = f"{pg.url}&timezone={session}"
    async with Kit(mill) as kit:
        first, second = await kit.claim(count=2)
        row = whole(pg, "jobs", 1)
        assert (row["claimed_at"], row["heartbeat_at"], row["updated_at"]) == (after(td(0)),) * 3
        assert len(await (await kit.store()).renew([first, second])) == 2
        assert (await kit.settle(first, Retry(after=td(minutes=10)))).written
        assert whole(pg, "jobs", 1)["run_after"] == after(td(minutes=10))
        kit.advance(td(minutes=6))
        assert [s.id for s in await kit.sweep()] == [2]
        assert await kit.claim() == []  # touched a moment ago, or not due
        kit.advance(td(minutes=5))
        assert sorted(c.id for c in await kit.claim(count=2)) == [1, 2]


#: SQLite's ways to keep a time: the column's type, and a moment as an application writes it there.
SQLITE_TIMES: dict[str, tuple[str, Any]] = {
    "datetime": ("datetime", lambda t: t.strftime("%Y-%m-%d %H:%M:%S")),
    "timestamp": ("timestamp", lambda t: t.strftime("%Y-%m-%d %H:%M:%S.%f")),
    "text with T and Z": ("text", lambda t: t.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"),
    "text with an offset": ("text", lambda t: t.astimezone(UTC).isoformat()),
    "integer seconds": ("integer", lambda t: int(t.timestamp())),
    "real seconds": ("real", lambda t: t.timestamp()),
}


@pytest.mark.parametrize("kind", SQLITE_TIMES)
async def test_sqlite_times_are_read_and_written_in_the_columns_own_form(lite: Db, kind: str) -> None:
    """DESIGN: time is the database's; TEXT, INTEGER and REAL columns alike."""
    of, form = SQLITE_TIMES[kind]
    names = ("claimed_at", "heartbeat_at", "run_after", "finished_at", "updated_at", "created_at")
    table(lite, "worker text, attempts integer default 0, " + ", ".join(f"{name} {of}" for name in names))
    now = datetime.now(UTC)
    for i, (due, born) in enumerate([(now + td(minutes=2), 3), (now - td(minutes=2), 2), (now - td(hours=3), 1)], 1):
        times = {"run_after": form(due), "created_at": form(now - td(hours=born)), "updated_at": form(now - td(days=1))}
        lite.insert("jobs", [{"id": i} | times])
    async with Kit(lane(lite, untouched_for=td(seconds=30), order_by=["-created_at"])) as kit:
        later, sooner = await kit.claim(count=9)
        assert (later.id, sooner.id) == (3, 2)
        row = whole(lite, "jobs", 3)
        assert [type(row[n]) for n in names] == [type(form(now))] * 3 + [type(None)] + [type(form(now))] * 2
        assert as_time(row["claimed_at"]) == after(td(0))
        assert len(await (await kit.store()).renew([later, sooner])) == 2
        assert (await kit.settle(later, Retry(after=td(minutes=10)))).written
        assert as_time(whole(lite, "jobs", 3)["run_after"]) == after(td(minutes=10))
        kit.advance(td(minutes=3))
        (due,) = await kit.claim(count=9)
        assert due.id == 1
        assert (await kit.settle(due)).written
        assert as_time(whole(lite, "jobs", 1)["finished_at"]) == after(td(minutes=3))
        kit.advance(td(minutes=3))
        assert [s.id for s in await kit.sweep()] == [2]
        kit.advance(td(minutes=5))
        assert sorted(c.id for c in await kit.claim(count=9)) == [2, 3]


# -- models


class Mood(enum.Enum):
    """Names and values differ, as they may."""

    ready = "R"
    running = "U"
    done = "D"
    dead = "X"


class Moment(sa.types.TypeDecorator[datetime]):
    """A user's own type: always aware."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class Name(sa.types.TypeDecorator[str]):
    """A user's own type: text, by another name."""

    impl = sa.String(50)
    cache_ok = True


class Base(DeclarativeBase):
    pass


class Link(Base):
    __tablename__ = "Links"
    id: Mapped[UUID] = mapped_column(sa.Uuid, primary_key=True, default=uuid4)
    mood: Mapped[Mood] = mapped_column(sa.Enum(Mood), default=Mood.ready)
    locked_by: Mapped[str | None]
    locked_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    heartbeat_at: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))
    attempts: Mapped[int] = mapped_column(default=0)
    ref: Mapped[UUID | None] = mapped_column(sa.Uuid)
    feeling: Mapped[Mood | None] = mapped_column(
        sa.Enum(Mood, name="feeling", values_callable=lambda e: [m.value for m in e])
    )
    info: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON)


def made(db: Db, count: int) -> None:
    """The model's table as its owner would have made it, with rows in it."""
    ddl: list[str] = []
    engine = sa.create_mock_engine(
        f"{db.dialect}://", lambda sql, *_: ddl.append(str(sql.compile(dialect=engine.dialect)))
    )
    Base.metadata.create_all(engine, checkfirst=False)
    db.execute(";\n".join(ddl))
    rows = [{"id": UUID(int=i), "mood": "ready", "feeling": "R", "attempts": 0} for i in range(1, count + 1)]
    db.insert("Links", rows)


@pytest.mark.parametrize("given", ["model", "table"])
@pytest.mark.parametrize("spelled", ["members", "names"])
async def test_a_lane_may_be_declared_over_a_model_with_its_own_types(db: Db, given: str, spelled: str) -> None:
    """Issue, declaration: SQLAlchemy Table or ORM model; Python enums, decorated types and UUIDs as its owner has."""
    made(db, 3)

    async def handle(job: Any) -> dict[str, Any]:
        assert isinstance(job.id, UUID)
        assert job["mood"] is Mood.running
        assert job["feeling"] is Mood.ready
        return {"ref": job.id, "feeling": Mood.done, "info": {"seen": True}}

    states = {s: {"mood": m if spelled == "members" else m.name} for s, m in zip(STATES, Mood, strict=True)}
    mill = Mill(db.url)
    mill.lane(Link if given == "model" else Link.__table__, name="links", **states)(handle)
    async with Kit(mill) as kit:
        store = await kit.store()
        stepped = await kit.step()
        assert (stepped.outcome, stepped.id) == ("done", UUID(int=1))
        (claim,) = await kit.claim()
        settlement = decide(store, claim, Dead("no"))
        await store.settle([settlement])
        settlement.reply_lost = True
        assert (await store.settle([settlement])).written
        await kit.claim()
        kit.advance(td(minutes=6))
        assert len(await kit.sweep()) == 1
    rows = db.query('select mood, feeling, ref, info from "Links" order by id')
    assert [r["mood"] for r in rows] == ["done", "dead", "ready"]
    assert rows[0]["feeling"] == "D"
    assert rows[0]["ref"] == (UUID(int=1) if db.dialect == "postgresql" else UUID(int=1).hex)


async def test_states_by_members_of_an_enum_stored_by_value_are_written_as_the_model_would(db: Db) -> None:
    """Issue, declaration: an Enum with values_callable keeps the members' values, not their names."""
    made(db, 1)
    states = {s: {"feeling": m} for s, m in zip(STATES, Mood, strict=True)}
    mill = Mill(db.url)
    mill.lane(Link, name="links", **states)(never)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        assert db.value('select feeling from "Links"') == "U"
        assert (await kit.settle(claim)).written
    assert db.value('select feeling from "Links"') == "D"


async def test_a_users_own_type_takes_a_role_like_the_type_it_decorates(db: Db) -> None:
    """Issue, declaration: roles found by name where a model has types of its own."""
    table(db, "worker text, locked_at $time, attempts integer")
    db.execute("insert into jobs (id) values (1)")
    model = sa.Table(
        "jobs", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("status", sa.String),
        sa.Column("worker", Name), sa.Column("locked_at", Moment), sa.Column("attempts", sa.Integer),
    )  # fmt: skip
    async with Kit(lane(db, model)) as kit:
        store = await kit.store()
        assert dict(store.binding.roles) == {"worker": "worker", "claimed_at": "locked_at", "attempts": "attempts"}
        (claim,) = await kit.claim()
        assert store.value(claim.row, "locked_at").tzinfo is not None
        assert (await kit.settle(claim)).written


async def test_the_databases_own_column_decides_how_time_is_told_not_the_models_word_for_it(pg: Db) -> None:
    """DESIGN: columns without a time zone are UTC, and a model may be silent, or wrong, about the zone."""
    pg.execute(
        "create table jobs (id integer primary key, status text, zoned timestamptz, plain timestamp, worker text)"
    )
    pg.execute("insert into jobs values (1, 'ready')")
    meta = sa.MetaData()
    model = sa.Table(
        "jobs", meta, sa.Column("id", sa.Integer, primary_key=True), sa.Column("status", sa.String),
        sa.Column("zoned", sa.DateTime()), sa.Column("plain", sa.DateTime(timezone=True)), sa.Column("worker", sa.Text),
    )  # fmt: skip
    mill = lane(pg, model, roles={"claimed_at": "zoned", "updated_at": "plain"})
    mill._given = f"{pg.url}&timezone=America/Montreal"
    async with Kit(mill) as kit:
        await kit.claim()
    row = whole(pg, "jobs", 1)
    assert row["zoned"] == after(td(0))
    assert row["plain"] == after(td(0))


# -- tables that are spread, and narrow columns


@pytest.mark.parametrize("kind", ["partitioned", "inherited"])
async def test_a_table_spread_over_partitions_is_one_lane(pg: Db, kind: str) -> None:
    """Issue, claim: rows of several partitions have the same ctid, and are told apart by their keys."""
    columns = "day date, id integer, status text default 'ready', worker text, claimed_at timestamptz, error text"
    if kind == "partitioned":
        pg.execute(f"create table jobs ({columns}, primary key (day, id)) partition by range (day)")
        part = "create table p{m} partition of jobs for values from ('2024-{m:02}-01') to ('2024-{n:02}-01')"
    else:
        pg.execute(f"create table jobs ({columns}, primary key (day, id))")
        part = "create table p{m} () inherits (jobs)"
    for month in (1, 2, 3):
        pg.execute(part.format(m=month, n=month + 1))
        target = "jobs" if kind == "partitioned" else f"p{month}"
        pg.execute(f"insert into {target} (day, id) values ('2024-{month:02}-05', 1), ('2024-{month:02}-06', 2)")
    async with Kit(lane(pg, max_attempts=1)) as kit:
        claims = [c for _ in range(3) for c in await kit.claim(count=1)]
        assert [str(c.id[0]) for c in claims] == ["2024-01-05", "2024-01-06", "2024-02-05"]
        assert (await kit.settle(claims[0])).written
        assert (await kit.settle(claims[1], Dead("no"))).written
        kit.advance(td(minutes=6))
        assert [s.id for s in await kit.sweep()] == [claims[2].id]
        assert len(await kit.claim(count=99)) == 4
    counts = pg.query("select status, count(*) as n from jobs group by status")
    assert {r["status"]: r["n"] for r in counts} == {"done": 1, "dead": 1, "running": 4}


async def test_a_worker_column_that_may_not_be_null_keeps_what_it_has(db: Db) -> None:
    """DESIGN: retry, release and sweep clear the holder, where the column lets them."""
    table(db, "worker text not null default '', claimed_at $time, attempts integer default 0")
    db.execute("insert into jobs (id) values (1), (2)")
    async with Kit(lane(db)) as kit:
        first, _ = await kit.claim(count=2)
        assert (await kit.settle(first, Retry("x"))).written
        kit.advance(td(minutes=6))
        assert len(await kit.sweep()) == 1
        assert len(await kit.claim(count=2)) == 2


async def test_an_error_is_cut_to_what_its_column_holds(db: Db) -> None:
    """Issue, settle: error text of bounded length; the poison's words too."""
    table(db, "worker text, claimed_at $time, attempts integer default 0, error varchar(20)")
    db.execute("insert into jobs (id) values (1), (2)")
    long = "the page answered with a very long story about why it cannot be had"
    async with Kit(lane(db, max_attempts=1, max_reclaims=0)) as kit:
        first, second = await kit.claim(count=2)
        assert (await kit.settle(first, Cancel(long))).written
        await kit.settle(second, Snooze(td(0)))
        for _ in range(2):
            await kit.claim()
            kit.advance(td(minutes=6))
            await kit.sweep()
    rows = db.query("select status, error from jobs order by id")
    assert rows[0] == {"status": "dead", "error": "the page answered w…"}
    assert rows[1]["status"] == "dead"
    assert rows[1]["error"].startswith("taken back too often")


async def test_a_row_deleted_while_it_is_worked_on_is_a_lost_claim(db: Db) -> None:
    """Issue: a row deleted while it is worked on; nothing is written, nothing fails."""
    table(db, "worker text, claimed_at $time, heartbeat_at $time")
    db.execute("insert into jobs (id) values (1), (2)")

    async def handle(job: Any) -> None:
        if job.id == 1:
            db.execute("delete from jobs where id = 1")

    async with Kit(lane(db, handler=handle)) as kit:
        tally = await kit.drain()
    assert (tally.completed, tally.losses, tally.failures) == (1, 1, 0)
    assert db.query("select id, status from jobs") == [{"id": 2, "status": "done"}]
