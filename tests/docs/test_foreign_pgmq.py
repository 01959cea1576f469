"""A lane over a queue of pgmq, as docs/how-to/foreign-tables.md declares it, beside readers like pgmq's own.

The extension is not here: the tables are as it documents them, and its functions are rewritten with the same
visibility, locks and columns.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databases import Db
from foreign import FILES, Place
from rowmill.testing import Kit

MESSAGE = "msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb, headers jsonb"
NAMES = "msg_id, read_ct, enqueued_at, vt, message, headers"
FUNCTIONS = f"""
create type pgmq.message as ({MESSAGE});
create function pgmq.send(msg jsonb, delay int default 0) returns bigint language sql as $$
  insert into pgmq.q_orders (vt, message) values (clock_timestamp() + delay * interval '1 second', msg) returning msg_id
$$;
create function pgmq.read(seconds int, qty int) returns setof pgmq.message language sql as $$
  with seen as (
    select msg_id from pgmq.q_orders where vt <= clock_timestamp() order by msg_id limit qty for update skip locked
  )
  update pgmq.q_orders q set vt = clock_timestamp() + seconds * interval '1 second', read_ct = read_ct + 1
  from seen where q.msg_id = seen.msg_id returning {", ".join("q." + name for name in NAMES.split(", "))}
$$;
create function pgmq.delete(id bigint) returns boolean language sql as $$
  with gone as (delete from pgmq.q_orders where msg_id = id returning 1) select exists (select from gone)
$$;
create function pgmq.archive(queue text, id bigint) returns boolean language sql as $$
  with gone as (delete from pgmq.q_orders where msg_id = id returning {NAMES}),
  kept as (insert into pgmq.a_orders ({NAMES}) select {NAMES} from gone returning 1) select exists (select from kept)
$$;
create function pgmq.set_vt(id bigint, seconds int) returns setof pgmq.message language plpgsql as $$ begin
  return query execute 'update pgmq.q_orders set vt = now() + $2 * interval ''1 second'' where msg_id = $1 returning *'
  using id, seconds;
end $$;
"""


def make(pg: Db, more: str) -> None:
    columns = f"read_ct int default 0 not null, enqueued_at timestamptz default now() not null, {more}"
    end = "vt timestamptz not null, message jsonb, headers jsonb"
    pg.execute(f"""create schema pgmq;
create table pgmq.q_orders (msg_id bigint primary key generated always as identity, {columns} {end});
create table pgmq.a_orders (msg_id bigint primary key, {columns} archived_at timestamptz default now() not null, {end});
create index q_orders_vt_idx on pgmq.q_orders (vt asc)""")
    pg.execute(FUNCTIONS)


@pytest.fixture(params=["last_read_at", "claimed_at"])
def mill(pg: Db, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's Mill, on tables with the time of the last read, and on those of before, with a column added."""
    make(pg, "last_read_at timestamptz," if request.param == "last_read_at" else "")
    if request.param == "claimed_at":
        pg.execute("alter table pgmq.q_orders add column claimed_at timestamptz")
    text = FILES["pgmq_lane.py"].replace('"claimed_at": "last_read_at"', f'"claimed_at": "{request.param}"')
    (tmp_path / "pgmq_lane.py").write_text(text)
    monkeypatch.setenv("DATABASE_URL", pg.url)
    spec = importlib.util.spec_from_file_location("pgmq_lane", tmp_path / "pgmq_lane.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.mill


def send(pg: Db, message: str = "{}", delay: int = 0) -> int:
    return int(pg.value("select pgmq.send(?::jsonb, ?::int)", message, delay))


def read(pg: Db, seconds: int = 30, count: int = 10) -> list[int]:
    return [row["msg_id"] for row in pg.query("select msg_id from pgmq.read(?::int, ?::int)", seconds, count)]


async def test_messages_are_worked_off_archived_retried_and_kept_when_dead(pg: Db, mill: Any) -> None:
    """Issue 25, point 5: sent as with pgmq; a delayed one waits; a dead one stays, invisible, and can be retried."""
    fine, broken, later = send(pg), send(pg, '{"broken": true}'), send(pg, delay=600)
    await asyncio.wait_for(mill.worker(drain=True).run(), 60)
    assert pg.query("select msg_id, read_ct from pgmq.a_orders") == [{"msg_id": fine, "read_ct": 1}]
    rows = pg.query("select msg_id, read_ct, extract(year from vt)::int as year from pgmq.q_orders order by 1")
    assert next(tuple(row.values()) for row in rows) == (broken, 3, 9999)
    assert [row["msg_id"] for row in rows] == [broken, later]
    assert read(pg) == [], "pgmq shows neither the dead one nor the delayed one"


async def test_neither_side_takes_what_the_other_one_holds(pg: Db, mill: Any) -> None:
    """While a handler runs, pgmq sees nothing; while a reader of pgmq holds a message, no lane claims it."""
    first, second = send(pg), send(pg)
    async with Kit(mill) as kit:
        assert read(pg, count=1) == [first]
        (claim,) = await kit.claim(count=10)
        assert claim.id == second
        assert read(pg) == []
        pg.execute("update pgmq.q_orders set vt = now() - interval '1 second' where msg_id = ?", first)
        assert read(pg) == [first], "the other reader's time is over"


async def test_both_read_one_queue_and_each_message_is_worked_on_once(pg: Db, mill: Any) -> None:
    ids = [send(pg) for _ in range(60)]
    taken: list[int] = []
    worker = mill.worker()
    running = asyncio.create_task(worker.run())
    while pg.value("select count(*) from pgmq.q_orders"):
        for id in await asyncio.to_thread(read, pg, 600, 2):
            assert pg.value("select pgmq.delete(?::bigint)", id)
            taken.append(id)
    worker.stop()
    await asyncio.wait_for(running, 60)
    archived = [row["msg_id"] for row in pg.query("select msg_id from pgmq.a_orders")]
    assert sorted([*taken, *archived]) == ids


@pytest.mark.parametrize("call", ["pgmq.delete({id}::bigint)", "pgmq.archive('orders', {id}::bigint)", "set_vt"])
async def test_a_message_that_is_taken_away_during_its_run_is_lost(pg: Db, mill: Any, call: str) -> None:
    """The outcome of a run that no longer holds its message is dropped."""
    id = send(pg)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        # What set_vt does: its stand-in fails where the table has one more column.
        visible = f"update pgmq.q_orders set vt = now() where msg_id = {id}"
        pg.execute(visible if call == "set_vt" else f"select {call.format(id=id)}")
        assert (await kit.settle(claim)).lost


def test_an_added_column_breaks_what_returns_every_column(pg: Db) -> None:
    make(pg, "")
    id = send(pg)
    assert pg.one("select read_ct from pgmq.set_vt(?::bigint, 0)", id) == {"read_ct": 0}
    pg.execute("alter table pgmq.q_orders add column claimed_at timestamptz")
    assert read(pg) == [id]
    with pytest.raises(asyncpg.DatatypeMismatchError, match="structure of query does not match"):
        pg.query("select * from pgmq.set_vt(?::bigint, 0)", id)


def test_a_real_worker_works_the_page_as_it_stands(pg: Db, tmp_path: Path) -> None:
    make(pg, "last_read_at timestamptz,")
    id = send(pg)
    Place(tmp_path, pg, "pgmq_lane.py").drain("pgmq_lane")
    assert pg.value("select msg_id from pgmq.a_orders") == id
