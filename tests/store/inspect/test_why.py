"""``rowmill why``: right for every reason there is."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import gated
from command import COMPOSITE, Command, ago, create_parts, register
from databases import Db
from rowmill import Breaker, Concurrency, Mill, Rate, Snooze
from rowmill.store.inspect.lane_view import view_lane
from rowmill.store.inspect.why import inquire
from rowmill.store.inspect.why_rules import WhyAnswer, why
from rowmill.testing import Kit

HEAD = (
    "mill.lane('pages', ready={'status': 'queued'}, running={'status': 'running'},"
    " done={'status': 'done'}, dead={'status': 'dead'}, canceled={'status': 'off'}, max_attempts=3,"
    " lease=td(minutes=1)"
)
IMPORTS = ("from datetime import timedelta as td", "from rowmill import Breaker, Concurrency, Rate")


class Row:
    """The table of pages, an application over it, and questions about its rows."""

    def __init__(self, db: Db, command: Command) -> None:
        self.db, self.command = db, command
        gated.make(db)
        self.options = ""
        self.app()

    def app(self, options: str = "", *more: str) -> None:
        """The lane crawl with these options, and further lanes."""
        self.command.app(self.db.url, *IMPORTS, f"{HEAD}, name='crawl', {options})(handler)", *more)

    def worker(self, name: str = "w-1", *, silent: float = 0, lanes: str = '["crawl"]', **said: Any) -> None:
        """A worker that serves the lane."""
        register(self.db, name, silent=silent, **said)
        self.db.execute("update rowmill_workers set lanes = ? where id = ?", lanes, name)

    def add(self, domain: str | None = "a", **columns: Any) -> int:
        (key,) = gated.fill(self.db, [domain], **columns)
        return int(key)

    def why(self, key: Any, *words: str, code: int = 0) -> Any:
        return self.command.json("why", "crawl", str(key), *words, code=code)

    def first(self, key: Any, *words: str) -> tuple[Any, dict[str, Any]]:
        """The answer, and its decisive reason."""
        answer = self.why(key, *words)
        return answer, answer["reasons"][0]

    def codes(self, key: Any) -> list[str]:
        return [reason["code"] for reason in self.why(key)["reasons"]]

    def kit(self, work: Callable[[Kit], Awaitable[Any]], worker: str = "w-1", **options: Any) -> Any:
        async def main() -> Any:
            mill = Mill(self.db.url)
            gated.lane(mill, **options)
            async with Kit(mill, worker_id=worker) as kit:
                return await work(kit)

        return asyncio.run(main())

    def claim(self, count: int = 1, worker: str = "w-1", **options: Any) -> None:
        async def work(kit: Kit) -> None:
            assert len(await kit.claim(count=count)) == count

        self.kit(work, worker, **options)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


@pytest.fixture
def row(db: Db, command: Command) -> Row:
    found = Row(db, command)
    found.worker()
    return found


# -- where the row is


def test_there_is_no_such_row(row: Row, command: Command) -> None:
    assert row.why(77, code=4)["state"] == "none"
    assert "no row has this id" in command("why", "crawl", "77").out
    assert "is not an id in table" in command("why", "crawl", "seven").err


def test_it_expired_and_the_next_sweep_ends_it(row: Row) -> None:
    """Issue 23: a row past its time is shown so until it is canceled."""
    time = "timestamptz" if row.db.dialect == "postgresql" else "datetime"
    row.db.execute(f"alter table pages add column good_until {time}")
    row.app("roles={'expires_at': 'good_until'}")
    row.worker()
    _, first = row.first(row.add(good_until=ago(seconds=-3600)))
    assert first["code"] != "expires_at"
    answer, first = row.first(row.add(good_until=ago(seconds=5)))
    assert first["code"] == "expires_at", answer
    assert "expired before it was started" in first["text"]


def test_its_inputs_changed_during_its_last_runs(row: Row, command: Command) -> None:
    """It is ready again, or runs again, and the reason is shown; it holds the row back from nothing."""
    row.app("inputs=['source_id']")
    row.worker()
    key = row.add(source_id=0)

    async def stale(kit: Kit) -> None:
        (claim,) = await kit.claim()
        row.db.execute("update pages set source_id = source_id + 1")
        assert (await kit.settle(claim)).written[0].kind == "stale"

    row.kit(stale, inputs=["source_id"])
    answer, _ = row.first(key)
    assert (answer["state"], row.codes(key)) == ("ready", ["line", "inputs_changed"])
    assert "source_id changed while the last run was under way" in answer["reasons"][1]["text"]
    row.kit(stale, inputs=["source_id"])
    assert "source_id changed while the last 2 runs were under way" in command("why", "crawl", str(key)).out
    row.claim(inputs=["source_id"])
    answer, _ = row.first(key)
    assert (answer["state"], row.codes(key)) == ("running", ["running", "inputs_changed"])


def test_it_is_running(row: Row, command: Command) -> None:
    key = row.add(status="running", worker="w-9", claimed_at=ago(seconds=40), heartbeat_at=ago(seconds=10))
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("running", "running")
    assert "on w-9, last heartbeat 1" in reason["text"]
    assert "(started 4" in command("why", "crawl", str(key)).out


def test_whoever_held_it_is_gone_and_another_has_the_name(row: Row) -> None:
    """A supervisor restarts a killed child under the same name: alive is not who holds the row."""
    key = row.add(status="running", worker="w-1", claimed_at=ago(seconds=40), heartbeat_at=ago(seconds=30))
    began = "update rowmill_workers set started_at = ? where id = 'w-1'"
    row.db.execute(began, ago(minutes=9))
    assert "it is running on w-1, last heartbeat 3" in row.first(key)[1]["text"]
    row.db.execute(began, ago(seconds=5))
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("running", "running")
    assert "it was running on w-1, but that worker has restarted since" in reason["text"]
    assert "when its lease of 60 s expires, in about " in reason["text"]
    assert [r["code"] for r in answer["reasons"]] == ["running", "sweep"]
    assert 30 + 20 - 19 < answer["runs_in_seconds"] <= 30 + 20, "the lease's end, and then the sweep"


def test_the_row_of_a_dead_worker_comes_back_with_the_sweep_after_its_lease(row: Row, command: Command) -> None:
    """A8; issue: the forecast is the end of the lease plus the sweep, not one of them."""
    key = row.add(status="running", worker="w-9", claimed_at=ago(seconds=40), heartbeat_at=ago(seconds=20))
    row.worker("w-9", silent=90)
    answer = row.why(key)
    assert answer["state"] == "running"
    assert "w-9 is dead" in answer["reasons"][0]["text"]
    assert 40 + 20 - 19 < answer["runs_in_seconds"] <= 40 + 20
    assert "It should run in " in command("why", "crawl", str(key)).out
    row.db.execute("update rowmill_workers set seen_at = ?", ago(minutes=9))
    assert row.why(key)["by_itself"] is False, "nobody is there to sweep it"


def test_the_forecast_for_a_stuck_row_stays_where_it_is(row: Row, command: Command) -> None:
    """The lease's end and one sweep later: asked again, the row does not get more time."""
    row.app("sweep_every=td(minutes=1)")
    key = row.add(status="running", worker="w-9", claimed_at=ago(minutes=9), heartbeat_at=ago(seconds=90))
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("stuck", "stuck")
    assert 60 + 60 - 90 - 19 < answer["runs_in_seconds"] <= 60 + 60 - 90
    assert reason["seconds"] == answer["runs_in_seconds"]
    assert "at the latest at 2" in " ".join(command("why", "crawl", str(key)).out.split())
    row.db.execute("update pages set heartbeat_at = null, claimed_at = ?", ago(seconds=90))
    assert 60 + 60 - 90 - 19 < row.why(key)["runs_in_seconds"] <= 60 + 60 - 90, "judged by its claim"


