"""The commands that act on rows: retry, cancel, release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import systems
from command import COMPOSITE, Command, ago, create_parts
from databases import Db, as_time
from rowmill import Mill
from rowmill.ops import row_actions
from rowmill.testing import Kit

REASON = "canceled by an operator"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def columns(db: Db, table: str, key: Any, *names: str) -> list[Any]:
    row = db.one(f'select * from "{table}" where id = ?', key)
    return [row[name] for name in names]


def due(value: Any) -> bool:
    """The time has come, by about now."""
    return abs(as_time(value) - datetime.now(UTC)) < timedelta(seconds=20)


async def handler(job: Any) -> None: ...


def kit(db: Db, declare: Callable[..., Any], **options: Any) -> Kit:
    mill = Mill(db.url)
    declare(mill, handler, **options)
    return Kit(mill)


# -- retry


def test_retry_makes_a_dead_row_ready_at_once_and_keeps_its_error(db: Db, command: Command) -> None:
    """An enum state, counters, a lease."""
    systems.create(db, "enrichment")
    spent = {"attempts": 2, "locked_by": "w-1", "locked_at": ago(hours=1), "last_error": "forbidden"}
    dead = systems.insert_enrichment(db, 3, status="dead", run_after=ago(minutes=-9), **spent)
    (done,) = systems.insert_enrichment(db, 1, status="succeeded", attempts=1)
    command.app(db.url, "enrichment")
    ended = command("retry", "--state", "dead")
    assert (ended.code, ended.out) == (0, "3 rows made ready\n")
    for key in dead:
        *kept, run_after = columns(
            db, "enrichment_jobs", key, "status", "attempts", "locked_by", "locked_at", "last_error", "run_after"
        )
        assert kept == ["queued", 0, None, None, "forbidden"]
        assert due(run_after)
    assert columns(db, "enrichment_jobs", done, "status", "attempts") == ["succeeded", 1]
    assert command("retry", "--state", "dead").code == 4


def test_retry_by_id_takes_rows_that_wait_and_passes_over_what_runs_or_is_done(db: Db, command: Command) -> None:
    systems.create(db, "prices")
    failed = {"status": "retryable", "retry_count": 3, "attempts": 2, "next_retry_at": ago(hours=-3)}
    (waiting,) = systems.insert_scrape(db, 1, **failed, error_message="timed out")
    (running,) = systems.insert_scrape(db, 1, status="running", locked_by="w", heartbeat_at=ago(hours=3))
    (done,) = systems.insert_scrape(db, 1, status="succeeded", completed_at=ago(hours=1))
    command.app(db.url, "scrape")
    ids = [word for key in (waiting, running, done, 999) for word in ("--id", str(key))]
    document = command.json("retry", *ids)
    assert (document["count"], document["ids"]) == (1, [str(waiting)])
    assert {entry["id"]: entry["reason"] for entry in document["passed_over"]} == {
        str(running): "it is running",
        str(done): "it is done",
        "999": "no row has this id",
    }
    *found, again = columns(
        db, "scrape_jobs", waiting, "status", "retry_count", "attempts", "error_message", "next_retry_at"
    )
    assert found == ["pending", 0, 0, "timed out"]
    assert due(again)
    assert columns(db, "scrape_jobs", running, "status", "locked_by") == ["running", "w"]
    ended = command("retry", "--id", str(running))
    assert (ended.code, ended.err) == (4, f"{running}: not made ready: it is running\n")


def test_retry_of_an_exhausted_phase_gives_it_all_its_attempts_back(db: Db, command: Command) -> None:
    """E6: no state says dead; a touch would hold the row back for 30 s, so it is not touched."""
    systems.create(db, "analysis")
    (key,) = systems.insert_analysis(db, 1, status="prompt-forming", retryCount=3, error="no answer")
    command.app(db.url, "prompt_forming", "website_analysis")
    assert command("retry", "--lane", "website_analysis", "--id", key).code == 4, "that is another phase"
    assert command.json("retry", "--lane", "prompt_forming", "--state", "dead")["count"] == 1
    assert columns(db, "AnalysisJob", key, "status", "retryCount", "error") == ["prompt-forming", 0, "no answer"]
    (row,) = command.json("jobs", "--lane", "prompt_forming", "--state", "ready")["rows"]
    assert row["id"] == key


def test_retry_clears_what_a_finished_row_keeps(db: Db, command: Command) -> None:
    """A10: integer and text states, a finished_at column."""
    systems.create(db, "registre")
    (key,) = systems.insert_rdprm(db, 1, status="failed", worker_id="w", completed_at=ago(hours=1))
    command.app(db.url, "rdprm")
    assert command("retry", "--id", str(key)).out == "1 row made ready\n"
    assert columns(db, "rdprm_searches", key, "status", "worker_id", "completed_at") == ["pending", None, None]


def test_a_retried_row_that_something_else_holds_back_is_written_once(
    db: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_actions, "STEP", 2)
    systems.create(db, "prices")
    systems.insert_scrape(db, 5, source_id=systems.insert_source(db, enabled=False)[0])
    command.app(db.url, "scrape")
    assert command.json("retry", "--state", "excluded")["count"] == 5


def test_an_id_given_twice_is_one_row(lite: Db, command: Command) -> None:
    systems.create(lite, "registre")
    (key,) = systems.insert_extraction(lite, 1, status_id=4)
    command.app(lite.url, "extraction")
    assert command.json("retry", "--id", str(key), "--id", str(key))["count"] == 1


def test_rows_with_composite_keys_are_named_by_both_parts(db: Db, command: Command) -> None:
    create_parts(db)
    rows = [{"book": book, "page": page, "state": "bad", "attempts": 3} for book in "ab" for page in (1, 2)]
    db.insert("parts", rows, key="page")
    command.app(db.url, COMPOSITE)
    document = command.json("retry", "--id", "a,2", "--id", "b,1")
    assert sorted(document["ids"]) == ["a,2", "b,1"]
    left = db.query("select book, page from parts where state = 'bad' order by book")
    assert [(row["book"], row["page"]) for row in left] == [("a", 1), ("b", 2)]
    assert command.json("cancel", "--id", "a,2")["count"] == 1
    assert command.json("retry", "--state", "canceled")["count"] == 1


# -- cancel


def test_cancel_ends_rows_that_are_ready_or_waiting_in_the_lanes_own_state(db: Db, command: Command) -> None:
    create_parts(db)
    db.insert("parts", [{"book": "a", "page": page, "state": "new"} for page in range(3)], key="page")
    command.app(db.url, COMPOSITE)
    ended = command("cancel", "--state", "ready")
    assert (ended.code, ended.out) == (0, "3 rows canceled\n")
    assert {(row["state"], row["error"]) for row in db.query("select * from parts")} == {("off", REASON)}
    assert command.json("status")["lanes"][0]["counts"]["canceled"] == 3


def test_without_a_canceled_state_canceled_rows_are_dead(db: Db, command: Command) -> None:
    systems.create(db, "enrichment", "analysis")
    (waiting,) = systems.insert_enrichment(db, 1, run_after=ago(minutes=-5))
    (phase,) = systems.insert_analysis(db, 1)
    command.app(db.url, "enrichment", "website_analysis")
    assert command("cancel", "--lane", "enrichment", "--state", "waiting", "--reason", "sold").code == 0
    assert columns(db, "enrichment_jobs", waiting, "status", "last_error") == ["dead", "sold"]
    assert command("cancel", "--lane", "website_analysis", "--id", phase).code == 0
    assert columns(db, "AnalysisJob", phase, "inProgress", "retryCount", "error") == [False, 3, REASON]
    counts = {lane["lane"]: lane["counts"]["dead"] for lane in command.json("status")["lanes"]}
    assert counts == {"enrichment": 1, "website_analysis": 1}


async def test_a_running_row_is_canceled_only_on_request_and_its_outcome_is_then_dropped(
    db: Db, command: Command
) -> None:
    """X1"""
    systems.create(db, "enrichment")
    (key,) = systems.insert_enrichment(db, 1)
    command.app(db.url, "enrichment")
    async with kit(db, systems.enrichment) as live:
        (claim,) = await live.claim()
        ended = await asyncio.to_thread(command, "cancel", "--id", str(key))
        assert ended.code == 4
        assert "it is running (add --running to take it from its worker)" in ended.err
        assert (await asyncio.to_thread(command, "cancel", "--state", "running")).code == 2
        assert (await asyncio.to_thread(command, "cancel", "--id", str(key), "--running")).code == 0
        report = await live.settle(claim)
        assert [settlement.claim for settlement in report.lost] == [claim]
    assert columns(db, "enrichment_jobs", key, "status", "last_error") == ["dead", REASON]


# -- release


FENCES: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("enrichment", systems.enrichment, systems.insert_enrichment),
    ("extraction", systems.extraction, systems.insert_extraction),
    ("scrape", systems.scrape, systems.insert_scrape),
    ("website_analysis", systems.website_analysis, systems.insert_analysis),
]


@pytest.mark.parametrize(("name", "declare", "insert"), FENCES, ids=[name for name, *_ in FENCES])
async def test_a_released_row_is_ready_again_without_a_failure_and_its_holder_has_lost_it(
    name: str, declare: Callable[..., Any], insert: Callable[..., Any], db: Db, command: Command
) -> None:
    """X1, on every fence shape of the five systems"""
    systems.create(db)
    (key,) = insert(db, 1)
    command.app(db.url, name)
    async with kit(db, declare) as live:
        store = await live.store()
        before = db.one(f"select * from {store.statements.table} where id = ?", key)
        (claim,) = await live.claim()
        assert (await asyncio.to_thread(command, "release", "--id", str(key))).out == "1 row released\n"
        after = db.one(f"select * from {store.statements.table} where id = ?", key)
        touched = {store.binding.roles.get("updated_at")}
        assert {c: v for c, v in after.items() if c not in touched} == {
            c: v for c, v in before.items() if c not in touched
        }
        assert (await live.settle(claim)).lost
        live.advance(timedelta(minutes=1))
        async with kit(db, declare) as other:
            other.worker_id = "another"
            other.advance(timedelta(minutes=1))
            (second,) = await other.claim()
            assert (await live.settle(claim)).lost, "the row runs again, but not for the old holder"
            assert (await other.settle(second)).written


def test_release_by_worker_takes_all_that_it_holds_and_nothing_else(db: Db, command: Command) -> None:
    systems.create(db, "analysis")
    held = {"inProgress": True, "heartbeatAt": ago(seconds=5)}
    mine = systems.insert_analysis(db, 2, **held, lockedBy="w-1~abc")
    (other,) = systems.insert_analysis(db, 1, **held, lockedBy="w-10~abc")
    command.app(db.url, "website_analysis")
    assert command.json("release", "--worker", "w-1")["count"] == 2
    assert columns(db, "AnalysisJob", mine[0], "inProgress", "lockedBy") == [False, None]
    assert columns(db, "AnalysisJob", other, "inProgress", "lockedBy") == [True, "w-10~abc"]
    assert command("release", "--worker", "w-10~abc").code == 0
    assert command("release", "--worker", "w-10").code == 4


def test_release_of_stuck_rows_leaves_those_whose_holder_is_alive(db: Db, command: Command) -> None:
    """E4"""
    systems.create(db, "registre")
    (silent,) = systems.insert_extraction(db, 1, status_id=2, worker_id="w", heartbeat_at=ago(minutes=6))
    (alive,) = systems.insert_extraction(db, 1, status_id=2, worker_id="w", heartbeat_at=ago(minutes=4))
    command.app(db.url, "extraction")
    assert command.json("release", "--stuck")["count"] == 1
    assert columns(db, "extraction_queue", silent, "status_id", "worker_id") == [1, None]
    assert columns(db, "extraction_queue", alive, "status_id", "worker_id") == [2, "w"]


def test_release_by_worker_needs_a_worker_column(lite: Db, command: Command) -> None:
    lite.execute("create table plain (id integer primary key, state text, claimed_at datetime)")
    states = "ready={'state': 'new'}, running={'state': 'run'}, done={'state': 'ok'}, dead={'state': 'bad'}"
    command.app(lite.url, f"mill.lane('plain', name='plain', {states})(handler)")
    ended = command("release", "--worker", "w")
    assert ended.code == 1
    assert "has no worker column" in ended.err


def test_a_family_that_does_not_exist_is_named_with_where_to_look(lite: Db, command: Command) -> None:
    """A message is no family: the names are in the column Family of ``rowmill errors``."""
    systems.create(lite, "enrichment")
    command.app(lite.url, "enrichment")
    ended = command("retry", "--error", "HTTP Error 500")
    assert ended.code == 4
    assert "there is no family 'HTTP Error 500'" in ended.err
    assert "rowmill errors APP" in ended.err
    assert "Family" in ended.err
    assert command.json("retry", "--error", "HTTP Error 500", code=4)["count"] == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("jobs", "square"), "Try: --lane square"),
        (("retry", "square", "14"), "Try: --lane square --id 14"),
        (("retry", "14"), "Try: --id 14"),
    ],
)
def test_a_word_too_many_is_answered_with_its_option(
    words: tuple[str, ...], hint: str, lite: Db, command: Command
) -> None:
    """Some commands take the lane as a word, others as an option."""
    systems.create(lite, "enrichment")
    name = command.app(lite.url, "enrichment")
    ended = command(words[0], name, *words[1:])
    assert ended.code == 2
    assert hint in " ".join(ended.err.replace("\u2502", " ").split())


def test_an_unknown_command_is_answered_with_the_nearest(command: Command) -> None:
    """Also where the word is another tool's."""
    for word, meant in (("web", "serve"), ("statsu", "status")):
        ended = command(word)
        assert ended.code == 2
        assert f"did you mean {meant!r}?" in ended.err
