"""docs/how-to/deploy.md, step by step, on an empty PostgreSQL: from one's own table to workers with a small role."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import Command
from databases import Db
from postgres_programs import installed

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deploy.md"
TABLES = """
create table states (id integer primary key, name text not null unique);
insert into states values (1, 'new'), (2, 'fetching'), (3, 'fetched'), (4, 'rating'), (5, 'rated'), (7, 'on_hold'),
    (9, 'failed');
create table links (
    id bigint generated always as identity primary key, url text not null,
    state_id integer not null default 1 references states (id), title text, secret text
);
insert into links (url) select 'https://example.org/' || n from generate_series(1, 20) n;
insert into links (url, state_id) values ('https://example.org/later', 7);
"""
SHOP = """
import os
from rowmill import Mill

mill = Mill()


@mill.lane("links", ready={"state_id": 1}, running={"state_id": 2}, done={"state_id": 3}, dead={"state_id": 9},
           ignore_states=[7])
async def fetch(job):
    return {"title": f"Page {job.id}"}


@mill.lane("links", ready={"state_id": 3}, running={"state_id": 4}, done={"state_id": 5}, dead={"state_id": 9},
           priority=1)
async def rate(job):
    pass


@mill.task(max_attempts=5)
async def send_report(to: str) -> str:
    return f"sent to {to}"


@mill.cron("0 3 * * *", tz="America/Montreal")
async def nightly():
    await send_report.enqueue(to="a@b.c", key="nightly")
"""
ROLE = "shop_worker"


@pytest.fixture
def shop(pg: Db) -> Iterator[Db]:
    pg.execute(TABLES)
    yield pg
    if pg.value(f"select count(*) from pg_roles where rolname = '{ROLE}'"):
        pg.execute(f"drop owned by {ROLE}; drop role {ROLE}")


def documented() -> list[str]:
    """The commands of the page's section about the worker's role."""
    (block,) = re.findall(r"## A role with least privilege.*?```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


@pytest.mark.no_pooler("migrate asks for the direct address")
def test_the_documented_steps_lead_from_an_empty_database_to_workers(
    shop: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 19.9: a table with a lookup of states, two lanes, a task and a cron; no step is a dead end."""
    command = Command(tmp_path, monkeypatch, capsys)
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.delitem(sys.modules, "shop", raising=False)  # the one of another page
    monkeypatch.setenv("ROWMILL_DATABASE_URL", shop.url)
    migrate, sql, psql = documented()
    assert migrate == "rowmill migrate shop:mill --apply"
    ended = command(*shlex.split(migrate)[1:])
    assert ended.code == 0, ended
    ended = command("check", "shop:mill", "--strict")
    assert ended.code == 0, ended

    words, _, file = sql.partition(" > ")
    ended = command(*shlex.split(words)[1:], "--hide", "fetch.secret", "--hide", "rate.secret")
    assert ended.code == 0, ended
    (tmp_path / file).write_text(ended.out)
    assert psql.startswith(f'psql "$OWNER_URL" -f {file}')
    run = [str(installed("psql")), shop.direct, "-q", "-v", "ON_ERROR_STOP=1", "-f", file]
    subprocess.run(run, cwd=tmp_path, timeout=180, check=True)

    monkeypatch.setenv("ROWMILL_DATABASE_URL", shop.url.replace("postgres:", f"{ROLE}:", 1))
    shop.execute("select rowmill_enqueue('send_report', '{\"to\": \"x@y.z\"}')")
    ended = command("check", "shop:mill", "--strict")
    assert ended.code == 0, ended
    ended = command("run", "shop:mill", "--drain")
    assert ended.code == 0, ended
    assert "41 done" in ended.err, ended
    assert shop.value("select count(*) from links where state_id = 5 and title is not null") == 20
    assert shop.value("select state from rowmill_jobs where task = 'send_report'") == "done"
    assert shop.value("select count(*) from rowmill_crons where name = 'nightly'") == 1
    assert command("status", "shop:mill").code == 0
