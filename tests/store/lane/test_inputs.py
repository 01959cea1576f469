"""Never stale: an outcome is final only if the row's inputs are still what the run worked from."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from rowmill import Cancel, Concurrency, Dead, LostClaim, Mill, Retry, fixed
from rowmill.declare.outcome import Release
from rowmill.errors import DeclarationError, InputsChanged, Unreachable
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit
from workers import until

STATES: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead", "canceled")}
INPUTS: dict[str, Any] = {"inputs": ["url", "body"], "backoff": fixed(td(0)), "max_attempts": 3}


async def handle(job: Any) -> None:
    return None


def make(db: Db, rows: int = 1, more: str = "", key: str = "id integer primary key") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        f"create table jobs ({key}, status text not null default 'ready', worker text, claimed_at {time},"
        f" heartbeat_at {time}, run_after {time}, attempts integer not null default 0, error text,"
        f" finished_at {time}, url text, body text, result text, n integer check (n < 100){more});"
        "create table effects (job integer, note text)"
    )
    if key.startswith("id integer"):
        db.insert("jobs", [{"id": n, "url": f"u{n}", "body": f"b{n}"} for n in range(1, rows + 1)])


def edit(db: Db, text: str | None = "new", column: str = "body", id: int = 1) -> None:
    db.execute(f"update jobs set {column} = ? where id = {id}", text)


def row(db: Db, id: int = 1) -> dict[str, Any]:
    return db.one(f"select * from jobs where id = {id}")


def notes(db: Db) -> list[tuple[Any, ...]]:
    return [tuple(one.values()) for one in db.query("select lane, row_id, runs from rowmill_stale_runs order by 1, 2")]


def lane(mill: Mill, handler: Any = handle, **options: Any) -> Any:
    return mill.lane("jobs", name="jobs", **STATES, **{**INPUTS, **options})(handler)


@pytest.mark.parametrize(
    "ended",
    [None, {"result": "made"}, Dead("no"), Cancel("off"), "an object of no kind"],
    ids=["done", "with columns", "dead", "cancel", "wrong"],
)
async def test_an_end_computed_from_old_inputs_is_not_final_and_costs_no_attempt(
    db: Db, mill: Mill, ended: Any
) -> None:
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        edit(db)
        report = await kit.settle(claim, ended)
        assert [s.kind for s in report.written + report.refused] == ["stale"]
        left = row(db)
        assert (left["status"], left["worker"], left["claimed_at"], left["attempts"]) == ("ready", None, None, 0)
        assert (left["result"], left["error"], left["finished_at"], left["body"]) == (None, None, None, "new")
        assert notes(db) == [("jobs", "1", 1)]
        (again,) = await kit.claim()
        assert again.row[again.holder.at["body"]] == "new"
        report = await kit.settle(again, {"result": "from new"})
        assert [s.kind for s in report.written] == ["done"]
    assert (row(db)["status"], row(db)["result"], row(db)["attempts"]) == ("done", "from new", 1)
    assert notes(db) == []


async def test_what_the_run_returned_is_written_if_the_lane_says_so(db: Db, mill: Mill) -> None:
    make(db, 2)
    lane(mill, stale="write")
    async with Kit(mill) as kit:
        first, second = await kit.claim(count=2)
        edit(db)
        edit(db, id=2)
        await kit.settle(first, {"result": "partial"})
        await kit.settle(second, Dead("no"))
    assert [(r["status"], r["result"], r["body"], r["error"]) for r in (row(db), row(db, 2))] == [
        ("ready", "partial", "new", None), ("ready", None, "new", None),
    ]  # fmt: skip


async def test_a_retry_a_snooze_and_a_release_go_their_own_way(db: Db, mill: Mill) -> None:
    """A retry is worked on again anyway, with the newest values; it counts as a failure."""
    make(db, 3)
    lane(mill)
    async with Kit(mill) as kit:
        for claim, ended in zip(await kit.claim(count=3), (Retry("later"), Settlement, Release()), strict=True):
            edit(db, id=claim.id)
            given = Settlement(claim, "snooze", delay=td(0)) if ended is Settlement else ended
            report = await kit.settle(claim, given)
            assert len(report.written) == 1
            assert report.written[0].kind != "stale"
    assert [(row(db, n)["status"], row(db, n)["attempts"]) for n in (1, 2, 3)] == [
        ("ready", 1),
        ("ready", 0),
        ("ready", 0),
    ]
    assert notes(db) == []


async def test_the_last_attempt_that_fails_with_old_inputs_is_not_the_rows_end(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill, max_attempts=1)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        edit(db)
        assert (await kit.settle(claim, ValueError("boom"))).written[0].kind == "stale"
        (claim,) = await kit.claim()
        assert (await kit.settle(claim, ValueError("boom"))).written[0].kind == "dead"
    assert row(db)["status"] == "dead"


async def test_columns_that_are_no_inputs_may_change(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        edit(db, "x", "result")
        assert (await kit.settle(claim)).written[0].kind == "done"


async def test_an_edit_that_was_taken_back_changes_nothing(db: Db, mill: Mill) -> None:
    """The values are compared, not whether somebody wrote."""
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        edit(db)
        edit(db, "b1")
        assert (await kit.settle(claim)).written[0].kind == "done"
        edit(db)
    assert row(db)["status"] == "done"


@pytest.mark.parametrize(
    ("before", "after"), [("a", "A"), (None, "a"), ("a", None), ("", None), ("a", "a "), ("é", "e")]
)
async def test_any_change_of_a_text_counts(db: Db, mill: Mill, before: Any, after: Any) -> None:
    collation = " collate nocase" if db.dialect == "sqlite" else ""
    make(db, more=f", note text{collation}")
    edit(db, before, "note")
    lane(mill, inputs=["note"])
    async with Kit(mill) as kit:
        for changed, kind in ((False, "done"), (True, "stale")):
            db.execute("update jobs set status = 'ready'")
            edit(db, before, "note")
            (claim,) = await kit.claim()
            if changed:
                edit(db, after, "note")
            assert (await kit.settle(claim)).written[0].kind == kind


POSTGRES_TYPES = [
    ("json", "'{\"a\": 1}'", "'{\"a\": 2}'"), ("jsonb", "'{\"a\": [1, null]}'", "'{\"a\": [1]}'"),
    ("timestamptz", "'2024-05-01 12:00Z'", "'2024-05-01 12:00:00.000001Z'"), ("timestamp", "'infinity'", "'-infinity'"),
    ("timestamptz", "'20000-01-01Z'", "'20000-01-02Z'"), ("bytea", "'\\x00ff'", "'\\x00fe'"),
    ("numeric", "1.0", "1.00"),
    ("float8", "'NaN'", "0.1"), ("uuid", "gen_random_uuid()", "gen_random_uuid()"), ("int[]", "'{1,null}'", "'{1}'"),
    ("interval", "'1 month'", "'30 days'"), ("char(4)", "'a'", "'b'"), ("int4range", "'[1,3)'", "'[1,4)'"),
    ("inet", "'10.0.0.1'", "'10.0.0.2'"), ("money", "'1.5'", "'1.6'"), ("boolean", "true", "null"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "after"), POSTGRES_TYPES)
async def test_columns_of_every_type_are_compared(pg: Db, kind: str, before: str, after: str) -> None:
    """Also with another time zone and other formats in the session that settles, and for types without equality."""
    make(pg, more=f", thing {kind}")
    pg.execute(f"update jobs set thing = {before}")
    mill = Mill(pg.url)
    lane(mill, inputs=["thing", "url"])
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        name = pg.one("select current_database() as name")["name"]
        for setting in ("timezone = 'Asia/Tokyo'", "bytea_output = 'escape'", "datestyle = 'German'",
                        "intervalstyle = 'iso_8601'", "extra_float_digits = 0"):  # fmt: skip
            pg.execute(f'alter database "{name}" set {setting}')
        await kit._databases["default"].close()
        assert (await kit.settle(claim)).written[0].kind == "done"
        pg.execute(f"update jobs set status = 'ready', thing = {before}")
        (claim,) = await kit.claim()
        pg.execute(f"update jobs set thing = {after}")
        assert (await kit.settle(claim)).written[0].kind == "stale"


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("blob", b"\x00\xff", b"\x00\xfe"), ("real", 0.1, 0.1 + 1e-16 * 3), ("", 5, 6), ("json", '{"a": 1}', '{"a": 2}'),
     ("text", "x" * 1_000_000, "x" * 999_999 + "y"), ("integer", 2**53 + 1, 2**53), ("text", "0\x00a", "0\x00b")],
)  # fmt: skip
async def test_columns_of_every_type_are_compared_on_sqlite(lite: Db, kind: str, before: Any, after: Any) -> None:
    make(lite, more=f", thing {kind}")
    lite.execute("update jobs set thing = ?", before)
    mill = Mill(lite.url)
    lane(mill, inputs="thing")
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        assert (await kit.settle(claim)).written[0].kind == "done"
        lite.execute("update jobs set status = 'ready'")
        (claim,) = await kit.claim()
        lite.execute("update jobs set thing = ?", after)
        assert (await kit.settle(claim)).written[0].kind == "stale"


async def test_text_that_is_not_utf_8_does_not_look_changed(lite: Db) -> None:
    make(lite)
    lite.execute("update jobs set body = cast(x'61ff62' as text)")
    mill = Mill(lite.url)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        assert (await kit.settle(claim)).written[0].kind == "done"


async def test_a_big_input_is_not_sent_back(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    make(pg)
    pg.execute("update jobs set body = repeat('x', 2000000)")
    mill = Mill(pg.url)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        store = await kit.store()
        sent = store.settling([Settlement(claim, "done"), Settlement(claim, "done", columns={"result": "x"})][:1])
        assert len(repr(sent.parameters if hasattr(sent, "parameters") else vars(sent))) < 5000
        assert (await kit.settle(claim, {"result": "x"})).written[0].kind == "done"


async def test_composite_keys_are_noted_apart(db: Db, mill: Mill) -> None:
    make(db, key="tenant text, number integer", more=", primary key (tenant, number)")
    db.execute("insert into jobs (tenant, number, url, body) values ('a,1', 2, 'u', 'b'), ('a', 12, 'u', 'b')")
    lane(mill)
    async with Kit(mill) as kit:
        claims = await kit.claim(count=2)
        db.execute("update jobs set body = 'new'")
        for claim in claims:
            assert (await kit.settle(claim)).written[0].kind == "stale"
        assert [runs for _, _, runs in notes(db)] == [1, 1]
        for claim in await kit.claim(count=2):
            assert (await kit.settle(claim)).written[0].kind == "done"
    assert notes(db) == []


# -- batches


async def test_in_a_batch_only_the_changed_rows_go_back(db: Db, mill: Mill) -> None:
    make(db, 30)
    lane(mill)
    async with Kit(mill) as kit:
        claims = await kit.claim(count=30)
        db.execute("update jobs set url = 'new' where id % 3 = 0")
        store = await kit.store()
        ends = [Settlement(claim, "dead" if claim.id % 2 else "done", error="no") for claim in claims]
        report = await store.settle(ends)
        assert len(report.written) == 30
        assert not [*report.lost, *report.locked, *report.refused, *report.stuck]
    found = {r["id"]: r["status"] for r in db.query("select id, status from jobs")}
    assert found == {n: "ready" if n % 3 == 0 else "dead" if n % 2 else "done" for n in range(1, 31)}


async def test_a_refused_batch_is_divided_and_its_stale_rows_go_back(db: Db, mill: Mill) -> None:
    """A row whose values the database refuses is dead, unless its inputs changed: then it is worked on again."""
    make(db, 8)
    lane(mill)
    async with Kit(mill) as kit:
        claims = await kit.claim(count=8)
        db.execute("update jobs set url = 'new' where id in (2, 3)")
        store = await kit.store()
        wrong = {3, 4}
        ends = [Settlement(c, "done", columns={"n": 500 if c.id in wrong else 1}) for c in claims]
        report = await store.settle(ends)
        kinds = {s.claim.id: s.kind for s in report.written + report.refused}
    assert kinds == {n: {2: "stale", 3: "stale", 4: "dead"}.get(n, "done") for n in range(1, 9)}
    found = {r["id"]: r["status"] for r in db.query("select id, status from jobs")}
    assert found == {n: {2: "ready", 3: "ready", 4: "dead"}.get(n, "done") for n in range(1, 9)}


async def test_refused_columns_of_a_stale_run_are_left_out(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill, stale="write")
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        db.execute("update jobs set url = 'new'")
        # Two rules at once: it may not hold 500, and it went back.
        claim_settlement = Settlement(claim, "stale", columns={"n": 500}, delay=td(0))
        report = await (await kit.store()).settle([claim_settlement])
        assert [s.kind for s in report.refused] == ["stale"]
    assert (row(db)["status"], row(db)["n"]) == ("ready", None)


async def test_a_stale_row_that_may_not_go_back_ends_with_the_reason(db: Db, mill: Mill) -> None:
    """A unique rule for waiting rows: meanwhile another one waits in its place."""
    make(db, 1)
    db.execute("create unique index one_ready on jobs (url) where status = 'ready'")
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        edit(db)
        db.execute("insert into jobs (id, url) values (9, 'u1')")
        report = await kit.settle(claim)
        assert [s.kind for s in report.refused] == ["dead"]
    assert row(db)["status"] == "dead"
    assert "the database refused the outcome stale" in row(db)["error"]


async def test_a_lost_claim_is_lost_whatever_its_inputs(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        db.execute("update jobs set status = 'ready', worker = null, body = 'new'")
        (other,) = await kit.claim()
        report = await kit.settle(claim, {"result": "old"})
        assert (report.lost, report.written) == ([s for s in report.lost if s.claim is claim], [])
        assert (await kit.settle(other, {"result": "new"})).written[0].kind == "done"
    assert row(db)["result"] == "new"
    assert notes(db) == []


async def test_the_edit_may_come_while_the_outcome_is_being_written(pg: Db) -> None:
    """The editor's transaction has the row locked: the outcome waits, and then sees what was committed."""
    make(pg)
    mill = Mill(pg.url)
    lane(mill)
    async with Kit(mill) as kit, Kit(mill) as other:
        (claim,) = await kit.claim()
        await other.store()
        database = other._databases["default"]
        async with database.begin() as connection:
            await connection.exec_driver_sql("update jobs set body = 'new' where id = 1")
            assert len((await kit.settle(claim)).locked) == 1
        assert (await kit.settle(claim)).written[0].kind == "stale"
    assert row(pg)["status"] == "ready"