def test_it_is_stuck_and_will_be_swept(row: Row, command: Command) -> None:
    key = row.add(status="running", worker="w-9", claimed_at=ago(minutes=9), heartbeat_at=ago(minutes=5))
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("stuck", "stuck")
    assert "no heartbeat for 5 min, and its lease is 60 s" in reason["text"]
    assert (answer["runs_in_seconds"], answer["by_itself"]) == (None, True), "the time of the sweep is over"
    assert "It should run after the next sweep, which is due now." in command("why", "crawl", str(key)).out
    row.db.execute("update rowmill_workers set seen_at = ?", ago(minutes=9))
    answer, reason = row.first(key)
    assert [r["code"] for r in answer["reasons"]] == ["stuck", "no_worker"], "nobody is there to sweep it"
    assert answer["by_itself"] is False


@pytest.mark.parametrize(("status", "state"), [("done", "done"), ("dead", "dead"), ("off", "canceled")])
def test_it_has_ended(row: Row, status: str, state: str) -> None:
    key = row.add(status=status, finished_at=ago(minutes=7), error="forbidden")
    answer, reason = row.first(key)
    assert answer["state"] == reason["code"] == state
    assert ("forbidden" in reason["text"]) == (state != "done")
    assert "(7 min ago)" in row.command("why", "crawl", str(key)).out


