"""The functions on a server where not everybody means well: hostile search paths, hostile names, least rights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from command import Command
from databases import Db
from rowmill import Mill
from rowmill.errors import DeclarationError
from rows import empty
from sqlworker import Functions, install_now, quoted

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
JOBS = """create table {table} (id integer generated always as identity primary key, status {kind} default 'ready',
  worker varchar(40), claimed_at timestamptz, heartbeat_at timestamptz, attempts integer not null default 0,
  run_after timestamptz, error text, note text)"""
#: A caller that is made to call one of these has run somebody else's code.
TROJANS = """
create schema evil; grant usage on schema evil to public;
create table evil.caught (what text); grant insert on evil.caught to public;
create table evil.jobs (like public.jobs including all);
create function evil.trap(a varchar, b varchar) returns boolean language plpgsql as
  $$ begin insert into evil.caught values ('varchar ='); return true; end $$;
create operator evil.= (leftarg = varchar, rightarg = varchar, procedure = evil.trap);
create function evil.trap(a public.state, b public.state) returns boolean language plpgsql as
  $$ begin insert into evil.caught values ('enum ='); return true; end $$;
create operator evil.= (leftarg = public.state, rightarg = public.state, procedure = evil.trap);
create function evil.trap(a integer, b integer) returns boolean language plpgsql as
  $$ begin insert into evil.caught values ('integer ='); return true; end $$;
create operator evil.= (leftarg = integer, rightarg = integer, procedure = evil.trap);
create function evil.now() returns timestamptz language plpgsql as
  $$ begin insert into evil.caught values ('now'); return '2100-01-01'; end $$;
create function evil.clock_timestamp() returns timestamptz language plpgsql as
  $$ begin insert into evil.caught values ('clock'); return '2100-01-01'; end $$;
create function evil.format(text, text, text) returns text language plpgsql as
  $$ begin insert into evil.caught values ('format'); return 'x'; end $$;
create function evil.date_trunc(text, timestamptz) returns timestamptz language plpgsql as
  $$ begin insert into evil.caught values ('trunc'); return '2100-01-01'; end $$;
create function evil.quote_ident(text) returns text language plpgsql as
  $$ begin insert into evil.caught values ('quote'); return 'x'; end $$;
create type evil.bigint as (a text); create type evil.jsonb as (a text);
create function evil.wanted(integer) returns boolean language plpgsql as
  $$ begin insert into evil.caught values ('wanted'); return true; end $$;
