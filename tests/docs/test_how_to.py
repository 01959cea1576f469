"""The guides of docs/how-to that have programs of their own: their files and commands are run as they stand."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_readme import blocks

from command import Command
from databases import Db


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
