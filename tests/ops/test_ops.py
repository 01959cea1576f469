"""Every operator verb is written once: the command line's ``--json`` and the HTTP API give the same document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import web
from command import Command, ago, register
from databases import Db, make_own_tables
from rowmill.store.own.fingerprint import fingerprint

LANE = "environments/default/lanes/fetch"
#: Values that differ from one moment to the next: only whether there is one is compared.
MOVING = {"ages", "at", "since", "until", "seconds", "seconds_left", "oldest_ready_seconds", "running_seconds",
          "silent_seconds", "runs_at", "runs_in_seconds", "tokens"}  # fmt: skip
FORBIDDEN = fingerprint("forbidden")

#: A question of an operator: the words of the command, and the call of the API.
QUESTIONS = [
    (["status"], "status"),
    (["status", "--lane", "read"], "status?lane=read"),
    (["workers"], "workers"),
    (["workers", "--all"], "workers?all=true"),
    (["stuck"], "stuck"),
    (["jobs", "--lane", "fetch"], f"{LANE}/rows?order=queue&limit=20"),
    (["jobs", "--lane", "fetch", "--state", "ready", "--limit", "1"], f"{LANE}/rows?order=queue&state=ready&limit=1"),
    (["why", "fetch", "1"], f"{LANE}/rows/1/why"),
    (["why", "fetch", "3"], f"{LANE}/rows/3/why"),
    (["logs", "fetch", "1"], f"{LANE}/rows/1/logs"),
    (["logs", "fetch", "1", "--run", "2"], f"{LANE}/rows/1/logs?run=2"),
    (["gates"], "gates"),
    (["gates", "fetch", "--key", "a.example"], "gates?lane=fetch&key=a.example"),
    (["errors", "--hours", "24"], "errors?hours=24"),
    (["health"], "health"),
    (["audit"], "audit"),
]
#: What an operator does: the words of the command, the call of the API, and its body. In this order, on equal rows.
ACTIONS: list[tuple[list[str], str, dict[str, Any]]] = [
    (["retry", "--id", "6", "--id", "99", "--id", "4"], f"{LANE}/retry", {"ids": [6, 99, 4]}),
    (["cancel", "--id", "1", "--reason", "enough"], f"{LANE}/cancel", {"ids": ["1"], "reason": "enough"}),
    (["cancel", "--state", "waiting"], f"{LANE}/cancel", {"state": "waiting"}),
    (["retry", "--state", "canceled", "--yes"], f"{LANE}/retry", {"state": "canceled"}),
    (["release", "--stuck"], f"{LANE}/release", {"stuck": True}),
    (["release", "--worker", "w-1"], f"{LANE}/release", {"worker": "w-1"}),
    (["retry", "--error", FORBIDDEN, "--yes"], f"{LANE}/errors/retry", {"error": FORBIDDEN}),
    (["cancel", "--error", FORBIDDEN, "--yes"], f"{LANE}/errors/bury", {"error": FORBIDDEN}),
    (["pause", "--reason", "night"], "environments/default/pause", {"reason": "night"}),
    (["pause", "--key", "a.example", "--for", "10m"], "environments/default/pause",
     {"lane": "fetch", "key": "a.example", "seconds": 600}),
    (["resume", "--key", "a.example"], "environments/default/resume", {"lane": "fetch", "key": "a.example"}),
    (["resume"], "environments/default/resume", {}),
    (["gates", "set", "fetch", "a.example", "most=1"], f"{LANE}/gates/set", {"key": "a.example", "most": 1}),
    (["gates", "reset", "fetch", "a.example"], f"{LANE}/gates/reset", {"key": "a.example"}),
    (["gates", "reset", "fetch", "--yes"], f"{LANE}/gates/reset", {"all": True}),
]  # fmt: skip


def fill(db: Db) -> None:
    """The same rows in every state, and a worker."""
    web.create_pages(db)
    for row in (
        {"url": "u/1", "domain": "a.example"},
        {"url": "u/2", "domain": "b.example"},
        {"url": "u/3", "domain": "a.example", "run_after": ago(hours=-1), "attempts": 1, "error": "timed out"},
        {"url": "u/4", "status": "fetching", "worker": "w-1", "claimed_at": ago(minutes=1), "attempts": 1},
        {"url": "u/5", "status": "fetching", "worker": "w-2", "claimed_at": ago(hours=2), "attempts": 1},
        {"url": "u/6", "status": "given up", "error": "forbidden", "attempts": 3},
        {"url": "u/7", "status": "given up", "error": "forbidden", "attempts": 3},
    ):
        db.insert("pages", [row])
    make_own_tables(db.url)
    for run, outcome in enumerate(("retry", "done"), 1):
        log = {"lane": "fetch", "row_id": "1", "attempt": run, "worker": "w-1", "outcome": outcome, "dropped": 3}
        lines = f'[[0.5, "info", "attempt {run}", null], [0.25, "error", "no\\nanswer", "4"]]'
        db.insert("rowmill_run_logs", [{**log, "at": ago(minutes=3), "kept_until": ago(days=-7), "lines": lines}])
    register(db, "w-9", state="busy", current=[{"lane": "fetch", "id": 4, "seconds": 1, "environment": "default"}])


def still(document: Any) -> Any:
    """A document without what differs from one moment to the next."""
    if isinstance(document, dict):
        return {name: (value is not None) if name in MOVING else still(value) for name, value in document.items()}
    return [still(part) for part in document] if isinstance(document, list) else document


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


@pytest.fixture
def edges(fresh: Callable[[str], Db], command: Command) -> Iterator[tuple[Command, TestClient, Db]]:
    """Both edges, each over a database of its own with the same rows; the command's database."""
    here, there = fresh("sqlite"), fresh("sqlite")
    for db in (here, there):
        fill(db)
    command.app(here.url, "from web import make_mill", f"mill = make_mill({here.url!r})")
    with web.served(web.make_mill(there)) as client:
        yield command, client, here


def test_a_question_gets_the_same_document_from_the_command_and_the_api(
    edges: tuple[Command, TestClient, Db],
) -> None:
    """Issue 20, point 6: for every verb that both have."""
    command, _, db = edges
    with web.served(web.make_mill(db)) as client:
        for words, path in QUESTIONS:
            told, sent = command.json(*words), client.get(f"/api/v1/{path}")
            assert sent.status_code == 200, (path, sent.text)
            assert still(told) == still(sent.json()), words
        (row,) = command.json("jobs", "--lane", "fetch", "--id", "1")["rows"]
        assert row == client.get(f"/api/v1/{LANE}/rows/1").json()


def test_an_action_gets_the_same_document_from_the_command_and_the_api(
    edges: tuple[Command, TestClient, Db],
) -> None:
    """Issue 20, point 6: the same is done to the same rows, and the same is told."""
    command, client, _ = edges
    for words, path, body in ACTIONS:
        of_lane = ["--lane", "fetch"] if words[0] in ("retry", "cancel", "release") or "--key" in words[:3] else []
        ended = command(*words, *of_lane, "--json")
        sent = client.post(f"/api/v1/{path}", json=body)
        assert sent.status_code == 200, (path, sent.text)
        assert still(json.loads(ended.out)) == still(sent.json()), words
