"""The sql command: statements with the reason for each step, and functions printed, installed and taken away."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import systems
from command import Command
from databases import Db
from rowmill import Mill
from rowmill.store.inspect.lane_view import view_lane
from rowmill.store.inspect.sql_listing import commented, texts
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit
from sqlworker import installed


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def test_sql_says_why_above_each_step_and_the_statement_stays_the_same(db: Db, command: Command) -> None:
    systems.create(db, "enrichment", "prices")
    command.app(db.url, "enrichment", "scrape")
    for lane in ("enrichment", "scrape"):
        shown = command("sql", lane).out
        plain = command.json("sql", lane)["statements"]
        for statement in plain:
            assert "--" not in statement["sql"]
            begin = shown.index(f"-- {lane}: {statement['name']}\n")
            said = shown[begin:].split(";\n\n")[0].splitlines()[1:]
            kept = [line for line in said if not line.lstrip().startswith("-- ")]
            assert "\n".join(kept).rstrip(";\n") == statement["sql"]
            assert len(kept) < len(said), f"{statement['name']} is not commented"


async def test_sql_shows_of_a_queue_what_its_workers_send(db: Db) -> None:
    """A queue's claim and its plain ends are shorter than those of other lanes: these are shown, each with its whys."""
    mill = Mill(db.url)

    @mill.task
    async def greet(name: str) -> None: ...

    async with Kit(mill) as kit:
        await greet.enqueue("Ada")
        store = await kit.store("default")
        shown = await texts(await view_lane(mill.lanes["default"], "default", store.database, store.clock))
        (claim,) = await store.claim(1)
        await store.settle([Settlement(claim, "done")])
        sent = set(store._texts.values())
    await mill.close()
    assert len(sent) == 2
    assert sent <= set(shown.values())
    for name, text in shown.items():
        assert commented(name, text) != text, f"{name} is not commented"


def test_a_text_that_goes_on_over_lines_is_not_commented() -> None:
    """A state or a name may have any lines in it; a comment there would be part of it."""
    text = "update t set\n    status = 'it''s\nwhere \"x'\nwhere id = 1\nreturning 1"
    added = [line for line in commented("settle, done", text).splitlines() if line not in text.splitlines()]
    assert len(added) == 3
    assert "'it''s\nwhere" in commented("settle, done", text)


def test_functions_are_printed_applied_replaced_and_dropped(pg: Db, command: Command) -> None:
    """D2; issue: names configurable; applied in one transaction; --drop takes away exactly what was installed."""
    systems.create(pg, "prices")
    command.app(pg.url, "scrape")
    there = "select proname from pg_proc where pronamespace = 'public'::regnamespace order by 1"
    words = ["sql", "scrape", "--functions", "--name", "claim=claim_next_pending_job"]
    printed = command(*words)
    assert "create or replace function public.claim_next_pending_job(worker text)" in printed.out
    assert "revoke all on function public.claim_next_pending_job(text) from public" in printed.out
    assert "returns setof public.scrape_jobs" in printed.out
    assert pg.query(there) == [], "printed only"
    for _ in range(2):
        applied = command(*words, "--apply")
        assert (applied.code, applied.out.splitlines()[0]) == (0, "installed public.claim_next_pending_job(text)")
    assert len(pg.query(there)) == 7
    document = command.json(*words)
    assert [f["verb"] for f in document["functions"]] == [
        "claim", "claim_batch", "heartbeat", "complete", "fail", "release", "sweep"]  # fmt: skip
    assert "drop function public.claim_next_pending_job(text);" in command(*words, "--drop").out
    pg.execute(
        "create function claim_next_pending_job(worker text, extra integer) returns text language sql"
        " as 'select 1::text'"
    )
    assert command(*words, "--drop", "--apply").code == 0
    assert pg.query(there) == [{"proname": "claim_next_pending_job"}], "somebody else's"
    assert "No functions" in command(*words, "--drop").out


def test_a_lane_that_changed_leaves_no_function_of_its_old_shape(pg: Db, command: Command) -> None:
    """PostgREST could not tell two of one name apart."""
    systems.create(pg, "prices")
    command.app(pg.url, "scrape")
    assert command("sql", "scrape", "--functions", "--apply").code == 0
    pg.execute("alter table scrape_jobs rename column locked_at to started")
    pg.execute("alter table scrape_jobs alter id type integer")
    command.app(pg.url, "scrape")
    assert command("sql", "scrape", "--functions", "--apply").code == 0
    left = pg.query("select oid::regprocedure::text as f from pg_proc where proname = 'scrape_heartbeat'")
    assert left == [{"f": "scrape_heartbeat(integer,text)"}]