def test_it_is_in_no_state_of_this_lane(row: Row) -> None:
    key = row.add(status="odd")
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"], answer["by_itself"]) == ("elsewhere", "no_state", False)
    assert "status is 'odd'" in reason["text"]
    other = HEAD.replace("'queued'", "'odd'").replace("'running'}", "'odder'}")
    row.app("", f"{other}, name='other')(handler)")
    assert "in lane 'other' it is ready" in row.first(key)[1]["text"]


def test_it_is_in_a_state_that_the_lane_ignores(row: Row) -> None:
    """Not an unknown state: the declaration says that it is to be left alone."""
    key = row.add(status="on hold")
    row.app("ignore_states=['on hold']")
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"], answer["by_itself"]) == ("ignored", "ignored", False)
    assert reason["text"] == "the lane ignores this state: status is 'on hold' (ignore_states)"


# -- not ready


def test_it_waits_for_its_time(row: Row, command: Command) -> None:
    key = row.add(run_after=ago(minutes=-10))
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("held", "run_after")
    assert 590 < answer["runs_in_seconds"] <= 600
    assert "It should run in 10 min, at " in command("why", "crawl", str(key)).out


def test_a_row_that_waits_for_its_retry_shows_its_last_error(row: Row) -> None:
    key = row.add(run_after=ago(minutes=-10), error="TimeoutError: no answer\nmore of it")
    _, reason = row.first(key)
    assert reason["text"].endswith("; its last error: TimeoutError: no answer")


def test_it_was_touched_a_moment_ago(row: Row) -> None:
    row.app("untouched_for=td(minutes=10), roles={'updated_at': 'finished_at'}")
    key = row.add(finished_at=ago(minutes=4))
    answer, reason = row.first(key)
    assert reason["code"] == "untouched_for"
    assert 350 < answer["runs_in_seconds"] <= 360


def test_the_lanes_where_does_not_hold(row: Row, command: Command) -> None:
    row.app('''where="domain <> 'a'"''')
    key = row.add("a")
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("excluded", "where")
    assert "crawl 1: excluded" in command("why", "crawl", str(key)).out
    assert "domain <> 'a'" in reason["text"]
    assert answer["runs_in_seconds"] is None
    assert "once that condition is true" in command("why", "crawl", str(key)).out
    assert row.first(row.add("b"))[0]["state"] == "ready"
    assert row.first(row.add(None))[1]["code"] == "where", "NULL is not true"


def test_its_attempts_are_used_up_where_no_state_says_dead(row: Row) -> None:
    """E6"""
    row.command.app(
        row.db.url, *IMPORTS,
        HEAD.replace(" dead={'status': 'dead'},", "") + ", name='crawl', roles={'failures': 'attempts'})(handler)",
    )  # fmt: skip
    answer, reason = row.first(row.add(attempts=3))
    assert (answer["state"], reason["code"], answer["by_itself"]) == ("exhausted", "attempts", False)
    assert "3 of 3" in reason["text"]
    assert row.first(row.add(attempts=2))[0]["state"] == "ready"


