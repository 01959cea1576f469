"""The verbs as functions of the database: they do to a row what the Python workers do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import systems
from databases import Db, Row
from golden import as_newest, compare
from recorded import astray
from rowmill import Dead, Mill, Retry, exponential, fixed
from rowmill.declare.outcome import Release
from rowmill.errors import DeclarationError
from rowmill.testing import Kit
from rows import LEEWAY, changed, empty
from sqlworker import install_now, installed

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


async def handle(job: Any) -> None:
    return None


def _system(system: str, lane: str, insert: str) -> Callable[[Db, Mill], Callable[..., Any]]:
    def declare(db: Db, mill: Mill) -> Callable[..., Any]:
        systems.create(db, system)
        getattr(systems, lane)(mill, handle)
        status = {"status": "prompt-forming"} if lane == "prompt_forming" else {}
        return lambda n=1, **columns: getattr(systems, insert)(db, n, **status | columns)

    return declare


def _own(columns: str, after: str = "", **options: Any) -> Callable[[Db, Mill], Callable[..., Any]]:
    def declare(db: Db, mill: Mill) -> Callable[..., Any]:
        db.execute(f"create table jobs (id integer generated always as identity, {columns}){after}")
        if after:
            db.execute("create table jobs_all partition of jobs default")
        mill.lane("jobs", name="jobs", **STATES | options)(handle)
        return lambda n=1, **columns: db.populate("jobs", n, {"status": "ready"} | columns, born=())

    return declare


_MARKS = "status varchar(10), worker varchar(20), claimed_at timestamptz"
SHAPES = {
    "extraction": _system("registre", "extraction", "insert_extraction"),
    "req": _system("registre", "req", "insert_req"),
    "ocr": _system("registre", "ocr", "insert_ocr"),
    "enrichment": _system("enrichment", "enrichment", "insert_enrichment"),
    "scrape": _system("prices", "scrape", "insert_scrape"),
    "prompt_forming": _system("analysis", "prompt_forming", "insert_analysis"),
    "composite": _own(f"tenant text default 'a', {_MARKS}, primary key (tenant, id)"),
    "partitioned": _own(
        f"tenant text default 'a', {_MARKS}, attempts smallint, primary key (tenant, id)", " partition by list (tenant)"
    ),
    "sharded": _own(
        f"tenant text default 'a', {_MARKS}, attempts smallint, expires_at timestamptz, primary key (tenant, id)",
        " partition by list (tenant)", shard={"tenant": "a"}, canceled={"status": "off"}),
    "shards": _own(f"tenant integer default 3, {_MARKS}, primary key (id)", shard={"tenant": range(4)}),
    "without_zone": _own(
        "primary key (id), status text, locked_by text, locked_at timestamp, next_retry_at timestamp,"
        " updated_at timestamp, attempts bigint not null default 0, error text, max_attempts integer",
        backoff=fixed(td(minutes=2)), max_attempts=3),
    "no_worker": _own("primary key (id), status text, claimed_at timestamptz, attempts integer", renew="claimed_at"),
    "unfenced": _own("primary key (id), status text, updated_at timestamptz", unfenced=True),
    "unfenced_once": _own(f"primary key (id), {_MARKS}", unfenced=True),
    "condition": _own(
        f"primary key (id), {_MARKS}, attempts integer, retries integer",
        ready="status in ('ready', 'late')", retry={"status": "late"}, where="id > 0 and :now > '2020-01-01'"),
}  # fmt: skip

#: What a run does: the function and its parameters, and the same said by a handler.
ENDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "complete": ("complete", {}, None),
    "fail": ("fail", {"error": "boom"}, Retry("boom")),
    "fail for good": ("fail", {"error": "boom", "permanent": True}, Dead("boom")),
    "fail with a delay": ("fail", {"error": "boom", "delay": td(hours=1)}, Retry("boom", after=td(hours=1))),
    "release": ("release", {}, Release()),
}


class Pair:
    """Two rows that are the same but for their identity: one for a Python worker, one for the functions."""

    def __init__(self, db: Db, table: str, insert: Callable[..., list[Any]], **columns: Any) -> None:
        db.execute(f"delete from {table}")
        self._db, self._table, self.ids = db, table, insert(2, **columns)
        self._before = [self._row(id) for id in self.ids]

    def _row(self, id: Any) -> Row:
        return self._db.one(f"select * from {self._table} where id = ?", id)

    def assert_alike(self, when: str) -> None:
        """What changed is the same: times within a leeway, a worker without the mark of its process."""
        one, other = (changed(before, self._row(before["id"])) for before in self._before)
        assert one.keys() == other.keys(), (when, one, other)
        for column, value in one.items():
            if isinstance(value, datetime):
                assert abs(value - other[column]) < LEEWAY, (when, one, other)
            else:
                assert (value.split("~")[0] if isinstance(value, str) else value) == other[column], (when, one, other)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_function_leaves_a_row_as_the_python_worker_leaves_it(pg: Db, shape: str) -> None:
    """D2, X1: claim and every outcome, on a pair of rows each, compared column by column."""
    mill = Mill(pg.url)
    insert = SHAPES[shape](pg, mill)
    functions = await installed(pg, mill)
    async with Kit(mill, worker_id="w") as kit:
        table = (await kit.store()).statements.table
        for name, (verb, given, ended) in ENDS.items():
            pair = Pair(pg, table, insert)
            (claim,) = await kit.claim()
            row = functions.claim()
            assert row is not None
            assert row["id"] == pair.ids[1], "in the lane's order"
            pair.assert_alike(f"{name}: claimed")
            assert (await kit.settle(claim, ended)).written
            answer = functions.settle(verb, row, **given)
            assert answer in (True, "retry", "dead")
            pair.assert_alike(name)
            assert functions.settle(verb, row, **given) in (False, None) or shape == "unfenced", "once only"


@pytest.mark.parametrize("shape", ["ocr", "enrichment", "scrape", "prompt_forming", "without_zone"])
async def test_failures_back_off_and_end_as_those_of_python_workers_do(pg: Db, shape: str) -> None:
    """B5, C9, D1, D4, E6: failure after failure until the row is dead; by its own limit where it has one."""
    mill = Mill(pg.url)
    insert = SHAPES[shape](pg, mill)
    functions = await installed(pg, mill)
    own = {"ocr": {"ocr_max_attempts": 2}, "without_zone": {"max_attempts": 2}}
    async with Kit(mill, worker_id="w") as kit:
        store = await kit.store()
        for columns in ({}, own.get(shape, {})):
            pair = Pair(pg, store.statements.table, insert, **columns)
            due = [store.binding.roles.get("run_after"), store.binding.roles.get("updated_at")]
            for failure in range(1, 20):
                claims = await kit.claim()
                row = functions.claim()
                assert (row is None) == (not claims)
                if row is None:
                    break
                assert (await kit.settle(claims[0], Retry("boom"))).written
                answer = functions.settle("fail", row, error="boom")
                pair.assert_alike(f"failure {failure}: {answer}")
                for column in filter(None, due):
                    pg.execute(f'update {store.statements.table} set "{column}" = ?', _for(store, column))
            assert answer == "dead"


def _for(store: Any, column: str) -> datetime:
    past = datetime.now(UTC) - td(hours=1)
    return past if "with time zone" in store.binding.sql_types[column] else past.replace(tzinfo=None)


@pytest.mark.parametrize("shape", ["ocr", "scrape", "prompt_forming", "partitioned"])
async def test_a_swept_row_goes_back_and_a_poisoned_one_ends_as_with_python_workers(pg: Db, shape: str) -> None:
    """A12, B7, D3, E6: the previous worker is told; taken back too often, a row is dead."""
    mill = Mill(pg.url)
    insert = SHAPES[shape](pg, mill)
    functions = await installed(pg, mill)
    async with Kit(mill, worker_id="w") as kit:
        store = await kit.store()
        pair = Pair(pg, store.statements.table, insert)
        for _ in range(12):
            claims, row = await kit.claim(), functions.claim()
            if row is None:
                break
            assert functions.call("sweep", batch=10) == [], "both are alive"
            old = _for(store, store.statements.evidence()).replace(year=2020)
            key = store.binding.key[-1]
            for id in pair.ids:
                columns = [store.binding.roles.get(role) for role in ("claimed_at", "heartbeat_at", "updated_at")]
                for column in filter(None, columns):
                    pg.execute(f'update {store.statements.table} set "{column}" = ? where "{key}" = ?', old, id)
                if id == pair.ids[0]:
                    (swept,) = await kit.sweep()
                else:
                    (told,) = functions.call("sweep", batch=10)
                    assert told["previous_worker"] == "w"
                    assert told["poison"] == swept.poison
            assert (swept.worker or "").split("~")[0] == "w"
            pair.assert_alike("swept")
            if due := store.binding.roles.get("updated_at"):
                pg.execute(f'update {store.statements.table} set "{due}" = ?', _for(store, due))
            assert claims
        else:
            assert store.binding.counter is None, "never poisoned, although sweeps are counted"


def scrape(db: Db, **options: Any) -> Any:
    """The functions of D's lane, and what inserts rows."""
    systems.create(db, "prices")
    mill = Mill(db.url)
    systems.scrape(mill, handle, **options.pop("lane", {}))
    return install_now(db, mill, **options)


