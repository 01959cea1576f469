"""The guides of docs/how-to that have programs of their own: their files and commands are run as they stand."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shlex
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_readme import blocks

from command import Command
from databases import Db
from rowmill.testing import Kit


class Guide:
    """Follows a page in this process: writes its files and runs its commands, in the order of the page."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._patch, self._command = folder, patch, Command(folder, patch, capsys)

    def follow(self, page: str) -> None:
        modules = []
        for kind, text in blocks(page):
            if kind == "python":
                name = text.split()[1]
                (self.folder / name).write_text(text)
                modules.append(name.removesuffix(".py"))
            elif kind == "console":
                for step in text.removeprefix("$ ").split("\n$ "):
                    for module in modules:  # each command imports the application afresh
                        self._patch.delitem(sys.modules, module, raising=False)
                    self.run(*step.strip().splitlines())

    def write(self, page: str) -> None:
        """Write the page's files, and run nothing."""
        for kind, text in blocks(page):
            if kind == "python":
                (self.folder / text.split()[1]).write_text(text)
                self._patch.delitem(sys.modules, text.split()[1].removesuffix(".py"), raising=False)

    def run(self, line: str, *shown: str) -> None:
        """One command; the lines below it must be in its output, whatever the spaces."""
        allowed = 3 if "|| test $? -eq 3" in line else 0
        words = shlex.split(line.partition(" ||")[0], comments=True)
        with self._patch.context() as patch:
            while setting := re.match(r"([A-Z_]+)=(.*)", words[0]):
                patch.setenv(setting[1], setting[2])
                del words[0]
            if words[0] == "python":
                runpy.run_path(str(self.folder / words[1]))
                return
            assert words[0] == "rowmill", line
            ended = self._command(*words[1:])
        assert ended.code == allowed, f"{line}\n{ended}"
        for text in shown:
            assert " ".join(text.split()) in " ".join(ended.out.split()), f"{line}\n{ended.out}"


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Guide:
    return Guide(tmp_path, monkeypatch, capsys)


def test_failures_are_found_by_family_and_retried(guide: Guide) -> None:
    """Issue: a failed family is retried, a stuck row is explained."""
    guide.follow("docs/how-to/failures.md")
    rows = Db(f"sqlite:///{guide.folder}/shop.db").query("select status, count(*) as n from orders group by 1")
    assert {row["status"]: row["n"] for row in rows} == {"failed": 1, "sent": 5}


