"""``rowmill health``: rows that do not move are a finding, not only what slows the database down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import systems
from command import Command, ago, register
from databases import Db


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def findings(command: Command, check: str) -> list[tuple[str, str]]:
    """Level and text of what a check told."""
    document: Any = command.json("health")
    return [(f["level"], f["told"]) for f in document["environments"][0]["findings"] if f["check"] == check]


def test_health_names_stuck_rows(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    command.app(db.url, "enrichment")
    assert findings(command, "stuck") == [("ok", "no row is stuck")]
    systems.insert_enrichment(db, 2, status="running", locked_by="loop-0", locked_at=ago(hours=3), attempts=1)
    ((level, told),) = findings(command, "stuck")
    assert (level, told.partition(":")[0]) == ("bad", "2 rows are stuck")
    assert "rowmill release --lane enrichment --stuck" in " ".join(command("health").out.split())


def test_health_says_that_ready_rows_have_no_worker(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 3)
    command.app(db.url, "enrichment")
    register(db, "w-1", silent=300, state="busy")
    assert findings(command, "workers") == [("bad", "no live worker serves the lane, and 3 rows are ready")]
    register(db, "w-2")
    assert findings(command, "workers") == [("ok", "1 live worker")]
    db.execute("delete from rowmill_workers")
    db.execute("delete from enrichment_jobs")
    assert findings(command, "workers") == [("ok", "no live worker serves the lane, and no row is ready")]


def test_health_names_a_dead_worker_that_holds_rows(db: Db, command: Command) -> None:
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 2, status="running", locked_by="w-gone", locked_at=ago(minutes=5), attempts=1)
    command.app(db.url, "enrichment")
    register(db, "w-gone", silent=300, state="busy")
    register(db, "w-live")
    ((level, told),) = findings(command, "workers")
    assert (level, told) == ("look", "worker w-gone died 5 min ago and holds 2 rows")
