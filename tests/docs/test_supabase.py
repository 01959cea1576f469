"""docs/how-to/supabase.md: what PostgREST sends to the database, as its role, under row level security."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databases import Db
from rowmill import Mill
from sqlworker import installed

pytestmark = pytest.mark.no_pooler("roles and settings of a transaction, as PostgREST sets them")
PAGE = (Path(__file__).parents[2] / "docs/how-to/supabase.md").read_text()
TABLE = """create table links (id bigint generated always as identity primary key, owner uuid, url text not null,
  status text not null default 'new', title text, worker text, claimed_at timestamptz, heartbeat_at timestamptz,
  attempts integer not null default 0, run_after timestamptz, error text)"""
#: What Supabase has before anybody begins.
SUPABASE = """
create role authenticator noinherit login; create role authenticated nologin; create role anon nologin;
grant anon, authenticated to authenticator;
grant usage on schema public to anon, authenticated; grant select on links to anon, authenticated;
create schema auth; grant usage on schema auth to authenticated;
create function auth.uid() returns uuid language sql stable as
  $$ select (current_setting('request.jwt.claims', true)::json ->> 'sub')::uuid $$;
"""
USER = "11111111-1111-4111-8111-111111111111"


async def rpc(db: Db, role: str, function: str, body: dict[str, Any]) -> Any:
    """A request for a function, as PostgREST makes it: one transaction, the token's role, arguments by name."""
    connection = await asyncpg.connect(db.direct.replace("postgres:", "authenticator:", 1))
    try:
        async with connection.transaction():
            await connection.execute("select set_config('search_path', 'worker_api, public', true),"
                                     " set_config('role', $1, true), set_config('request.jwt.claims', $2, true)",
                                     role, json.dumps({"role": role, "sub": USER}))  # fmt: skip
            types = {"id": "bigint", "attempts": "int", "claimed_at": "timestamptz", "result": "jsonb"}
            listed = ", ".join(f'"{name}" {types.get(name, "text")}' for name in body)
            named = ", ".join(f'"{name}" := pgrst_body."{name}"' for name in body)
            rows = await connection.fetch(
                "with pgrst_source as (select pgrst_call.* from (select $1::json as json_data) pgrst_payload,"
                f" lateral (select * from json_to_record(pgrst_payload.json_data) as _({listed}) limit 1) pgrst_body,"
                f' lateral "worker_api"."{function}"({named}) pgrst_call)'
                " select coalesce(json_agg(_t), '[]')::text as body from pgrst_source _t",
                json.dumps(body),
            )
            return json.loads(rows[0]["body"])
    finally:
        await connection.close()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


async def test_a_worker_over_postgrest_claims_and_settles_and_nobody_else_can(pg: Db) -> None:
    """Issue 25, point 5: the page's roles, functions, requests and policy, on a real server."""
    pg.execute(TABLE)
    roles = "authenticator, authenticated, anon, link_worker"
    try:
        pg.execute(SUPABASE)
        for text in fenced("sql"):
            pg.execute(text)
        mill = Mill(pg.url)
        states = {"ready": {"status": "new"}, "running": {"status": "now"}, "done": {"status": "done"}}
        mill.lane("links", name="fetch", dead={"status": "dead"}, max_attempts=1, **states)(print)
        await installed(pg, mill, "fetch", schema="worker_api", definer=True, grants=["link_worker"])
        pg.execute("insert into links (url, owner) values ('a', ?), ('b', null)", USER)

        (row,) = await rpc(pg, "link_worker", "fetch_claim_next", {"worker": "edge-1"})
        mark = ("id", "worker", "claimed_at", "attempts")
        held = {name: row[name] for name in mark}
        assert (row["url"], held["worker"]) == ("a", "edge-1")
        assert all(answer != [] for answer in [await rpc(pg, "link_worker", "fetch_heartbeat", held)])
        await rpc(pg, "link_worker", "fetch_complete", {**held, "result": {"title": "A"}})
        (second,) = await rpc(pg, "link_worker", "fetch_claim_next", {"worker": "edge-1"})
        again = {name: second[name] for name in mark}
        await rpc(pg, "link_worker", "fetch_fail", {**again, "error": "HTTP 503"})
        assert await rpc(pg, "link_worker", "fetch_claim_next", {"worker": "edge-1"}) == []
        assert pg.query("select url, status, title, error from links order by id") == [
            {"url": "a", "status": "done", "title": "A", "error": None},
            {"url": "b", "status": "dead", "title": None, "error": "HTTP 503"},
        ]  # fmt: skip
        # Users other than the worker.
        for role in ("anon", "authenticated"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await rpc(pg, role, "fetch_claim_next", {"worker": "thief"})
        user = await asyncpg.connect(pg.direct.replace("postgres:", "authenticator:", 1))
        async with user.transaction():
            await user.execute("select set_config('role', 'authenticated', true),"
                               " set_config('request.jwt.claims', $1, true)", json.dumps({"sub": USER}))  # fmt: skip
            assert [r["url"] for r in await user.fetch("select url from links")] == ["a"]
        await user.close()
    finally:
        pg.execute(f"drop owned by {roles} cascade; drop role if exists {roles}")


def test_the_edge_function_calls_functions_and_parameters_that_there_are() -> None:
    """Its calls are those that the test above makes."""
    (code,) = fenced("ts")
    calls = set(re.findall(r"db\.rpc\('(\w+)', (.*?)\)(?:,|\n| )", code))
    assert {name for name, _ in calls} == {"fetch_claim_next", "fetch_heartbeat", "fetch_complete", "fetch_fail"}
    assert "{ id: row.id, worker: row.worker, claimed_at: row.claimed_at, attempts: row.attempts }" in code