"""


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


async def handle(job: Any) -> None:
    return None


def work(db: Db, functions: Functions, *, setup: str = "", count: int = 4) -> list[Any]:
    """Every verb over one connection that was set up like this; what they answered."""

    async def run() -> list[Any]:
        connection = await asyncpg.connect(db.direct)
        try:
            await connection.execute(setup or "select 1")
            answers: list[Any] = []
            for end in ("complete", "fail", "release", "complete")[:count]:
                row = await connection.fetchrow(f"select * from {functions.full('claim')}('w')")
                assert row is not None
                held = functions.held(dict(row))
                listed = ", ".join(f"{quoted(name)} => ${i}" for i, name in enumerate(held, 1))
                if "heartbeat" in functions.functions:
                    answers.append(
                        await connection.fetchval(f"select {functions.full('heartbeat')}({listed})", *held.values())
                    )
                more = ', result => \'{"note": "n"}\'' if end == "complete" else ""
                answers.append(
                    await connection.fetchval(f"select {functions.full(end)}({listed}{more})", *held.values())
                )
            await connection.fetch(f"select * from {functions.full('sweep')}()")
            await connection.fetch(f"select * from {functions.full('claim_batch')}('w')")
            return answers
        finally:
            await connection.close()

    return asyncio.run(run())


RIGHT = [True, True, True, "retry", True, True, True, True]


def trojan_table(db: Db) -> Mill:
    db.execute("create type state as enum ('ready', 'running', 'done', 'dead')")
    db.execute(JOBS.format(table="jobs", kind="state"))
    db.execute("create function wanted(integer) returns boolean language sql as 'select true'")
    mill = Mill(db.url)
    mill.lane("jobs", name="jobs", where="wanted(attempts) and worker is distinct from 'x'::varchar", **STATES)(handle)
    return mill


PATHS = ("evil, pg_catalog, public", "evil, public", "pg_temp, evil")


@pytest.mark.parametrize("path", PATHS)
def test_a_hostile_search_path_gets_no_control(pg: Db, path: str) -> None:
    """Issue: trojan tables, types, operators and functions in the caller's path, before the server's, are not used."""
    mill = trojan_table(pg)
    functions = install_now(pg, mill)
    pg.execute(TROJANS)
    pg.execute("insert into jobs (note) select 'x' from generate_series(1, 5)")
    setup = f"set search_path = {path}; create temporary table jobs as select * from public.jobs"
    assert work(pg, functions, setup=setup) == RIGHT
    assert pg.query("select * from evil.caught") == []
    assert pg.value("select count(*) from public.jobs where status = 'done'") == 2


def test_the_trap_would_catch_a_statement_that_looks_names_up(pg: Db) -> None:
    """The test above can fail: the same comparison, said plainly, falls into the trap."""
    trojan_table(pg)
    pg.execute(TROJANS)
    pg.execute("insert into jobs (note) values ('x')")
    pg.execute(
        "set search_path = evil, pg_catalog, public;"
        " select 1 from public.jobs where status = 'ready' and now() > '2020-01-01'"
    )
    assert {row["what"] for row in pg.query("select * from evil.caught")} == {"enum =", "now"}


AUDIT = """
create table audit (id integer, said text);
create function note() returns trigger language plpgsql as
  $$ begin insert into audit values (new.id, new.status); return new; end $$;
create trigger noted after update on jobs for each row execute function note();
"""


def test_triggers_that_look_names_up_go_on_working_and_the_functions_stay_safe(pg: Db) -> None:
    """A trigger that finds its tables by the search_path needs one; an operator in it still gets no control."""
    mill = trojan_table(pg)
    pg.execute(AUDIT)
    functions = install_now(pg, mill)
    pg.execute(TROJANS.replace("create schema evil;", "create schema if not exists evil;"))
    # The same operators where the trigger's names are found.
    pg.execute("create operator public.= (leftarg = varchar, rightarg = varchar, procedure = evil.trap)")
    pg.execute("create operator public.= (leftarg = public.state, rightarg = public.state, procedure = evil.trap)")
    pg.execute("insert into jobs (note) select 'x' from generate_series(1, 5)")
    assert work(pg, functions, setup="set search_path = evil, pg_catalog, public") == RIGHT
    assert pg.query("select * from evil.caught") == []
    assert pg.value("select count(*) from audit where said = 'done'") == 2


def test_with_the_owners_rights_no_trigger_may_look_where_everybody_can_create(pg: Db) -> None:
    """security definer: refused while the trigger's path is open to all, taken when it is not."""
    mill = trojan_table(pg)
    pg.execute(AUDIT + "grant create on schema public to public")
    with pytest.raises(DeclarationError, match=r"noted.*anyone may create"):
        install_now(pg, mill, definer=True)
    pg.execute("alter function note() set search_path = public, pg_temp")
    assert install_now(pg, mill, definer=True).claim() is None
    pg.execute("alter function note() reset search_path; revoke create on schema public from public")
    assert install_now(pg, mill, definer=True).claim() is None


def _role(db: Db, name: str, grants: str = "") -> str:
    db.execute(f"do $$ begin create role {name}; exception when duplicate_object then null; end $$")
    db.execute(f"grant usage on schema public to {name}; {grants}")
    return f"set role {name}"