# -- pauses


def test_its_environment_its_lane_or_its_key_is_paused(row: Row, command: Command) -> None:
    row.app("gates=[Concurrency(2, by='domain')]")
    key, other = row.add("a"), row.add("b")
    command.json("pause", "--lane", "crawl", "--key", "a", "--reason", "they asked")
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("held", "key_paused")
    assert "domain a is paused: they asked" in reason["text"]
    assert answer["by_itself"] is False
    assert row.first(other)[0]["state"] == "ready"
    command.json("pause", "--lane", "crawl", "--for", "10m")
    assert row.first(other)[1]["code"] == "lane_paused"
    assert 590 < row.first(other)[0]["runs_in_seconds"] <= 600
    command.json("pause", "--reason", "night")
    assert row.codes(key)[:3] == ["environment_paused", "key_paused", "lane_paused"], "those without an end first"
    assert "until it is resumed" in command("why", "crawl", str(key)).out
    for words in ([], ["--lane", "crawl"], ["--lane", "crawl", "--key", "a"]):
        command.json("resume", *words)
    assert row.first(key)[0]["state"] == "ready"


def test_a_lane_with_a_gate_for_all_of_it_is_paused_once(row: Row, command: Command) -> None:
    row.app("gates=[Concurrency(9)]")
    key = row.add()
    command.json("pause", "--lane", "crawl")
    assert row.codes(key) == ["lane_paused", "line"]


# -- gates


def test_as_many_of_its_key_are_running_as_may(row: Row) -> None:
    gates = [Concurrency(2, by="domain")]
    row.app("gates=[Concurrency(2, by='domain')]")
    row.add(), row.add()
    row.claim(2, gates=gates)
    key, free, loose = row.add(), row.add("b"), row.add(None)
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("held", "concurrency")
    assert "domain a: concurrency limit reached, 2 of 2 running: " in reason["text"]
    assert "1 (w-1)" in reason["text"]
    assert reason["since"] is not None
    assert "when one of those runs ends" in row.command("why", "crawl", str(key)).out
    assert row.first(free)[0]["state"] == "ready"
    assert row.first(loose)[0]["state"] == "ready", "a row without a key is not held back"
    row.command.json("gates", "set", "crawl", "a", "most=3")
    assert row.first(key)[0]["state"] == "ready"
    row.command.json("gates", "set", "crawl", "b", "most=0")
    assert row.first(free)[0]["by_itself"] is False


def test_the_whole_lane_is_full(row: Row) -> None:
    row.app("gates=[Concurrency(1)]")
    row.add()
    row.claim(gates=[Concurrency(1)])
    assert row.first(row.add("b"))[1]["text"].startswith("the lane: concurrency limit reached, 1 of 1 running")


def test_every_process_runs_as_many_of_its_key_as_it_may(row: Row) -> None:
    gates = [Concurrency(1, by="domain", scope="process")]
    row.app("gates=[Concurrency(1, by='domain', scope='process')]")
    row.add()
    row.claim(gates=gates)
    key = row.add()
    assert row.first(key)[1]["code"] == "process_concurrency"
    row.worker("w-2")
    assert row.first(key)[0]["state"] == "ready", "the other process has room"


def test_its_breaker_is_open_and_then_half_open(row: Row, command: Command) -> None:
    """D8"""
    gates = [Breaker(1, td(minutes=5), by="domain")]
    row.app("gates=[Breaker(1, td(minutes=5), by='domain')]")
    row.add()

    async def fail(kit: Kit) -> None:
        (one,) = await kit.claim()
        await kit.settle(one, RuntimeError("down"))

    row.kit(fail, gates=gates)
    key = row.add()
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("held", "breaker")
    assert "circuit open after 1 failure in a row" in reason["text"]
    assert 290 < answer["runs_in_seconds"] <= 300
    assert reason["since"] is not None
    row.db.execute("update rowmill_gates set open_until = ?", ago(seconds=1))
    assert row.first(key)[0]["state"] == "ready", "it may be the probe"
    row.db.execute("update pages set status = 'running', worker = 'w-1', heartbeat_at = ? where id = 1", ago(seconds=1))
    answer, reason = row.first(key)
    assert reason["code"] == "probe"
    assert "its one probe is running: 1 (w-1)" in reason["text"]


