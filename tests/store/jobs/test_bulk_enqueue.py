"""Many jobs in one call: all of them, in order, with what each was given; or none."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databases import Db, as_time
from rowmill import Mill, Refused
from rowmill.declare.call import CallBatch
from rowmill.store.jobs import bulk_copy
from rowmill.store.json_documents import as_json

td = timedelta


async def test_many_are_enqueued_at_once_in_order_with_their_ids(mill: Mill, db: Db) -> None:
    @mill.task
    async def note(n: int) -> int:
        return n

    for count in (3, 250):  # below and above where COPY begins
        handles = await note.enqueue_many([{"n": n} for n in range(count)], priority=7)
        rows = {r["id"]: r for r in db.query("select id, args, priority from rowmill_jobs")}
        assert [h.id for h in handles] == sorted(h.id for h in handles)
        for n, handle in enumerate(handles):
            assert f'"n": {n}' in rows[handle.id]["args"].replace('":', '": ').replace("  ", " ")
            assert rows[handle.id]["priority"] == 7
    await mill.worker(drain=True).run()
    assert db.value("select count(*) from rowmill_jobs where state = 'done'") == 253


async def test_calls_of_all_kinds_in_several_parts_get_what_each_was_given(mill: Mill, db: Db) -> None:
    """What a part leaves to the table's defaults for one job is no other's."""

    @mill.task
    async def plain(n: int) -> None: ...

    @mill.task(queue="slow", priority=3, max_attempts=2)
    async def special(n: int) -> None: ...

    day = datetime(2031, 5, 1, tzinfo=UTC)
    calls = [
        special.call(n) if n % 7 == 0 else plain.options(run_after=day).call(n) if n % 700 == 1 else plain.call(n)
        for n in range(2_300)
    ]
    handles = await mill.enqueue_many(calls)
    assert [handle.id for handle in handles] == sorted({handle.id for handle in handles})
    rows = {row["id"]: row for row in db.query("select * from rowmill_jobs")}
    assert len(rows) == 2_300
    now = datetime.now(UTC)
    for n, handle in enumerate(handles):
        row = rows[handle.id]
        wanted = ("special", "slow", 3, 2) if n % 7 == 0 else ("plain", "default", 0, 5)
        assert (row["task"], row["queue"], row["priority"], row["max_attempts"]) == wanted
        assert json.loads(row["args"]) == {"n": n}
        assert row["state"] == "ready"
        if n % 7 and n % 700 == 1:
            assert as_time(row["run_after"]) == day
        else:
            assert abs(as_time(row["run_after"]) - now) < td(minutes=5)


ODD = ["\\", "\\N", "\\.", "a\tb", "a\nb", "\r", '"', "'", "\\u0041", "{}", "é\u2028", "\U0001f600", "", "a\\\tb\\"]


async def test_text_that_copy_has_a_meaning_for_comes_through_as_it_is(mill: Mill, db: Db) -> None:
    """Backslashes, tabs and line ends in arguments, and in the name of a task."""
    seen: list[str] = []

    @mill.task(name="odd\\t\tname")
    async def note(text: str) -> None:
        seen.append(text)

    texts = ODD * 20
    await note.enqueue_many([(text,) for text in texts])
    await mill.enqueue_many([note.options(priority=n % 2).call(text) for n, text in enumerate(texts)])
    assert {row["task"] for row in db.query("select task from rowmill_jobs")} == {"odd\\t\tname"}
    await mill.worker(drain=True).run()
    assert sorted(seen) == sorted(texts * 2)


async def test_many_calls_alike_are_the_calls_they_stand_for(mill: Mill) -> None:
    @mill.task
    async def note(n: int) -> None: ...

    calls = note._calls([(n,) for n in range(5)], {"priority": 3})
    assert isinstance(calls, CallBatch)
    assert list(calls) == [note.options(priority=3).call(n) for n in range(5)]
    assert list(calls[1:3]) == list(calls)[1:3]
    assert calls[-1].args == {"n": 4}
    assert len(calls) == 5


@pytest.mark.parametrize("at", [20, 1_500, 2_999])
async def test_one_that_the_database_refuses_leaves_none_of_them(mill: Mill, db: Db, at: int) -> None:
    """Whichever part it is in; and the next call is none the worse for it."""

    @mill.task
    async def note(value: Any) -> None: ...

    await mill.prepare()
    db.execute(
        "alter table rowmill_jobs add column odd boolean check (not odd);"
        "create function refuse() returns trigger language plpgsql as"
        """ $$ begin new.odd := new.args->>'value' = 'odd'; return new; end $$;"""
        "create trigger refuse before insert on rowmill_jobs for each row execute function refuse()"
        if db.dialect == "postgresql"
        else "create trigger refuse before insert on rowmill_jobs when json_extract(new.args, '$.value') = 'odd'"
        " begin select raise(abort, 'odd'); end"
    )
    with pytest.raises(Refused, match="odd"):
        await note.enqueue_many([("odd" if n == at else n,) for n in range(3_000)])
    assert db.value("select count(*) from rowmill_jobs") == 0
    assert len(await note.enqueue_many([(n,) for n in range(3_000)])) == 3_000
    assert db.value("select count(*) from rowmill_jobs") == 3_000


async def test_one_that_no_json_can_say_leaves_none_of_them(pg: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parts before it are on their way."""
    mill = Mill(pg.url)

    @mill.task
    async def note(n: int) -> None: ...

    def picky(value: Any) -> str:
        if value == {"n": 2_500}:
            raise ValueError("no")
        return as_json(value)

    monkeypatch.setattr(bulk_copy, "as_json", picky)
    with pytest.raises(Refused, match="cannot read or send: no"):
        await note.enqueue_many([(n,) for n in range(3_000)])
    assert pg.value("select count(*) from rowmill_jobs") == 0
    assert len(await note.enqueue_many([(n,) for n in range(2_400)])) == 2_400
    await mill.close()


@pytest.mark.parametrize("part", [0, 1, 2])
async def test_a_call_that_is_given_up_adds_nothing(pg: Db, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one part on its way, or several."""
    mill = Mill(pg.url)
    sent, send = 0, bulk_copy._Sender.send

    async def given_up(self: Any, *given: Any) -> None:
        nonlocal sent
        await send(self, *given)
        if sent == part:
            calls.cancel()
        sent += 1

    monkeypatch.setattr(bulk_copy._Sender, "send", given_up)

    @mill.task
    async def note(n: int) -> None: ...

    await mill.prepare()
    calls = asyncio.create_task(note.enqueue_many([(n,) for n in range(5_000)]))
    await asyncio.wait([calls])
    assert calls.cancelled()
    assert sent == part + 1
    assert pg.value("select count(*) from rowmill_jobs") == 0
    await note.enqueue_many([(n,) for n in range(2_000)])
    assert pg.value("select count(*) from rowmill_jobs") == 2_000
    await mill.close()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(_VALUES)
def test_json_is_as_the_library_says_it(value: Any) -> None:
    text = as_json(value)
    whole = json.dumps(value, separators=(",", ":"))
    assert text == whole or "\\u0000" in whole or "\\ud" in whole
    json.loads(text)


def test_what_json_has_no_word_for_is_refused_in_the_librarys_words() -> None:
    within: list[Any] = []
    within.append(within)
    with pytest.raises(ValueError, match="Circular"):
        as_json(within)
    with pytest.raises(TypeError, match="not JSON serializable"):
        as_json({"a": object()})
    assert as_json({"a": 1}) == '{"a":1}'