def test_claim_next_pending_job_takes_pending_due_and_stuck_rows(pg: Db) -> None:
    """D2, D1: one transaction sets running, locked_by, locked_at and heartbeat_at, and returns the row."""
    functions = scrape(pg, names={"claim": "claim_next_pending_job"})
    pending, later, due, stuck, alive = systems.insert_scrape(pg, 5)
    past, future = (datetime.now(UTC) + td(minutes=m) for m in (-10, 10))
    pg.execute("update scrape_jobs set status = 'retryable', next_retry_at = ? where id = ?", future, later)
    pg.execute("update scrape_jobs set status = 'retryable', next_retry_at = ? where id = ?", past, due)
    held = "update scrape_jobs set status = 'running', locked_by = 'gone', locked_at = ?, heartbeat_at = ? where id = ?"
    pg.execute(held, past, past, stuck)
    pg.execute(held, past, datetime.now(UTC), alive)
    disabled = systems.insert_source(pg, enabled=False)[0]
    systems.insert_scrape(pg, 1, source_id=disabled)
    got = []
    while rows := pg.query("select * from claim_next_pending_job('node-1')"):
        (row,) = rows
        assert (row["status"], row["locked_by"]) == ("running", "node-1")
        assert abs(row["locked_at"] - row["heartbeat_at"]) < td(seconds=1)
        assert row == pg.one("select * from scrape_jobs where id = ?", row["id"])
        got.append(row["id"])
    assert sorted(got) == [pending, due, stuck]
    assert pg.value("select attempts from scrape_jobs where id = ?", stuck) == 1, "the sweep counts"
    assert functions.settle("heartbeat", row) is True