def test_its_breaker_stands_in_a_table_of_the_users_own(row: Row) -> None:
    """D8"""
    row.app("gates=[Breaker(2, td(minutes=5), by='source_id', table='sources')]")
    row.db.execute("insert into sources (id, failure_streak, paused_until) values (7, 2, ?)", ago(minutes=-3))
    answer, reason = row.first(row.add(source_id=7))
    assert reason["code"] == "breaker"
    assert 170 < answer["runs_in_seconds"] <= 180


class TooMany(Exception):
    status = 429
    headers = {"Retry-After": "90"}  # noqa: RUF012


def test_the_other_side_asked_to_wait(row: Row) -> None:
    row.app("gates=[Rate(100, by='domain')]")
    row.add()

    async def refuse(kit: Kit) -> None:
        (one,) = await kit.claim()
        await kit.settle(one, TooMany())

    row.kit(refuse, gates=[Rate(100, by="domain")])
    answer, reason = row.first(row.add())
    assert reason["code"] == "closed"
    assert 80 < answer["runs_in_seconds"] <= 90


def test_one_vendors_refusal_is_told_of_that_vendor_alone(row: Row, command: Command) -> None:
    """D7; issue: beside a rate of the whole lane; gates and why tell the same."""
    row.app("gates=[Concurrency(5, by='domain'), Rate(100)]")
    row.add("a")
    gates = [Concurrency(5, by="domain"), Rate(100)]

    async def refuse(kit: Kit) -> None:
        (one,) = await kit.claim()
        await kit.settle(one, TooMany())

    row.kit(refuse, gates=gates)
    held, free = row.add("a"), row.add("b")
    assert row.first(held)[1]["text"] == "domain a: the other side asked to wait (Retry-After)"
    assert row.first(free)[0]["state"] == "ready"
    closed = {gate["label"]: [key["key"] for key in gate["keys"] if key["closed_seconds"]]
              for gate in command.json("gates")["gates"]}  # fmt: skip
    assert closed == {"": [], "domain": ["a"]}


def test_the_whole_lane_is_closed_on_request(row: Row, command: Command) -> None:
    """D7"""
    row.app("gates=[Concurrency(5, by='domain')]")
    row.add("a")

    async def refuse(kit: Kit) -> None:
        (one,) = await kit.claim()
        await kit.settle(one, Snooze(td(seconds=90), closes="lane"))

    row.kit(refuse, gates=[Concurrency(5, by="domain")])
    answer, reason = row.first(row.add("b"))
    assert (reason["code"], reason["text"]) == ("lane_paused", "lane 'crawl' is paused: the other side asked to wait")
    assert 30 < answer["runs_in_seconds"] <= 90
    assert re.search(r"lane 'crawl' .*paused.*for another \d+ \w+: the other side asked to wait", command("gates").out)
    (pause,) = command.json("gates")["paused"]
    assert (pause["lane"], pause["reason"]) == ("crawl", "the other side asked to wait")


def test_its_rate_is_used_up(row: Row) -> None:
    """D7"""
    row.app("gates=[Rate(6, by='domain', burst=1)]")
    row.add()
    row.claim(gates=[Rate(6, by="domain", burst=1)])
    first, second = row.add(), row.add()
    answer, reason = row.first(first)
    assert reason["code"] == "rate"
    assert 0 < answer["runs_in_seconds"] <= 10.1
    later = row.first(second)[0]["runs_in_seconds"]
    assert answer["runs_in_seconds"] < later <= 20.1, "one token for the row before it"


