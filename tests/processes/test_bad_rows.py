"""One bad row costs itself alone: 200 good rows beside it are done, once, and it is set aside or reported itself.

Why processes: some of these rows kill or hang theirs, and the supervisor's part is to start another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from databases import Db
from farm import JOBS
from waiting import eventually

GOOD = 200
#: Far more than any of these takes on a busy machine: a bound for a run that hangs.
PATIENCE = 100.0

APP = """
import os, time
from datetime import timedelta as td
from rowmill import Mill, fixed

from rowmill.store.lane import row_watch
row_watch.BACKOFF = row_watch.LONGEST_BACKOFF = 0.1
mill = Mill(os.environ["DATABASE"])
log = os.open(os.environ["STARTS"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)

def forever(job):
    while True:
        time.sleep(1)

def until_told(job):
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)

ACTS = {
    "seen": lambda job: job["seen"], "big": lambda job: len(job["big"]),
    "kill": lambda job: os._exit(9), "hang": forever, "wait": until_told,
}

@mill.lane(
    "jobs", name="jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
    dead={"status": "dead"}, lease=td(seconds=int(os.environ["LEASE"])), sweep_every=td(seconds=1),
    poll=td(seconds=1), concurrency=20,
    max_attempts=2, max_reclaims=int(os.environ["RECLAIMS"]), backoff=fixed(td(0)),
    timeout=td(seconds=float(os.environ["TIMEOUT"])),
)
def work(job):
    os.write(log, f"{job.id}\\n".encode())
    if job["note"]:
        ACTS[job["note"]](job)
"""

#: Every time that a row is written as done, by any process.
RECORD = {
    "postgresql": """
create function record() returns trigger language plpgsql as
  $$begin insert into runs values (new.id, new.worker, new.attempts); return null; end$$;
create trigger record after update on jobs for each row
  when (new.status = 'done' and old.status <> 'done') execute function record();
alter table jobs add column seen timestamptz, add column big text;
""",
    "sqlite": """
create trigger record after update on jobs when new.status = 'done' and old.status <> 'done'
  begin insert into runs values (new.id, new.worker, new.attempts); end;