def test_a_lane_that_is_never_empty_is_swept_too(pg: Db) -> None:
    """X2: once in sweep_every a claim sweeps, however much else is ready."""
    functions = scrape(pg, lane={"sweep_every": td(seconds=1)})
    stuck, *_ = systems.insert_scrape(pg, 50)
    pg.execute("update scrape_jobs set status = 'running', locked_by = 'gone' where id = ?", stuck)
    claimed = functions.claim()
    assert claimed is not None
    assert claimed["id"] == stuck, "no heartbeat at all: gone; and the oldest goes first"


async def test_a_batch_is_taken_in_order_and_what_is_locked_is_passed_over(pg: Db) -> None:
    """C6: N rows in one statement; a row that somebody has locked is left, and nobody waits for it."""
    systems.create(pg, "prices")
    mill = Mill(pg.url)
    systems.scrape(mill, handle)
    functions = await installed(pg, mill)
    ids = systems.insert_scrape(pg, 6)
    other = await asyncpg.connect(pg.direct)
    try:
        async with other.transaction():
            await other.execute("select 1 from scrape_jobs where id = $1 for update", ids[0])
            rows = functions.call("claim_batch", worker="w", batch=3)
    finally:
        await other.close()
    assert [row["id"] for row in rows] == ids[1:4]
    assert functions.call("claim_batch", worker="w", batch=0) == []
    assert functions.call("claim_batch", worker="w", batch=-1) == []
    assert [row["id"] for row in functions.call("claim_batch", worker="w")] == [ids[0], *ids[4:]]


