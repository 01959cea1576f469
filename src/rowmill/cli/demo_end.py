"""The end of the demo: what the tables say, checked against what the handlers wrote down, in plain words."""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ..plural import counted

_ENDED = """select cast(id as text), case status when 'fetched' then 'done' when 'gone' then 'dead' end from links
union all select name, case state when 2 then 'done' when 9 then 'dead' end from documents"""
_FINALS = "select row, outcome, attempt, error, pid, times from runs where outcome in ('done', 'dead')"
_DOUBLED_PAGES = "select count(*) from (select 1 from pages group by document, page having count(*) > 1)"
_MISSING_PAGES = """select count(*) from documents d
where state = 2 and page_count <> (select count(*) from pages where document = d.name)"""


@dataclass(frozen=True)
class Findings:
    """What the demo found. It went well if every check held."""

    seconds: float
    rows: int
    done: int
    retried: int
    dead: dict[str, str]
    taken_back: int
    runs: int
    pages: int
    checks: dict[str, bool]

    @property
    def good(self) -> bool:
        """All checks held."""
        return all(self.checks.values())

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        checks = [{"check": check, "held": held} for check, held in self.checks.items()]
        return {**asdict(self), "checks": checks, "ok": self.good}


def examine(file: Path, seconds: float, orphans: Sequence[str], killed: int | None) -> Findings:
    """Hold the tables against ``runs``, which the handlers wrote."""
    with closing(sqlite3.connect(file)) as db:

        def one(text: str) -> int:
            return int(db.execute(text).fetchone()[0])

        ended = dict(db.execute(_ENDED).fetchall())
        finals = db.execute(_FINALS).fetchall()
        runs, retries = one("select count(*) from runs"), one("select count(*) from runs where outcome = 'retry'")
        cut = one("select count(*) from runs where times = 0")
        under_way = one(f"select count(*) from runs where times = 0 and pid = {killed or 0}")
        pages, wrong_pages = one("select count(*) from pages"), one(_DOUBLED_PAGES) + one(_MISSING_PAGES)
        retried = one("select count(distinct row) from runs where outcome = 'retry'")
        twice = one("select count(*) from runs where times > 1")
    left = counted(len(orphans), "row")
    outcomes = Counter((row, outcome) for row, outcome, *_ in finals)
    finished_by = {row: pid for row, _, _, _, pid, _ in finals}
    return Findings(
        seconds=round(seconds, 1),
        rows=len(ended),
        done=sum(state == "done" for state in ended.values()),
        retried=retried,
        dead={
            _name(row): error if attempt == 1 else f"{error} ({counted(attempt, 'attempt')})"
            for row, outcome, attempt, error, _, _ in finals
            if outcome == "dead"
        },
        taken_back=len(orphans),
        runs=runs,
        pages=pages,
        checks={
            "every row has ended": None not in ended.values(),
            "every row has exactly one outcome, the one that its table shows": outcomes == Counter(ended.items()),
            f"no outcome was recorded twice ({runs} runs: {len(finals)} ends, {retries} retries, {cut} cut off)": (
                twice == 0 and runs == len(finals) + retries + cut
            ),
            f"the {left} of the killed worker ({under_way} under way) were finished by others": (
                bool(orphans) and all(finished_by.get(row) not in (None, killed) for row in orphans)
            ),
            f"{pages} pages were read: none is missing, none is there twice": wrong_pages == 0,
        },
    )


def _name(row: str) -> str:
    return f"link {row}" if row.isdigit() else f"document {row}"


def tell(console: Console, findings: Findings, kept: Path | None) -> None:
    """The summary, the proof, and what to try next: on a screen of 24 lines the first is still to be seen."""

    def say(text: str | Text = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say()
    took = f"{counted(findings.rows, 'row')} in {findings.seconds:.0f} seconds"
    say(Text(f"{took}, by two processes, one of them killed in mid-run:", "bold"))
    say(f"  {findings.done:>4} done, each exactly once")
    say(f"  {findings.retried:>4} failed at first and were tried again")
    say(f"  {findings.taken_back:>4} were taken back from the killed worker")
    say(f"  {len(findings.dead):>4} dead:")
    for row, reason in findings.dead.items():
        say(f"         {row}: {reason}")
    say(Text("Checked against the table `runs`, which the handlers write to:", "bold"))
    for check, held in findings.checks.items():
        say(Text.assemble("  ", ("yes", "green") if held else ("NO ", "bold red"), f"  {check}"))
    say()
    for line in _next(kept):
        say(line)


def _next(kept: Path | None) -> list[str]:
    if kept is None:
        here, there = command(Path.cwd()), command(Path.cwd() / "mill")
        return [
            "[bold]Next, your own table:[/bold]",
            *_aligned({
                f"{here} demo --keep mill": "the same again; leaves app.py and demo.db",
                "cd mill": "put your database and table into app.py",
                f"{there} run app:mill": "work on it",
            }),
        ]  # fmt: skip
    there = command(kept.resolve())
    return [
        f"[bold]Kept in {escape(str(kept))}:[/bold] app.py, demo.db. To look at it:",
        f"  cd {escape(shlex.quote(str(kept)))}",
        *_aligned({
            f"{there} status app:mill": "rows by state",
            f"{there} jobs app:mill --lane fetch --state dead": "the dead rows",
            f"{there} retry app:mill --lane fetch --state dead": "ready again",
            f"{there} run app:mill --drain": "work on them",
        }),
    ]  # fmt: skip


def _aligned(words: dict[str, str]) -> list[str]:
    width = max(map(len, words))
    return [f"  {escape(typed):<{width}}  {meaning}" for typed, meaning in words.items()]


def command(folder: Path) -> str:
    """What to type for ``rowmill`` in a folder: the word, or the way to it where the shell does not find it."""
    if shutil.which("rowmill"):
        return "rowmill"
    script = Path(sys.executable).with_name("rowmill")
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m rowmill"
    if script.is_relative_to(Path.cwd()):
        return shlex.quote(os.path.relpath(script, folder))
    return shlex.quote(str(script))
