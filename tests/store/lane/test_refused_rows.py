"""A row that the database will not let be claimed, or let go, holds up no other and is reported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill import Concurrency, Mill, RowmillError
from rowmill.ops.directory import LaneDirectory
from rowmill.ops.questions import why

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
TRIGGER = {
    "postgresql": "create function no() returns trigger language plpgsql as"
    " $$ begin raise exception 'not this one'; end $$;"
    " create trigger refuse before update on jobs for each row when ({when}) execute function no()",
    "sqlite": "create trigger refuse before update on jobs when {when} begin select raise(abort, 'not this one'); end",
}


def make(db: Db, rows: int = 40, attempts: str = "int") -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id int primary key, site text, status text default 'ready', worker text,"
        f" claimed_at {time}, heartbeat_at {time}, attempts {attempts} default 0, reclaims int default 0,"
        " error text, n int default 0)"
    )
    db.insert("jobs", [{"id": i, "site": f"s{i}"} for i in range(1, rows + 1)])


def refuse(db: Db, when: str) -> None:
    db.execute(TRIGGER[db.dialect].format(when=when))


async def handle(job: Any) -> None: ...


def declared(db: Db, **options: Any) -> tuple[Mill, list[Any]]:
    mill, told = Mill(db.url), list[Any]()
    mill.on_event(told.append)
    mill.lane("jobs", name="jobs", max_attempts=3, **STATES, **options)(handle)
    return mill, told


def ended(db: Db) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in db.query("select id, status from jobs order by id"):
        found.setdefault(row["status"], []).append(row["id"])
    return found


OTHERS = [i for i in range(1, 41) if i != 7]
GATES: dict[str, list[Any]] = {"no gate": [], "by key": [Concurrency(1, by="site")], "in all": [Concurrency(50)]}


@pytest.mark.parametrize("gates", list(GATES))
async def test_a_row_that_may_not_run_is_set_aside(db: Db, gates: str) -> None:
    make(db)
    refuse(db, "new.status = 'running' and new.id = 7")
    mill, told = declared(db, gates=GATES[gates])
    tally = await mill.worker(drain=True).run()
    assert ended(db) == {"done": OTHERS, "dead": [7]}
    assert tally.died == 1
    error = db.value("select error from jobs where id = 7")
    assert "refused the claim" in error
    assert "not this one" in error
    (event,) = [event for event in told if event.name == "row_refused"]
    assert (event.fields["id"], event.fields["lane"]) == (7, "jobs")


@pytest.mark.parametrize("gates", list(GATES))
async def test_one_that_may_not_change_at_all_is_passed_over_and_reported(db: Db, gates: str) -> None:
    make(db)
    refuse(db, "new.id = 7")
    mill, told = declared(db, gates=GATES[gates])
    await mill.worker(drain=True).run()
    assert ended(db) == {"done": OTHERS, "ready": [7]}
    assert [event.fields["id"] for event in told if event.name == "row_refused"] == [7]
    async with LaneDirectory(mill) as directory:
        answer = await why(directory, "default", "jobs", "7")
        assert "refused" in [reason["code"] for reason in answer["reasons"]]
        assert "not this one" in str(answer["reasons"])


async def test_a_counter_at_the_end_of_its_type(pg: Db) -> None:
    make(pg, attempts="smallint")
    pg.execute("update jobs set attempts = 32767 where id = 7")
    mill, _ = declared(pg)
    await mill.worker(drain=True).run()
    assert ended(pg) == {"done": OTHERS, "dead": [7]}


async def test_a_constraint_that_old_rows_break(pg: Db) -> None:
    """NOT VALID: no update of the row passes, so it stays as it is."""
    make(pg)
    pg.execute("alter table jobs add check (id <> 7) not valid")
    mill, told = declared(pg)
    await mill.worker(drain=True).run()
    assert ended(pg) == {"done": OTHERS, "ready": [7]}
    assert [event.fields["id"] for event in told if event.name == "row_refused"] == [7]


async def test_one_running_row_of_a_site_at_a_time(db: Db) -> None:
    """A unique index on running rows refuses whole batches; nobody is at fault, and all get done."""
    make(db)
    db.execute("update jobs set site = 'same' where id < 20")
    db.execute("create unique index one on jobs (site) where status = 'running'")
    mill, _ = declared(db)
    await mill.worker(drain=True).run()
    assert ended(db) == {"done": list(range(1, 41))}


async def test_the_claim_does_not_ask_about_it_every_time(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    make(db)
    refuse(db, "new.id = 7")
    mill, _ = declared(db, batch=2)
    refused: list[str] = []
    mill.on_event(lambda event: refused.append(event.name) if event.name == "row_refused" else None)
    await mill.worker(drain=True).run()
    assert ended(db) == {"done": OTHERS, "ready": [7]}
    assert refused == ["row_refused"]


async def test_an_outcome_that_is_refused_for_good_is_given_up_and_told(db: Db) -> None:
    """The row stays running; the drain ends, and what is written is bounded."""
    make(db)
    refuse(db, "old.status = 'running' and new.status <> 'running' and new.id = 7")
    mill, told = declared(db)
    worker = mill.worker(drain=True)
    worker.stuck_pauses = (0.01, 0.01)
    tally = await worker.run()
    assert ended(db) == {"done": OTHERS, "running": [7]}
    refused = [event for event in told if event.name == "settle_refused"]
    assert len(refused) == 3
    assert (refused[-1].fields["id"], refused[-1].fields["given_up"]) == (7, True)
    assert tally.left


async def test_at_the_end_such_an_outcome_is_not_written_in_a_loop(db: Db) -> None:
    make(db, 3)
    refuse(db, "old.status = 'running' and new.status <> 'running' and new.id = 2")
    mill, told = declared(db)
    worker = mill.worker()
    mill.on_event(lambda event: worker.stop() if event.name == "settle_refused" else None)
    async with asyncio.timeout(60):
        await worker.run()
    assert len([event for event in told if event.name == "settle_refused"]) <= 3
    assert ended(db) == {"done": [1, 3], "running": [2]}


def test_check_names_a_row_that_may_not_be_claimed(
    db: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(db)
    refuse(db, "new.id = 7")
    command = Command(tmp_path, monkeypatch, capsys)
    command.app(db.url, f"mill.lane('jobs', name='jobs', max_attempts=3, **{STATES!r})(handler)")
    (lane,) = command.json("check")["checked"]
    (text,) = [finding["text"] for finding in lane["findings"] if finding["code"] == "claim_refused"]
    assert "row 7" in text
    assert "not this one" in text


async def test_a_state_that_no_row_may_have_ends_no_row(db: Db) -> None:
    """A wrong word in `running`: the declaration is at fault, not 40 rows."""
    make(db)
    refuse(db, "new.status = 'running'")
    mill, _ = declared(db)
    with pytest.raises(RowmillError, match="refuses the claim"):
        await mill.worker(drain=True).run()
    assert ended(db) == {"ready": list(range(1, 41))}