async def test_an_edit_that_commits_behind_the_statements_snapshot_is_seen(pg: Db) -> None:
    """The settle statement has its snapshot, and waits inside; the edit commits; the row is compared as it is then."""
    make(pg, 2)
    pg.execute(
        "create function wait_here() returns boolean language plpgsql volatile as $$ begin"
        " perform pg_advisory_lock(7); perform pg_advisory_unlock(7); return true; end $$"
    )
    mill = Mill(pg.url)
    lane(mill)
    async with Kit(mill) as kit, Kit(mill) as other:
        claims = await kit.claim(count=2)
        store = await kit.store()
        statements: Any = store.statements
        held = statements._held

        def stopped(*given: Any) -> str:
            return (
                str(held(*given))
                .replace("with held", "with stop as materialized (select wait_here()), held")
                .replace("cross join lateral", "cross join stop cross join lateral")
            )

        statements._held = stopped
        await other.store()
        database = other._databases["default"]
        async with database.begin() as connection:
            await connection.exec_driver_sql("select pg_advisory_lock(7)")
            settling = asyncio.create_task(store.settle([Settlement(claim, "done") for claim in claims]))
            waits = "select 1 from pg_locks where locktype = 'advisory' and not granted"
            await until(lambda: bool(pg.query(waits)))
            edit(pg, id=2)
            await connection.exec_driver_sql("select pg_advisory_unlock(7)")
        report = await settling
        assert {s.claim.id: s.kind for s in report.written} == {1: "done", 2: "stale"}
    assert (row(pg, 2)["status"], row(pg, 2)["body"]) == ("ready", "new")


