"""Mistakes in a declaration: each is told before the first row is claimed, with the lane, the place and the fix."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import rowmill
from databases import Db
from rowmill import DeclarationError, Mill, RowmillError, Unreachable
from rowmill.testing import Kit
from rows import empty

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}
TABLE = """
create table jobs (
    id integer primary key, status text not null default 'ready', step integer not null default 1,
    flag boolean not null default false, worker text, claimed_at $time, attempts integer not null default 0,
    title text, note text
);
create table plain (id integer primary key, status text);
create table keyless (status text, worker text, claimed_at $time);
create table bare (id integer primary key, status text, worker text);
create table limited (id integer primary key, status text, worker text, claimed_at $time, max_attempts integer);
create table timed (id integer primary key, status text, worker text, claimed_at $time);
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """A database with a few tables, once of each kind."""
    db = empty(request, tmp_path, request.param)
    db.execute(TABLE.replace("$time", "timestamptz" if db.dialect == "postgresql" else "datetime"))
    return db


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


async def handle(job: Any) -> None:
    return None


async def asking(job: Any, htp: Any) -> None:
    return None


def says(error: RowmillError, *words: str) -> None:
    """The message and its ``Try:`` have all these words."""
    text = str(error)
    for word in words:
        assert word in text, f"{word!r} is missing in: {text}"


# -- what needs no database

