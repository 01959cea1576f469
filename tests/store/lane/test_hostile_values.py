"""Hostile values: whatever stands in columns, states, error texts and payloads, it is kept or refused, never run."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta as td
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gated
from databases import Db
from rowmill import Dead, Job, Mill, Retry, WrongArguments
from rowmill.engine.execute import decide
from rowmill.store import Database
from rowmill.store.gates.gate_rows import GateRows
from rowmill.store.inspect.sql_listing import commented, one_line
from rowmill.store.jobs.job_rows import listed
from rowmill.store.lane import sql_literals
from rowmill.testing import Kit

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = settings(max_examples=200, deadline=None)
#: What SQL, formats and drivers take for something else, among all that text can be.
SNIPPETS = st.sampled_from(
    ["'", "''", '"', "\\", "\\'", "--", "/*", "*/", ";", "$1", "$$", ":now", "?", "%s", "%(a)s", "{x}", "\n", "\r",
     "\u2028", "null", "'; drop table victims; --", "E'\\x27'", "with held", "update ", "  for no key", "\x1b[31m"]
)  # fmt: skip
kept = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
texts = st.lists(st.one_of(SNIPPETS, kept), min_size=1, max_size=6).map("".join).filter(bool)
#: Also what no database keeps.
wild = st.lists(
    st.one_of(SNIPPETS, st.text(max_size=12), st.sampled_from(["\x00", "\ud800", "\udfff\ud800"])), max_size=6
).map("".join)


@pytest.fixture
def guarded(db: Db) -> Db:
    """A database with rows, and a table that no statement is to touch."""
    gated.make(db)
    db.execute("create table victims (id integer primary key); insert into victims values (1)")
    return db


def unharmed(db: Db) -> bool:
    return bool(db.query("select id from victims") == [{"id": 1}])


def collected(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Examples first, for a test that awaits."""
    found: list[Any] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


async def test_a_value_rendered_into_sql_is_that_value(guarded: Db) -> None:
    """Issue, SQL rendering: states, names of lanes and keys, and lists stand in the text of statements."""
    mill = Mill(guarded.url)
    gated.lane(mill)
    async with Kit(mill) as kit:
        store = await kit.store()
        rows = GateRows.open(store.database, mill.clock, "x")
        for text in collected(texts, 150):
            forms = [store.statements.literal("status", text), rows.literal(text), listed([text])]
            asked = f"select {', '.join(forms)}"
            found = await store.database.read(lambda run, asked=asked: run(asked, ()))
            assert list(found[0]) == [text] * 3
    assert unharmed(guarded)


@FEW
@given(state=texts)
def test_a_lane_works_with_any_state(guarded: Db, state: str) -> None:
    """Issue, column values: claim, renew, settle and sweep, with any text as the state."""
    guarded.execute("delete from pages")
    gated.fill(guarded, ["a", "a"], status=state)
    mill = Mill(guarded.url)
    gated.lane(mill, ready={"status": state}, running={"status": f"{state}1"}, done={"status": f"{state}2"})

    async def work() -> None:
        async with Kit(mill) as kit:
            claims = await kit.claim(count=2)
            assert await (await kit.store()).renew(claims) == claims
            assert (await kit.settle(claims[0])).written
            kit.advance(td(minutes=2))
            assert [s.id for s in await kit.sweep()] == [claims[1].id]

    asyncio.run(work())
    found = sorted(row["status"] for row in guarded.query("select status from pages"))
    assert found == sorted([f"{state}2", state])
    assert unharmed(guarded)


@FEW
@given(said=st.lists(wild, min_size=1, max_size=6), long=st.integers(0, 200_000))
def test_any_error_text_ends_its_own_row_and_no_other(guarded: Db, said: list[str], long: int) -> None:
    """Issue, error texts: with NUL, lone surrogates, and without end; a whole batch of them."""
    guarded.execute("delete from pages")
    texts_ = [*said, "x" * long + "é\x00" * 10, "plain"]
    gated.fill(guarded, ["a"] * len(texts_))
    mill = Mill(guarded.url)
    gated.lane(mill)

    async def work() -> Any:
        async with Kit(mill) as kit:
            store, claims = await kit.store(), await kit.claim(count=len(texts_))
            ends = [Dead(text) if i % 2 else Retry(text) for i, text in enumerate(texts_)]
            return await store.settle([decide(store, c, end) for c, end in zip(claims, ends, strict=True)])

    report = asyncio.run(work())
    assert len(report.written) == len(texts_)
    rows = guarded.query("select status, error from pages order by id")
    assert [row["status"] for row in rows] == ["dead" if i % 2 else "queued" for i in range(len(texts_))]
    assert rows[-1]["error"] == "plain"
    for row, text in zip(rows, texts_, strict=True):
        assert "\x00" not in row["error"]
        if text and text.isprintable() and len(text) < 1000:
            assert row["error"] == text
    assert unharmed(guarded)