def test_a_result_is_written_with_the_outcome_and_typed_by_the_table(pg: Db) -> None:
    """The columns of a result as JSON: any type, also those the lane writes; key and state are not for results."""
    pg.execute("""create type verdict as enum ('good', 'bad');
        create table jobs (id uuid primary key default gen_random_uuid(), status text not null default 'ready',
          worker text, claimed_at timestamptz, finished_at timestamptz, error text, price numeric(12, 2), v verdict,
          tags text[], doc jsonb, made timestamptz, raw bytea, "Odd ""name" text,
          twice integer generated always as (1) stored)""")
    mill = Mill(pg.url)
    mill.lane("jobs", **STATES)(handle)
    functions = install_now(pg, mill)
    pg.execute("insert into jobs default values")
    row = functions.claim()
    assert row is not None
    text = (
        '{"price": 12.5, "v": "good", "tags": ["a", "b"], "doc": {"k": [1, null]}, "made": "2026-01-02T03:04:05Z",'
        ' "raw": "\\\\x00ff", "Odd \\"name": "O\'Hara; $1 %s", "finished_at": "2020-01-01T00:00:00Z"}'
    )
    for wrong, word in (('{"status": "done"}', "status"), ('{"id": "1"}', "id"), ('{"nmae": 1}', "nmae"),
                        ('{"twice": 3}', "twice"), ('[1]', "array"), ('{"v": "ugly"}', "ugly")):  # fmt: skip
        with pytest.raises(asyncpg.PostgresError, match=word):
            functions.settle("complete", row, result=wrong)
    assert pg.value("select status from jobs") == "running", "nothing was written"
    assert functions.settle("complete", row, result=text) is True
    done = pg.one("select *, raw = '\\x00ff'::bytea as same from jobs")
    assert (done["status"], str(done["price"]), done["v"], done["tags"]) == ("done", "12.50", "good", ["a", "b"])
    assert (done["same"], done['Odd "name'], done["finished_at"].year) == (True, "O'Hara; $1 %s", 2020)
    assert functions.settle("complete", row, result=text) is False


def test_a_lost_claim_writes_nothing(pg: Db) -> None:
    """X1: swept and taken by another, the first worker's heartbeat, outcome and release are all refused."""
    functions = scrape(pg)
    systems.insert_scrape(pg, 1)
    first = functions.claim("first")
    assert first is not None
    pg.execute("update scrape_jobs set heartbeat_at = now() - interval '1 hour'")
    second = functions.claim("second")
    assert second is not None
    assert second["id"] == first["id"]
    before = pg.one("select * from scrape_jobs")
    for verb, answer in (("heartbeat", False), ("complete", False), ("fail", None), ("release", False)):
        assert functions.settle(verb, first) is answer
        mixed = first | {"locked_by": "second"}
        assert functions.settle(verb, mixed) is answer, "the claim's time tells them apart"
    assert pg.one("select * from scrape_jobs") == before
    assert functions.settle("heartbeat", second) is True
    assert pg.one("select * from scrape_jobs")["heartbeat_at"] > before["heartbeat_at"]