def test_what_functions_cannot_be_is_told(pg: Db, lite: Db, command: Command) -> None:
    """Issue: a hint on SQLite; somebody else's function is not replaced; options need --functions."""
    systems.create(pg, "prices")
    systems.create(lite, "prices")
    command.app({"one": pg.url, "two": lite.url}, "scrape")
    on_sqlite = command("sql", "scrape", "--functions", "--env", "two")
    assert on_sqlite.code == 1
    assert "SQLite" in on_sqlite.err
    assert "Try: --env" in on_sqlite.err
    pg.execute("create function scrape_claim_next(text) returns text language sql as 'select 1::text'")
    theirs = command("sql", "scrape", "--functions", "--apply")
    assert theirs.code == 1
    assert "not rowmill's" in theirs.err
    assert pg.value("select count(*) from pg_proc where proname like 'scrape%'") == 1, "nothing half done"
    for words in (["--apply"], ["--drop"], ["--prefix", "x"], ["--security", "definer"], ["--functions", "--name", "x"],
                  ["--functions", "--schema", ""], ["--functions", "--security", "root"]):  # fmt: skip
        assert command("sql", "scrape", *words).code == 2, words
    gone = command("sql", "scrape", "--functions", "--schema", "nowhere", "--apply")
    assert gone.code == 1
    assert 'schema "nowhere" does not exist' in gone.err
    assert command("sql", "scrape", "--functions", "--grant", "nobody-at-all", "--apply").code == 1


DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "other-languages.md"


def calls_of(text: str) -> list[str]:
    return [call for block in re.findall(r"```sql\n(.*?)```", text, re.DOTALL) for call in block.split(";\n") if call]


async def test_the_calls_with_inputs_do_what_the_page_says(pg: Db) -> None:
    """Issue 23: the claim with its inputs, and the end that takes them; edited meanwhile it is none."""
    pg.execute(
        "create table pages (id integer primary key, status text default 'ready', worker text, claimed_at timestamptz,"
        " attempts integer not null default 0, body text, summary text)"
    )
    mill = Mill(pg.url)

    async def summarise(job: Any) -> None: ...

    states: dict[str, Any] = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
    mill.lane("pages", name="pages", inputs=["body"], **states)(summarise)
    await installed(pg, mill)
    pg.execute("insert into pages (id, body) values (1, 'a text')")
    claim, complete = [call for call in calls_of(DOCS.read_text()) if "pages_" in call]
    for edited in (True, False):
        row = pg.one(claim)
        if edited:
            pg.execute("update pages set body = 'another text'")
        call = complete.replace("2026-11-15 10:00:00.123456+00", str(row["claimed_at"]))
        assert pg.value(call.replace("80c8b162...", row["inputs"])) is not edited
    assert pg.one("select status, summary from pages") == {"status": "done", "summary": "..."}


def test_the_page_about_other_languages_does_what_it_says(pg: Db, command: Command, tmp_path: Path) -> None:
    """D2: its commands and its SQL are run as they stand, with the claim's own time put in."""
    text = DOCS.read_text()
    commands = re.findall(r"^\$ rowmill (.*?)\s*(?:#.*)?$", text, re.MULTILINE)
    calls = [call for call in calls_of(text) if "pages_" not in call]
    pg.execute("do $$ begin create role scraper; exception when duplicate_object then null; end $$")
    systems.create(pg, "prices")
    systems.insert_scrape(pg, 1)
    reference = command.app(pg.url, "scrape")
    for words in commands:
        assert command(*words.replace("prices:mill", reference).split()).code == 0
    assert len(calls) == 4
    answers = []
    for call in calls:
        at = pg.value("select coalesce(locked_at, now())::text from scrape_jobs")
        answers.append(next(iter(pg.one(call.replace("2026-11-15 10:00:00.123456+00", at)).values())))
    assert answers == [1, True, True, None]
    assert pg.value("select query_params from scrape_jobs where status = 'succeeded'") == '{"pages": 3}'

    systems.insert_scrape(pg, 2)
    (program,) = re.findall(r"```js\n(// worker.mjs\n.*?)```", text, re.DOTALL)
    claim, heartbeat, complete, fail = re.findall(r"'(select .*?)'", program)
    given: list[str] = ["'node-2'"]

    def value(call: str) -> Any:
        return next(iter(pg.one(re.sub(r"\$(\d)", lambda n: given[int(n[1]) - 1], call)).values()))

    given = [str(value(claim)), "'node-2'", "(select locked_at from scrape_jobs where locked_by = 'node-2')"]
    assert value(heartbeat) is True
    given.append("""'{"query_params": {"pages": 3}}'""")
    assert [value(complete), value(fail)] == [True, None], "done, so its claim is over"
    (tmp_path / "worker.mjs").write_text(program)
    if node := shutil.which("node"):
        subprocess.run([node, "--check", tmp_path / "worker.mjs"], check=True)
