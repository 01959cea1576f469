"""What the model test stands on: lanes with and without gates, their tables, what handlers do, and a wrong clock."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime
from datetime import timedelta as td
from typing import Any

import pytest
from hypothesis import strategies as st

import gated
import model
from databases import Db
from model import End, Gates
from rowmill import Breaker, Cancel, Claim, Concurrency, Dead, Mill, Rate, Retry, Snooze, Wait, fixed
from rowmill.declare.outcome import Release
from rowmill.testing import Kit

SITES = ["a", "a", "b", "c", None]


@dataclass(frozen=True)
class Setup:
    """A lane to be proved: its table, and its gates."""

    gates: Gates = field(default_factory=Gates)
    own: bool = False
    inputs: bool = False
    chunk: int | None = None
    expires: bool = False
    #: The lane serves so many shards of the table, of which there is one more.
    shards: int = 0

    def declared(self) -> list[Any]:
        """The gates as a lane has them."""
        g, found = self.gates, list[Any]()
        if g.concurrency is not None:
            found.append(Concurrency(g.concurrency, by="domain"))
        if g.whole is not None:
            found.append(Concurrency(g.whole))
        if g.breaker is not None:
            found.append(Breaker(g.breaker, hours(model.COOLDOWN), by="domain"))
        if g.burst is not None:
            found.append(Rate(g.burst, per=hours(model.TOKEN * g.burst), by="domain", burst=g.burst))
        return found


SETUPS = {
    "plain": Setup(),
    "inputs": Setup(inputs=True),
    "inputs, limit and breaker": Setup(Gates(concurrency=2, breaker=2), inputs=True, expires=True),
    "chunks": Setup(chunk=4, expires=True),
    "rowmill's own table": Setup(own=True),
    "limit by key": Setup(Gates(concurrency=2)),
    "limit by key and in all": Setup(Gates(concurrency=2, whole=3)),
    "breaker": Setup(Gates(breaker=2)),
    "shards": Setup(shards=3, inputs=True),
    "shards, limit and breaker": Setup(Gates(concurrency=2, breaker=2), shards=2, expires=True),
    "limit, breaker and rate": Setup(Gates(concurrency=2, breaker=3, burst=3)),
}


def hours(n: float) -> td:
    return td(hours=n)


class TooMany(Exception):
    """What an HTTP client raises for 429."""

    status = 429
    headers = {"Retry-After": str(2.5 * 3600)[:-2]}  # noqa: RUF012


def ends() -> dict[str, tuple[Callable[[], Any], End]]:
    """What a handler may return or raise, and what that means."""
    return {
        "done": (lambda: None, End("done", word="")),
        "columns": (lambda: {"result": "made"}, End("done", "made", word="")),
        "retry": (lambda: Retry("later", after=hours(2.5)), End("retry", "later", 2.5, "transient")),
        "error": (lambda: ValueError("boom"), End("retry", "ValueError: boom", model.BACKOFF, "transient")),
        "refused": (lambda: TooMany("slow"), End("retry", "TooMany: slow", 2.5, "rate", closes=True)),
        "dead": (lambda: Dead("no"), End("dead", "no", word="permanent")),
        "cancel": (lambda: Cancel("off"), End("canceled", "off")),
        "snooze": (lambda: Snooze(hours(0.5)), End("snooze", delay=0.5)),
        "closing": (lambda: Snooze(hours(3.5), closes=True), End("snooze", delay=3.5, closes=True)),
        "release": (Release, End("release")),
        "wait": (lambda: Wait("approved = 1", timeout=hours(model.TIMEOUT)), End("wait", "dead")),
        "wait, then run": (lambda: Wait("approved = 1", timeout=hours(model.TIMEOUT), then="run"), End("wait", "run")),
    }


ENDS = ends()


def picked(most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 30), min_size=1, max_size=most)


class _Wrong(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)


class WrongClock(datetime, metaclass=_Wrong):
    """A wall clock that is off by years, differently at every step."""

    skew = td(0)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.now(tz) + cls.skew

    @classmethod
    def rule(cls, patch: pytest.MonkeyPatch) -> None:
        """From now on it is the only one there is, for rowmill's modules and for ``time.time``."""
        real = time.time
        patch.setattr(time, "time", lambda: real() + cls.skew.total_seconds())
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "rowmill" and getattr(module, "datetime", None) is datetime:
                patch.setattr(module, "datetime", cls)


async def all_of(steps: AsyncIterator[Any]) -> list[Any]:
    return [step async for step in steps]


