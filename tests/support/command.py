"""The command line inside a test: an application written to a file, and commands run as ``rowmill`` would."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer.main

import systems
from databases import Db
from rowmill.cli import main
from rowmill.cli.app import console
from rowmill.store import Database
from rowmill.store.own.workers import WorkersTable, WorkerState

_numbers = itertools.count(1)
#: All commands with their options, made once and not for every command line: half of what a command costs.
_made_once = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


class Command:
    """Runs commands in this process, on an application of its own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._patch, self._capsys = folder, patch, capsys
        patch.chdir(folder)
        patch.setattr(typer.main, "get_command", _made_once)
        patch.delenv("ROWMILL_APP", raising=False)
        patch.setenv("COLUMNS", "80")
        self._patch.setattr(sys, "path", [str(folder), *sys.path])

    def app(self, databases: str | Mapping[str, str], *lines: str) -> str:
        """Write an application with these lanes of ``systems``, or lines of Python; it stands in ROWMILL_APP."""
        name = f"app_{next(_numbers)}"
        body = [f"systems.{line}(mill, handler)" if line.isidentifier() else line for line in lines]
        head = ["import systems"] if any(line.startswith("systems.") for line in body) else []
        head += ["from rowmill import Mill", f"mill = Mill({databases!r})", "async def handler(job): ..."]
        (self._folder / f"{name}.py").write_text("\n".join(head + body) + "\n")
        self._patch.setenv("ROWMILL_APP", f"{name}:mill")
        return f"{name}:mill"

    def terminal(self, columns: int = 80) -> None:
        """From now on standard output is a terminal of that width."""
        self._patch.setattr(console, "_force_terminal", True)
        self._patch.setattr(console, "_width", columns)

    def __call__(self, *words: str) -> Ended:
        self._patch.setattr(sys, "argv", ["rowmill", *words])
        self._capsys.readouterr()
        code = 0
        try:
            main(name="rowmill")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        return Ended(code, out, err)

    def json(self, *words: str, code: int = 0) -> Any:
        """The document a command prints with ``--json``, after it ended with that code."""
        ended = self(*words, "--json")
        assert ended.code == code, ended
        return json.loads(ended.out)


# -- rows to look at

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
COMPOSITE = (
    "mill.lane('parts', name='parts', ready={'state': 'new'}, running={'state': 'run'}, done={'state': 'ok'},"
    " dead={'state': 'bad'}, canceled={'state': 'off'}, max_attempts=3)(handler)"
)


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


def counts(document: Any, lane: str) -> dict[str, Any]:
    """A lane's counts without those that are zero or unknown."""
    (found,) = [entry for entry in document["lanes"] if entry["lane"] == lane]
    return {state: n for state, n in found["counts"].items() if n}


def fill_enrichment(db: Db) -> None:
    """Some rows in every state: 3 ready, 2 waiting, 2 running of which 1 stuck, 1 done, 1 dead."""
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 2)
    systems.insert_enrichment(db, 1, status="failed", run_after=ago(minutes=1), attempts=1)
    systems.insert_enrichment(db, 2, status="failed", run_after=ago(minutes=-5), last_error="timed out")
    systems.insert_enrichment(db, 1, status="running", locked_by="w-1", locked_at=ago(minutes=1), attempts=1)
    systems.insert_enrichment(db, 1, status="running", locked_by="w-2", locked_at=ago(minutes=11), attempts=1)
    systems.insert_enrichment(db, 1, status="succeeded")
    systems.insert_enrichment(db, 1, status="dead", last_error="forbidden")


def create_parts(db: Db) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table parts (book text not null, page integer not null, state text not null default 'new',"
        f" worker text, claimed_at {time}, attempts integer not null default 0, error text,"
        " primary key (book, page))"
    )


def register(
    db: Db, name: str, *, silent: float = 0, state: str = "idle", lane: str = "enrichment", **said: Any
) -> None:
    """A worker that said this of itself, that long ago."""

    async def work() -> None:
        database = Database.open(db.url)
        fleet = WorkersTable(database)
        await fleet.ensure()
        me = WorkerState(name, f"inc-{name}", "host", 42, [lane], "0.1.0")
        assert await fleet.register(me) is None
        for word, value in said.items():
            setattr(me, word, value)
        me.state = state
        await fleet.beat(me)
        await database.close()

    asyncio.run(work())
    db.execute("update rowmill_workers set seen_at = ? where id = ?", ago(seconds=silent), name)