alter table jobs add column seen datetime;
alter table jobs add column big text;
""",
}


def refuse(condition: str) -> dict[str, str]:
    """A trigger that refuses an update of the row."""
    return {
        "postgresql": "create function refuse_{id}() returns trigger language plpgsql as"
        " $$begin raise exception 'not this row'; end$$;"
        f" create trigger refuse_{{id}} before update on jobs for each row when (old.id = {{id}} and {condition})"
        " execute function refuse_{id}();",
        "sqlite": f"create trigger refuse_{{id}} before update on jobs when old.id = {{id}} and {condition}"
        " begin select raise(abort, 'not this row'); end;",
    }


@dataclass(frozen=True)
class Bad:
    """One kind of bad row: how it is made, what its handler does, and how it must end."""

    name: str
    #: By dialect; ``{id}`` stands for the row's.
    made: dict[str, str]
    #: A name in ACTS.
    act: str | None
    ends: Callable[[dict[str, Any] | None, list[dict[str, Any]]], bool]
    #: Done by another connection while the row runs.
    meanwhile: str | None = None


def dead_with(*words: str) -> Callable[[dict[str, Any] | None, list[dict[str, Any]]], bool]:
    def ends(row: dict[str, Any] | None, _events: list[dict[str, Any]]) -> bool:
        return row is not None and row["status"] == "dead" and all(word in (row["error"] or "") for word in words)

    return ends


def reported(status: str | None, *names: str) -> Callable[[dict[str, Any] | None, list[dict[str, Any]]], bool]:
    """The row is in that state (None: it is gone), and an event of one of these names tells of it; or it is dead."""

    def ends(row: dict[str, Any] | None, events: list[dict[str, Any]]) -> bool:
        found = row["status"] if row is not None else None
        return (found == status and bool({event["event"] for event in events} & set(names))) or (
            found == "dead" and bool(row and row["error"])
        )

    return ends


BEYOND = {
    "postgresql": "update jobs set seen = '20000-01-01' where id = {id}",
    "sqlite": "update jobs set big = cast(x'ff00ff' as text) where id = {id}",
}
HUGE = {
    "postgresql": "update jobs set big = repeat('x', 50000000) where id = {id}",
    "sqlite": "update jobs set big = replace(hex(zeroblob(25000000)), '00', 'xx') where id = {id}",
}
NOTHING = dict.fromkeys(("postgresql", "sqlite"), "select 1")

#: Those of one group are put into one table: they do not get in each other's way.
GROUPS: dict[str, list[Bad]] = {
    "bad in themselves": [
        Bad("unreadable", BEYOND, "read", dead_with()),
        Bad("50 MB", HUGE, "big", lambda row, _: row is not None and row["status"] == "done"),
        Bad("edited", NOTHING, "wait", reported("parked", "claim_lost"),
            "update jobs set status = 'parked' where id = {id}"),
        Bad("deleted", NOTHING, "wait", reported(None, "claim_lost"), "delete from jobs where id = {id}"),
        Bad("unclaimable", refuse("new.status = 'running'"), None, reported("queued", "row_refused")),
        Bad("unsettlable", refuse("old.status = 'running' and new.status <> 'running'"), None,
            reported("running", "settle_refused", "row_refused")),
    ],
    "killing": [Bad("killing", NOTHING, "kill", dead_with())],
    "hanging": [Bad("hanging", NOTHING, "hang", dead_with())],
}  # fmt: skip


class Field:
    """A table with good rows and bad ones, and the worker processes over it."""

    def __init__(self, db: Db, folder: Path, group: list[Bad]) -> None:
        self.db, self.folder, self.group = db, folder, group
        db.execute(JOBS[db.dialect])
        db.execute(RECORD[db.dialect])
        self.column = "seen" if db.dialect == "postgresql" else "big"
        acts = {bad.name: self.column if bad.act == "read" else bad.act for bad in group}
        rows = db.insert("jobs", [{"note": None}] * GOOD)
        # In the middle: claimed with good ones before it and behind it.
        self.bad = {bad.name: id for bad, id in zip(group, rows[GOOD // 2 :], strict=False)}
        self.good = set(rows) - set(self.bad.values())
        extra = db.insert("jobs", [{"note": None}] * len(group))
        self.good |= set(extra)
        for bad in group:
            id = self.bad[bad.name]
            db.execute("update jobs set note = ? where id = ?", acts[bad.name], id)
            db.execute(bad.made[db.dialect].format(id=id))
        (folder / "blast_app.py").write_text(APP)
        self.events, self.starts, self.go = folder / "events.log", folder / "starts.log", folder / "go"
        self.starts.touch()

    def start(self, processes: int) -> subprocess.Popen[bytes]:
        # A process that hangs is recycled for every try: one less of them makes the test shorter.
        hangs = any(bad.act == "hang" for bad in self.group)
        timeout, reclaims = ("1", "1") if hangs else ("60", "3")
        # Where no process dies, a lease that a busy machine cannot outlast: a live row must not be taken back.
        lease = "5" if {"hang", "kill"} & {bad.act for bad in self.group} else "60"
        environment = {
            **os.environ, "DATABASE": self.db.url, "STARTS": str(self.starts), "GO": str(self.go),
            "TIMEOUT": timeout, "RECLAIMS": reclaims, "LEASE": lease,
            "PYTHONPATH": os.pathsep.join([str(self.folder), *filter(None, sys.path)]),
        }  # fmt: skip
        words = ["run", "blast_app:mill", "--drain", "--processes", str(processes), "--log", "json", "--grace", "1"]
        with self.events.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "rowmill", *words], env=environment, cwd=self.folder, stderr=log,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def started(self) -> list[int]:
        return [int(line) for line in self.starts.read_text().split()]

    def told(self, id: Any) -> list[dict[str, Any]]:
        lines = [line for line in self.events.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for event in map(json.loads, lines) if event.get("id") == id]

    def meddle(self) -> None:
        """What another connection does while the rows run."""
        those = [bad for bad in self.group if bad.meanwhile is not None]
        eventually(lambda: {self.bad[bad.name] for bad in those} <= set(self.started()), PATIENCE)
        for bad in those:
            assert bad.meanwhile is not None
            self.db.execute(bad.meanwhile.format(id=self.bad[bad.name]))
        self.go.touch()

    def unfinished(self) -> list[str]:
        """What is not yet as it must end."""
        rows = {row["id"]: row for row in self.db.query("select id, status, error from jobs")}
        good = sum(rows[id]["status"] == "done" for id in self.good)
        left = [] if good == GOOD else [f"{GOOD - good} good rows: {[rows[i] for i in self.good][:3]}"]
        for bad in self.group:
            id = self.bad[bad.name]
            if not self.ends(bad)(rows.get(id), self.told(id)):
                left.append(f"{bad.name}: {rows.get(id)}, told {self.told(id)[-2:]}")
        return left

    def ends(self, bad: Bad) -> Callable[[dict[str, Any] | None, list[dict[str, Any]]], bool]:
        return dead_with(self.column) if bad.act == "read" else bad.ends


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dialect", "group", "processes"),
    [
        # Each database once, and both numbers of processes.
        *(("postgresql", "bad in themselves", 2), ("sqlite", "bad in themselves", 1)),
        *(("postgresql", "killing", 1), ("sqlite", "killing", 2)),
        *(("postgresql", "hanging", 2), ("sqlite", "hanging", 1)),
    ],
)
def test_a_bad_row_costs_itself_alone(
    fresh: Callable[[str], Db], tmp_path: Path, dialect: str, group: str, processes: int
) -> None:
    db = fresh(dialect)
    field = Field(db, tmp_path, GROUPS[group])
    supervisor = field.start(processes)
    try:
        field.meddle()
        try:
            eventually(lambda: not field.unfinished(), PATIENCE, every=0.2)
        except AssertionError:
            pytest.fail(f"not in time: {field.unfinished()}\n{field.events.read_text()[-3000:]}")
    finally:
        if supervisor.poll() is None:
            supervisor.send_signal(signal.SIGTERM)
        try:
            supervisor.wait(timeout=60)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
    recorded = [row["job_id"] for row in db.query("select job_id from runs") if row["job_id"] in field.good]
    assert sorted(recorded) == sorted(field.good), "each good row is recorded as done once"
    if group not in ("killing", "hanging"):  # rows of a process that died are run again
        starts = [id for id in field.started() if id in field.good]
        assert sorted(starts) == sorted(field.good), "each good row is run once"
