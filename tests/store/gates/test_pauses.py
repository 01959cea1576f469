"""Pause and resume: of an environment, a lane, a key; at once, with a reason and an end; and a drain that ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import gated
import systems
from command import Command, ago, counts
from databases import Db
from rowmill import Concurrency, Event, Mill, Rate
from rowmill.engine import shutdown
from rowmill.store.gates import pauses
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit

GATED = (
    "mill.lane('pages', name='crawl', ready={'status': 'queued'}, running={'status': 'running'},"
    " done={'status': 'done'}, dead={'status': 'dead'}, max_attempts=3"
)
BY_DOMAIN = f"{GATED}, gates=[rowmill.Concurrency(2, by='domain')])(handler)"
BY_TWO = f"{GATED}, gates=[rowmill.Concurrency(2, by='domain'), rowmill.Rate(5, by='source_id')])(handler)"
UNGATED = f"{GATED})(handler)"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def app(command: Command, db: Db, lane: str) -> str:
    return command.app(db.url, "import rowmill", lane)


def claim(db: Db, count: int = 10, *, gates: Any = (), advance: timedelta | None = None) -> list[Any]:
    """Ids that a worker would claim now; they are given back."""

    async def work() -> list[Any]:
        mill = Mill(db.url)
        gated.lane(mill, gates=gates)
        async with Kit(mill) as kit:
            if advance is not None:
                kit.advance(advance)
            claims = await kit.claim(count=count)
            for one in claims:
                store = await kit.store()
                await store.settle([Settlement(one, "release")])
            return sorted(one.id for one in claims)

    return asyncio.run(work())


def test_a_lane_without_gates_is_paused_at_once_and_resumed(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b"])
    app(command, db, UNGATED)
    assert claim(db) == [1, 2]
    paused = command.json("pause", "--lane", "crawl", "--reason", "maintenance")
    assert (paused["lane"], paused["key"], paused["reason"], paused["until"]) == ("crawl", None, "maintenance", None)
    assert claim(db) == []
    resumed = command.json("resume", "--lane", "crawl")
    assert resumed["resumed"]["reason"] == "maintenance"
    assert resumed["still_paused"] == []
    assert claim(db) == [1, 2]
    assert command("resume", "--lane", "crawl").code == 4, "it was not paused"


def test_an_environment_is_paused_with_all_its_lanes(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b"])
    app(command, db, BY_DOMAIN)
    command.json("pause", "--reason", "night")
    assert claim(db) == []
    assert claim(db, gates=[Concurrency(2, by="domain")]) == []
    status = command.json("status")
    assert status["lanes"][0]["paused"] is True
    assert [(p["lane"], p["reason"]) for p in status["paused"]] == [(None, "night")]
    shown = command("status").out
    assert "crawl (paused)" in shown
    assert "environment 'default' " in shown
    assert "paused until it is resumed: night" in shown or "ago until it is resumed: night" in shown
    assert command("resume").code == 0
    assert claim(db, gates=[Concurrency(2, by="domain")]) == [1, 2]


def test_a_key_is_paused_and_the_others_go_on(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b"])
    app(command, db, BY_DOMAIN)
    paused = command.json("pause", "--lane", "crawl", "--key", "a")
    assert (paused["by"], paused["key"]) == ("domain", "a")
    assert claim(db, gates=[Concurrency(2, by="domain")]) == [2]
    status = command.json("status")
    assert status["lanes"][0]["paused"] is False
    assert status["paused"][0]["key"] == "a"
    assert "lane 'crawl', domain a " in command("status").out
    assert command("resume", "--lane", "crawl", "--key", "b").code == 4
    app(command, db, UNGATED)
    assert command.json("status")["paused"] == [], "a gate that is not declared holds nothing back"
    app(command, db, BY_DOMAIN)
    assert command("resume", "--lane", "crawl", "--key", "a").code == 0
    assert claim(db, gates=[Concurrency(2, by="domain")]) == [1, 2]


def test_a_pause_of_a_number_is_a_pause_of_that_number_however_it_is_written(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["x"], source_id=7)
    gated.fill(db, ["x"], source_id=8)
    app(command, db, BY_TWO)
    assert command.json("pause", "--lane", "crawl", "--key", "7", "--by", "source_id")["by"] == "source_id"
    assert claim(db, gates=[Concurrency(5, by="source_id")]) == [2]
    if db.dialect == "postgresql":
        assert command.json("pause", "--lane", "crawl", "--key", "008", "--by", "source_id")["key"] == "8"
        ended = command("pause", "--lane", "crawl", "--key", "seven", "--by", "source_id")
        assert ended.code == 1
        assert "'seven' is not a key of source_id" in ended.err


def test_a_pause_has_an_end_and_is_over_then(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a"])
    app(command, db, UNGATED)
    paused = command.json("pause", "--lane", "crawl", "--for", "1h30m")
    left = datetime.fromisoformat(paused["until"]) - datetime.now(UTC)
    assert timedelta(minutes=89) < left < timedelta(minutes=91)
    assert claim(db) == []
    assert claim(db, advance=timedelta(minutes=91)) == [1]
    until = datetime.now(UTC) + timedelta(hours=3)
    assert abs(command.json("pause", "--lane", "crawl", "--until", until.isoformat())["seconds_left"] - 10800) < 30
    assert claim(db, advance=timedelta(minutes=91)) == []
    assert claim(db, advance=timedelta(minutes=181)) == [1]
    assert command("pause", "--lane", "crawl", "--until", "2001-01-01").code == 1


def test_running_rows_go_on(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "b"])
    app(command, db, UNGATED)

    async def work() -> None:
        mill = Mill(db.url)
        gated.lane(mill)
        async with Kit(mill) as kit:
            (one,) = await kit.claim()
            await asyncio.to_thread(command.json, "pause", "--lane", "crawl")
            assert len(await (await kit.store()).renew([one])) == 1
            assert (await kit.settle(one)).written
            assert await kit.claim() == []

    command.json("pause", "--lane", "crawl")  # makes the table, as a worker's start does
    command.json("resume", "--lane", "crawl")
    asyncio.run(work())
    assert counts(command.json("status"), "crawl") == {"ready": 1, "done": 1}


def test_resume_wakes_idle_workers(pg: Db, command: Command) -> None:
    gated.make(pg)
    app(command, pg, UNGATED)
    command.json("pause", "--lane", "crawl")
    heard: list[str] = []

    async def work() -> None:
        connection = await asyncpg.connect(pg.direct)
        told = asyncio.Event()
        await connection.add_listener("rowmill", lambda *_: (heard.append("woken"), told.set()))
        await asyncio.to_thread(command.json, "resume", "--lane", "crawl")
        await asyncio.wait_for(told.wait(), 60)
        await connection.close()

    asyncio.run(work())
    assert heard


def test_what_cannot_be_meant_is_refused_with_the_way_out(lite: Db, command: Command) -> None:
    gated.make(lite)
    app(command, lite, UNGATED)
    for words, code, said in (
        (["--lane", "crawl", "--key", "a"], 1, "has no gate by a key"),
        (["--lane", "crwl"], 1, "did you mean 'crawl'?"),
        (["--key", "a"], 1, "has no gate by a key"),
        (["--lane", "crawl", "--by", "domain"], 2, "--by needs --key"),
        (["--for", "soon"], 2, "'soon' is not a duration"),
        (["--for", "10"], 2, "90s, 10m"),
        (["--for", "9999w"], 2, "ten years"),
        (["--until", "25:61"], 2, "is not a time"),
        (["--for", "1m", "--until", "18:30"], 2, "cannot be used together"),
        (["--reason", ""], 2, "--reason is empty"),
        (["--env", "prod"], 1, "there is no environment 'prod'"),
    ):
        ended = command("pause", *words)
        assert (ended.code, said in ended.err) == (code, True), (words, ended)
    app(command, lite, BY_TWO)
    ended = command("pause", "--lane", "crawl", "--key", "a")
    assert (ended.code, "--by 'domain' or --by 'source_id'" in ended.err) == (1, True), ended
    assert "did you mean 'domain'?" in command("pause", "--lane", "crawl", "--key", "a", "--by", "domian").err
    assert "No row has the key a" in command("pause", "--lane", "crawl", "--key", "a", "--by", "domain").err


def test_several_environments_are_asked_for_by_name(fresh: Callable[[str], Db], command: Command) -> None:
    one, two = fresh("sqlite"), fresh("sqlite")
    for db in (one, two):
        gated.make(db)
        gated.fill(db, ["a"])
    command.app({"prod": one.url, "staging": two.url}, UNGATED)
    assert "--env prod or --env staging" in command("pause", "--lane", "crawl").err
    command.json("pause", "--env", "staging")
    assert (claim(one), claim(two)) == ([1], [])
    paused = {entry["environment"]: entry["paused"] for entry in command.json("status")["lanes"]}
    assert paused == {"prod": False, "staging": True}


@pytest.mark.bare
def test_a_role_that_may_not_make_the_table_is_told_who_may(pg: Db, command: Command) -> None:
    gated.make(pg)
    role = f"reader_{pg.url.partition('?')[0].rpartition('/')[2]}"
    pg.execute(f"create role {role} login; revoke create on schema public from public; grant all on pages to {role}")
    try:
        app(command, Db(pg.url.replace("postgres:@", f"{role}:@")), UNGATED)
        ended = command("pause", "--lane", "crawl")
        assert ended.code == 1
        assert "cannot be created" in ended.err
        assert "rowmill migrate APP --apply" in ended.err
    finally:
        pg.execute(f"drop owned by {role}; drop role {role}")


# -- a drain


def drain(db: Db, **options: Any) -> tuple[Any, list[Event]]:
    told: list[Event] = []

    async def work() -> Any:
        mill = Mill(db.url)
        gated.lane(mill, poll=timedelta(milliseconds=100), **options)
        mill.on_event(told.append)
        async with asyncio.timeout(60):
            return await mill.worker(drain=True).run()

    return asyncio.run(work()), told


def test_a_drain_ends_before_rows_that_are_paused_without_end(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a", "a", "b", None])
    app(command, db, BY_DOMAIN)
    command.json("pause", "--lane", "crawl", "--key", "a", "--reason", "they asked")
    tally, told = drain(db, gates=[Concurrency(2, by="domain")])
    assert tally.completed == 2
    (event,) = [event for event in told if event.name == "drain_held_back"]
    assert (event.fields["lane"], event.fields["count"]) == ("crawl", 2)
    assert event.fields["why"] == "domain a is paused: they asked"
    command.json("pause", "--lane", "crawl")
    gated.fill(db, ["b"])
    tally, told = drain(db)
    assert tally.completed == 0
    assert [event.fields["count"] for event in told if event.name == "drain_held_back"] == [3]
    command.json("pause")
    assert [event.fields["count"] for event in drain(db)[1] if event.name == "drain_held_back"] == [3]


async def test_a_row_without_a_key_is_not_held_back_by_a_key_that_is_paused(db: Db) -> None:
    gated.make(db)
    gated.fill(db, ["a", None])
    mill = Mill(db.url)
    gated.lane(mill, gates=[Concurrency(2, by="domain")])
    async with Kit(mill) as kit:
        store = await kit.store()
        await pauses.pause(store.database, mill.clock, pauses.Target("crawl", "domain", "a"), None, None)
        assert await pauses.held_back(store) is None
        db.execute("update pages set status = 'done' where domain is null")
        assert await pauses.held_back(store) == pauses.HeldBack(1, "domain a is paused")
        db.execute("update pages set status = 'running' where status = 'done'")
        assert await pauses.held_back(store) is None, "what runs may come back"


def test_a_drain_waits_for_a_pause_that_has_an_end(db: Db, command: Command) -> None:
    gated.make(db)
    gated.fill(db, ["a"])
    app(command, db, UNGATED)
    command.json("pause", "--lane", "crawl", "--for", "1500ms")
    tally, told = drain(db)
    assert tally.completed == 1
    assert "drain_held_back" not in [event.name for event in told]


def test_the_closing_words_of_a_drain_say_what_was_held_back(lite: Db, command: Command) -> None:
    systems.create(lite, "enrichment")
    systems.insert_enrichment(lite, 2)
    command.app(lite.url, "enrichment")
    command.json("pause", "--lane", "enrichment", "--reason", "night")
    ended = subprocess.run(
        [sys.executable, "-m", "rowmill", "run", "--drain", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 6, ended.stderr
    assert "2 ready in lane 'enrichment' of 'default' held back, the lane is paused: night" in ended.stderr
    assert "Try: rowmill resume" in ended.stderr
    (left,) = json.loads(ended.stdout)["held_back"]
    assert (left["lane"], left["count"]) == ("enrichment", 2)


def test_a_drain_says_how_many_rows_wait_and_when_the_first_is_due(lite: Db, command: Command) -> None:
    systems.create(lite, "enrichment")
    systems.insert_enrichment(lite, 2)
    lite.execute("update enrichment_jobs set run_after = ?", ago(minutes=-30))
    command.app(lite.url, "enrichment")
    ended = subprocess.run(
        [sys.executable, "-m", "rowmill", "run", "--drain", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "2 rows wait in lane 'enrichment': the first is due in 30 min.\n" in ended.stderr
    (waiting,) = json.loads(ended.stdout)["waiting"]
    assert (waiting["lane"], waiting["count"]) == ("enrichment", 2)


def test_a_drain_says_that_it_waits_for_a_closed_key(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word it looks hung until the key opens."""
    monkeypatch.setattr(shutdown, "_SAY_WAITING", 0.0)
    gated.make(db)
    gated.fill(db, ["a", "a"])
    told: list[Event] = []

    def listen(event: Event) -> None:
        if event.name == "drain_waiting":
            told.append(event)
            db.execute("update pages set status = 'done'")

    async def work() -> None:
        mill = Mill(db.url)
        gated.lane(mill, poll=timedelta(milliseconds=100), gates=[Rate(1, timedelta(hours=1), by="domain")])
        mill.on_event(listen)
        async with asyncio.timeout(60):
            await mill.worker(drain=True).run()

    asyncio.run(work())
    assert told[0].fields["hint"] == "ready rows are held back by a gate: rowmill gates crawl shows until when"


