"""The status of lanes: rows by state, whatever environment is down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import systems
from command import COMPOSITE, NOWHERE, Command, ago, counts, create_parts, fill_enrichment
from databases import Db
from rowmill.store.inspect import lane_view as inspect_module


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def test_status_counts_rows_by_state_and_tells_the_age_of_the_oldest_ready_row(db: Db, command: Command) -> None:
    fill_enrichment(db)
    command.app(db.url, "enrichment")
    document = command.json("status")
    assert counts(document, "enrichment") == {
        "ready": 3, "waiting": 2, "running": 2, "stuck": 1, "done": 1, "dead": 1,
    }  # fmt: skip
    (lane,) = document["lanes"]
    assert lane["counts"]["canceled"] is None, "the lane has no such state"
    assert lane["table"] == "enrichment_jobs"
    assert 86000 < lane["oldest_ready_seconds"] < 87000
    assert document["errors"] == []


def test_status_of_a_pipeline_counts_the_done_of_one_lane_as_the_ready_of_the_next(db: Db, command: Command) -> None:
    """A11, B2"""
    systems.create(db, "registre")
    systems.insert_extraction(db, 3)
    systems.insert_extraction(db, 1, status_id=2, worker_id="w", heartbeat_at=ago(minutes=6))
    systems.insert_ocr(db, 2)
    systems.insert_ocr(db, 1, status_id=6, ocr_worker_id="w", ocr_heartbeat_at=ago(seconds=6))
    systems.insert_ocr(db, 4, status_id=5)
    command.app(db.url, "ocr", "extraction", "req")
    document = command.json("status")
    assert counts(document, "extraction") == {"ready": 3, "running": 1, "stuck": 1, "done": 2}
    assert counts(document, "ocr") == {"ready": 2, "running": 1, "done": 4}
    assert counts(document, "req") == {}


def test_status_of_phases_without_a_dead_state_shows_exhausted_rows_as_dead(db: Db, command: Command) -> None:
    """E6"""
    systems.create(db, "analysis")
    systems.insert_analysis(db, 4)
    systems.insert_analysis(db, 2, updatedAt=ago(seconds=3))
    systems.insert_analysis(db, 1, runAfter=ago(minutes=-3), retryCount=2)
    systems.insert_analysis(db, 3, retryCount=3)
    systems.insert_analysis(db, 1, inProgress=True, lockedBy="w~1", heartbeatAt=ago(seconds=3))
    systems.insert_analysis(db, 2, inProgress=True, lockedBy="w~1")
    systems.insert_analysis(db, 5, status="prompt-forming")
    command.app(db.url, "website_analysis", "prompt_forming")
    document = command.json("status")
    assert counts(document, "website_analysis") == {
        "ready": 4, "waiting": 3, "running": 3, "stuck": 2, "done": 5, "dead": 3,
    }  # fmt: skip
    assert counts(document, "prompt_forming") == {"ready": 5}


def test_a_row_that_where_excludes_is_not_waiting(db: Db, command: Command) -> None:
    """D1; issue: a row that will not run by itself is told apart from one whose time will come."""
    systems.create(db, "prices")
    systems.insert_scrape(db, 2)
    systems.insert_scrape(db, 1, next_retry_at=ago(minutes=-9))
    disabled = systems.insert_source(db, enabled=False)[0]
    systems.insert_scrape(db, 3, source_id=disabled)
    systems.insert_scrape(db, 1, source_id=disabled, next_retry_at=ago(minutes=-9))
    command.app(db.url, "scrape")
    assert counts(command.json("status"), "scrape") == {"ready": 2, "waiting": 1, "excluded": 4}
    assert "Excluded" in command("status").out
    rows = command.json("jobs", "--state", "excluded")["rows"]
    assert [row["state"] for row in rows] == ["excluded"] * 4
    assert "where is false" in command("jobs", "--state", "excluded").out
    assert command.json("why", "scrape", str(rows[0]["id"]))["state"] == "excluded"
    assert command.json("cancel", "--id", str(rows[0]["id"]))["count"] == 1, "an operator may still act on it"
    db.execute("update sources set enabled = true")
    assert counts(command.json("status"), "scrape") == {"ready": 5, "waiting": 1, "dead": 1}


def test_a_lane_without_where_excludes_nothing(lite: Db, command: Command) -> None:
    fill_enrichment(lite)
    command.app(lite.url, "enrichment")
    assert "Excluded" not in command("status").out
    refused = command("jobs", "--state", "excluded")
    assert refused.code == 1
    assert "no where=" in refused.err


def test_the_oldest_is_the_row_that_has_been_ready_the_longest(db: Db, command: Command) -> None:
    """D10; issue: since its run_after where that is later than its creation, else since its creation."""
    systems.create(db, "enrichment")
    command.app(db.url, "enrichment")

    def oldest() -> float:
        (lane,) = command.json("status")["lanes"]
        return float(lane["oldest_ready_seconds"])

    systems.insert_enrichment(db, 1, run_after=ago(days=900), created_at=ago(minutes=5))
    assert 290 < oldest() < 400, "a run_after before the row was there says nothing"
    systems.insert_enrichment(db, 1, run_after=ago(minutes=2), created_at=ago(days=30))
    assert 290 < oldest() < 400, "not ready before its run_after"
    systems.insert_enrichment(db, 1, run_after=ago(minutes=20), created_at=ago(days=30))
    assert 1100 < oldest() < 1400
    whens = [line.split() for line in command("jobs", "--state", "ready").out.splitlines()]
    assert not any("900" in words for words in whens)
    assert 1100 < command.json("top")["lanes"][0]["oldest_ready"] < 1400


def test_counts_stop_at_a_bound_and_say_so(db: Db, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    systems.create(db, "registre")
    systems.insert_extraction(db, 12)
    systems.insert_ocr(db, 10)
    monkeypatch.setattr(inspect_module, "MOST", 10)
    monkeypatch.setattr("rowmill.ops.documents.MOST", 10)
    command.app(db.url, "extraction")
    (lane,) = command.json("status")["lanes"]
    assert (lane["counts"]["ready"], lane["counts"]["done"], lane["at_least"]) == (10, 10, ["ready"])
    assert "10+" in command("status").out


def test_a_count_that_takes_too_long_is_given_up_and_the_others_are_shown(
    pg: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_enrichment(pg)
    monkeypatch.setattr(inspect_module, "_ALL", 0.2)
    monkeypatch.setattr(inspect_module, "_EACH", 0.2)
    command.app(pg.url, "systems.enrichment(mill, handler, where='pg_sleep(1) is not null')")
    (lane,) = command.json("status")["lanes"]
    assert lane["unknown"] == ["ready", "waiting", "excluded"]
    assert lane["counts"]["running"] == 2
    assert "counting took too long" in command("status").out


def test_an_environment_that_is_down_is_shown_and_the_others_still_are(lite: Db, command: Command) -> None:
    fill_enrichment(lite)
    command.app({"prod": NOWHERE, "staging": lite.url}, "enrichment")
    document = command.json("status", code=1)
    assert [lane["environment"] for lane in document["lanes"]] == ["staging"]
    (error,) = document["errors"]
    assert (error["environment"], error["unreachable"]) == ("prod", True)
    shown = command("status")
    assert shown.code == 1
    (line,) = [line for line in shown.out.splitlines() if line.startswith("prod: ")]
    assert line.startswith("prod: cannot reach")
    assert line.endswith(f"Try: {error['hint']}"), "one line, and what to do"
    assert "enrichment" in shown.out
    assert f"Try: {error['hint']}\n" in command("workers").err
    assert command.json("status", "--env", "staging")["errors"] == []
    for words in (["workers"], ["stuck"], ["jobs"]):
        assert command(*words).code == 1
        assert command(*words, "--env", "staging").code == 0


def test_a_table_that_one_environment_lacks_is_told_and_the_others_are_shown(
    fresh: Callable[[str], Db], command: Command
) -> None:
    whole, empty = fresh("sqlite"), fresh("sqlite")
    fill_enrichment(whole)
    command.app({"prod": whole.url, "dev": empty.url}, "enrichment")
    document = command.json("status", code=1)
    assert len(document["lanes"]) == 1
    assert (document["errors"][0]["lane"], document["errors"][0]["unreachable"]) == ("enrichment", False)
    assert "no table 'enrichment_jobs'" in document["errors"][0]["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "--lane", "enrichmant"], "did you mean 'enrichment'?"),
        (["status", "--env", "defualt"], "did you mean 'default'?"),
        (["jobs", "--lane", "nothing"], "'enrichment', the only one"),
        (["sql", "enrichmant"], "did you mean 'enrichment'?"),
        (["stuck", "app_nowhere:mill"], "no module 'app_nowhere'"),
        (["jobs", "--state", "canceled"], 'canceled={"status": "..."}'),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(words: list[str], said: str, lite: Db, command: Command) -> None:
    systems.create(lite, "enrichment")
    command.app(lite.url, "enrichment")
    ended = command(*words)
    assert ended.code == 1
    assert "Error: " in ended.err
    assert said in ended.err


@pytest.mark.parametrize(
    "words", [["status", "--watch", "--json"], ["jobs", "--state", "odd"], ["jobs", "--limit", "0"]]
)
def test_a_command_that_makes_no_sense_ends_with_2(words: list[str], lite: Db, command: Command) -> None:
    systems.create(lite, "enrichment")
    command.app(lite.url, "enrichment")
    assert command(*words).code == 2


@pytest.mark.parametrize("words", [["run"], ["run", "--log", "json"], ["status"], ["retry", "--id", "1"], ["sql", "a"]])
def test_a_command_without_an_application_ends_with_2(words: list[str], command: Command) -> None:
    ended = command(*words)
    assert ended.code == 2
    assert "no application given" in ended.err
    assert "ROWMILL_APP" in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--lanes", ""],
        ["run", "--lanes", " "],
        ["run", "--worker-id", ""],
        ["run", "--env", ""],
        ["status", "--env", "default", "--env", ""],
        ["workers", "--env", ""],
        ["cancel", "--state", "ready", "--env", ""],
        ["sql", "enrichment", "--env", ""],
    ],
)
def test_an_option_that_was_given_nothing_does_not_mean_all(words: list[str], lite: Db, command: Command) -> None:
    """A variable that is not set."""
    fill_enrichment(lite)
    command.app(lite.url, "enrichment")
    ended = command(*words)
    assert (ended.code, ended.out) == (2, "")
    assert f"Error: {[word for word in words if word.startswith('--')][-1]} is empty\nTry: leave" in ended.err


NEW = "mill.lane('parts', name='{0}', ready={{'state': '{1}'}}, running={{'state': '{0} runs'}}, {2})(handler)"
ENDS = "done={'state': 'ok'}, dead={'state': 'bad'}, max_attempts=3"


def test_rows_that_no_lane_counts_are_told_once_per_table(
    db: Db, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelled state."""
    create_parts(db)
    command.app(db.url, NEW.format("one", "nwe", ENDS), NEW.format("two", "one is done", ENDS))
    document = command.json("status")
    assert document["elsewhere"] == [], "an empty table"
    states = ["new"] * 4 + ["odd"] * 2 + list("abcd")
    db.insert("parts", [{"book": "a", "page": page, "state": state} for page, state in enumerate(states)], key="page")
    (told,) = command.json("status")["elsewhere"]
    assert (told["environment"], told["table"], told["rows"], told["at_least"]) == ("default", "parts", 10, False)
    assert told["kinds"][:2] == [{"columns": {"state": "new"}, "rows": 4}, {"columns": {"state": "odd"}, "rows": 2}]
    assert len(told["kinds"]) == 5
    line = "10 rows of table 'parts' are in no state of any lane (state = 'new': 4; state = 'odd': 2; "
    assert [words.startswith(line) for words in command("status").out.splitlines()].count(True) == 1
    assert "others: 1)" in command("status", "--lane", "two").out
    monkeypatch.setattr(inspect_module, "SAMPLE", 6)
    monkeypatch.setattr("rowmill.ops.documents.SAMPLE", 6)
    assert "6 or more rows of table 'parts' are in no state of any lane (of the first 6: " in command("status").out
    db.execute("update parts set state = 'one is done' where page = 0")
    assert command.json("status", "--lane", "one")["elsewhere"] == [], "the other lane, not asked for, has one"