def test_a_language_that_keeps_times_to_the_millisecond_holds_its_claim(pg: Db) -> None:
    """A JavaScript Date has no microseconds."""
    functions = scrape(pg)
    systems.insert_scrape(pg, 1)
    row = functions.claim()
    assert row is not None
    cut = row["locked_at"].replace(microsecond=row["locked_at"].microsecond // 1000 * 1000)
    assert functions.settle("complete", row | {"locked_at": cut}) is True


def test_a_moving_claim_is_renewed_with_the_time_of_the_last_renewal(pg: Db) -> None:
    """renew="claimed_at": the fence moves with the heartbeat."""
    mill = Mill(pg.url)
    insert = SHAPES["no_worker"](pg, mill)
    functions = install_now(pg, mill)
    insert(1)
    row = functions.claim()
    assert row is not None
    pg.execute("select pg_sleep(0.002)")
    moved = functions.settle("heartbeat", row)
    assert moved > row["claimed_at"]
    assert functions.settle("complete", row) is False
    assert functions.settle("complete", row | {"claimed_at": moved}) is True


def test_columns_that_come_later_are_returned_too(pg: Db) -> None:
    """A migration of the table does not break the workers: a claim returns whole rows."""
    functions = scrape(pg)
    systems.insert_scrape(pg, 2)
    assert functions.claim() is not None
    pg.execute("alter table scrape_jobs add column later text default 'x'")
    row = functions.claim()
    assert row is not None
    assert row["later"] == "x"
    assert functions.settle("complete", row) is True


def test_a_claim_without_a_worker_is_refused(pg: Db) -> None:
    """Nobody could ever settle it."""
    functions = scrape(pg)
    systems.insert_scrape(pg, 1)
    for nobody in (None, ""):
        with pytest.raises(asyncpg.PostgresError, match="needs the name of its worker"):
            functions.call("claim", worker=nobody)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backoff": lambda n: td(seconds=n)}, "Python function"),
        ({"backoff": exponential(), "names": {"clame": "x"}}, "no function 'clame'"),
        ({"names": {"claim": "x", "sweep": "x"}}, "two functions"),
        ({"prefix": "é" * 30}, "63 bytes"),
    ],
)
def test_what_cannot_be_a_function_is_refused_with_a_word(pg: Db, options: dict[str, Any], words: str) -> None:
    """Issue: a Python backoff, a name that PostgreSQL would cut, two of one name."""
    lane = {"lane": {"backoff": options.pop("backoff")}} if "backoff" in options else {}
    with pytest.raises(DeclarationError, match=words):
        scrape(pg, **lane, **options)
    assert pg.value("select count(*) from pg_proc p where pronamespace = 'public'::regnamespace") == 0


def test_a_lane_that_functions_could_not_serve_is_refused(pg: Db) -> None:
    """Where only the table of workers shows life, others look dead."""
    pg.execute("create table jobs (id integer primary key, status text, worker text)")
    mill = Mill(pg.url)
    mill.lane("jobs", **STATES)(handle)
    with pytest.raises(DeclarationError, match="taken back at once"):
        install_now(pg, mill)
    pg.execute("alter table jobs add column heartbeat_at timestamptz")
    assert install_now(pg, mill).claim() is None


@pytest.mark.parametrize("by", ["sweep", "claim"])
def test_a_row_that_may_not_go_back_ends_and_holds_no_other_up(pg: Db, by: str) -> None:
    """X2: one waiting row per key; while the first ran, another was queued: the first cannot be swept back."""
    functions = scrape(pg)
    first, other, waiting = systems.insert_scrape(pg, 3, intake_id=1, query_params={})
    pg.execute("update scrape_jobs set intake_id = 2 where id = ?", other)
    pg.execute("update scrape_jobs set status = 'running', locked_by = 'gone' where id in (?, ?)", first, other)
    pg.execute("create unique index one on scrape_jobs (intake_id) where status = 'pending'")
    if by == "sweep":
        told = {row["id"]: row["poison"] for row in functions.call("sweep")}
        assert told == {first: True, other: False}
    pg.execute("update scrape_jobs set next_retry_at = now() + interval '1 hour' where id = ?", waiting)
    row = functions.claim()
    assert row is not None
    assert row["id"] == other
    dead = pg.one("select * from scrape_jobs where id = ?", first)
    assert dead["status"] == "failed"
    assert dead["error_message"].startswith("the database would not take it back: duplicate key")


