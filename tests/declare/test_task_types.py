"""Tasks and lanes are typed like their handlers, rows like their tables: for type checkers, and so for editors."""

from __future__ import annotations

import datetime
import decimal
import re
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from databases import Db
from rowmill import Job, Mill
from rowmill.ops.adopt import types

#: What has to be refused carries a mark; nothing else may be.
CODE = """
from datetime import timedelta
from rowmill import Handle, Job, Mill, SyncJob, injected

mill = Mill("sqlite:///x.db")

@mill.task(max_attempts=5)
async def send(to: str, pages: int = 1) -> str:
    return to

@mill.task
async def with_job(job: Job, n: int, http: object = injected) -> int:
    return n

@mill.task
def plain(job: SyncJob, n: int) -> bytes:
    return b""

@mill.cron("* * * * *")
async def nightly() -> None: ...

async def main() -> None:
    handle: Handle[str] = await send.enqueue(to="a")
    await send.enqueue("a", 2)
    await send.enqueue(to="a", run_after=timedelta(1), key="k")
    n: int = await (await with_job.enqueue(5)).result()
    b: bytes = await (await plain.enqueue(n=1)).result(timeout=1)
    await send.options(key="x").enqueue(to="a")
    send.enqueue_sync("a")
    await nightly.enqueue()
    await send.enqueue(to=5)  # wrong
    await send.enqueue(nobody=5)  # wrong
    await send.enqueue(to="a", run_after="soon")  # wrong
    await with_job.enqueue("x")  # wrong
    await send.options(key="x").enqueue(two="a")  # wrong
    y: int = await handle.result()  # wrong
"""
#: Handlers of lanes keep their types; a row's columns have those of the table, or of a model.
LANES = """
from rowmill import Job, Mill
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from links_types import LinksJob, LinksRow, LinksSyncJob

mill = Mill("sqlite:///x.db")
states = {"ready": {"status": "new"}, "running": {"status": "now"}, "done": {"status": "done"}}

class Base(DeclarativeBase): ...

class Link(Base):
    __tablename__ = "links"
    id: Mapped[int] = mapped_column(primary_key=True)
    url: Mapped[str]
    title: Mapped[str | None]

@mill.lane("links", **states)
async def fetch(job: LinksJob) -> dict[str, str]:
    url: str = job["url"]
    title: str | None = job["title"]
    at: float = job["created_at"].timestamp()
    attempt: int = job.attempt
    no: int = job["url"]  # wrong
    job["ulr"]  # wrong
    await job.progress(0.5)
    return {"title": url}

@mill.lane(Link, name="modelled", **states)
async def modelled(job: Job) -> None:
    url: str = job[Link.url]
    no: int = job[Link.title]  # wrong

@mill.lane("links", name="plain", **states)
def plain(job: LinksSyncJob) -> None:
    key: int = job["id"]
    no: str = job["id"]  # wrong

async def main(job: LinksJob, row: LinksRow, other: Job) -> None:
    found: dict[str, str] = await fetch(job)
    wrong: int = await fetch(job)  # wrong
    await fetch("job")  # wrong
    plain(other)  # wrong
    row["url"].upper()
    row["ulr"]  # wrong
    fetch.on_settled(print)
    name: str = fetch.name
"""
TABLE = """create table links (id integer primary key, url text not null, title text, status text not null,
  score numeric(8, 2), ratio real not null, live boolean not null, extra json, raw blob,
  created_at timestamp not null)"""


def test_a_type_checker_knows_parameters_columns_and_results(tmp_path: Path) -> None:
    """Issue 25, point 7: of tasks, of lanes' handlers, of rows by ``adopt --types`` and by a model."""
    with sqlite3.connect(tmp_path / "links.db") as db:
        db.execute(TABLE)
    adopt = [str(Path(sys.executable).parent / "rowmill"), "adopt", "sqlite:///links.db", "links"]
    written = subprocess.run([*adopt, "--types", "links_types.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (written.returncode, written.stdout) == (0, ""), written.stderr
    again = subprocess.run([*adopt, "--types", "links_types.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "already exists" in again.stderr
    files = {"typed_tasks": CODE, "typed_lanes": LANES}
    for name, code in files.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(Path(__file__).parents[2] / ".mypy_cache" / "of a task's types"),  # a quarter of a minute, else
        *(f"{name}.py" for name in files),
    ]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110).stdout
    found = set(re.findall(r"^(\w+)\.py:(\d+): error", told, re.MULTILINE))
    wanted = {
        (name, str(n))
        for name, code in files.items()
        for n, line in enumerate(code.splitlines(), 1)
        if line.endswith("# wrong")
    }
    assert found == wanted, told


#: What a column of each type is in a job, on both databases.
VALUES = {
    "postgresql": """id integer primary key, status text default 'new', worker text, claimed_at timestamptz,
  n bigint default 5, big numeric(8, 2) default 1.5, ratio double precision default 0.5, live boolean default true,
  day date default now(), at timestamp default now(), it uuid default gen_random_uuid(), span interval default '1 h',
  raw bytea default '', words text[] default '{a}', extra jsonb default '{}', short varchar(5) default 'x'""",
    "sqlite": """id integer primary key, status text default 'new', worker text, claimed_at datetime,
  n bigint default 5, big numeric(8, 2) default 1.5, ratio real default 0.5, live boolean default 1,
  day date default '2026-01-31', at timestamp default '2026-01-31 08:00:00', extra json default '{}',
  short varchar(5) default 'x', raw blob default x'00'""",
}


async def test_the_types_that_adopt_writes_are_those_of_the_values(db: Db) -> None:
    """A type that is written to the file is the one that a handler meets."""
    db.execute(f"create table things ({VALUES[db.dialect]})")
    db.execute("insert into things (id) values (1)")
    source = await types(db.url, "things")
    hints = dict(re.findall(r'^    "(\w+)": (.*),$', source, re.MULTILINE))
    names: dict[str, Any] = {"datetime": datetime, "decimal": decimal, "uuid": uuid, "Any": object}
    mill, met = Mill(db.url), dict[str, Any]()

    @mill.lane(
        "things", ready={"status": "new"}, running={"status": "now"}, done={"status": "ok"}, dead={"status": "no"}
    )
    async def look(job: Job) -> None:
        met.update(job)

    await mill.worker(drain=True).run()
    assert set(hints) == set(met)
    assert sum(hint != "Any" for hint in hints.values()) >= 11
    wrong = {column: (hints[column], value) for column, value in met.items()
             if not isinstance(value, eval(hints[column], names))}  # fmt: skip
    assert wrong == {}
    exec(compile(source, "types", "exec"), {})