@pytest.mark.parametrize("lost", ["done", "stale"])
async def test_a_lost_reply_is_followed_by_the_same_end(
    db: Db, mill: Mill, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Whether the outcome stands, the row tells; a row that went back is not settled by the outcome sent again."""
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        store = await kit.store()
        settlement = Settlement(claim, "done", columns={"result": "old"})
        if lost == "stale":
            edit(db)
        write, replies = store.database.write, list[Any]()

        async def unheard(verb: Any, **given: Any) -> Any:
            found = await write(verb, **given)
            replies.append(found)
            if found:
                raise Unreachable("the connection is gone")
            return found

        monkeypatch.setattr(store.database, "write", unheard)
        with pytest.raises(Unreachable):
            await store.settle([settlement])
        monkeypatch.undo()
        edit(db, "newest")
        report = await store.settle([settlement])
        assert [s.kind for s in report.written] == [lost]
    assert row(db)["status"] == {"done": "done", "stale": "ready"}[lost]
    assert row(db)["result"] == {"done": "old", "stale": None}[lost]


async def test_claims_found_again_after_a_lost_reply_go_by_what_was_found(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        await kit.claim()
        edit(db)
        (claim,) = await (await kit.store()).mine()
        assert (await kit.settle(claim)).written[0].kind == "done"


async def test_a_claim_that_is_renewed_in_its_claimed_at_stays_comparable(db: Db, mill: Mill) -> None:
    make(db, 2)
    lane(mill, renew="claimed_at", roles={"heartbeat_at": None, "worker": None})
    async with Kit(mill) as kit:
        first, second = await kit.claim(count=2)
        store = await kit.store()
        assert len(await store.renew([first, second])) == 2
        edit(db)
        assert (await kit.settle(first)).written[0].kind == "stale"
        assert (await kit.settle(second)).written[0].kind == "done"


@pytest.mark.parametrize("gates", [[Concurrency(2, by="url")], [Concurrency(2, by="url"), Concurrency(3)]])
async def test_claims_through_gates_know_their_inputs(db: Db, mill: Mill, gates: Any) -> None:
    make(db, 4)
    db.execute("update jobs set url = null where id = 4")
    lane(mill, inputs=["body"], gates=gates)
    async with Kit(mill) as kit:
        claims = {claim.id: claim for claim in await kit.claim(count=3)}
        assert len(claims) == 3
        for n, claim in claims.items():
            if n % 2:
                edit(db, id=n)
            assert (await kit.settle(claim)).written[0].kind == ("stale" if n % 2 else "done")


async def test_a_backfill_of_an_older_version_goes_by_its_inputs(db: Db, mill: Mill) -> None:
    make(db, more=", made_by integer")
    db.execute("update jobs set status = 'done', made_by = 1, attempts = 2")
    lane(mill, version=2, version_column="made_by")
    async with Kit(mill) as kit:
        (claim,) = await kit.claim("jobs-backfill")
        edit(db)
        assert (await kit.settle(claim, {"result": "old"})).written[0].kind == "stale"
        assert (row(db)["status"], row(db)["made_by"], row(db)["result"]) == ("done", 1, None)
        (claim,) = await kit.claim("jobs-backfill")
        assert (await kit.settle(claim, {"result": "new"})).written[0].kind == "done"
    assert (row(db)["made_by"], row(db)["result"]) == (2, "new")


# -- the bound


async def test_after_so_many_runs_in_a_row_the_outcome_is_final(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill, settle_after=3)
    kinds = []
    async with Kit(mill) as kit:
        for n in range(4):
            (claim,) = await kit.claim()
            edit(db, f"edit {n}")
            report = await kit.settle(claim, {"result": f"run {n}"})
            kinds += [(s.kind, s.kept_changing) for s in report.written]
    assert kinds == [("stale", False)] * 3 + [("done", True)]
    assert (row(db)["status"], row(db)["result"], row(db)["attempts"]) == ("done", "run 3", 1)
    assert notes(db) == []


async def test_after_so_long_the_outcome_is_final(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill, settle_after=td(minutes=5))
    async with Kit(mill) as kit:
        for minutes, kind in ((0, "stale"), (4, "stale"), (2, "dead")):
            kit.advance(td(minutes=minutes))
            (claim,) = await kit.claim()
            edit(db, f"edit {minutes}")
            assert (await kit.settle(claim, Dead("no"))).written[0].kind == kind


async def test_by_default_it_takes_both_ten_runs_and_a_minute(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill)
    async with Kit(mill) as kit:

        async def run(n: int) -> str:
            (claim,) = await kit.claim()
            edit(db, f"edit {n}")
            return (await kit.settle(claim)).written[0].kind

        assert {await run(n) for n in range(12)} == {"stale"}
        kit.advance(td(seconds=61))
        assert await run(12) == "done"


async def test_an_outcome_that_is_final_begins_the_count_again(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill, settle_after=2)
    async with Kit(mill) as kit:
        for _ in range(3):
            for kind in ("stale", "stale", "done"):
                (claim,) = await kit.claim()
                edit(db, str(datetime.now(UTC)) if kind == "stale" else row(db)["body"])
                assert (await kit.settle(claim)).written[0].kind == kind
            db.execute("update jobs set status = 'ready'")


@pytest.mark.bare
async def test_without_a_bound_no_table_of_its_own_is_needed(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill, settle_after=None)
    async with Kit(mill) as kit:
        for _ in range(15):
            (claim,) = await kit.claim()
            edit(db, str(datetime.now(UTC)))
            assert (await kit.settle(claim)).written[0].kind == "stale"
        (claim,) = await kit.claim()
        assert (await kit.settle(claim)).written[0].kind == "done"


# -- finish and hooks


@pytest.mark.parametrize("colour", ["async", "sync"])
async def test_a_stale_finish_rolls_back_and_the_row_is_ready_again(db: Db, mill: Mill, colour: str) -> None:
    make(db)
    raised: list[type] = []

    async def work(job: Any) -> None:
        if row(db)["body"] == "b1":
            edit(db)
        try:
            async with job.finish() as tx:
                await tx.execute(
                    "insert into effects (job, note) values (:id, :note)", {"id": job.id, "note": job["body"]}
                )
                tx.set(result=job["body"])
        except InputsChanged:
            raised.append(InputsChanged)
            raise

    def plain(job: Any) -> None:
        if row(db)["body"] == "b1":
            edit(db)
        with job.finish() as tx:
            tx.execute("insert into effects (job, note) values (:id, :note)", {"id": job.id, "note": job["body"]})
            tx.set(result=job["body"])

    lane(mill, work if colour == "async" else plain)
    async with Kit(mill) as kit:
        first = await kit.step()
        assert first is not None
        assert first.outcome == "stale"
        assert (row(db)["status"], row(db)["attempts"], row(db)["result"]) == ("ready", 0, None)
        assert db.query("select * from effects") == []
        second = await kit.step()
        assert second is not None
        assert (second.outcome, second.attempt) == ("done", 1)
    assert [tuple(r.values()) for r in db.query("select * from effects")] == [(1, "new")]
    assert row(db)["result"] == "new"
    assert notes(db) == []


async def test_a_handler_that_swallows_it_changes_nothing(db: Db, mill: Mill) -> None:
    make(db)

    async def work(job: Any) -> Any:
        edit(db, str(datetime.now(UTC)))
        try:
            async with job.finish() as tx:
                tx.set(result="in the block")
        except Exception:
            return {"result": "after the block"}

    lane(mill, work)
    async with Kit(mill) as kit:
        step = await kit.step()
        assert step is not None
        assert step.outcome == "stale"
    assert (row(db)["status"], row(db)["result"]) == ("ready", None)


async def test_a_finish_is_final_where_the_inputs_keep_changing(db: Db, mill: Mill) -> None:
    make(db)

    async def work(job: Any) -> None:
        edit(db, str(datetime.now(UTC)))
        async with job.finish() as tx:
            await tx.execute("insert into effects (job, note) values (1, 'once')")
            tx.set(result="made")

    lane(mill, work, settle_after=2)
    told: list[str] = []
    mill.on_event(lambda event: told.append(event.name) if event.name.startswith("inputs") else None)
    async with Kit(mill) as kit:
        counters = await kit.drain()
    assert counters.completed == 1
    assert told == ["inputs_changed", "inputs_changed", "inputs_kept_changing"]
    assert (row(db)["status"], row(db)["result"], len(db.query("select * from effects"))) == ("done", "made", 1)
    assert notes(db) == []


async def test_a_finish_block_that_writes_its_own_input_is_told_so(db: Db, mill: Mill) -> None:
    make(db)

    async def work(job: Any) -> None:
        async with job.finish() as tx:
            await tx.execute("update jobs set body = 'mine' where id = 1")

    lane(mill, work)
    async with Kit(mill) as kit:
        step = await kit.step()
        assert step is not None
        assert step.outcome in ("retry", "dead")
        assert "the finish block itself wrote an input" in str(step.error)
    assert row(db)["body"] == "b1"


async def test_a_finish_whose_claim_is_lost_is_lost(db: Db, mill: Mill) -> None:
    make(db)

    async def work(job: Any) -> None:
        db.execute("update jobs set status = 'ready', worker = null, body = 'new'")
        with pytest.raises(LostClaim):
            async with job.finish() as tx:
                tx.set(result="old")
        raise LostClaim("told")

    lane(mill, work)
    async with Kit(mill) as kit:
        step = await kit.step()
        assert step is not None
        assert step.outcome == "lost"


async def test_the_hook_hears_of_stale_rows_as_stale(db: Db, mill: Mill) -> None:
    make(db, 3)
    made = lane(mill, settle_after=1)
    heard: list[tuple[Any, ...]] = []

    @made.on_settled
    async def hook(tx: Any, settled: Any) -> None:
        for one in settled:
            heard.append((one.id, one.outcome, one["body"]))
            await tx.execute("insert into effects values (:id, :note)", {"id": one.id, "note": one.outcome})

    async with Kit(mill) as kit:
        store = await kit.store()
        claims = await kit.claim(count=3)
        edit(db, id=2)
        await store.settle([Settlement(claim, "done") for claim in claims])
        assert sorted(heard) == [(1, "done", "b1"), (2, "stale", "b2"), (3, "done", "b3")]
        (claim,) = await kit.claim()
        edit(db, "newest", id=2)
        assert (await kit.settle(claim)).written[0].kind == "done"
    assert heard[-1] == (2, "done", "new")
    assert len(db.query("select * from effects")) == 4


async def test_a_hook_that_fails_for_a_stale_row_does_not_keep_it(db: Db, mill: Mill) -> None:
    make(db)
    made = lane(mill)

    @made.on_settled
    async def hook(tx: Any, settled: Any) -> None:
        if any(one.outcome == "stale" for one in settled):
            raise ValueError("no")

    async def work(job: Any) -> None:
        if job["body"] == "b1":
            edit(db)

    made.handler = work
    async with Kit(mill) as kit:
        counters = await kit.drain()
    assert counters.completed == 1
    assert (row(db)["status"], row(db)["attempts"]) == ("done", 1)


# -- a worker


async def test_a_worker_runs_stale_rows_again_at_once_counts_them_and_tells(db: Db, mill: Mill) -> None:
    make(db, 5)
    seen: dict[int, list[str]] = {}

    async def work(job: Any) -> Any:
        seen.setdefault(job.id, []).append(job["body"])
        if job["body"].startswith("b") and job.id % 2:
            edit(db, f"new {job.id}", id=job.id)
        return {"result": job["body"]}

    lane(mill, work, poll=td(hours=1))
    told: list[dict[str, Any]] = []
    mill.on_event(lambda event: told.append(event.fields) if event.name == "inputs_changed" else None)
    async with Kit(mill) as kit:
        counters = await kit.drain()
    assert {r["id"]: (r["status"], r["result"], r["attempts"]) for r in db.query("select * from jobs")} == {
        n: ("done", f"new {n}" if n % 2 else f"b{n}", 1) for n in range(1, 6)
    }
    assert (counters.completed, counters.failures, counters.died) == (5, 0, 0)
    assert counters.lanes["jobs"]["stale"] == sum(event["changed_count"] for event in told) == 3
    assert sum(int(r["stale"]) for r in db.query("select stale from rowmill_minutes")) == 3


async def test_a_row_edited_all_the_time_is_done_at_last(db: Db, mill: Mill) -> None:
    make(db, 2)
    runs = 0

    async def work(job: Any) -> Any:
        nonlocal runs
        if job.id == 1:
            runs += 1
            edit(db, str(datetime.now(UTC)))
        return {"result": job["body"]}

    lane(mill, work, settle_after=td(seconds=0.3))
    told: list[str] = []
    mill.on_event(lambda event: told.append(event.name))
    async with asyncio.timeout(60), Kit(mill) as kit:
        counters = await kit.drain()
    assert counters.completed == 2
    assert runs > 1
    assert "inputs_kept_changing" in told


# -- declarations


async def test_an_input_that_the_handler_returns_is_refused(db: Db, mill: Mill) -> None:
    make(db)
    lane(mill)
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        report = await kit.settle(claim, {"url": "https://normalised.example"})
        assert [s.kind for s in report.written] == ["dead"]
        assert "which is an input of the lane" in str(report.written[0].error)
    assert row(db)["url"] == "u1"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["urll"], "there is no column 'urll'"), (["status"], "is a state column"), (["error"], "has the role error"),
        (["heartbeat_at"], "has the role heartbeat_at"), (["id"], "is the row's key"),
    ],
)  # fmt: skip
async def test_an_input_that_cannot_be_one_is_refused_with_a_hint(
    db: Db, mill: Mill, inputs: list[str], words: str
) -> None:
    make(db)
    lane(mill, inputs=inputs)
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match=words) as raised:
            await kit.store()
    assert raised.value.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": {"url": 1}}, "inputs is a list of column names"), ({"inputs": ["url", 3]}, "list of column names"),
        ({"stale": "keep"}, "stale='keep'"), ({"inputs": [], "stale": "write"}, "no column is an input"),
        ({"inputs": (), "settle_after": 3}, "no column is an input"), ({"settle_after": 0}, "settle_after=0"),
        ({"settle_after": td(0)}, "settle_after"), ({"settle_after": True}, "settle_after=True"),
        ({"settle_after": "5"}, "settle_after='5'"), ({"settle_after": (td(1), 5)}, "settle_after"),
        ({"settle_after": (1, td(1), 2)}, "settle_after"),
    ],
)  # fmt: skip
def test_a_declaration_that_cannot_work_is_refused(mill: Mill, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        lane(mill, **options)


@pytest.mark.parametrize("how", ["task", "queue"])
def test_tasks_have_no_inputs(mill: Mill, how: str) -> None:

    def declare() -> None:
        if how == "task":
            mill.task(name="send", inputs=["args"])(handle)
        else:
            mill.queue("mail", inputs=["args"])

    with pytest.raises(DeclarationError, match="arguments of a job do not change") as raised:
        declare()
    assert "@mill.lane" in str(raised.value.hint)


@pytest.mark.bare
async def test_a_role_that_may_not_create_the_table_is_told(pg: Db) -> None:
    make(pg)
    pg.execute("drop role if exists plain_worker")
    pg.execute("revoke create on schema public from public")  # before PostgreSQL 15 everybody may
    pg.execute("create role plain_worker login; grant select, update on jobs to plain_worker")
    mill = Mill(pg.url.replace("postgres:@", "plain_worker:@"))
    lane(mill)
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError, match="rowmill_stale_runs") as raised:
            await kit.store()
    assert "settle_after=None" in str(raised.value.hint)
    pg.execute("drop owned by plain_worker; drop role plain_worker")


async def test_what_a_run_returned_may_be_of_any_column_type(db: Db, mill: Mill) -> None:
    kind = "jsonb" if db.dialect == "postgresql" else "json"
    make(db, more=f", document {kind}")
    lane(mill, stale="write")
    async with Kit(mill) as kit:
        (claim,) = await kit.claim()
        edit(db)
        await kit.settle(claim, {"document": {"a": [1, None]}, "result": "x"})
    found = row(db)["document"]
    assert (json.loads(found) if isinstance(found, str) else found) == {"a": [1, None]}
    assert row(db)["status"] == "ready"