@pytest.mark.parametrize("by", ["sweep", "claim"])
async def test_an_expired_row_is_not_claimed_and_ends(pg: Db, by: str) -> None:
    """Issue 23: a row past its time is never started, by whatever language."""
    pg.execute(
        f"create table jobs (id integer primary key, {_MARKS}, error varchar(12), valid_until timestamptz,"
        " finished_at timestamptz)"
    )
    mill = Mill(pg.url)
    mill.lane(
        "jobs", name="jobs", roles={"expires_at": "valid_until"}, expired={"status": "late"}, **STATES
    )(handle)  # fmt: skip
    functions = await installed(pg, mill)
    pg.execute("insert into jobs (id, status, valid_until) values (1, 'ready', now() - interval '1 second')")
    assert (functions.call("sweep") if by == "sweep" else functions.claim()) in ([], None)
    row = pg.one("select * from jobs")
    assert (row["status"], row["error"], row["finished_at"] is not None) == ("late", "expired: it ", True)
    pg.execute("insert into jobs (id, status, valid_until) values (2, 'ready', now() + interval '1 hour')")
    claimed = functions.claim()
    assert claimed is not None
    assert claimed["id"] == 2


@pytest.mark.parametrize("shape", ["enrichment", "scrape", "prompt_forming", "sharded"])
async def test_the_functions_are_those_that_were_reviewed(pg: Db, shape: str) -> None:
    """D2, C6, E2: kept as files to be read; UPDATE_GOLDEN=1 rewrites them."""
    mill = Mill(pg.url)
    SHAPES[shape](pg, mill)
    functions = (await installed(pg, mill)).functions.values()
    text = "\n\n".join(f"-- {function.verb}\n{function.sql};" for function in functions) + "\n"
    compare(Path(__file__).parents[1] / "golden_functions" / f"{shape}.sql", as_newest(text))


def test_a_key_whose_type_brings_its_own_operators_is_refused(pg: Db) -> None:
    """Without its schema in the path it would be compared by another type's rules, and silently."""
    pg.execute("create type coin as (kind text)")
    pg.execute("create table jobs (id coin primary key, status text, worker text, claimed_at timestamptz)")
    mill = Mill(pg.url)
    mill.lane("jobs", **STATES)(handle)
    with pytest.raises(DeclarationError, match=r"'id', whose type public\.coin has operators of its own"):
        install_now(pg, mill)


@pytest.mark.parametrize("shape", ["sharded", "shards"])
async def test_the_functions_of_a_lane_keep_to_its_shard(pg: Db, shape: str) -> None:
    """Issue 24: the filter stands beside every mention of the table, in functions, too."""
    mill = Mill(pg.url)
    insert = SHAPES[shape](pg, mill)
    functions = await installed(pg, mill)
    bodies = "\n".join(function.sql for function in functions.functions.values())
    assert astray(bodies, "jobs", "tenant") == []
    insert(1, tenant="b" if shape == "sharded" else 9)
    (id,) = insert(1)
    row = functions.claim()
    assert row is not None
    assert row["id"] == id
    assert functions.claim() is None, "the other row is in another shard"
    assert functions.settle("complete", row) is True
    pg.execute("update jobs set status = 'running', claimed_at = now() - interval '1 day' where status = 'ready'")
    assert functions.call("sweep", batch=10) == []