def test_of_rows_that_no_lane_counts_all_state_columns_are_told(db: Db, command: Command) -> None:
    db.execute("create table steps (id integer primary key, step integer, busy boolean, worker text, attempts integer)")
    db.insert("steps", [{"id": 1, "step": 7, "busy": None}])
    command.app(
        db.url,
        "mill.lane('steps', name='steps', ready={'step': 1, 'busy': False}, running={'busy': True},"
        " done={'step': 2, 'busy': False})(handler)",
    )
    assert "1 row of table 'steps' is in no state of any lane (busy is null and step = 7: 1)" in command("status").out


def test_a_look_at_a_file_that_is_not_there_does_not_make_one(command: Command, tmp_path: Path) -> None:
    command.app(f"sqlite:///{tmp_path}/jbos.db", "enrichment")
    for word in ("status", "workers", "stuck", "jobs"):
        ended = command(word)
        assert ended.code == 1
        assert "there is no file" in (ended.out + ended.err).replace("\n", " ")
    assert not (tmp_path / "jbos.db").exists()


def test_the_status_of_many_lanes_fits_eighty_columns(lite: Db, command: Command) -> None:
    systems.create(lite)
    systems.insert_analysis(lite, 3)
    command.app({"prod": lite.url, "staging": lite.url}, "extraction", "ocr", "website_analysis", "scrape")
    command.terminal()
    shown = command("status").out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "website_analysis" in shown