#: the options that are wrong, and words of the answer
AT_ONCE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown parameter": ({"concurency": 3}, ("'concurency'", "did you mean 'concurrency'?")),
    "creation time as a role": ({"roles": {"created_at": "inserted"}}, ("'created_at' is not a role",
                                "order_by='inserted' instead of")),
    "unknown role": ({"roles": {"banana": "worker"}}, ("no role 'banana'", "one of attempts", "roles={")),
    "misspelled role": ({"roles": {"wroker": "w"}}, ("no role 'wroker'", "did you mean 'worker'?")),
    "running is ready": ({"running": {"status": "ready"}}, ("a running row would still be ready", "give running")),
    "running in ready": ({"ready": {"status": ["ready", "running"]}}, ("would still be ready",)),
    "running says nothing new": ({"running": {"other": 1}, "ready": {"status": "a", "other": [1, 2]}},
                                 ("would still be ready",)),
    "ignored states without a column": (
        {"running": {"status": "running", "note": "r"}, "done": {"status": "done", "note": "d"},
         "ignore_states": ["on_hold"]}, ("ignore_states", "'on_hold'", 'ignore_states=[{"status": ')),
    "ignored states that no lane could be in": ({"ignore_states": [{}]}, ("ignore_states", "{}")),
    "dead is ready again": ({"ready": {"status": ["ready", "bad"]}, "dead": {"status": "bad"}},
                            ("dead", "ready again", "forever")),
    "list in done": ({"done": {"status": ["a", "b"]}}, ("done['status']", "one value", "for ready only")),
    "list in running": ({"running": {"status": ["a"]}}, ("running['status']", "one value")),
    "empty list in ready": ({"ready": {"status": []}}, ("ready['status']", "at least one value")),
    "done without columns": ({"done": "done"}, ("done must be column values", 'done={"status": "done"}')),
    "empty done": ({"done": {}}, ("done must be column values",)),
    "ready in sql without retry": ({"ready": "status = 'x'"}, ("SQL condition", "add retry=")),
    "lease in seconds": ({"lease": 300}, ("lease must be a positive timedelta, not 300", "lease=timedelta(")),
    "no lease at all": ({"lease": td(0)}, ("lease must be a positive timedelta",)),
    "slow heartbeat": ({"lease": td(seconds=30), "heartbeat": td(seconds=20)}, ("heartbeat", "0:00:20", "0:00:15")),
    "no attempts": ({"max_attempts": 0}, ("max_attempts must be a whole number of at least 1",)),
    "half a batch": ({"batch": 1.5}, ("batch must be a whole number",)),
    "no slots": ({"concurrency": 0}, ("concurrency must be a whole number",)),
    "priority as a word": ({"priority": "high"}, ("priority", "'high'")),
    "a slot name of unknown parts": ({"slot_name": "{phase}-processor-{n}"}, ("slot_name", "{lane}")),
    "negative reclaims": ({"max_reclaims": -1}, ("max_reclaims must be 0 or more",)),
    "unknown renewal": ({"renew": "heartbeat"}, ("renew='heartbeat'", "did you mean 'heartbeat_at'?")),
    "unknown isolation": ({"isolation": "proces"}, ("isolation='proces'", "did you mean 'process'?")),
    "chunk of nothing": ({"chunk": 0}, ("chunk must be a whole number of at least 1, not 0", "chunk=64")),
    "chunk as a flag": ({"chunk": True}, ("chunk must be a whole number", "not True")),
    "chunk_wait without a chunk": ({"chunk_wait": td(seconds=1)}, ("chunk_wait is given without chunk", "chunk=64")),
    "chunk_wait in seconds": ({"chunk_wait": 0.2}, ("chunk_wait must be a positive timedelta, not 0.2",)),
    "a batch that fills no chunk": ({"chunk": 64, "batch": 10}, ("batch=10", "cannot fill a chunk of 64", "batch=64")),
    "backoff in seconds": ({"backoff": 30}, ("backoff must be", "fixed(")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", AT_ONCE)
def test_what_is_wrong_in_itself_is_told_at_the_declaration(mistake: str) -> None:
    """Issue, declaration: validated with messages that name lane and fix, with "did you mean"."""
    options, words = AT_ONCE[mistake]
    with pytest.raises(DeclarationError) as caught:
        Mill("sqlite:///jobs.db").lane("jobs", name="my_lane", **STATES | options)(handle)
    says(caught.value, "lane 'my_lane'", *words)


@pytest.mark.parametrize("state", ["ready", "running", "done"])
def test_a_lane_without_one_of_its_three_states_is_refused(state: str) -> None:
    """Issue, declaration: what is missing, and what it looks like."""
    options = {name: values for name, values in STATES.items() if name != state}
    with pytest.raises(DeclarationError) as caught:
        Mill("sqlite:///jobs.db").lane("jobs", name="my_lane", **options)(handle)
    says(caught.value, "lane 'my_lane'", f"{state} is missing", f'{state}={{"status"')


def test_a_handler_without_a_job_is_refused() -> None:
    """Issue, declaration: a mistake in the signature is told before it costs a row."""
    with pytest.raises(DeclarationError, match="takes no parameters"):
        Mill("sqlite:///jobs.db").lane("jobs", name="my_lane", **STATES)(lambda: None)


def many(jobs: Any) -> None: ...
def single(job: Any) -> None: ...
def hinted(row: rowmill.Job) -> None: ...
def yielding(jobs: Any) -> Iterator[None]:
    yield


def listed(jobs: list[rowmill.Job]) -> None: ...


def test_a_chunk_may_not_wait_as_long_as_its_lease() -> None:
    """Issue 23: never beyond the lease."""
    options = {"chunk": 4, "chunk_wait": td(seconds=40), "lease": td(minutes=1)}
    with pytest.raises(DeclarationError) as caught:
        Mill("sqlite:///jobs.db").lane("jobs", name="my_lane", **STATES | options)(many)
    says(caught.value, "lane 'my_lane'", "0:00:40", "lease of 0:01:00", "chunk_wait of at most 0:00:30")


@pytest.mark.parametrize(
    ("handler", "options", "words"),
    [
        (single, {"chunk": 4}, ("gets a list of jobs, but its first parameter is one job", "single(jobs: list[Job])")),
        (hinted, {"chunk": 4}, ("gets a list of jobs, but its first parameter is one job",)),
        (yielding, {"chunk": 4}, ("the handler yields", "a mapping by job.id")),
        (listed, {}, ("'jobs' is a list of jobs", "one job at a time", "chunk=64")),
    ],
    ids=["job", "hint", "generator", "list without chunk"],
)
def test_a_handler_that_does_not_fit_its_chunk_is_refused(
    handler: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Issue 23: one job where it gets many, or many where it gets one."""
    with pytest.raises(DeclarationError) as caught:
        Mill("sqlite:///jobs.db").lane("jobs", name="my_lane", **STATES | options)(handler)
    says(caught.value, "lane 'my_lane'", *words)


def test_a_lane_declared_without_its_table_is_refused() -> None:
    """Issue, declaration: ``@mill.lane`` without parentheses."""
    with pytest.raises(DeclarationError, match="needs the table"):
        Mill("sqlite:///jobs.db").lane(handle)


def test_two_lanes_of_one_name_are_refused() -> None:
    """Issue, declaration: names are what commands and logs call a lane by."""
    mill = Mill("sqlite:///jobs.db")
    mill.lane("jobs", **STATES)(handle)
    with pytest.raises(DeclarationError) as caught:
        mill.lane("others", **STATES)(handle)
    says(caught.value, "two lanes named 'handle'", 'name="..."')


def test_two_resources_of_one_name_are_refused() -> None:
    """Issue, declaration: a resource is asked for by its name."""
    mill = Mill("sqlite:///jobs.db")
    mill.resource(name="http")(lambda: 1)
    with pytest.raises(DeclarationError, match="two resources named 'http'"):
        mill.resource(name="http")(lambda: 2)


def _declared(mill: Mill, handler: Callable[..., Any] = handle, **options: Any) -> Mill:
    mill.lane("jobs", name="my_lane", **STATES | options)(handler)
    return mill


LITE = "sqlite:///jobs.db"


def _nested() -> Mill:
    mill = _declared(Mill(LITE), lambda job, page: None)
    mill.resource(name="page")(lambda browsr: browsr)
    mill.resource(name="browser")(lambda: 1)
    return mill


def _circle() -> Mill:
    mill = _declared(Mill(LITE), lambda job, hen: None)
    mill.resource(name="hen")(lambda egg: egg)
    mill.resource(name="egg")(lambda hen: hen)
    return mill


def _inside() -> Callable[..., Any]:
    async def local(job: Any) -> None:
        return None

    return local


#: a Mill with a mistake that shows when a worker is made, and words of the answer
AT_THE_WORKER: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "unknown resource": (lambda: _declared(Mill(LITE), asking).worker(),
                         ("lane 'my_lane'", "needs the resource 'htp'", "@mill.resource")),
    "unknown resource of a resource": (lambda: _nested().worker(), ("'browsr'", "did you mean 'browser'?")),
    "resources in a circle": (lambda: _circle().worker(), ("hen", "egg")),
    "unknown environment of a lane": (lambda: _declared(Mill({"prod": LITE}), environments=["prd"]).worker(),
                                      ("lane 'my_lane'", "no environment 'prd'", "did you mean 'prod'?")),
    "environments as one word": (lambda: _declared(Mill({"prod": LITE}), environments="prd").worker(),
                                 ("lane 'my_lane'", "'prd'")),
    "unknown environment": (lambda: _declared(Mill({"prod": LITE})).worker(environments=["stagin"]),
                            ("no environment 'stagin'",)),
    "unknown lane": (lambda: _declared(Mill(LITE)).worker(lanes=["my_lan"]),
                     ("no lane 'my_lan'", "did you mean 'my_lane'?")),
    "no lanes": (lambda: Mill(LITE).worker(), ("no lanes", "@mill.lane")),
    "unknown kind of database": (lambda: _declared(Mill("mysql://u:secret@h/db")).worker(),
                                 ("mysql://u:***@h/db", "postgresql://", "sqlite:///")),
    "an environment without a url": (lambda: _declared(Mill({"prod": None})).worker(), ("'prod'", "postgresql://")),
    "no url at all": (lambda: _declared(Mill("jobs.db")).worker(), ("'jobs.db'", "sqlite:///")),
    "memory": (lambda: _declared(Mill("sqlite:///:memory:")).worker(), ("in memory", "sqlite:///jobs.db")),
    "memory, shorter": (lambda: _declared(Mill("sqlite://")).worker(), ("in memory", "sqlite:///jobs.db")),
    "a handler nobody can import": (lambda: _declared(Mill(LITE), _inside(), isolation="process").worker(),
                                    ("lane 'my_lane'", "import", "at the top of a module")),
    "a lambda in a process": (lambda: _declared(Mill(LITE), lambda job: None, isolation="process").worker(),
                              ("lane 'my_lane'", "import")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", AT_THE_WORKER)
def test_what_is_wrong_among_the_parts_of_a_mill_is_told_when_a_worker_is_made(mistake: str) -> None:
    """Issue, declaration: resources, environments, URLs, handlers; passwords are never shown."""
    make, words = AT_THE_WORKER[mistake]
    with pytest.raises(DeclarationError) as caught:
        make()
    says(caught.value, *words)
    assert "secret" not in str(caught.value)


def test_a_mill_without_a_database_says_where_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN, command line: ROWMILL_DATABASE_URL stands in."""
    monkeypatch.delenv("ROWMILL_DATABASE_URL", raising=False)
    with pytest.raises(DeclarationError, match="ROWMILL_DATABASE_URL"):
        _ = Mill().environments
    monkeypatch.setenv("ROWMILL_DATABASE_URL", LITE)
    assert Mill().environments == {"default": LITE}


# -- what only the table can tell


async def refused(db: Db, table: Any, **options: Any) -> DeclarationError:
    """What the table's database answers to a declaration."""
    mill = Mill(db.url)
    mill.lane(table, name="my_lane", **STATES | options)(handle)
    async with Kit(mill) as kit:
        with pytest.raises(DeclarationError) as caught:
            await kit.store()
    says(caught.value, "lane 'my_lane'")
    return caught.value


#: table, options, words of the answer
BY_THE_TABLE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "wrong table": ("jbs", {}, ("no table 'jbs'", "environment 'default'", "did you mean 'jobs'?")),
    "wrong schema": ("nowhere.jobs", {}, ("no table 'nowhere.jobs'",)),
    "wrong column": ("jobs", {"done": {"status": "done", "stauts": "x"}},
                     ("'jobs'", "done", "'stauts'", "did you mean 'status'?")),
    "done leaves it running": ("jobs", {"done": {"flag": True}}, ("done", "still look as if it were running")),
    "dead leaves it running": ("jobs", {"dead": {"flag": True}}, ("dead", "still look as if it were running")),
    "retry leaves it running": ("jobs", {"retry": {"flag": True}}, ("retry", "still look as if it were running")),
    "ready in another column": ("jobs", {"ready": {"note": "ready"}}, ("still be ready", "ready looks at 'note'")),
    "misspelled column in ready": ("jobs", {"ready": {"statuss": "ready"}},
                                   ("ready: there is no column 'statuss'", "did you mean 'status'?")),
    "misspelled column in running": ("jobs", {"running": {"statuss": "running"}},
                                     ("running: there is no column 'statuss'", "did you mean 'status'?")),
    "misspelled column in done": ("jobs", {"done": {"statuss": "done"}},
                                  ("done: there is no column 'statuss'", "did you mean 'status'?")),
    "misspelled column in an ignored state": ("jobs", {"ignore_states": [{"statuss": "on_hold"}]},
                                              ("ignore_states: there is no column 'statuss'", "'status'?")),
    "an ignored state of another type": ("jobs", {"ignore_states": [7]}, ("ignore_states['status']", "str value")),
    "wrong column in ready": ("jobs", {"ready": {"stat": 1, "status": "ready"}}, ("ready", "no column 'stat'")),
    "wrong column of a role": ("jobs", {"roles": {"error": "titel"}}, ("role error", "did you mean 'title'?")),
    "wrong column in the order": ("jobs", {"order_by": ["step", "creatd"]}, ("order_by", "no column 'creatd'")),
    "wrong direction in the order": ("jobs", {"order_by": ["step descending"]}, ("order_by", "step descending")),
    "nulls in the order": ("jobs", {"order_by": ["step desc nulls first"]}, ("order_by",)),
    "text for a number": ("jobs", {"done": {"status": "done", "step": "3"}},
                          ("done['step']", "'3'", "INTEGER", "int value")),
    "number for text": ("jobs", {"done": {"status": 3}}, ("done['status']", "3", "str value")),
    "number for a flag": ("jobs", {"done": {"status": "done", "flag": 1}},
                          ("done['flag']", "BOOLEAN", "bool value")),
    "null for a column that has none": ("jobs", {"done": {"status": None}}, ("done['status']", "NOT NULL")),
    "a role on text": ("jobs", {"roles": {"attempts": "title"}},
                       ("'title'", "TEXT", "attempts", "whole number", '{"attempts": None}')),
    "a role on a number": ("jobs", {"roles": {"worker": "step"}}, ("'step'", "INTEGER", "worker", "text")),
    "a running that a role would overwrite": (
        "jobs", {"running": {"status": "running", "attempts": 99}},
        ("running sets 'attempts' to 99", '{"attempts": None}')),
    "no key": ("keyless", {}, ("'keyless'", "no primary key", "add primary key")),
    "no fence": ("plain", {}, ("'plain'", "neither a worker nor a claimed_at", "unfenced=True")),
    "nothing to count in": ("timed", {"max_attempts": 3},
                            ("max_attempts=3", "no column to count", 'roles={"attempts"')),
    "a limit of each row and nothing to count in": ("limited", {}, ("max_attempts", "count")),
    "no end": ("timed", {"dead": None}, ("dead is left out", 'dead={"status"', 'roles={"failures"')),
    "timeout beyond the lease": ("timed", {"timeout": td(minutes=5)},
                                 ("timeout of 0:05:00", "lease of 0:05:00", "at most 0:04:30", 'renew="claimed_at"')),
    "renewal without its column": ("timed", {"renew": "heartbeat_at"}, ("no column has the role heartbeat_at",)),
    "untouched without its column": ("timed", {"untouched_for": td(seconds=30)}, ("untouched_for", "updated_at")),
    "done without a pause": ("timed", {"done": {"status": "ready"}}, ("done is ready again", "run_after")),
    "a condition on no column": ("jobs", {"where": "nope = 1"}, ("where", "nope")),
    "a condition that is no sql": ("jobs", {"where": "status ="}, ("where",)),
    "a condition built on no column": ("jobs", {"where": lambda t: t.c.nope == 1}, ("where", "nope")),
    "ready on no column": ("jobs", {"ready": "nope = 1", "retry": {"status": "ready"}}, ("ready", "nope")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BY_THE_TABLE)
async def test_what_the_table_does_not_have_is_told_before_the_first_claim(db: Db, mistake: str) -> None:
    """Issue: wrong table, wrong column, wrong value; messages name lane, table, column and fix."""
    table, options, words = BY_THE_TABLE[mistake]
    says(await refused(db, table, **options), *words)


@pytest.mark.parametrize("kind", ["view", "materialized view"])
async def test_a_lane_over_a_view_names_the_view_and_what_to_do(db: Db, kind: str) -> None:
    """Issue: a view has no primary key, and cannot be given one."""
    if kind == "materialized view" and db.dialect == "sqlite":
        pytest.skip("SQLite has none")
    db.execute(f"create {kind} open_jobs as select * from jobs where flag = false")
    error = await refused(db, "open_jobs")
    says(error, f"'open_jobs' is a {kind}", "name the table behind it", "where=")
    assert "primary key" not in str(error)


async def test_a_status_value_that_the_enum_lacks_is_told_with_the_nearest(pg: Db) -> None:
    """Issue: a status value that the enum lacks."""
    pg.execute("create type mood as enum ('ready', 'running', 'done', 'dead')")
    pg.execute("create table jobs (id int primary key, status mood, worker text, claimed_at timestamptz)")
    error = await refused(pg, "jobs", done={"status": "donne"})
    says(error, "'jobs'", "done['status']", "the enum mood has no value 'donne'", "did you mean 'done'?")


async def test_a_python_enum_is_checked_by_its_names(db: Db) -> None:
    """Issue: a status value that the model's enum lacks."""
    mood = enum.Enum("Mood", ["ready", "running", "done", "dead"])
    table = sa.Table(
        "jobs", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("status", sa.Enum(mood))
    )
    says(await refused(db, table, done={"status": "finished"}), "no value 'finished'", "one of dead, done")


async def test_a_uuid_column_cannot_hold_a_worker(pg: Db) -> None:
    """Issue: a role on a column of the wrong type."""
    pg.execute("create table jobs (id int primary key, status text, by uuid, claimed_at timestamptz)")
    says(await refused(pg, "jobs", roles={"worker": "by"}), "'by'", "UUID", "worker", "text")


async def test_what_a_table_lacks_may_be_done_without(db: Db) -> None:
    """DESIGN: a lane does without; unfenced=True accepts the risk; a role that is None is off."""
    mill = Mill(db.url)
    mill.lane("jobs", name="off", **STATES, roles={"attempts": None, "worker": None})(handle)
    mill.lane("bare", name="worker_alone", **STATES)(handle)
    mill.lane("timed", name="timeout", **STATES, timeout=td(minutes=4, seconds=30))(handle)
    mill.lane("timed", name="renewed", **STATES, timeout=td(hours=1), renew="claimed_at")(handle)
    async with Kit(mill) as kit:
        assert dict((await kit.store("off")).binding.roles) == {"claimed_at": "claimed_at"}
        assert (await kit.store("worker_alone")).needs_workers_table
        assert (await kit.store("timeout")).binding.timeout == td(minutes=4, seconds=30)
        assert (await kit.store("renewed")).binding.timeout == td(hours=1)


# -- databases that are not there


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@127.0.0.1:1/db",
        "postgresql://u:secret@no-such-host.invalid/db",
        "postgresql://u:secret@127.0.0.1:port/db",
        "sqlite:////no/such/folder/jobs.db",
    ],
)
async def test_a_database_that_cannot_be_reached_is_told_without_its_password(url: str) -> None:
    """Issue: an unreachable database."""
    async with Kit(_declared(Mill(url))) as kit:
        with pytest.raises(RowmillError) as caught:
            await kit.store()
    says(caught.value, "cannot", "Try: ")
    assert isinstance(caught.value, DeclarationError if ":port" in url or "sqlite" in url else Unreachable)
    assert "secret" not in str(caught.value)


async def test_a_database_of_another_name_is_told_by_the_server(pg: Db) -> None:
    """Issue: an unreachable database: the server is there, the database is not."""
    url = pg.url.replace("/test_shared?", "/nowhere?")
    async with Kit(_declared(Mill(url))) as kit:
        with pytest.raises(Unreachable, match="there is no database 'nowhere'"):
            await kit.store()