def test_its_rate_is_0(row: Row) -> None:
    row.app("gates=[Rate.from_table('sources', 'rate_limit_per_minute', by='source_id')]")
    row.db.execute("insert into sources (id, rate_limit_per_minute) values (7, 0)")
    answer, reason = row.first(row.add(source_id=7))
    assert (reason["code"], answer["by_itself"]) == ("rate", False)


def test_the_lanes_pace_is_used_up(row: Row) -> None:
    """E5"""
    row.app("pace=(1, td(minutes=1))")
    row.add()
    row.claim(pace=(1, td(minutes=1)))
    answer, reason = row.first(row.add())
    assert reason["code"] == "pace"
    assert 50 < answer["runs_in_seconds"] <= 62


def test_several_reasons_are_all_told_the_decisive_one_first(row: Row, command: Command) -> None:
    row.app("gates=[Concurrency(1, by='domain'), Rate(1, by='domain'), Concurrency(1, by='source_id')]")
    gates = [Concurrency(1, by="domain"), Rate(1, by="domain"), Concurrency(1, by="source_id")]
    row.add(source_id=1)
    row.claim(gates=gates)
    key = row.add(source_id=1, run_after=ago(hours=-1))
    assert row.codes(key) == ["run_after", "concurrency", "concurrency", "rate"]
    command.json("pause", "--for", "2h")
    assert row.codes(key)[:2] == ["environment_paused", "run_after"], "the later end decides"
    row.db.execute("update rowmill_workers set seen_at = ?", ago(minutes=9))
    assert row.codes(key)[0] == "no_worker", "what does not end by itself decides"


# -- who works


def test_its_lane_is_not_served_in_this_environment(fresh: Callable[[str], Db], command: Command) -> None:
    dbs = {name: fresh("sqlite") for name in ("prod", "dev")}
    for db in dbs.values():
        gated.make(db)
        gated.fill(db, ["a"])
    command.app({n: d.url for n, d in dbs.items()}, *IMPORTS, f"{HEAD}, name='crawl', environments=['prod'])(handler)")
    answer = command.json("why", "crawl", "1", "--env", "dev")
    assert answer["reasons"][0]["code"] == "not_served"
    assert "it is declared for prod" in answer["reasons"][0]["text"]


def test_no_live_worker_serves_its_lane(row: Row, command: Command) -> None:
    key = row.add()
    row.db.execute("update rowmill_workers set seen_at = ?", ago(minutes=9))
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"], answer["by_itself"]) == ("held", "no_worker", False)
    assert "the last one was w-1" in reason["text"]
    shown = command("why", "crawl", str(key)).out
    assert shown.startswith(f"crawl {key}: waiting for a worker\n")
    assert "It will not run by itself.\nTry: rowmill run starts a worker" in shown
    row.worker("w-2", lanes='["other"]')
    assert row.first(key)[1]["code"] == "no_worker"
    row.worker("w-3")
    assert row.first(key)[0]["state"] == "ready"


def job(lane: str, n: int, **more: Any) -> dict[str, Any]:
    return {"slot": f"{lane}-{n}", "lane": lane, "environment": "default", "id": str(n), "seconds": 1.0, **more}


def test_all_slots_of_its_lane_are_busy(row: Row, command: Command) -> None:
    row.app("concurrency=2")
    key = row.add()
    row.worker("w-1", state="busy", current=[job("crawl", 1), job("crawl", 2)])
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("held", "capacity")
    assert "w-1 (2 running)" in reason["text"]
    assert "when a slot is free" in command("why", "crawl", str(key)).out
    row.worker("w-2")
    assert row.first(key)[0]["state"] == "ready"


def test_a_process_has_as_many_runs_as_it_may_over_all_lanes(row: Row) -> None:
    key = row.add()
    row.worker("w-1", state="busy", current=[job("other", 1, at_once=1)])
    assert row.first(key)[1]["code"] == "capacity"
    row.worker("w-1", state="busy", current=[job("other", 1, at_once=2)])
    assert row.first(key)[0]["state"] == "ready"