def test_watching_goes_on_until_it_is_interrupted(lite: Db, command: Command, tmp_path: Path) -> None:
    create_parts(lite)
    reference = command.app(lite.url, COMPOSITE)
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "rowmill", "status", reference, "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
        cwd=tmp_path,
        # Tests started in the background ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            while "Ctrl-C" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (0, "")


INSERTED = (
    "mill.lane('papers', name='papers', ready={'status': 'new'}, running={'status': 'run'}, done={'status': 'ok'},"
    " dead={'status': 'bad'}, unfenced=True, max_attempts=1)(handler)"
)


def test_oldest_is_told_by_a_time_of_order_by_and_is_a_dash_where_nothing_tells_it(db: Db, command: Command) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table papers (id integer primary key, status text not null default 'new',"
        f" inserted {time} not null default current_timestamp)"
    )
    db.execute("insert into papers (id, inserted) values (1, ?), (2, ?)", ago(hours=3), ago(hours=1))
    command.app(db.url, INSERTED)
    assert command.json("status")["lanes"][0]["oldest_ready_seconds"] is None
    assert command("status").out.splitlines()[1].endswith("-")
    command.app(db.url, INSERTED.replace("unfenced", "order_by='inserted', unfenced"))
    assert 3 * 3600 <= command.json("status")["lanes"][0]["oldest_ready_seconds"] < 3 * 3600 + 60
