"""Any table: keys, names, states, conditions and orders of every shape go through all the verbs."""

from __future__ import annotations

from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from databases import Db
from rowmill import Mill, Retry
from rowmill.testing import Kit
from rows import empty

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
#: The columns of a table that has everything, without its key.
COLUMNS = (
    "status text not null default 'ready', worker text, claimed_at $time, heartbeat_at $time,"
    " attempts integer not null default 0, run_after $time, error text, result text"
)


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


def columns(db: Db, text: str = COLUMNS) -> str:
    return text.replace("$time", "timestamptz" if db.dialect == "postgresql" else "datetime")


def lane(db: Db, table: Any, **options: Any) -> Mill:
    mill = Mill(db.url)
    mill.lane(table, name="lane", **STATES | options)(never)
    return mill


async def all_verbs(mill: Mill, db: Db, table: str) -> list[Any]:
    """Three ready rows: one is done, one fails and comes again, one is swept and comes again; then all are done."""
    ids = []
    async with Kit(mill) as kit:
        store = await kit.store()
        first, second, third = await kit.claim(count=3)
        ids = [first.id, second.id, third.id]
        assert len(await store.renew([first, second, third])) == 3
        assert (await kit.settle(first, {"result": "first"})).written
        assert (await kit.settle(second, Retry("again", after=td(seconds=1)))).written
        kit.advance(td(minutes=6))
        assert [s.id for s in await kit.sweep()] == [third.id]
        assert (await kit.settle(third)).lost
        while claims := await kit.claim():
            assert (await kit.settle(claims[0], {"result": "later"})).written
    rows = db.query(f"select status, result, attempts from {table} order by attempts, result")
    assert [tuple(r.values()) for r in rows] == [("done", "first", 1), ("done", "later", 2), ("done", "later", 2)]
    return ids