async def test_a_worker_tells_how_many_runs_it_may_have(db: Db) -> None:
    gated.make(db)
    gated.fill(db, ["a"])
    mill = Mill(db.url)
    seen: list[Any] = []

    async def look(job: Any) -> None:
        seen.extend(worker.shutdown.snapshot().current)

    gated.lane(mill, look)
    worker = mill.worker(drain=True, concurrency=3)
    await worker.run()
    assert [one["at_once"] for one in seen] == [3]


def test_lanes_above_have_ready_rows(row: Row, command: Command) -> None:
    """A2"""
    other = HEAD.replace("'queued'", "'urgent'").replace("'running'}", "'urgently'}")
    row.app("priority=1", f"{other}, name='urgent')(handler)")
    row.worker("w-1", lanes='["crawl", "urgent"]')
    key = row.add()
    assert row.codes(key) == ["line"]
    row.add(status="urgent")
    answer, reason = row.first(key)
    assert (answer["state"], reason["code"]) == ("ready", "above")
    assert "lane 'urgent'" in reason["text"]
    command.json("pause", "--lane", "urgent")
    assert row.codes(key) == ["line"], "what is paused does not go before"
    command.json("resume", "--lane", "urgent")
    row.worker("w-1", lanes='["crawl"]')
    assert row.codes(key) == ["line"], "no worker serves both"


def test_an_environment_above_has_ready_rows(fresh: Callable[[str], Db], command: Command) -> None:
    """A2"""
    dbs = {name: fresh("sqlite") for name in ("prod", "dev")}
    for db in dbs.values():
        gated.make(db)
        gated.fill(db, ["a"])
        register(db, "w-1")
        db.execute("""update rowmill_workers set lanes = '["crawl"]'""")
    command.app({n: d.url for n, d in dbs.items()}, *IMPORTS, f"{HEAD}, name='crawl')(handler)")
    (reason, _) = command.json("why", "crawl", "1", "--env", "dev")["reasons"]
    assert (reason["code"], reason["text"].endswith("lane 'crawl' in 'prod'")) == ("above", True)
    assert [r["code"] for r in command.json("why", "crawl", "1", "--env", "prod")["reasons"]] == ["line"]
    assert "--env prod or --env dev" in command("why", "crawl", "1").err


@contextmanager
def locked(db: Db, sql: str) -> Iterator[None]:
    """Somebody's transaction, open until the block ends."""
    ready, done = threading.Event(), threading.Event()

    async def hold() -> None:
        connection = await asyncpg.connect(db.direct, server_settings={"application_name": "somebody"})
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(sql)
        ready.set()
        await asyncio.to_thread(done.wait, 30)
        await transaction.rollback()
        await connection.close()

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        done.set()
        thread.join()


def test_somebodys_transaction_has_it_locked(pg: Db, command: Command) -> None:
    row = Row(pg, command)
    row.worker()
    key = row.add()
    with locked(pg, f"select 1 from pages where id = {key} for update"):
        answer, reason = row.first(key)
        assert (answer["state"], reason["code"]) == ("held", "locked")
        assert "somebody" in reason["text"].partition("(")[2]
        assert reason["since"] is not None
    assert row.first(key)[0]["state"] == "ready"


def test_it_is_ready_and_in_line(row: Row, command: Command) -> None:
    keys = [row.add() for _ in range(3)]
    answer, reason = row.first(keys[0])
    assert (answer["state"], reason["code"], answer["runs_in_seconds"]) == ("ready", "line", 0)
    assert "at the next claim" in command("why", "crawl", str(keys[0])).out
    answer, reason = row.first(keys[2])
    assert "2 rows of the lane are ahead of it" in reason["text"]
    assert answer["runs_in_seconds"] is None
    gated.fill(row.db, ["a"] * 1000)
    assert "more than 1,000 rows" in row.first(row.add())[1]["text"]
    row.app("gates=[Concurrency(2, by='domain')]")
    assert "first in line of its key" in row.first(row.add("z"))[1]["text"]


# -- and the claim