def test_a_drain_says_which_rows_of_others_it_waits_for(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word it looks hung until their lease ends."""
    monkeypatch.setattr(shutdown, "_SAY_WAITING", 0.0)
    gated.make(db)
    gated.fill(
        db, ["a", "b"], status="running", worker="loop-0", claimed_at=ago(seconds=1), heartbeat_at=ago(seconds=1)
    )
    told: list[Event] = []

    def listen(event: Event) -> None:
        if event.name == "drain_waiting":
            told.append(event)
            db.execute("update pages set status = 'done'")

    async def work() -> None:
        mill = Mill(db.url)
        gated.lane(mill, poll=timedelta(milliseconds=100), lease=timedelta(minutes=5))
        mill.on_event(listen)
        async with asyncio.timeout(60):
            await mill.worker(drain=True).run()

    asyncio.run(work())
    fields = told[0].fields
    assert (fields["lane"], fields["count"], fields["holders"]) == ("crawl", 2, "loop-0")
    assert 200 < fields["seconds"] <= 360


def test_a_drain_says_that_it_waits_for_rows_without_a_time(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows seeded as running show neither a worker nor a time: the drain lasts a lease, and says so."""
    monkeypatch.setattr(shutdown, "_SAY_WAITING", 0.0)
    gated.make(db)
    gated.fill(db, ["a", "b"], status="running")
    told: list[Event] = []

    def listen(event: Event) -> None:
        if event.name == "drain_waiting":
            told.append(event)
            db.execute("update pages set status = 'done'")

    async def work() -> None:
        mill = Mill(db.url)
        gated.lane(mill, poll=timedelta(milliseconds=100), lease=timedelta(minutes=5))
        mill.on_event(listen)
        async with asyncio.timeout(60):
            await mill.worker(drain=True).run()

    asyncio.run(work())
    fields = told[0].fields
    assert (fields["lane"], fields["count"], fields["seconds"]) == ("crawl", 2, 360)
    assert "rowmill release --lane crawl --stuck does it now" in fields["hint"]