async def test_what_stands_in_a_row_comes_to_the_handler_and_back_as_it_is(guarded: Db) -> None:
    """Issue, column values and payloads: what a handler reads, and what it returns."""
    values = collected(texts, 60)
    gated.fill(guarded, values)
    mill = Mill(guarded.url)
    seen: dict[Any, str] = {}

    async def handler(job: Any) -> dict[str, str]:
        seen[job.id] = job["domain"]
        return {"error": job["domain"]}

    gated.lane(mill, handler)
    async with Kit(mill) as kit:
        assert (await kit.drain()).completed == len(values)
    rows = guarded.query("select id, domain, error from pages order by id")
    assert [row["domain"] for row in rows] == [row["error"] for row in rows] == values
    assert [seen[row["id"]] for row in rows] == values
    assert unharmed(guarded)


payloads = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), wild, st.floats(allow_nan=False, width=32)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(wild, inner, max_size=4)),
    max_leaves=12,
)


async def test_any_payload_is_worked_on_or_refused_at_the_call(guarded: Db) -> None:
    """Issue, payloads: what was taken runs, with what can be kept of it; the queue never stops behind one."""
    mill = Mill(guarded.url)
    ran: list[Any] = []

    @mill.task(max_attempts=1)
    async def take(job: Job, payload: Any) -> Any:
        ran.append(payload)
        return payload

    taken = []
    for payload in collected(payloads, 60):
        try:
            await take.enqueue(payload=payload)
        except WrongArguments:
            continue
        taken.append(payload)
    async with Kit(mill) as kit:
        tally = await kit.drain()
    await mill.close()
    assert (tally.completed, len(ran)) == (len(taken), len(taken))
    assert len(taken) > 30
    for sent, got in zip(taken, ran, strict=True):
        text = json.dumps(sent)
        if "\\u0000" not in text and "\\ud" not in text:
            assert _same(sent, got), (sent, got)
    assert unharmed(guarded)


def _same(sent: Any, got: Any) -> bool:
    """The same value, but for one thing: JSON has one kind of number. PostgreSQL writes a float of 1e16 and more as a
    whole number in its shortest form. Read as a float it is the one that was sent.
    """
    if isinstance(sent, list):
        return isinstance(got, list) and len(sent) == len(got) and all(map(_same, sent, got))
    if isinstance(sent, dict):
        return isinstance(got, dict) and sent.keys() == got.keys() and all(_same(sent[key], got[key]) for key in sent)
    if isinstance(sent, float) and abs(sent) >= 1e16:
        return isinstance(got, int | float) and float(got) == sent
    return bool(got == sent)


@MANY
@given(texts)
@example("a\nwith held\nupdate x")
def test_comments_in_a_statement_change_nothing_of_what_it_does(text: str) -> None:
    """Issue, SQL rendering: what ``rowmill sql`` shows has a why above each step, and never inside a literal."""
    literal = "'" + text.replace("'", "''") + "'"
    plain = (
        f"update pages set\n    note = {literal}\nwhere id in (\n  select id from pages\n  where status = {literal}\n)"
    )
    shown = commented("claim", plain)
    inserted = [line for line in shown.split("\n") if line not in plain.split("\n")]
    assert all(line.lstrip().startswith("-- ") for line in inserted)
    assert literal in shown, "a literal was cut by a comment"


@MANY
@given(st.text())
def test_a_text_in_a_comment_cannot_end_its_line(text: str) -> None:
    """Issue, SQL rendering: names and reasons may stand in comments."""
    assert len(one_line(text).splitlines()) <= 1


@MANY
@given(value=texts, other=texts)
def test_a_literal_is_read_back_from_sql_text_as_it_was(value: str, other: str) -> None:
    """Issue, SQL rendering: defaults, check constraints and predicates, from whatever a schema has in them."""
    quoted = ["'" + text.replace("'", "''") + "'" for text in (value, other)]
    assert sql_literals.plain_default(f"{quoted[0]}::character varying", "text") == value
    assert sql_literals.allowed_by_check(f"status in ({', '.join(quoted)})", "status", ["id"], "text") == tuple(
        dict.fromkeys([value, other])
    )
    assert sql_literals.literals_of(f"(status = {quoted[0]})", "status", ["id"], "text") == (value,)


@MANY
@given(st.text(), st.sampled_from(["text", "int", "bool"]))
def test_no_schema_text_upsets_its_reader(text: str, kind: str) -> None:
    sql_literals.plain_default(text, kind)
    sql_literals.allowed_by_check(text, "status", ["id"], kind)
    sql_literals.literals_of(text, "status", ["id"], kind)
    sql_literals.comment_meanings(text, kind)


def test_the_address_of_no_database_is_run(tmp_path: Any) -> None:
    """A URL is read, whatever it says: it names a file, and nothing else."""
    database = Database.open(f"sqlite:///{tmp_path}/a'; drop table victims; --.db")
    assert database.path.endswith("--.db")  # type: ignore[attr-defined]