def test_nobody_may_call_them_until_somebody_is_named(pg: Db) -> None:
    """Issue: granted to nobody, also where default privileges grant every new function, as Supabase does."""
    mill = trojan_table(pg)
    setup = _role(pg, "anon", "alter default privileges in schema public grant execute on functions to anon")
    pg.execute("insert into jobs (note) select 'x' from generate_series(1, 5); grant all on jobs to anon")
    functions = install_now(pg, mill)
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for function"):
        work(pg, functions, setup=setup)
    install_now(pg, mill, grants=["anon"])
    assert work(pg, functions, setup=setup) == RIGHT
    install_now(pg, mill)
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for function"):
        work(pg, functions, setup=setup)
    pg.execute("alter default privileges in schema public revoke execute on functions from anon")


def test_the_least_rights_are_enough(pg: Db) -> None:
    """Issue: select and update with the caller's rights; none on the table with the owner's."""
    mill = trojan_table(pg)
    pg.execute("insert into jobs (note) select 'x' from generate_series(1, 12)")
    invoker = _role(pg, "least", "grant select, update on jobs to least")
    functions = install_now(pg, mill, grants=["least"])
    assert work(pg, functions, setup=invoker) == RIGHT
    pg.execute("revoke all on jobs from least")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied for table"):
        work(pg, functions, setup=invoker)
    pg.execute("update jobs set status = 'ready', run_after = null")
    assert work(pg, install_now(pg, mill, grants=["least"], definer=True), setup=invoker) == RIGHT


HOSTILE = (
    '"; drop table users; --',
    "O'Brien\\",
    "$rowmill$ $1 %s",
    "two\nlines; drop table users",
    "sélect 名",
    "user",
    "loop",
    "a.b",
    "x" * 63,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_names(pg: Db, name: str) -> None:
    """Issue: schema, table, columns, states, lane and functions of any name."""
    called = quoted(name)
    literal = "'" + name.replace("'", "''") + "'"
    pg.execute("create table users (id integer)")
    pg.execute(f"create schema {called}")
    pg.execute(
        f"create table {called}.{called} ({called} integer generated always as identity primary key,"
        f" status text default {literal}, note text, worker text, claimed_at timestamptz, attempts integer default 0)"
    )
    pg.execute(f"insert into {called}.{called} (note) select 'x' from generate_series(1, 6)")
    lane = name if len(name) < 40 else name[:30]
    states = {state: {"status": state} for state in ("running", "done", "dead")} | {"ready": {"status": name}}
    table = f"{called}.{called}"
    mill = Mill(pg.url)
    mill.lane(table, name=lane, **states)(handle)
    functions = install_now(pg, mill, prefix="f", names={"claim": name})
    assert work(pg, functions) == [True, "retry", True, True], name
    assert pg.value("select count(*) from users") == 0, "still there"


@pytest.mark.parametrize("name", HOSTILE[:4])
def test_a_printed_script_installs_what_apply_installs(pg: Db, command: Command, name: str) -> None:
    """Issue: the script is whole: run as it stands it leaves the same functions; --drop leaves none."""
    pg.execute("create table users (id integer)")
    pg.execute(JOBS.format(table="jobs", kind="text"))
    lane = name[:40]
    command.app(pg.url, f"mill.lane('jobs', name={lane!r}, **{STATES!r})(handler)")
    words = ["sql", lane, "--functions", f"--prefix={name[:40]}"]
    state = "select p.oid::regprocedure::text, prosrc, proconfig, proacl::text, description from pg_proc p join"
    state += " pg_description d on d.objoid = p.oid where pronamespace = 'public'::regnamespace order by 1"
    applied = command(*words, "--apply")
    assert applied.code == 0, applied.err
    by_apply = pg.query(state)
    assert len(by_apply) == 7
    dropped = command(*words, "--drop", "--apply")
    assert dropped.code == 0, dropped.err
    assert pg.query(state) == []
    pg.execute(command(*words).out)
    assert pg.query(state) == by_apply
    pg.execute(command(*words, "--drop").out)
    assert pg.query(state) == []
    assert pg.value("select count(*) from users") == 0
