"""``rowmill gates``: how gates stand, and changing it by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

import gated
from command import Command
from databases import Db
from rowmill import Breaker, Concurrency, Mill, Rate
from rowmill.testing import Kit

HEAD = (
    "mill.lane('pages', name='crawl', ready={'status': 'queued'}, running={'status': 'running'},"
    " done={'status': 'done'}, dead={'status': 'dead'}, max_attempts=3, lease=td(minutes=1), "
)
ALL = [Concurrency(2, by="domain"), Rate(6, burst=4, by="domain"), Breaker(2, td(minutes=5), by="domain")]
ALL_TEXT = "gates=[Concurrency(2, by='domain'), Rate(6, burst=4, by='domain'), Breaker(2, td(minutes=5), by='domain')]"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def app(command: Command, db: Db, gates: str) -> str:
    imports = ["from datetime import timedelta as td", "from rowmill import Breaker, Concurrency, Rate"]
    return command.app(db.url, *imports, f"{HEAD}{gates})(handler)")


def with_kit(db: Db, work: Callable[[Kit], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        mill = Mill(db.url)
        gated.lane(mill, **options)
        async with Kit(mill) as kit:
            return await work(kit)

    return asyncio.run(main())


def claimed(db: Db, count: int = 10, **options: Any) -> int:
    async def work(kit: Kit) -> int:
        return len(await kit.claim(count=count))

    return int(with_kit(db, work, **options))


def keys(document: Any, label: str = "domain") -> dict[str, Any]:
    (found,) = [gate for gate in document["gates"] if gate["label"] == label]
    return {entry["key"]: entry for entry in found["keys"]}


async def trouble(kit: Kit) -> None:
    """a: two running and full; b: two failures in a row; c: one run; d: nothing."""
    for one in await kit.claim(count=10):
        if one.gates["domain"] == "b":
            await kit.settle(one, RuntimeError("down"))
        elif one.gates["domain"] == "c":
            await kit.settle(one)


def test_gates_lists_keys_with_a_state_those_held_back_first(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "a", "a", "b", "b", "b", "c"])
    with_kit(db, trouble, gates=ALL)
    gated.fill(db, ["d"])
    reference = app(command, db, ALL_TEXT)
    document = command.json("gates", reference, "crawl")
    (gate,) = document["gates"]
    assert gate["declared"] == [
        "at most 2 running", "6 starts per min, burst of 4", "breaker after 2 failures, for 5 min",
    ]  # fmt: skip
    found = keys(document)
    assert list(found)[2:] == ["c"], "those held back are the first; d has no state to show"
    a, b, c = found["a"], found["b"], found["c"]
    assert (a["running"], a["most"], [h["by"] for h in a["held_back"]]) == (2, 2, ["concurrency"])
    assert (b["streak"], [h["by"] for h in b["held_back"]]) == (2, ["breaker"])
    assert 290 < b["open_seconds"] <= 300
    assert (c["running"], c["held_back"]) == (0, [])
    assert 2.9 < c["tokens"] < 4
    shown = command("gates").out
    assert "crawl by domain: at most 2 running; 6 starts per min, burst of 4" in shown
    assert "2/2" in shown
    assert "circuit open for 5 min" in shown
    assert list(keys(command.json("gates", "crawl", "--limit", "1"))) == [next(iter(found))]
    assert "--limit" in command("gates", "--limit", "1").out
    assert list(keys(command.json("gates", "--key", "d"))) == ["d"], "one that is asked for is shown however it is"


def test_a_gate_that_refusals_close_is_told_as_such(lite: Db, command: Command) -> None:
    gated.make(lite)
    app(command, lite, "gates=[Concurrency(2, by='domain'), Rate(6, closes=True)]")
    declared = {gate["label"]: gate["declared"] for gate in command.json("gates")["gates"]}
    assert declared == {"": ["6 starts per min, burst of 6", "closed by refusals"], "domain": ["at most 2 running"]}


def test_what_is_set_is_what_the_claim_minds(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 9)
    app(command, db, ALL_TEXT)
    assert command.json("gates", "set", "crawl", "a", "most=1")["most"] == 1
    assert claimed(db, gates=ALL) == 1
    command.json("gates", "set", "crawl", "a", "most=4", "tokens=2")
    assert claimed(db, gates=ALL) == 2, "two tokens"
    command.json("gates", "set", "crawl", "a", "most=9", "tokens=4", "closed=10m")
    assert claimed(db, gates=ALL) == 0
    assert "closed by Retry-After for 10 min" in command("gates").out
    command.json("gates", "set", "crawl", "a", "closed=no", "open=90s")
    assert claimed(db, gates=ALL) == 0
    assert keys(command.json("gates"))["a"]["streak"] == 2, "open by its streak and its time"
    command.json("gates", "set", "crawl", "a", "open=no")
    assert claimed(db, 1, gates=ALL) == 1
    command.json("gates", "set", "crawl", "a", "most=no")
    assert claimed(db, gates=ALL) == 0
    assert keys(command.json("gates"))["a"]["most"] == 2


def test_the_delay_of_an_adaptive_rate_and_the_limit_of_the_whole_lane(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a"] * 9)
    gates = [Rate.auto(by="domain", start=td(seconds=10)), Concurrency(5)]
    app(command, db, "gates=[Rate.auto(by='domain', start=td(seconds=10)), Concurrency(5)]")
    assert command.json("gates", "set", "crawl", "a", "delay=500ms")["delay_seconds"] == 0.5
    assert command.json("gates", "set", "crawl", "most=0")["most"] == 0
    assert claimed(db, gates=gates) == 0
    assert command.json("gates", "set", "crawl", "most=3")["key"] is None
    assert claimed(db, gates=gates) == 1
    assert "the whole lane" in command("gates").out


def test_a_breaker_in_the_users_own_table_is_shown_and_changed_there(db: Db, command: Command) -> None:
    """D8"""
    gated.make(db)
    db.execute("insert into sources (id, failure_streak) values (1, 1), (2, 0)")
    gated.fill(db, ["x"] * 3, source_id=1)
    gates = [Breaker(2, td(minutes=5), by="source_id", table="sources")]
    app(command, db, "gates=[Breaker(2, td(minutes=5), by='source_id', table='sources')]")
    command.json("gates", "set", "crawl", "1", "open=5m")
    assert db.one("select failure_streak as n from sources where id = 1")["n"] == 2
    assert claimed(db, gates=gates) == 0
    assert [h["by"] for h in keys(command.json("gates"), "source_id")["1"]["held_back"]] == ["breaker"]
    assert command.json("gates", "reset", "crawl", "1")["count"] == 1
    row = db.one("select failure_streak as n, paused_until as p from sources where id = 1")
    assert (row["n"], row["p"]) == (0, None)
    assert claimed(db, gates=gates) == 3


def test_reset_makes_gates_fresh_and_keeps_pauses(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b", "b", "c"])
    app(command, db, ALL_TEXT)
    for key in "ab":
        command.json("gates", "set", "crawl", key, "open=5m", "tokens=0", "most=1")
    command.json("pause", "--lane", "crawl", "--key", "b", "--reason", "asked")
    assert command.json("gates", "reset", "crawl", "a")["count"] == 1
    assert claimed(db, gates=ALL) == 2, "a and c"
    ended = command("gates", "reset", "crawl")
    assert ended.code == 1
    assert "--yes" in ended.err
    assert command.json("gates", "reset", "crawl", "--yes")["count"] >= 2
    b = keys(command.json("gates", "--key", "b"))["b"]
    assert (b["streak"], b["most"], b["paused"], b["reason"]) == (0, 2, True, "asked")
    command.json("resume", "--lane", "crawl", "--key", "b")
    assert claimed(db, gates=ALL) == 2, "both of b"


def test_what_cannot_be_set_is_refused_with_the_way_out(lite: Db, command: Command) -> None:
    gated.make(lite)
    reference = app(command, lite, "gates=[Concurrency(2, by='domain'), Rate(6, by='source_id'), Concurrency(9)]")
    for words, code, said in (
        (["set", "crawl", "a", "moist=1", "--by", "domain"], 2, "did you mean 'most'?"),
        (["set", "crawl", "a", "most", "--by", "domain"], 2, "is not name=value"),
        (["set", "crawl", "a", "most=-1", "--by", "domain"], 2, "is not a whole number"),
        (["set", "crawl", "a", "most=99999999999", "--by", "domain"], 2, "is not a whole number"),
        (["set", "crawl", "a", "--by", "domain"], 2, "nothing to set"),
        (["set", "crawl", "a", "most=1"], 1, "--by 'domain' or --by 'source_id'"),
        (["set", "crawl", "a", "tokens=1", "--by", "domain"], 1, "has no rate gate by domain"),
        (["set", "crawl", "1", "tokens=lots", "--by", "source_id"], 2, "is not a number"),
        (["set", "crawl", "1", "tokens=nan", "--by", "source_id"], 2, "is not a number"),
        (["set", "crawl", "1", "delay=1s", "--by", "source_id"], 2, "adaptive"),
        (["set", "crawl", "a", "closed=soon", "--by", "domain"], 2, "is not a duration"),
        (["set", reference, "crwl", "a", "most=1"], 1, "did you mean 'crawl'?"),
        (["reset", "crawl", "a", "b"], 2, "too many arguments"),
        (["crawl", "a"], 2, "too many arguments"),
    ):
        ended = command("gates", *words)
        assert (ended.code, said in ended.err) == (code, True), (words, ended)
    app(command, lite, "priority=1")
    assert command("gates").out == "No gates.\n"
    assert "has no gates" in command("gates", "set", "crawl", "a", "most=1").err


def test_a_reset_of_a_key_without_a_state_says_that_there_is_nothing(db: Db, command: Command) -> None:
    """Issue: it said "1 gate reset"; and it made a row for a key that nobody has."""
    gated.make(db)
    gated.fill(db, ["a"])
    app(command, db, ALL_TEXT)
    for key, said in (("a", "domain a has no state"), ("nobody", "no row has domain nobody")):
        ended = command("gates", "reset", "crawl", key)
        assert ended.code == 4
        assert f"nothing to reset: {said}" in ended.err
        assert "Try: rowmill gates" in ended.err
        assert command.json("gates", "reset", "crawl", key, code=4)["count"] == 0
    assert db.query("select key from rowmill_gates") == []
    command.json("gates", "set", "crawl", "a", "most=1")
    assert "1 gate reset" in command("gates", "reset", "crawl", "a").out


def test_gates_before_the_first_worker_shows_what_is_declared(db: Db, command: Command) -> None:
    gated.make(db)
    app(command, db, ALL_TEXT)
    (gate,) = command.json("gates")["gates"]
    assert gate["keys"] == []
    assert "at most 2 running" in command("gates").out


def test_budgets_are_listed_at_the_end(db: Db, command: Command) -> None:
    gated.make(db)
    app(command, db, ALL_TEXT)
    command.json("gates", "set", "crawl", "a", "most=1")
    db.execute("""insert into rowmill_gates (lane, dim, key, cells) values ('', 'budget:gemini', '', '{"1": 5}')""")
    assert command.json("gates")["budgets"][0]["budget"] == "gemini"
    assert command("gates").out.splitlines()[-1].startswith("budget gemini: ")


def test_the_claim_through_gates_is_printed_as_it_runs(db: Db, command: Command) -> None:
    gated.make(db)
    command.app(
        db.url,
        "from rowmill import Concurrency, Rate",
        "mill.lane('pages', name='crawl', ready={'status': 'queued'}, running={'status': 'running'},"
        " done={'status': 'done'}, dead={'status': 'dead'}, gates=[Concurrency(2, by='domain')])(handler)",
        "mill.lane('pages', name='both', ready={'status': 'queued'}, running={'status': 'running'},"
        " done={'status': 'done'}, dead={'status': 'dead'}, gates=[Concurrency(2, by='domain'), Rate(5)])(handler)",
    )
    names = [each["name"] for each in command.json("sql", "crawl")["statements"]]
    assert any(name.startswith("claim, ") for name in names)
    assert "claim" not in names
    both = [each["sql"] for each in command.json("sql", "both")["statements"] if each["name"].startswith("claim")]
    assert "domain" in both[0]
    if db.dialect == "postgresql":
        assert "version" in command("sql", "crawl").out