KEYS: dict[str, tuple[str, str, list[Any]]] = {
    "integer": ("id integer primary key", "id", [1, 2, 3]),
    "bigint": ("id bigint primary key", "id", [2**53 + 1, 2**53 + 2, 2**62]),
    "text": ("id text primary key", "id", ["it's", 'say "x" \\ %s $1 :a ?', "ü\U0001f600"]),
    "varchar": ("id varchar(20) primary key", "id", ["a", "b", "c"]),
    "two columns": ("tenant text, number integer, primary key (tenant, number)", "tenant, number",
                    [("a", 2), ("b", 1), ("b", 2)]),
    "unique instead of primary": ("id integer not null unique", "id", [1, 2, 3]),
}  # fmt: skip
POSTGRESQL_KEYS: dict[str, tuple[str, str, list[Any]]] = {
    "uuid": ("id uuid primary key", "id", [UUID(int=1), UUID(int=2), UUID(int=3)]),
    "smallint": ("id smallint primary key", "id", [1, 2, 3]),
    "numeric": ("id numeric(20, 2) primary key", "id", [1, 2, 3]),
    "bytea": ("id bytea primary key", "id", [b"\x00\x01", b"\x00\x02", b"\xff"]),
    "char": ("id char(4) primary key", "id", ["a   ", "b   ", "c   "]),
    "enum": ("id mood primary key", "id", ["bad", "good", "fine"]),
    "domain": ("id short primary key", "id", ["a", "b", "c"]),
    "inet": ("id inet primary key", "id", None),  # type: ignore[dict-item]
    "day": ("day date, number bigint, primary key (day, number)", "day, number",
            [(datetime(2024, 1, d).date(), 1) for d in (1, 2, 3)]),
    "time": ("id timestamptz primary key", "id", [datetime(2024, 1, d, tzinfo=UTC) for d in (1, 2, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
async def test_rows_are_told_apart_by_keys_of_any_type(db: Db, key: str) -> None:
    """C2, E1: int, bigint, text and composite keys."""
    await _keys(db, *KEYS[key])


@pytest.mark.parametrize("key", POSTGRESQL_KEYS)
async def test_rows_are_told_apart_by_keys_of_postgresqls_own_types(pg: Db, key: str) -> None:
    """C2: uuid keys, and others that only PostgreSQL has."""
    pg.execute(
        "create type mood as enum ('bad', 'good', 'fine'); create domain short as text check (length(value) < 9)"
    )
    definition, names, ids = POSTGRESQL_KEYS[key]
    if key == "inet":
        from ipaddress import ip_address

        ids = [ip_address(f"10.0.0.{n}") for n in (1, 2, 3)]
    await _keys(pg, definition, names, ids)


async def _keys(db: Db, definition: str, names: str, ids: list[Any]) -> None:
    db.execute(f"create table jobs ({columns(db)}, {definition})")
    marks = ", ".join("?" for _ in names.split(","))
    for key in ids:
        db.execute(f"insert into jobs ({names}) values ({marks})", *(key if isinstance(key, tuple) else (key,)))
    assert await all_verbs(lane(db, "jobs"), db, "jobs") == ids


NAMES = {
    "order": '"order"',
    '"order"': '"order"',
    '"My Table"': '"My Table"',
    "MyTable": '"MyTable"',
    "public.jobs": "jobs",
    '"a.b"': '"a.b"',
    '"say ""so"""': '"say ""so"""',
    "naïve": '"naïve"',
    "percent%s": '"percent%s"',
}


@pytest.mark.parametrize("name", NAMES)
async def test_a_table_may_have_any_name(db: Db, name: str) -> None:
    """E1: mixed case, reserved words, quotes, dots."""
    db.execute(f"create table {NAMES[name]} (id integer primary key, {columns(db)})")
    db.execute(f"insert into {NAMES[name]} (id) values (1), (2), (3)")
    await all_verbs(lane(db, name), db, NAMES[name])


@pytest.mark.parametrize("name", ["other.jobs", 'other."order"', '"My Schema"."My Table"'])
async def test_a_table_may_be_in_any_schema(pg: Db, name: str) -> None:
    """E1: schema-qualified names; a table of the same name in public is another."""
    pg.execute('create schema other; create schema "My Schema"')
    pg.execute("create table jobs (id text primary key); create type other.mood as enum ('ready', 'x')")
    pg.execute(f"create table {name} (id integer primary key, {columns(pg)}, mood other.mood default 'ready')")
    pg.execute(f"insert into {name} (id) values (1), (2), (3)")
    await all_verbs(lane(pg, name, ready={"status": "ready", "mood": "ready"}), pg, name)


async def test_columns_may_have_any_names(db: Db) -> None:
    """E1: camel case and reserved words as columns, found as roles where they are camel-cased twins."""
    db.execute(
        columns(
            db,
            """create table jobs ("select" integer primary key, "My Status" text default 'ready', "lockedBy" text,
            "lockedAt" $time, "heartbeatAt" $time, attempts integer default 0, "runAfter" $time, "lastError" text,
            "from" text, "My Rank" integer default 0)""",
        )
    )
    db.execute('insert into jobs ("select") values (1), (2)')
    states = {state: {"My Status": state} for state in STATES}
    mill = lane(db, "jobs", **states, order_by=['"My Rank"', '"select" desc'])
    async with Kit(mill) as kit:
        one, two = await kit.claim(count=2)
        assert (one.id, two.id) == (2, 1)
        assert (await kit.settle(one, {"from": "here"})).written
        assert (await kit.settle(two, Retry("oh"))).written
    rows = db.query('select * from jobs order by "select"')
    assert [(r["My Status"], r["lockedBy"], r["lastError"], r["from"]) for r in rows] == [
        ("ready", None, "oh", None),
        ("done", "test-worker", None, "here"),
    ]


# -- states


def _states(ready: Any, running: Any, done: Any, dead: Any) -> dict[str, Any]:
    return {"ready": ready, "running": running, "done": done, "dead": dead}


#: definition of the columns, the states, and each state as it then stands in the row
STATE_SHAPES: dict[str, tuple[str, dict[str, Any], list[tuple[Any, ...]]]] = {
    "int": ("s integer default 1", _states({"s": 1}, {"s": 2}, {"s": 3}, {"s": 4}), [(1,), (2,), (3,), (4,)]),
    "negative": ("s integer default -1", _states({"s": -1}, {"s": 0}, {"s": 1}, {"s": -9}), [(-1,), (0,), (1,), (-9,)]),
    "quotes": ("s text default 'it''s'", _states({"s": "it's"}, {"s": "a\\b"}, {"s": "%s :x $1"}, {"s": '"'}),
               [("it's",), ("a\\b",), ("%s :x $1",), ('"',)]),
    "null": ("s text", _states({"s": None}, {"s": "run"}, {"s": "ok"}, {"s": "no"}),
             [(None,), ("run",), ("ok",), ("no",)]),
    "null or": ("s text", _states({"s": ["new", None]}, {"s": "run"}, {"s": "ok"}, {"s": "no"}),
                [("new",), ("run",), ("ok",), ("no",)]),
    "back to null": ("s text, t text", _states({"s": None, "t": None}, {"s": "run"}, {"s": None, "t": "ok"},
                                               {"s": None, "t": "no"}),
                     [(None, None), ("run", None), (None, "ok"), (None, "no")]),
    "flags": ("s boolean default false, t boolean default false",
              _states({"s": False, "t": False}, {"s": True}, {"s": False, "t": True}, {"s": True, "t": True}),
              [(False, False), (True, False), (False, True), (True, True)]),
    "several": ("s integer default 1, t text default 'a'",
                _states({"s": [1, 2], "t": "a"}, {"t": "b"}, {"s": 3, "t": "c"}, {"s": 4, "t": "d"}),
                [(1, "a"), (1, "b"), (3, "c"), (4, "d")]),
}  # fmt: skip


@pytest.mark.parametrize("shape", STATE_SHAPES)
async def test_states_may_be_any_values_of_any_columns(db: Db, shape: str) -> None:
    """A4, A6, A9, E1, E2: integers, text, booleans, NULL, lists, several columns together."""
    await _state_shape(db, *STATE_SHAPES[shape])


async def test_states_may_be_a_native_enum(pg: Db) -> None:
    """C3: a PostgreSQL enum, alone and with a flag."""
    pg.execute("create type \"Mood\" as enum ('new', 'it''s on', 'ok', 'no')")
    states = _states({"s": ["new"], "t": False}, {"s": "it's on"}, {"s": "ok"}, {"s": "no"})
    shown = [("new", False), ("it's on", False), ("ok", False), ("no", False)]
    await _state_shape(pg, "s \"Mood\" default 'new', t boolean default false", states, shown)


async def _state_shape(db: Db, definition: str, states: dict[str, Any], shown: list[tuple[Any, ...]]) -> None:
    db.execute(columns(db, f"create table jobs (id integer primary key, worker text, claimed_at $time, {definition})"))
    db.execute("insert into jobs (id) values (1)")
    names = ", ".join(name for name in ("s", "t") if len(shown[0]) > 1 or name == "s")

    def now() -> tuple[Any, ...]:
        return tuple(db.one(f"select {names} from jobs where id = 1").values())

    async with Kit(lane(db, "jobs", **states)) as kit:
        store = await kit.store()
        seen = []
        await kit.claim()
        kit.advance(td(minutes=6))
        assert await kit.sweep()
        seen.append(now())
        (claim,) = await kit.claim()
        seen.append(now())
        assert await store.unfinished()
        assert (await kit.settle(claim)).written
        seen.append(now())
        assert await kit.claim() == []
        assert await kit.sweep() == []
        assert not await store.unfinished()
        db.execute("insert into jobs (id) values (2)")
        await kit.settle((await kit.claim())[0], OSError())
        seen.append(tuple(db.one(f"select {names} from jobs where id = 2").values()))
    assert seen == shown


@pytest.mark.parametrize("also", [{"worker": None}, {"claimed_at": None}], ids=str)
async def test_ready_may_also_say_that_nobody_holds_the_row(db: Db, also: dict[str, Any]) -> None:
    """C6: "and locked_at null": a column that the claim itself writes cannot tell what is running."""
    db.execute(f"create table jobs (id integer primary key, {columns(db)})")
    db.execute("insert into jobs (id) values (1), (2), (3)")
    await all_verbs(lane(db, "jobs", ready={"status": "ready"} | also), db, "jobs")


async def test_ready_may_be_a_condition_in_sql(db: Db) -> None:
    """Issue, declaration: ready as a SQL condition, with retry for the way back."""
    db.execute(f"create table jobs (id integer primary key, n integer, {columns(db)})")
    db.execute("insert into jobs (id, n, status) values (1, 5, 'a'), (2, 50, 'b'), (3, 500, 'a'), (4, 6, 'done')")
    ready = "status in ('a', 'b') and n < 100 or status = 'again'"
    mill = lane(db, "jobs", ready=ready, retry={"status": "again"})
    async with Kit(mill) as kit:
        one, two = await kit.claim(count=10)
        assert (one.id, two.id) == (1, 2)
        await kit.settle(one, Retry(after=td(0)))
        kit.advance(td(minutes=6))
        assert [s.id for s in await kit.sweep()] == [2]
        assert db.query("select id from jobs where status = 'again' order by id") == [{"id": 1}, {"id": 2}]
        assert [c.id for c in await kit.claim(count=10)] == [1, 2]


async def test_a_further_condition_in_sql_knows_the_time(db: Db) -> None:
    """D1: where= as SQL text with :now, moved with the test's time; a cast beside it is left alone."""
    cast = "'x'::text = 'x'" if db.dialect == "postgresql" else "cast('x' as text) = 'x'"
    db.execute(columns(db, f"create table jobs (id integer primary key, opens_at $time not null, {COLUMNS})"))
    now = datetime.now(UTC)
    db.insert("jobs", [{"id": i, "opens_at": now + td(minutes=m)} for i, m in ((1, -1), (2, 10))])
    async with Kit(lane(db, "jobs", where=f"opens_at <= :now and {cast} or 1 = 2")) as kit:
        assert [c.id for c in await kit.claim(count=9)] == [1]
        kit.advance(td(minutes=11))
        assert [c.id for c in await kit.claim(count=9)] == [2]


@pytest.mark.parametrize("table", ["jobs", '"My Jobs"'])
async def test_a_further_condition_may_be_built_over_the_table(db: Db, table: str) -> None:
    """DESIGN, where: a lambda over the reflected table; its literals mean what they say."""
    db.execute(f"create table {table} (id integer primary key, path text, {columns(db)})")
    db.insert(table.strip('"'), [{"id": i, "path": p} for i, p in enumerate(["a\\b", "100%", "it's", "x"], 1)])
    for value, found in (("a\\b", [1]), ("100%", [2]), ("it's", [3])):
        async with Kit(lane(db, table, where=lambda t, value=value: t.c.path == value)) as kit:
            assert [c.id for c in await kit.claim(count=9)] == found
    async with Kit(lane(db, table, where=lambda t: t.c.path.in_(["x", "y"]) | (t.c.id > 99))) as kit:
        assert [c.id for c in await kit.claim(count=9)] == [4]


async def test_a_further_condition_may_look_into_other_tables_row_by_row(db: Db) -> None:
    """D1: disabled sources, as a subquery that is about this row, not about any row."""
    db.execute(f"create table jobs (id integer primary key, source_id integer, {columns(db)})")
    db.execute("create table sources (id integer primary key, enabled boolean)")
    db.execute("insert into sources values (1, true), (2, false)")
    db.execute("insert into jobs (id, source_id) values (1, 1), (2, 2)")
    sources = sa.table("sources", sa.column("id"), sa.column("enabled", sa.Boolean))
    conditions = [
        lambda t: t.c.source_id.in_(sa.select(sources.c.id).where(sources.c.enabled)),
        lambda t: sa.exists().where(sources.c.id == t.c.source_id, sources.c.enabled),
        lambda t: sa.select(sources.c.enabled).where(sources.c.id == t.c.source_id).scalar_subquery(),
    ]
    for where in conditions:
        db.execute("update jobs set status = 'ready'")
        async with Kit(lane(db, "jobs", where=where)) as kit:
            assert [c.id for c in await kit.claim(count=9)] == [1]