def test_many_rows_are_worked_on_in_one_call(guide: Guide, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 23: an embeddings endpoint, a task in chunks, and a batch API: submit, snooze, collect."""
    guide.follow("docs/how-to/chunks.md")
    notes = Db(f"sqlite:///{guide.folder}/notes.db")
    assert notes.query("select status, attempts, count(*) as n from notes group by 1, 2 order by n") == [
        {"status": "failed", "attempts": 1, "n": 1}, {"status": "done", "attempts": 1, "n": 199}
    ]  # fmt: skip
    assert notes.one("select id, error from notes where status = 'failed'") == {
        "id": 71, "error": "Refused: input must not be empty"
    }  # fmt: skip
    assert notes.value("select vector from notes where id = 9") == "[6, 1]"
    asyncio.run(runpy.run_path(str(guide.folder / "embeddings.py"))["main"]())
    assert "[6, 1] in 2 calls" in capsys.readouterr().out
    replies = Db(f"sqlite:///{guide.folder}/replies.db")
    assert replies.query("select status, attempts, count(distinct batch) as batches, count(*) as n from replies") == [
        {"status": "submitted", "attempts": 0, "batches": 3, "n": 2500}
    ]
    replies.execute("update replies set run_after = null")  # ten minutes later
    guide.run("rowmill run replies:mill --drain")
    assert replies.query("select distinct status from replies") == [{"status": "done"}]
    assert replies.value("select reply from replies where id = 2") == "PROMPT 1"


def test_rows_that_are_too_old_expire(guide: Guide) -> None:
    """Issue 23: a row past its time is never started."""
    guide.follow("docs/how-to/expire-rows.md")
    rows = Db(f"sqlite:///{guide.folder}/codes.db").query("select status, count(*) as n from codes group by 1")
    assert {row["status"]: row["n"] for row in rows} == {"sent": 2, "late": 2}


def test_a_page_that_changes_during_its_run_is_worked_on_again(guide: Guide) -> None:
    """Issue 23: the outcome of a run whose inputs changed is not final."""
    guide.follow("docs/how-to/never-stale.md")
    rows = Db(f"sqlite:///{guide.folder}/pages.db").query("select status, summary, attempts from pages order by id")
    assert [tuple(row.values()) for row in rows] == [
        ("done", "One: 6 characters", 1), ("done", "Two: 14 characters", 1),
    ]  # fmt: skip


def test_a_post_waits_for_its_approval(guide: Guide) -> None:
    """Issue 23: a state that a person ends by an ordinary UPDATE."""
    guide.follow("docs/how-to/wait-for-a-column.md")
    rows = Db(f"sqlite:///{guide.folder}/posts.db").query("select status, draft, attempts from posts order by id")
    assert [tuple(row.values()) for row in rows] == [
        ("published", "A post about owls", 1), ("new", "A post about bats", 0),
    ]  # fmt: skip


def test_a_post_waits_for_its_approval_on_postgresql(pg: Db, guide: Guide) -> None:
    (fill,) = (text for _, text in blocks("docs/how-to/wait-for-a-column.md") if text.startswith("# fill.py"))
    pg.execute(fill.split('"""')[1])
    guide.write("docs/how-to/wait-for-a-column.md")
    file = guide.folder / "posts.py"
    file.write_text(file.read_text().replace("sqlite:///posts.db", pg.url))
    guide.run("rowmill run posts:mill --drain")
    guide.run("rowmill why posts:mill 2", "waits for approved_at is not null until")
    pg.execute("update posts set approved_at = current_timestamp where id = 1")
    guide.run("rowmill run posts:mill --drain")
    assert [row["status"] for row in pg.query("select status from posts order by id")] == ["published", "new"]


def test_tenants_are_rows_of_a_list(guide: Guide) -> None:
    """Issue 24: the tenants that a table lists are served as one Mill."""
    guide.follow("docs/how-to/many-databases.md")
    for tenant in ("ash", "birch"):
        rows = Db(f"sqlite:///{guide.folder}/{tenant}.db").query("select distinct status from invoices")
        assert rows == [{"status": "sent"}]


def test_lanes_without_polls_are_declared_as_the_page_says(guide: Guide, pg: Db) -> None:
    """Issue 24: a lane that listens, and an application that is called."""
    guide.write("docs/how-to/serverless.md")
    pg.execute(
        "create table orders (id bigint generated always as identity primary key, status text default 'new',"
        " worker text, claimed_at timestamptz)"
    )
    pg.execute("insert into orders default values")
    file = guide.folder / "orders.py"
    file.write_text(file.read_text().replace("postgresql://app@db.example/shop", pg.direct))
    guide.run("rowmill run orders:mill --drain")
    assert pg.value("select status from orders") == "packed"
    assert runpy.run_path(str(guide.folder / "shop.py"))["app"].url_path_for("wake") == "/wake"


def test_schedules_are_rows_that_are_enqueued_at_their_ticks(
    guide: Guide, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 23: schedules in a table of one's own, and a lane whose rows snooze to their next tick."""
    guide.follow("docs/how-to/schedules.md")
    row = Db(f"sqlite:///{guide.folder}/feeds.db").one("select status, run_after from feeds")
    assert (row["status"], row["run_after"][14:19]) == ("on", "00:00")
    capsys.readouterr()
    guide.run("python try_plans.py")
    assert capsys.readouterr().out.endswith("1 job\n")


def test_the_schedules_of_the_guide_work_on_postgresql(pg: Db, guide: Guide) -> None:
    (fill,) = (text for _, text in blocks("docs/how-to/schedules.md") if text.startswith("# fill.py"))
    pg.execute(fill.split('"""')[1])
    guide.write("docs/how-to/schedules.md")
    file = guide.folder / "plans.py"
    file.write_text(file.read_text().replace("sqlite:///plans.db", pg.url))
    guide.run("rowmill run plans:mill --drain")
    guide.run("rowmill check plans:mill", "no problems found")
    module = runpy.run_path(str(file))

    async def ticks() -> list[object]:
        mill = module["mill"]
        await mill.prepare()
        async with Kit(mill) as kit:
            await kit.tick()
            kit.advance(timedelta(days=7))
            await kit.tick()
            enqueued = [(job.task, job.args) for job in await kit.enqueued()]
        await mill.close()
        return enqueued

    assert asyncio.run(ticks()) == [("report", {"customer": "acme", "pages": 3}), ("clean", {})]


@pytest.mark.parametrize(
    ("page", "file", "table", "done"),
    [("limits-per-domain", "crawl.db", "pages", ("fetched", 12)), ("llm-budgets", "notes.db", "notes", ("done", 6))],
)
def test_a_guide_works_its_rows_off(page: str, file: str, table: str, done: tuple[str, int], guide: Guide) -> None:
    """Issue: a limit per domain, a budget for a model."""
    guide.follow(f"docs/how-to/{page}.md")
    row = Db(f"sqlite:///{guide.folder}/{file}").one(f"select status, count(*) as n from {table} group by 1")
    assert (row["status"], row["n"]) == done


def test_a_row_is_tried_and_written_only_when_asked(guide: Guide) -> None:
    guide.follow("docs/how-to/try-a-row.md")
    rows = Db(f"sqlite:///{guide.folder}/shop.db").query("select status, description from products order by id")
    assert [tuple(row.values()) for row in rows] == [("done", "A fine lamp."), ("new", None)]


def test_what_a_run_logged_is_shown(guide: Guide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 25, point 8: by the command, without secrets."""
    guide.write("docs/how-to/run-logs.md")
    path = guide.folder / "shop.py"
    path.write_text(path.read_text().replace("max_attempts=2,", "max_attempts=2, backoff=lambda n: timedelta(0),"))
    path.write_text("from datetime import timedelta\n" + path.read_text())
    for line in (text for kind, text in blocks("docs/how-to/run-logs.md") if kind == "console"):
        for step in line.removeprefix("$ ").split("\n$ "):
            monkeypatch.delitem(sys.modules, "shop", raising=False)
            guide.run(*step.strip().splitlines())


def test_a_new_version_is_rehearsed_and_writes_nothing(guide: Guide) -> None:
    guide.follow("docs/how-to/rehearse.md")
    rows = Db(f"sqlite:///{guide.folder}/prices.db").query("select cents from prices order by id")
    assert [row["cents"] for row in rows] == [110, 25]


async def test_many_calls_make_one_job_with_the_last_arguments(guide: Guide) -> None:
    guide.write("docs/how-to/debounce.md")
    await runpy.run_path(str(guide.folder / "documents.py"))["save"]()
    (row,) = Db(f"sqlite:///{guide.folder}/documents.db").query("select state, args from rowmill_jobs")
    assert (row["state"], json.loads(row["args"])) == ("ready", {"document": 7, "version": 3})


class Refusing(BaseHTTPRequestHandler):
    """Answers with a page, and with 429 where the path says so."""

    def do_GET(self) -> None:
        self.send_response(429 if "busy" in self.path else 200)
        self.send_header("Retry-After", "3600")
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.mark.parametrize(("snoozed", "attempts"), [(True, 0), (False, 1)])
def test_a_refusal_costs_an_attempt_unless_it_is_snoozed(snoozed: bool, attempts: int, guide: Guide) -> None:
    """The page says so; either way it closes the domain."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    guide.write("docs/how-to/limits-per-domain.md")
    guide.run("python make_pages.py")
    db = Db(f"sqlite:///{guide.folder}/crawl.db")
    db.execute("delete from pages")
    db.execute("insert into pages (url, domain) values (?, 'busy.example')", f"{address}/busy")
    db.execute("insert into pages (url, domain) values (?, 'good.example')", f"{address}/")
    if not snoozed:
        file = guide.folder / "fetch.py"
        file.write_text(file.read_text().replace("    classify=refused,", "    #"))
    try:
        guide.run("rowmill run fetch:mill --drain")
    finally:
        server.shutdown()
        server.server_close()
    rows = db.query("select status, attempts from pages order by id")
    assert [(row["status"], row["attempts"]) for row in rows] == [("new", attempts), ("fetched", 1)]
    assert db.value("select count(*) from rowmill_gates where key = 'busy.example' and closed_until is not null") == 1


def test_the_table_of_limits_can_be_made_on_postgresql(pg: Db) -> None:
    (sql,) = [text for kind, text in blocks("docs/how-to/limits-per-domain.md") if kind == "sql"]
    pg.execute(sql)
    assert pg.value("select count(*) from pages") == 0
