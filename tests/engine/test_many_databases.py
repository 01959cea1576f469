"""Many databases or schemas as one mill: turns, bounded connections, environments that come, go, rest and fail."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta as td
from typing import Any

import pytest

from databases import Db
from farm import JOBS
from rowmill import DeclarationError, Mill, Snooze, WrongArguments, from_table
from rowmill.store.connection_limit import ConnectionLimit, ConnectionShares
from workers import STATES, events_of, jobs, until, working


def schema_url(url: str, schema: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}search_path={schema}"


def tenants(pg: Db, names: list[str], rows: dict[str, int]) -> dict[str, str]:
    """A schema for each tenant, with ready rows; their URLs."""
    for name in names:
        pg.execute(f"create schema {name}")
        pg.execute(f"set search_path to {name}; {JOBS['postgresql']}")
        pg.execute(f"insert into {name}.jobs (note) select null from generate_series(1, {rows.get(name, 0)})")
    return {name: schema_url(pg.url, name) for name in names}


def done(pg: Db, names: Any) -> int:
    text = " union all ".join(f"select count(*) as n from {name}.jobs where status = 'done'" for name in names)
    return int(pg.value(f"select sum(n) from ({text}) x"))


def lane(mill: Mill, handler: Callable[[Any], Any], **options: Any) -> None:
    async def work(job: Any) -> Any:
        return await handler(job)

    mill.lane("jobs", **STATES, **{"poll": td(seconds=0.2), **options})(work)


async def test_a_busy_environment_does_not_starve_the_others(db: Db, fresh: Callable[[str], Db]) -> None:
    """Fair order: rows that come to the small ones are all started beside one whose rows never end."""
    others = {f"small{n}": fresh(db.dialect) for n in range(3)}
    jobs(db, 100)
    for other in others.values():
        jobs(other, 0)
    starts: Counter[str] = Counter()
    mill = Mill({"busy": db.url} | {name: other.url for name, other in others.items()}, order="fair")

    async def handler(job: Any) -> Any:
        starts[job.environment] += 1
        await asyncio.sleep(0.001)
        return Snooze(td(0)) if job.environment == "busy" else None

    lane(mill, handler)
    async with working(mill, concurrency=4):
        await until(lambda: starts["busy"] > 20)  # every slot is the busy one's before the others have a row
        for other in others.values():
            other.execute("insert into jobs (note) values " + ", ".join(["(null)"] * 10))
        await until(lambda: all(starts[name] == 10 for name in others))
        before = starts["busy"]
        await until(lambda: starts["busy"] > before + 20)  # nor do they starve the busy one


async def test_slots_are_shared_by_weight(pg: Db) -> None:
    """An environment of weight 9 gets most of the slot time beside one of weight 1, whose runs take longer."""
    urls = tenants(pg, ["heavy", "light"], {"heavy": 3000, "light": 3000})
    used: Counter[str] = Counter()
    mill = Mill(urls, order="fair", weights={"heavy": 9})

    async def handler(job: Any) -> None:
        began = time.monotonic()
        await asyncio.sleep(0.02 if job.environment == "light" else 0.005)
        used[job.environment] += time.monotonic() - began  # type: ignore[assignment]

    lane(mill, handler)
    async with working(mill, concurrency=4) as worker:
        await until(lambda: min(used.values(), default=0) > 0.2 and len(used) == 2)
        before = dict(used)
        await until(lambda: sum(used.values()) - sum(before.values()) > 5)
        spent = {name: used[name] - before[name] for name in used}
        worker.stop()
    assert spent["heavy"] / sum(spent.values()) > 0.65  # 0.9, less what the light one gets while a claim is on its way


def test_the_environment_that_had_least_is_never_held_back(lite: Db) -> None:
    """Its runs were shorter than estimated, so its tag is lower than before its last claim."""
    mill = Mill({"one": lite.url}, order="fair")
    lane(mill, lambda job: None)
    worker = mill.worker()
    (environment,) = worker.environments
    turns = worker.turns
    turns._tags[environment], turns._before[environment], turns._lowest = 1.0, 2.0, 1.0
    assert not turns.has_to_wait(environment)
    turns._lowest = 0.5
    assert turns.has_to_wait(environment)


async def test_connections_stay_within_the_bound(pg: Db) -> None:
    """Twelve schemas with work at the same time, in ten connections: each of them does its work."""
    names = [f"t{n}" for n in range(12)]
    urls = tenants(pg, names, dict.fromkeys(names, 3))
    mill = Mill(urls, order="fair", max_connections=10)
    most, over = 0, False

    def watch() -> None:
        nonlocal most
        while not over:
            count = pg.value("select count(*) from pg_stat_activity where datname = current_database()"
                             " and pid <> pg_backend_pid() and backend_type = 'client backend'")  # fmt: skip
            most = max(most, count)
            time.sleep(0.02)

    async def handler(job: Any) -> None:
        async with job.finish() as tx:  # its connection counts, too
            tx.set(note="finished")

    lane(mill, handler)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        async with working(mill) as worker:
            await until(lambda: done(pg, names) == 36)
            assert sum(limit.peak for limit in vars(worker.shares).values()) <= 10
    finally:
        over = True
        watching.join()
    assert 0 < most <= 10


async def test_databases_are_added_and_dropped_while_it_runs(pg: Db, fresh: Callable[[str], Db]) -> None:
    """The list is a table: a row that comes is served, one that goes is closed, and its database can be dropped."""
    pg.execute("create table tenants (slug text primary key, dsn text, active boolean default true)")
    first, second = fresh("postgresql"), fresh("postgresql")
    for tenant in (first, second):
        jobs(tenant, 2)
    pg.execute("insert into tenants values ('first', ?)", first.url)
    mill = Mill(environments=from_table(pg.url, "tenants", name="slug", url="dsn", where="active"),
                refresh=td(seconds=0.1))  # fmt: skip
    seen = events_of(mill)
    ran: Counter[str] = Counter()

    async def handler(job: Any) -> None:
        ran[job.environment] += 1

    lane(mill, handler)
    async with working(mill) as worker:
        await until(lambda: ran["first"] == 2)
        pg.execute("insert into tenants values ('second', ?)", second.url)
        await until(lambda: ran["second"] == 2)
        await until(lambda: second.value("select count(*) from jobs where status = 'done'") == 2)
        pg.execute("update tenants set active = false where slug = 'second'")
        await until(lambda: [environment.name for environment in worker.environments] == ["first"])
        name = second.value("select current_database()")
        here = f"select count(*) from pg_stat_activity where datname = '{name}'"
        await until(lambda: pg.value(here) == 0)
        first.execute("insert into jobs (note) values (null)")
        await until(lambda: ran["first"] == 3)
    told = [(event.name, event.fields["environment"]) for event in seen if event.name.startswith("environment_")]
    assert ("environment_added", "second") in told
    assert ("environment_removed", "second") in told


async def test_a_run_ends_before_its_removed_environment_is_closed(db: Db, fresh: Callable[[str], Db]) -> None:
    """Nothing more is claimed there, and what runs is settled."""
    jobs(db, 3)
    listed = {"one": db.url}
    mill, go = Mill(lambda: listed, refresh=td(seconds=0.05)), asyncio.Event()
    running: list[Any] = []

    async def handler(job: Any) -> None:
        running.append(job.id)
        await go.wait()

    lane(mill, handler, concurrency=1, batch=1)
    async with working(mill) as worker:
        await until(lambda: running)
        listed.clear()
        await until(lambda: worker.environments[0].leaving)
        go.set()
        await until(lambda: not worker.environments)
    assert len(running) == 1
    assert db.value("select count(*) from jobs where status = 'done'") == 1


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield f"postgresql://nobody@127.0.0.1:{listening.getsockname()[1]}/nothing?sslmode=disable"


async def test_one_that_does_not_answer_costs_the_others_nothing(pg: Db, black_hole: str) -> None:
    """Its connection attempts go on while the others work, at first and afterwards."""
    names = [f"t{n}" for n in range(4)]
    urls = {f"hole{n}": black_hole for n in range(3)} | tenants(pg, names, dict.fromkeys(names, 5))
    mill = Mill(urls, order="fair", max_connections=10)

    async def handler(job: Any) -> None: ...

    lane(mill, handler)
    async with working(mill) as worker:
        await until(lambda: done(pg, names) == 20)
        assert {environment.name for environment in worker.environments if environment.opened} == set(names)
        worker.stop()
        worker.stop()


async def test_one_that_is_slow_costs_the_others_nothing(pg: Db) -> None:
    """Its claim waits for a lock on its table, and keeps no slots from the others meanwhile."""
    names = ["slow", "quick"]
    urls = tenants(pg, names, {"slow": 5})
    mill = Mill(urls, order="fair", max_connections=10)
    seen = events_of(mill)
    ran: Counter[str] = Counter()

    async def handler(job: Any) -> None:
        ran[job.environment] += 1

    lane(mill, handler, concurrency=1, batch=1)
    locked, release = threading.Event(), threading.Event()

    async def hold(connection: Any) -> None:
        async with connection.transaction():
            await connection.execute("lock table slow.jobs in access exclusive mode")
            locked.set()
            await asyncio.to_thread(release.wait, 60)

    async with working(mill) as worker:
        await until(lambda: ran["slow"] == 5 and done(pg, ["slow"]) == 5)
        holder = threading.Thread(target=lambda: pg.connected(hold))
        holder.start()
        try:
            await asyncio.to_thread(locked.wait, 60)
            worker.environments[0].wake()
            await until(lambda: worker.turns.busy)
            for count in range(1, 4):
                pg.execute("insert into quick.jobs (note) values (null)")
                await until(lambda count=count: ran["quick"] == count)
            assert pg.value("select count(*) from pg_locks where not granted") > 0
            # Not only after the slow statement was given up.
            assert not [event for event in seen if event.name in ("environment_down", "environment_busy")]
        finally:
            release.set()
            holder.join()
        pg.execute("insert into slow.jobs (note) values (null)")
        await until(lambda: ran["slow"] == 6)


async def test_an_environment_without_work_is_closed_until_it_has_some(db: Db) -> None:
    """It keeps no connection and no heartbeat, and is found by the poll."""
    jobs(db, 1)
    mill = Mill({"one": db.url}, order="fair", rest_after=td(seconds=0.1))
    ran: list[Any] = []

    async def handler(job: Any) -> None:
        ran.append(job.id)

    lane(mill, handler)
    async with working(mill) as worker:
        (environment,) = worker.environments
        for count in (1, 2):
            await until(lambda count=count: len(ran) == count)
            await until(lambda: not environment.opened)
            assert db.value("select state from rowmill_workers") == "stopped"
            db.execute("insert into jobs (note) values (null)")
        await until(lambda: len(ran) == 3)


async def test_rows_that_a_dead_worker_left_in_a_closed_environment_come_back(db: Db) -> None:
    """Nothing is ready there: a running row is reason enough to look."""
    jobs(db, 1)
    mill = Mill({"one": db.url}, order="fair", rest_after=td(seconds=0.1))
    ran: list[Any] = []

    async def handler(job: Any) -> None:
        ran.append(job.id)

    lane(mill, handler, lease=td(seconds=30), sweep_every=td(seconds=0.2))
    async with working(mill) as worker:
        await until(lambda: len(ran) == 1 and not worker.environments[0].opened)
        long_ago = "now() - interval '1 day'" if db.dialect == "postgresql" else "'2001-01-01 00:00:00.000'"
        db.execute(
            "insert into jobs (status, worker, claimed_at, heartbeat_at, attempts)"
            f" values ('running', 'gone', {long_ago}, {long_ago}, 1)"
        )
        await until(lambda: len(ran) == 2)


async def test_a_list_that_cannot_be_read_changes_nothing(db: Db) -> None:
    """The environments that are known are served on, and it is said once."""
    jobs(db, 1)
    broken = False

    async def listed() -> dict[str, str]:
        if broken:
            raise OSError("no such host")
        return {"one": db.url}

    mill = Mill(listed, refresh=td(seconds=0.05))
    seen, ran = events_of(mill), []

    async def handler(job: Any) -> None:
        ran.append(job.id)

    lane(mill, handler)
    async with working(mill):
        await until(lambda: len(ran) == 1)
        broken = True
        await until(lambda: any(event.name == "environments_unlisted" for event in seen))
        db.execute("insert into jobs (note) values (null)")
        await until(lambda: len(ran) == 2)
    assert len([event for event in seen if event.name == "environments_unlisted"]) == 1


async def test_one_wrong_environment_stops_no_other_and_all_wrong_stop_the_worker(
    db: Db, fresh: Callable[[str], Db]
) -> None:
    """A tenant without the table is told of; where no environment has it, the declaration is wrong."""
    wrong = fresh(db.dialect)
    jobs(db, 1)
    mill = Mill({"wrong": wrong.url, "right": db.url}, order="fair")
    seen, ran = events_of(mill), []

    async def handler(job: Any) -> None:
        ran.append(job.environment)

    lane(mill, handler)
    async with working(mill):
        await until(lambda: ran == ["right"])
        await until(lambda: any(event.name == "environment_wrong" for event in seen))
    mill = Mill({"wrong": wrong.url}, order="fair")
    lane(mill, handler)
    with pytest.raises(DeclarationError, match="jobs"):
        await mill.worker().run()


async def test_a_template_of_urls_names_columns(pg: Db) -> None:
    """Tenants that are schemas need no URL each. Values are escaped."""
    names = ["t1", "Weird&Name"]
    pg.execute("create table tenants (name text, schema text, part float)")
    pg.execute("insert into tenants values ('a', 't1', 2.5), ('b', ?, null)", names[1])
    template = schema_url(pg.url.replace("{", "{{"), "{schema}")
    mill = Mill(environments=from_table(pg.url, "public.tenants", url=template, weight="part"))
    assert mill.environments == {"a": schema_url(pg.url, "t1"), "b": schema_url(pg.url, "Weird%26Name")}
    assert [mill._weight(name) for name in ("a", "b")] == [2.5, 1.0]


async def test_a_task_goes_to_the_environment_that_is_named(db: Db, fresh: Callable[[str], Db]) -> None:
    """One that was added since is found, and none is taken for the default."""
    listed = {"one": db.url}
    mill = Mill(lambda: listed)

    @mill.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    assert list(mill.environments) == ["one"]
    listed["two"] = fresh(db.dialect).url
    handle = await greet.options(env="two").enqueue(name="you")
    async with working(mill):
        assert await handle.result(timeout=60) == "hello you"
    with pytest.raises(WrongArguments, match="must name one"):
        await greet.enqueue(name="you")
    with pytest.raises(WrongArguments, match="three"):
        await greet.options(env="three").enqueue(name="you")
    await mill.close()


@pytest.mark.parametrize(
    "options",
    [{"order": "quick"}, {"max_connections": 2}, {"refresh": td()}, {"rest_after": 60}],
    ids=["order", "connections", "refresh", "rest"],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """Each with what it must be."""
    with pytest.raises(DeclarationError, match="must be"):
        Mill("sqlite:///x.db", **options)


@pytest.mark.parametrize("answer", [{"one": None}, {"": "sqlite:///x.db"}, {1: "sqlite:///x.db"}])
def test_a_list_that_is_no_mapping_of_names_to_urls_is_refused(answer: Any) -> None:
    """It says which entry is wrong."""
    with pytest.raises(DeclarationError, match="is listed with the URL"):
        _ = Mill(lambda: answer).environments


def test_the_parts_of_a_bound_add_up_to_it() -> None:
    """None is without a connection."""
    for most in range(ConnectionShares.LEAST, 100):
        parts = [limit.most for limit in vars(ConnectionShares.of(most)).values()]
        assert sum(parts) == most
        assert min(parts) >= 1


async def test_a_place_that_nobody_waits_for_any_more_is_not_lost() -> None:
    """Who stops waiting leaves the place to the next."""
    limit = ConnectionLimit(1)
    async with limit.place(True, 60):
        waiting = asyncio.create_task(_hold(limit))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    limit.give_back()
    assert limit.open == 0
    async with limit.place(True, 60):
        assert limit.open == 1


async def _hold(limit: ConnectionLimit) -> None:
    async with limit.place(True, 60):
        pass