SHAPES = {
    "turns": [
        Concurrency(2, by="domain"),
        Rate(6, per=td(hours=1), by="domain"),
        Breaker(2, td(minutes=5), by="domain"),
    ],
    "walk": [Concurrency(2, by="domain"), Rate(6, per=td(hours=1), by="domain"), Concurrency(4, by="source_id")],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_why_never_disagrees_with_the_claim(row: Row, shape: str) -> None:
    """Keys in all kinds of states at random: what is told to be held back is not claimed, what is first in line is."""
    db, dice, gates = row.db, random.Random(f"{shape} 4"), SHAPES[shape]
    row.kit(lambda kit: kit.store(), gates=gates)  # makes the tables
    pages, states = [], []
    for n in range(40):
        page = {"domain": f"d{n:02}", "source_id": dice.randint(1, 9), "status": "queued", "worker": None}
        page |= {"heartbeat_at": None, "run_after": ago(seconds=5)}
        running = {**page, "status": "running", "worker": "w-1", "heartbeat_at": ago(seconds=1)}
        pages += [running] * dice.choice([0, 0, 0, 1, 2])
        later = {**page, "run_after": ago(minutes=-5)}
        pages += [later if dice.random() < 0.1 else page for _ in range(dice.randint(1, 3))]
        state = {"lane": "crawl", "dim": "domain", "key": page["domain"], "refilled_at": ago(seconds=1)}
        state |= {"tokens": dice.choice([None, None, 0.9, 1.0, 5.0]), "streak": dice.choice([0, 0, 1, 2])}
        state |= {"most": dice.choice([None, None, None, 0, 4])}
        ends = [None] * 6 + [ago(minutes=5), ago(minutes=-5)]
        state |= {f"{name}_until": dice.choice(ends) for name in ("open", "closed", "paused")}
        states.append(state)
    db.insert("pages", pages)
    db.insert("rowmill_gates", states, key="key")
    waiting = [found["id"] for found in db.query("select id from pages where status = 'queued' order by id")]

    async def work(kit: Kit) -> tuple[dict[int, WhyAnswer], set[int]]:
        ((name, database),) = kit.mill.databases()
        view = await view_lane(kit.mill.lanes["crawl"], name, database, kit.mill.clock)
        answers = {key: why(await (await inquire(view, (key,))).facts([], [])) for key in waiting}
        claimed: set[int] = set()
        while claims := await kit.claim(count=100):
            claimed |= {one.id for one in claims}
        await database.close()
        return answers, claimed

    answers, claimed = row.kit(work, gates=gates)
    held = {key for key, answer in answers.items() if answer.state != "ready"}
    first = {key for key, answer in answers.items() if answer.state == "ready" and answer.wait == 0}
    assert not held & claimed, "told to be held back, and claimed"
    assert len(held) > 20
    assert len(first) > 5
    if shape == "turns":
        assert first <= claimed, "told to be next, and not claimed"
    codes = {reason.code for key in held for reason in answers[key].reasons}
    assert {"run_after", "key_paused", "closed", "concurrency", "rate"} <= codes


# -- the command


@pytest.mark.bare
def test_nothing_is_written_and_no_table_is_needed(db: Db, command: Command) -> None:
    row = Row(db, command)
    row.app("gates=[Concurrency(1, by='domain'), Rate(1, by='domain')]")
    key = row.add()
    assert row.codes(key) == ["line"], "without rowmill_workers nothing is known of workers"
    names = "select count(*) from {} where {} like 'rowmill_%'"
    source = ("sqlite_master", "name") if db.dialect == "sqlite" else ("pg_tables", "tablename")
    assert db.value(names.format(*source)) == 0


@pytest.mark.bare
def test_words_are_read_as_for_sql_and_a_composite_key_too(db: Db, command: Command) -> None:
    create_parts(db)
    db.insert("parts", [{"book": "a", "page": 1}], key="page")
    reference = command.app(db.url, COMPOSITE)
    for words in ([reference, "parts", "a,1"], ["parts", "a,1"], [reference, "a,1"], ["a,1"]):
        assert command.json("why", *words)["state"] == "ready"
    assert command("why", reference, "parts", "a,1", "b").code == 2
    assert command("why", "nothing", "a,1").code == 1