@dataclass(eq=False)
class Hold:
    """A claim as some worker has it in hand, whether or not it still holds."""

    number: int
    claim: Claim
    kit: Kit
    attempt: int
    #: The key under which gates hear of its end; None after a recovery, which does not know it.
    site: str | None

    @property
    def id(self) -> int:
        return int(self.claim.id)


class Ground:
    """A database with the tables of a setup, cleared between examples; what is asked of it beside rowmill."""

    def __init__(self, db: Db, setup: Setup) -> None:
        self.db, self.setup, self.postgres = db, setup, db.dialect == "postgresql"
        self.table = "rowmill_jobs" if setup.own else "pages"
        gated.make(db)
        db.execute("alter table pages add column failures integer not null default 0")
        db.execute("alter table pages add column reclaims integer not null default 0")
        db.execute("alter table pages add column result text")
        db.execute("alter table pages add column body text not null default ''")
        db.execute("alter table pages add column approved integer not null default 0")
        db.execute(f"alter table pages add column expires_at {'timestamptz' if self.postgres else 'datetime'}")
        db.execute("alter table pages add column shard integer not null default 0")
        db.execute("create table effects (page integer)")
        asyncio.run(self._prepare())

    async def _prepare(self) -> None:
        mill = self.mill(lambda job: None)
        await mill.prepare()
        await mill.close()

    def clear(self) -> None:
        for table in (self.table, "effects", "rowmill_gates", "rowmill_stale_runs", "rowmill_waits"):
            self.db.execute(f"delete from {table}")
        if self.setup.shards:
            self.db.execute("insert into pages (shard) values (?)", self.setup.shards)

    def untouched(self) -> str:
        """How many rows of the shard that is not the lane's are as they were."""
        fresh = "status = 'queued' and worker is null and attempts = 0 and error is null and heartbeat_at is null"
        return f"select count(*) from pages where shard = {self.setup.shards} and {fresh}"

    def mill(self, behave: Callable[[Any], Any]) -> Mill:
        mill = Mill(self.db.url)
        common = {"lease": hours(model.LEASE), "heartbeat": hours(1), "max_reclaims": model.RECLAIMS}

        async def work(job: Any) -> Any:
            return await behave(job)

        async def many(jobs: Any) -> Any:
            return await behave(jobs)

        if self.setup.own:
            mill.queue("work", **common)
            mill.task(name="work", queue="work", max_attempts=model.LIMIT, backoff=fixed(hours(model.BACKOFF)))(work)
        else:
            mill.lane(
                "pages", name="work", ready={"status": ["queued", "failed"]}, running={"status": "running"},
                done={"status": "done"}, retry={"status": "failed"}, dead={"status": "dead"},
                canceled={"status": "canceled"}, max_attempts=model.LIMIT, backoff=fixed(hours(model.BACKOFF)),
                order_by="id", gates=self.setup.declared(), chunk=self.setup.chunk, **common,
                **({"inputs": ["body"], "settle_after": model.BOUND} if self.setup.inputs else {}),
                **({"roles": {"expires_at": "expires_at"}} if self.setup.expires else {}),
                **({"shard": {"shard": range(self.setup.shards)}} if self.setup.shards else {}),
            )(work if self.setup.chunk is None else many)  # fmt: skip
        return mill

    def at(self, column: str) -> str:
        """A time in hours."""
        if self.postgres:
            return f"(extract(epoch from {column}) / 3600)::float8"
        return f"(julianday({column}) - 2440587.5) * 24"

    def rows(self) -> str:
        state, site = ("state", "key") if self.setup.own else ("status", "domain")
        counts = ("0", "0") if self.setup.own else ("failures", "reclaims")
        result = "cast(result as text)" if self.setup.own else "result"
        body = "''" if self.setup.own else "body"
        stale = "coalesce((select runs from rowmill_stale_runs where row_id = cast(id as text)), 0)"
        return f"""select id, {site}, {self.at("run_after")}, {state}, worker, attempts, {counts[0]}, {counts[1]},
{self.at("claimed_at")}, {self.at("heartbeat_at")}, error, {result}, finished_at is not null,
{body}, {stale}, {"null" if self.setup.own else self.at("expires_at")}
from {self.table}{f" where shard < {self.setup.shards}" if self.setup.shards else ""} order by id"""

    def insert(self, shift: float, expires: float = math.inf, shard: int = 0) -> str:
        times = ", ".join("null" if at == math.inf else self._moment(at * 3600) for at in (shift, expires))
        mark = "$1" if self.postgres else "?"
        return (
            f"insert into pages (domain, run_after, expires_at, shard) values ({mark}, {times}, {shard}) returning id"
        )

    def _moment(self, seconds: float) -> str:
        if self.postgres:
            return f"now() + interval '{seconds} seconds'"
        return f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{seconds:+} seconds')"
