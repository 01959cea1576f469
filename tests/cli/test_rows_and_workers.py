"""The commands that show rows and workers: workers, stuck, jobs, sql."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

import systems
from command import COMPOSITE, NOWHERE, Command, ago, counts, create_parts, fill_enrichment, register
from databases import Db
from rowmill.engine.worker import SUSPICION
from rowmill.store.dialect import POSTGRES
from rowmill.store.own.process_identity import process_identity
from rowmill.store.own.workers import BEAT_EVERY


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def seconds_left(moment: str) -> float:
    return (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()


def ended_process() -> str:
    """A process of this host that is gone: another one has its pid."""
    boot, namespace, pid, started = (process_identity() or "").split()
    return f"{boot} {namespace} {pid} {int(started) - 1}"


# -- workers


def test_workers_shows_who_works_on_what_and_who_is_dead(db: Db, command: Command) -> None:
    """A14"""
    job = {"slot": "enrichment-1", "lane": "enrichment", "environment": "default", "id": "77", "seconds": 12.0}
    register(db, "w-idle", completed=1234, failed=2, lost=1)
    register(db, "w-busy", silent=10, state="busy", current=[{**job, "progress": [0.4, "page 2"]}])
    register(db, "w-gone", silent=100, state="busy", current=[{**job, "progress": None}])
    register(db, "w-stopped", state="stopped")
    command.app(db.url, "enrichment")
    document = command.json("workers")
    found = {worker["id"]: worker for worker in document["workers"]}
    assert {name: worker["state"] for name, worker in found.items()} == {
        "w-idle": "idle", "w-busy": "busy", "w-gone": "dead",
    }  # fmt: skip
    assert 21 < found["w-busy"]["current"][0]["seconds"] < 30, "the run goes on after the last sign of life"
    idle = found["w-idle"]
    assert (idle["completed"], idle["failed"], idle["lost"], idle["lanes"]) == (1234, 2, 1, ["enrichment"])
    assert {worker["id"] for worker in command.json("workers", "--all")["workers"]} - found.keys() == {"w-stopped"}
    shown = " ".join(command("workers").out.split())
    assert "40% page 2" in shown
    assert "1,234" in shown


def test_a_worker_of_two_environments_is_one_worker(fresh: Callable[[str], Db], command: Command) -> None:
    one, two = fresh("sqlite"), fresh("sqlite")
    register(one, "w-1", silent=100)
    register(two, "w-1", completed=5)
    command.app({"prod": one.url, "staging": two.url}, "enrichment")
    (worker,) = command.json("workers")["workers"]
    assert (worker["environments"], worker["state"], worker["completed"]) == (["prod", "staging"], "idle", 5)


def test_without_any_worker_workers_says_so(db: Db, command: Command) -> None:
    command.app(db.url, "enrichment")
    assert command.json("workers") == {"workers": [], "errors": []}
    assert "No live workers" in command("workers").out


def test_a_dead_worker_is_shown_with_what_it_held_when_last_seen(db: Db, command: Command) -> None:
    """Its rows may be back by now: neither their ids nor how long they run are known any more."""
    job = {"slot": "enrichment-1", "lane": "enrichment", "environment": "default", "id": "77", "seconds": 12.0}
    register(db, "w-gone", silent=100, state="busy", current=[{**job, "progress": None}] * 2)
    command.app(db.url, "enrichment")
    shown = " ".join(command("workers").out.split())
    assert "held 2 rows when last seen" in shown
    assert "enrichment 77" not in shown
    assert len(command.json("workers")["workers"][0]["current"]) == 2


# -- stuck


def test_stuck_lists_rows_without_a_sign_of_life_and_those_that_never_gave_one(db: Db, command: Command) -> None:
    """D10"""
    systems.create(db, "prices")
    running = {"status": "running", "locked_at": ago(minutes=20)}
    systems.insert_scrape(db, 1, **running, locked_by="alive", heartbeat_at=ago(seconds=20))
    (silent,) = systems.insert_scrape(db, 1, **running, locked_by="silent", heartbeat_at=ago(seconds=400))
    (never,) = systems.insert_scrape(db, 1, **running, locked_by="never")
    systems.insert_scrape(db, 1)
    command.app(db.url, "scrape")
    rows = command.json("stuck")["rows"]
    assert [(row["id"], row["worker"]) for row in rows] == [(never, "never"), (silent, "silent")]
    assert rows[0]["silent_seconds"] is None
    assert 390 < rows[1]["silent_seconds"] < 420
    assert 1190 < rows[1]["running_seconds"] < 1220
    shown = command("stuck").out
    assert "never" in shown
    assert "7 min" in shown
    assert "no live worker" in shown
    assert "so nothing takes these rows back. Try: rowmill run, or rowmill release --stuck" in shown


def test_stuck_says_when_a_row_without_a_time_comes_back_and_what_to_do(db: Db, command: Command) -> None:
    """D10: such a row is taken back a lease after a worker first saw it."""
    systems.create(db, "prices")
    systems.insert_scrape(db, 2, status="running")
    command.app(db.url, "scrape")
    register(db, "w-1", silent=1, lane="scrape")
    (one, other) = command.json("stuck")["rows"]
    assert one["swept"], "a live worker serves the lane"
    seconds = (datetime.fromisoformat(one["until"]) - datetime.now(UTC)).total_seconds()
    lease, sweep = one["lease_seconds"], 60
    assert lease < seconds <= lease + 2 * sweep, "nobody has seen it yet: the next sweep does"
    db.execute("insert into rowmill_sightings (lane, row_id, seen_at) values ('scrape', ?, ?)", str(other["id"]),
               ago(seconds=200))  # fmt: skip
    (known,) = [row for row in command.json("stuck")["rows"] if row["id"] == other["id"]]
    left = (datetime.fromisoformat(known["until"]) - datetime.now(UTC)).total_seconds()
    assert left <= lease + sweep - 200
    shown = " ".join(command("stuck").out.split())
    assert "A worker takes it back 5 min (the lease) after it first sees it" in shown
    assert "Try: rowmill release --stuck takes it back now" in shown
    answer = command.json("why", "scrape", str(other["id"]))
    assert answer["by_itself"]
    assert 0 < answer["runs_in_seconds"] <= lease + sweep - 200
    assert "shows neither a claim time nor a heartbeat" in answer["reasons"][0]["text"]


def test_where_only_the_workers_table_can_tell_it_is_asked(db: Db, command: Command) -> None:
    db.execute("create table jobs (id integer primary key, state text not null, worker text)")
    command.app(
        db.url,
        "mill.lane('jobs', name='jobs', ready={'state': 'new'}, running={'state': 'run'}, done={'state': 'ok'},"
        " dead={'state': 'bad'})(handler)",
    )
    holders = ["w-1~inc-w-1", "w-2~inc-w-2", "w-3~gone"]
    db.insert("jobs", [{"id": i, "state": "run", "worker": worker} for i, worker in enumerate(holders)])
    assert command.json("stuck")["rows"] == [], "without a workers table nothing is called stuck"
    assert counts(command.json("status"), "jobs") == {"running": 3}
    register(db, "w-1")
    register(db, "w-2", silent=400)
    assert counts(command.json("status"), "jobs") == {"running": 3, "stuck": 2}
    rows = {row["id"]: row for row in command.json("stuck")["rows"]}
    assert rows.keys() == {1, 2}
    assert rows[1]["worker"] == "w-2"
    assert 390 < rows[1]["silent_seconds"] < 420
    assert rows[2]["silent_seconds"] is None


def test_when_nothing_hangs_stuck_says_so(lite: Db, command: Command) -> None:
    systems.create(lite, "enrichment")
    command.app(lite.url, "enrichment")
    ended = command("stuck")
    assert (ended.code, ended.out) == (0, "Nothing is stuck.\n")


def test_a_holder_whose_process_is_gone_is_called_dead_and_its_rows_are_back_within_a_second(
    db: Db, command: Command
) -> None:
    """Its last heartbeat is two seconds old. The kernel of this host knows more."""
    systems.create(db, "enrichment")
    held = {"status": "running", "locked_at": ago(minutes=3), "attempts": 1}
    first, *_ = systems.insert_enrichment(db, 2, **held, locked_by="w-gone")
    register(db, "w-gone", silent=2, state="busy", process=ended_process())
    command.app(db.url, "enrichment")
    (entry,) = command.json("stuck")["held_by_dead"]
    assert (entry["evidence"], entry["swept"]) == ("its process is gone", False)
    register(db, "w-elsewhere", process="another-host 1 1 1")
    (entry,) = command.json("stuck")["held_by_dead"]
    assert seconds_left(entry["until"]) > 60, "a worker on another host cannot see it"
    register(db, "w-live", process=process_identity())
    (entry,) = command.json("stuck")["held_by_dead"]
    assert seconds_left(entry["until"]) <= 1
    gone, *others = sorted(command.json("workers")["workers"], key=lambda worker: worker["state"] != "dead")
    assert (gone["id"], gone["state"], gone["process_gone"]) == ("w-gone", "dead", True)
    assert {(worker["state"], worker["process_gone"]) for worker in others} == {("idle", False)}
    assert "its process is gone" in " ".join(command("workers").out.split())
    answer = command.json("why", "enrichment", str(first))
    assert "w-gone is dead: its process is gone" in answer["reasons"][0]["text"]
    assert answer["runs_in_seconds"] <= 1


def test_a_holder_without_its_lock_is_suspected_once_its_heartbeat_is_late(pg: Db, command: Command) -> None:
    """Its rows are back when the suspicion is over, long before their lease."""
    systems.create(pg, "enrichment")
    held = {"status": "running", "locked_at": ago(minutes=3), "attempts": 1}
    first, *_ = systems.insert_enrichment(pg, 2, **held, locked_by="w-lost")
    register(pg, "w-lost", state="busy")
    register(pg, "w-live")
    pg.execute("update rowmill_workers set lock_id = 1 where id = 'w-lost'")
    pg.execute("update rowmill_workers set lock_id = 2 where id = 'w-live'")
    command.app(pg.url, "enrichment")
    with psycopg.connect(pg.url) as session:
        session.execute(POSTGRES.hold_lock(2))
        workers = {worker["id"]: worker["lock_missing"] for worker in command.json("workers")["workers"]}
        assert workers == {"w-lost": True, "w-live": False}
        shown = " ".join(command("workers").out.split())
        assert shown.count("its session with the database is gone") == 1
        pg.execute("update rowmill_workers set seen_at = now() + interval '1 hour' where id = 'w-lost'")
        assert command.json("stuck")["held_by_dead"] == [], "it beats, so it lives"
        pg.execute("update rowmill_workers set seen_at = now() - interval '5 s' where id = 'w-lost'")
        (entry,) = command.json("stuck")["held_by_dead"]
        assert entry["evidence"] == "its session with the database is gone, and its heartbeat is late"
        assert seconds_left(entry["until"]) <= 2 * BEAT_EVERY + SUSPICION - 5
        pg.execute("update rowmill_workers set seen_at = now() - interval '5 s' where id = 'w-lost'")
        answer = command.json("why", "enrichment", str(first))
        assert "w-lost seems to be dead: its session with the database is gone" in answer["reasons"][0]["text"]
        assert answer["runs_in_seconds"] <= 2 * BEAT_EVERY + SUSPICION - 5


def test_stuck_says_what_dead_workers_hold_before_the_lease_ends(db: Db, command: Command) -> None:
    """Between a kill and the end of the lease nothing is stuck, and the rows do not run either."""
    systems.create(db, "enrichment")
    held = {"status": "running", "locked_at": ago(minutes=3), "attempts": 1}
    systems.insert_enrichment(db, 2, **held, locked_by="w-gone")
    systems.insert_enrichment(db, 1, **held, locked_by="w-live")
    register(db, "w-gone", silent=170, state="busy")
    register(db, "w-live", state="busy")
    command.app(db.url, "enrichment")
    document = command.json("stuck")
    (entry,) = document["held_by_dead"]
    assert (document["rows"], entry["worker"], entry["rows"], entry["swept"]) == ([], "w-gone", 2, True)
    left = (datetime.fromisoformat(entry["until"]) - datetime.now(UTC)).total_seconds()
    assert 420 < left <= 420 + 200, "the lease of ten minutes, and a sweep"
    shown = " ".join(command("stuck").out.split())
    assert "Nothing is stuck yet." in shown
    assert "dead worker w-gone holds 2 rows of lane 'enrichment' (it is silent); they are taken back by about " in shown
    db.execute("update rowmill_workers set seen_at = ?", ago(minutes=5))
    assert "no live worker takes them back" in " ".join(command("stuck").out.split())


def test_stuck_says_when_a_row_comes_back(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 1, status="running", locked_by="w-9", locked_at=ago(seconds=601), attempts=1)
    command.app(db.url, "enrichment")
    assert command.json("stuck")["rows"][0]["until"] is None, "nobody sweeps"
    register(db, "w-live")
    (row,) = command.json("stuck")["rows"]
    assert f"{datetime.fromisoformat(row['until']):%H:%M}" in command("stuck").out


# -- jobs


def test_jobs_shows_rows_of_a_state_with_the_time_that_matters(db: Db, command: Command) -> None:
    fill_enrichment(db)
    command.app(db.url, "enrichment")
    states = ("ready", "waiting", "running", "done", "dead")
    found = {state: command.json("jobs", "--state", state)["rows"] for state in states}
    assert {state: len(rows) for state, rows in found.items()} == {
        "ready": 3, "waiting": 2, "running": 2, "done": 1, "dead": 1,
    }  # fmt: skip
    assert all(row["state"] == state for state, rows in found.items() for row in rows)
    assert found["running"][0]["worker"] == "w-1", "the latest first"
    assert found["dead"][0]["error"] == "forbidden"
    assert datetime.fromisoformat(found["waiting"][0]["run_after"]) > datetime.now(UTC)
    assert len(command.json("jobs")["rows"]) == 9
    assert len(command.json("jobs", "--limit", "4")["rows"]) == 4
    assert "in 5 min" in command("jobs", "--state", "waiting").out


def test_ready_rows_are_listed_as_they_will_be_claimed(db: Db, command: Command) -> None:
    systems.create(db, "registre")
    oldest = systems.insert_extraction(db, 3)
    command.app(db.url, "extraction")
    assert [row["id"] for row in command.json("jobs", "--state", "ready")["rows"]] == oldest
    assert [row["id"] for row in command.json("jobs")["rows"]] == oldest[::-1]


def test_ready_rows_without_a_place_in_the_order_are_listed_last(db: Db, command: Command) -> None:
    """As they are claimed, whichever way the database sorts NULL."""
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(f"create table jobs (id integer primary key, state text not null, worker text, created_at {time})")
    moments = [None, ago(minutes=1), None, ago(minutes=2)]
    db.insert("jobs", [{"id": i, "state": "new", "created_at": moment} for i, moment in enumerate(moments)])
    command.app(
        db.url,
        "mill.lane('jobs', name='jobs', ready={'state': 'new'}, running={'state': 'run'}, done={'state': 'ok'},"
        " dead={'state': 'bad'})(handler)",
    )
    assert [row["id"] for row in command.json("jobs", "--state", "ready")["rows"]] == [3, 1, 0, 2]


def test_a_long_worker_id_does_not_take_the_room_of_the_error(lite: Db, command: Command) -> None:
    """On a terminal; into a pipe everything goes whole."""
    create_parts(lite)
    worker, error = f"unified-worker-{UUID(int=2**127 + 0xABCDEF)}", "TimeoutError: " + "it did not answer " * 20
    lite.insert("parts", [{"book": "a", "page": 1, "state": "bad", "worker": worker, "error": error}], key="page")
    lite.insert("parts", [{"book": "b", "page": 1, "state": "run", "worker": worker}], key="page")
    command.app(lite.url, COMPOSITE)
    (line,) = [line for line in command("jobs").out.splitlines() if line.startswith("a,1")]
    assert worker in line
    assert line.endswith(error.rstrip())
    assert worker in command("stuck").out
    command.terminal()
    shown = command("jobs").out
    assert max(map(len, shown.splitlines())) <= 80
    (line,) = [line for line in shown.splitlines() if line.startswith("a,1")]
    assert "unified-worker…abcdef" in line
    assert "TimeoutError: it did not answer" in line
    assert "unified-worker…abcdef" in command("stuck").out


def test_ids_are_never_folded(lite: Db, command: Command) -> None:
    """On a narrow terminal the error gives way: an id is there to be copied."""
    columns = "id text primary key, status text, attempts int, updated_at datetime, worker text, error text"
    lite.execute(f"create table papers ({columns})")
    key = str(UUID(int=2**127 + 1))
    lite.insert("papers", [{"id": key, "status": "bad", "attempts": 3, "updated_at": "2020-01-01 00:00:00",
                            "worker": "host-4711-abcd", "error": "it did not answer"}])  # fmt: skip
    states = "ready={'status': 'new'}, running={'status': 'run'}, done={'status': 'done'}, dead={'status': 'bad'}"
    command.app(lite.url, f"@mill.lane('papers', {states})", "async def papers(job): ...")
    command.terminal(80)
    lines = [line.rstrip() for line in command("jobs").out.splitlines()]
    (at,) = [n for n, line in enumerate(lines) if line.startswith(key)]
    assert "host-4711-abcd" in lines[at]
    assert lines[at + 1] == "  it did not answer"


def test_jobs_with_an_id_shows_all_columns_of_the_row(db: Db, command: Command) -> None:
    systems.create(db, "analysis", "enrichment")
    (key,) = systems.insert_analysis(db, 1, extractedInfo={"a": [1]}, error="[/red] \x1b[31mno")
    (link,) = systems.insert_enrichment(db, 1)
    command.app(db.url, "website_analysis", "enrichment")
    words = ("jobs", "--lane", "website_analysis", "--id", key)
    (row,) = command.json(*words)["rows"]
    assert (row["id"], row["state"]) == (key, "ready")
    assert row["columns"]["extractedInfo"] == {"a": [1]}
    shown = command(*words).out
    assert "currentStep" in shown
    assert "[/red]" in shown
    assert "\x1b" not in shown
    (row,) = command.json("jobs", "--lane", "enrichment", "--id", str(link))["rows"]
    assert row["id"] == str(link)


def test_a_row_of_another_lane_is_shown_as_in_no_state_of_this_one(lite: Db, command: Command) -> None:
    systems.create(lite, "registre")
    (key,) = systems.insert_extraction(lite, 1, status_id=6)
    command.app(lite.url, "extraction")
    (row,) = command.json("jobs", "--id", str(key))["rows"]
    assert row["state"] is None
    assert "in none of this lane's states" in " ".join(command("jobs", "--id", str(key)).out.split())
    assert command.json("jobs")["rows"] == []


def test_a_composite_key_is_written_with_commas(db: Db, command: Command) -> None:
    create_parts(db)
    db.insert("parts", [{"book": "a,b", "page": 1}, {"book": "c", "page": 2}], key="page")
    command.app(db.url, COMPOSITE)
    (row,) = command.json("jobs", "--id", "c,2")["rows"]
    assert row["id"] == ["c", 2]
    (row,) = command.json("jobs", "--id", '"a,b",1')["rows"]
    assert row["id"] == ["a,b", 1]
    assert command.json("jobs", "--id", '["a,b", 1]')["rows"] == [row], "as the log has it"
    assert '"a,b",1' in command("jobs").out, "as it can be given again"
    for nonsense in ("c", "c,2,3", "c,two", "[", "[1]", '["c", 2, 3]', '["c", null]'):
        ended = command("jobs", "--id", nonsense)
        assert ended.code == 1
        assert "is not an id in table 'parts'" in ended.err
        assert "Try: " in ended.err


def test_an_id_that_no_row_can_have_is_refused_with_the_type_it_needs(db: Db, command: Command) -> None:
    systems.create(db, "registre")
    command.app(db.url, "extraction")
    for nonsense in ("seven", "1.5", "", "99999999999999999999"):
        ended = command("jobs", "--id", nonsense)
        assert ended.code == 1
        assert "its key column 'id' is" in ended.err


def test_an_id_that_no_uuid_can_be_is_refused(pg: Db, command: Command) -> None:
    systems.create(pg, "enrichment")
    command.app(pg.url, "enrichment")
    assert "its key column 'id' is uuid" in command("jobs", "--id", "77").err


def test_an_id_that_no_row_has_ends_with_4(lite: Db, command: Command) -> None:
    systems.create(lite, "registre")
    command.app(lite.url, "extraction")
    ended = command("jobs", "--id", "77")
    assert (ended.code, ended.out) == (4, "No row has the id 77.\n")
    assert command.json("jobs", "--id", "77", code=4)["rows"] == []


def test_a_mill_with_several_lanes_asks_which(lite: Db, command: Command) -> None:
    systems.create(lite, "registre")
    command.app(lite.url, "extraction", "ocr")
    ended = command("jobs")
    assert ended.code == 2
    assert "--lane extraction or --lane ocr" in ended.err


def test_rows_without_most_roles_and_with_odd_times_are_shown(lite: Db, command: Command) -> None:
    """SQLite keeps whatever was put in, whatever the column says."""
    lite.execute("create table odd (id, state text, claimed_at numeric, created_at integer, primary key (id))")
    lite.insert("odd", [{"id": 1, "state": "run", "claimed_at": "soon", "created_at": 0}])
    lite.insert("odd", [{"id": "x", "state": "run", "claimed_at": ago(minutes=9).timestamp(), "created_at": None}])
    command.app(
        lite.url,
        "mill.lane('odd', name='odd', ready={'state': 'new'}, running={'state': 'run'}, done={'state': 'ok'},"
        " dead={'state': 'bad'})(handler)",
    )
    assert {row["id"] for row in command.json("jobs")["rows"]} == {1, "x"}
    assert command("jobs", "--id", "1").code == 0
    (row,) = command.json("jobs", "--id", "x")["rows"]
    assert 530 < row["running_seconds"] < 560


def test_reserved_words_conditions_in_sql_and_endless_waits_are_understood(pg: Db, command: Command) -> None:
    pg.execute(
        """create schema "My";
        create table "My"."order" (
            "group" uuid primary key default gen_random_uuid(), "select" text not null default 'new',
            locked_by text, locked_at timestamptz, run_after timestamptz, attempts integer not null default 0,
            created date default current_date
        );
        insert into "My"."order" (run_after) values ('infinity'), (null), (now() - interval '90 seconds');
        insert into "My"."order" ("select", locked_at) values ('run', now() - interval '9 minutes'), ('run', now());
        insert into "My"."order" (attempts) values (3)"""
    )
    command.app(
        pg.url,
        """states = {"running": {"select": "run"}, "done": {"select": "ok"}, "dead": {"select": "bad"}}""",
        """mill.lane('"My"."order"', name="odd", ready="\\"select\\" = 'new'", retry={"select": "new"},"""
        """ where=lambda t: t.c.attempts < 3, **states)(handler)""",
    )
    assert counts(command.json("status"), "odd") == {
        "ready": 2, "waiting": 1, "excluded": 1, "running": 2, "stuck": 1,
    }  # fmt: skip
    assert "held back" in command("jobs", "--state", "waiting").out
    assert command.json("retry", "--state", "waiting")["count"] == 1
    assert command.json("retry", "--state", "excluded")["count"] == 1
    assert counts(command.json("status"), "odd") == {"ready": 4, "running": 2, "stuck": 1}


# -- sql


def test_sql_prints_the_statements_as_they_will_run(db: Db, command: Command) -> None:
    systems.create(db, "enrichment", "prices")
    reference = command.app({"one": db.url, "two": NOWHERE}, "enrichment", "scrape")
    shown = command("sql", reference, "scrape").out
    names = [line.removeprefix("-- scrape: ") for line in shown.splitlines() if line.startswith("-- ")]
    assert {"claim", "settle, done", "settle, retry", "settle, dead", "settle, release", "renew"} <= set(names)
    assert ("skip locked" in shown) == (db.dialect == "postgresql")
    document = command.json("sql", "enrichment")
    assert (document["dialect"], document["environment"]) == (db.dialect, "one")
    statements = {entry["name"]: entry["sql"] for entry in document["statements"]}
    assert "renew" not in statements, "no column of that table is renewed"
    assert "'queued'" in statements["claim"]
    assert command("sql", "enrichment", "--env", "two").code == 1
    assert command("sql", "a", "b", "c").code == 2


def test_every_document_is_json_with_nothing_else_on_standard_output(lite: Db, command: Command) -> None:
    fill_enrichment(lite)
    command.app(lite.url, "enrichment")
    for words in (["status"], ["workers", "--all"], ["stuck"], ["jobs"], ["sql", "enrichment"]):
        ended = command(*words, "--json")
        json.loads(ended.out)
        assert ended.err == ""


def test_jobs_says_that_there_are_more_rows_than_it_shows(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 3)
    command.app(db.url, "enrichment")
    assert command.json("jobs", "--limit", "2")["more"] is True
    assert "These are the first 2 rows: --limit 20 shows more." in command("jobs", "--limit", "2").out
    assert command.json("jobs", "--limit", "3")["more"] is False
    assert "--limit" not in command("jobs", "--limit", "3").out


def test_jobs_lists_stuck_rows_by_the_word_that_status_counts_them_with(db: Db, command: Command) -> None:
    fill_enrichment(db)
    command.app(db.url, "enrichment")
    assert [row["worker"] for row in command.json("jobs", "--state", "stuck")["rows"]] == ["w-2"]
    assert "Stuck rows are counted among the running ones" in command("status").out
