"""The original's own tables, its columns and nothing more; its own worker beside this one; its own questions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import timedelta as td
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from apps.enrichment import mill, users, web
from apps.enrichment.connect import connect
from apps.enrichment.mill import create_tables
from apps.enrichment.tests.conftest import App, netscape
from apps.enrichment.tests.crowd import ROOT
from apps.standins import sites
from apps.standins.internet import Internet
from databases import Db
from rowmill import RowmillError
from rowmill.testing import Kit

USERS = ("uuid", "bigint", "text")
#: C2, C3: the columns that these tables are said to have.
ORIGINAL = """
create type enrichment_status as enum ('queued', 'running', 'succeeded', 'failed', 'dead');
create table import_jobs (
    id uuid primary key default gen_random_uuid(), user_id {user} not null,
    source_type text not null default 'chrome_html', status text not null default 'queued',
    total_items integer not null default 0, processed_items integer not null default 0,
    failed_items integer not null default 0, created_at timestamptz not null default now(), started_at timestamptz,
    finished_at timestamptz, last_error text);
create table enrichment_jobs (
    id uuid primary key default gen_random_uuid(), link_canonical_id uuid not null unique,
    status enrichment_status not null default 'queued', attempts integer not null default 0,
    max_attempts integer not null default 2, run_after timestamptz not null default now(), locked_at timestamptz,
    locked_by text, last_error text, created_at timestamptz not null default now(),
    updated_at timestamptz not null default now());
"""
#: C6, word for word: ten due rows, those of the lease's end among them, in one transaction.
CLAIM = """
with due as (
    select id from enrichment_jobs
    where ((status in ('queued', 'failed') and (locked_at is null or locked_at < now() - interval '10 minutes'))
        or (status = 'running' and locked_at < now() - interval '10 minutes'))
      and run_after <= now()
    order by run_after limit 10 for update skip locked)
update enrichment_jobs j set status = 'running', locked_at = now(), locked_by = 'theirs', attempts = attempts + 1,
    updated_at = now()
from due where j.id = due.id returning j.id
"""
FINISH = "update enrichment_jobs set status = 'succeeded', updated_at = now() where id = $1"
#: What its owner asks: how the jobs stand, and what hangs.
BY_WORKER = "select status::text, locked_by, count(*) as n from enrichment_jobs group by 1, 2 order by 2"
STUCK = "select id from enrichment_jobs where status = 'running' and locked_at < now() - interval '10 minutes'"


@pytest.mark.parametrize("user", USERS)
async def test_the_original_s_tables_get_what_they_lack(pg: Db, net: Internet, user: str) -> None:
    """C1 to C4: users have keys of the type that the imports have; others' imports and jobs are left to them."""
    net.default = sites.page()
    pg.execute(ORIGINAL.format(user=user))
    keys = {"uuid": uuid4(), "bigint": 7, "text": "u7"}
    pg.execute("insert into import_jobs (user_id) values (?)", keys[user])
    pg.execute("insert into enrichment_jobs (link_canonical_id) values (?)", uuid4())
    (note,) = await create_tables(pg.url)
    assert note.startswith("enrichment jobs without a url (1) are left")
    assert await create_tables(pg.url) == [note], "again at any time"
    connection = await connect(pg.url)
    id, _ = await users.add(connection, "ada")
    await connection.close()
    async with Kit(mill, environments=pg.url) as kit:
        app = App(pg, kit)
        ours = app.upload(netscape("https://a.example/"), id)
        await kit.drain("read", "enrich")
        assert app.standing(ours) == ("succeeded", 1, 1, 0)
    assert pg.value("select count(*) from import_jobs where status = 'queued'") == 1
    assert pg.value("select count(*) from enrichment_jobs where status = 'queued'") == 1


async def test_both_workers_finish_their_links_and_imports_are_counted(pg: Db, net: Internet) -> None:
    """C2, C6, X1: nothing is stolen, nothing is lost, the original's questions are answered; what the other worker
    finished is counted in the imports, too.
    """
    net.default = sites.page()
    pg.execute(ORIGINAL.format(user="uuid"))
    await create_tables(pg.url)
    urls = [f"https://a{n}.example/" for n in range(30)]
    async with Kit(mill, environments=pg.url) as kit:
        app = App(pg, kit)
        id = await app.imported(*urls)
        connection: asyncpg.Connection = await connect(pg.url)
        theirs = [row["id"] for row in await connection.fetch(CLAIM)]
        assert len(theirs) == 10
        ours = asyncio.create_task(mill.worker(lanes=["enrich"], worker_id="ours", drain=True).run())
        async with asyncio.timeout(60):
            done = "select count(*) from enrichment_jobs where status = 'succeeded'"
            while not await connection.fetchval(done):  # noqa: ASYNC110 (a row is asked, it does not tell)
                await asyncio.sleep(0.02)
        assert await kit.sweep("enrich") == [], "the other worker holds its rows"
        theirs += [row["id"] for row in await connection.fetch(CLAIM)]
        for job in theirs:
            await connection.execute(FINISH, job)
        assert (await ours).completed == 30 - len(theirs)
        await connection.close()
        counted = {tuple(row.values())[:2]: row["n"] for row in pg.query(BY_WORKER)}
        assert counted == {("succeeded", "ours"): 30 - len(theirs), ("succeeded", "theirs"): len(theirs)}
        assert pg.query(STUCK) == []
        assert pg.value("select max(attempts) from enrichment_jobs") == 1, "each was claimed once"
        assert len([visit for visit in net.visits if visit.path == "/"]) == 30 - len(theirs)
        await kit.store("default")
        await kit.tick()  # the clock begins here
        kit.advance(td(minutes=1))
        await kit.tick()
        await kit.drain("default")
        assert app.standing(id) == ("succeeded", 30, 30, 0)


async def test_keys_that_it_cannot_work_with_are_refused(pg: Db) -> None:
    """C2: with what to do, and nothing is changed."""
    pg.execute("create table import_jobs (id bigint primary key, user_id bigint)")
    with pytest.raises(RowmillError, match=r"(?s)import_jobs\.id is bigint, and this application needs uuid.*Try: "):
        await create_tables(pg.url)
    assert pg.value("select count(*) from information_schema.columns where table_name = 'import_jobs'") == 2


@pytest.mark.parametrize(
    ("url", "words"),
    [(None, "ROWMILL_DATABASE_URL is not set"), ("sqlite:///x.db", "needs PostgreSQL, and sqlite:///x.db"),
     ("postgresql://127.0.0.1:1/x", "cannot connect to")],
)  # fmt: skip
def test_a_database_that_cannot_be_used_is_told_without_a_traceback(url: str | None, words: str) -> None:
    """C1: the command that adds users."""
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment.pop("ROWMILL_DATABASE_URL", None)
    command = [sys.executable, "-m", "apps.enrichment.users", "ada"]
    environment |= {"ROWMILL_DATABASE_URL": url} if url else {}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: ")
    assert words in ended.stderr
    assert "\nTry: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("url", ["", "sqlite:///x.db"])
def test_the_web_side_without_a_database_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """C1: a server that calls the factory shows no traceback."""
    monkeypatch.setenv("ROWMILL_DATABASE_URL", url)
    with pytest.raises(SystemExit, match=r"(?s)^Error: .*\nTry: ROWMILL_DATABASE_URL="):
        web.app()
