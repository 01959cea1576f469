"""A gated claim at size: a key with very many rows in front costs the others nothing, whatever the planner knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

import gated
from databases import Db
from rowmill import Concurrency, Mill, Rate
from rowmill.store import LaneStore
from rowmill.store.lane.claim import Settlement
from rowmill.testing import Kit

OTHERS, KEYS = 1000, 100
MODES = ("force_custom_plan", "force_generic_plan")
#: Pages that one statement over ten rows may touch: a few for each key and row, and some dead entries. One walk over
#: the rows of the large key would be thousands.
MOST = 1200


def fill(db: Db, rows: int) -> None:
    """One key with so many rows, the oldest; behind it a thousand rows of a hundred others."""
    big = "select 'big', 1, now() - interval '1 day' + n * interval '1 millisecond'"
    db.execute(
        "alter table pages set (autovacuum_enabled = off);"
        f"insert into pages (domain, source_id, run_after) {big} from generate_series(1, {rows}) n;"
        f"insert into pages (domain, source_id) select 'k' || (n % {KEYS}), 2 from generate_series(1, {OTHERS}) n"
    )


class Heard:
    """What a store says to its database, as it is said."""

    def __init__(self, store: LaneStore) -> None:
        self.said: list[tuple[str, Any]] = []
        self._write, store.database.write = store.database.write, self.write  # type: ignore[method-assign]

    async def write(self, verb: Any, *, tolerant: bool = False) -> Any:
        def listening(run: Any) -> Any:
            def say(sql: str, parameters: Any = ()) -> Any:
                self.said.append((sql, parameters))
                return run(sql, parameters)

            return verb(say)

        return await self._write(listening)

    def last(self, word: str) -> tuple[str, Sequence[Any]]:
        return next(entry for entry in reversed(self.said) if word in entry[0])


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "'{" + ", ".join(f'"{part}"' for part in value) + "}'"
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


async def buffers(db: Db, sql: str, parameters: Sequence[Any], mode: str) -> int:
    """How many pages a statement touches; it is rolled back."""
    connection = await asyncpg.connect(db.direct, server_settings={"plan_cache_mode": mode})
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(f"prepare it as {sql}")
        values = f"({', '.join(_literal(parameter) for parameter in parameters)})" if parameters else ""
        found = await connection.fetchval(f"explain (analyze, buffers, format json) execute it{values}")
    finally:
        await transaction.rollback()
        await connection.close()
    plan = json.loads(found)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("way", ["turns", "walk"])
async def test_a_saturated_key_with_very_many_rows_does_not_hold_up_the_others(pg: Db, way: str) -> None:
    """Issue: a thousand rows of other keys behind 200,000 of one that is full are claimed without delay."""
    gated.make(pg)
    if way == "walk":
        pg.execute("create index on pages (domain, source_id, run_after, id) where status = 'queued'")
    fill(pg, 200_000)
    mill = Mill(pg.url)
    beside = [Concurrency(100_000, by="source_id")] if way == "walk" else []
    gated.lane(mill, gates=[Concurrency(2, by="domain"), *beside])
    async with Kit(mill) as kit:
        store = await kit.store()
        served = rounds = 0
        while served < OTHERS:
            rounds += 1
            claims = await store.claim(10)
            others = [claim for claim in claims if claim.gates and claim.gates["domain"] != "big"]
            assert others
            served += len(others)
            await store.settle([Settlement(claim, "done") for claim in others])
        assert rounds <= OTHERS // 10 + 2
        assert gated.running(pg) == {"big": 2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("known", ["never", "while empty", "while queued", "now"])
async def test_statements_stay_cheap_whatever_the_planner_knows(pg: Db, known: str, mode: str) -> None:
    """X4: a table never analysed, or at the wrong time, with indexes that look as good as the right ones."""
    gated.make(pg)
    pg.execute("create index on pages (run_after, id) where status = 'queued'")
    pg.execute("create index on pages (id) where status = 'running'")
    if known == "while empty":
        pg.execute("analyze pages")
    fill(pg, 50_000)
    if known == "while queued":
        pg.execute("analyze pages")
    mill = Mill(pg.url)
    gated.lane(mill, gates=[Concurrency(3, by="domain"), Rate(100, by="domain")])
    async with Kit(mill) as kit:
        store = await kit.store()
        held = [claim for _ in range(12) for claim in await store.claim(20)]
        assert len(held) > 200
        if known == "now":
            pg.execute("analyze pages")
        heard = Heard(store)
        await store.settle([Settlement(claim, "done") for claim in held[:100]])
        await store.claim(10)
        await store.renew(held[100:200])
        said = {word: heard.last(word) for word in ("'done'", "taken", "heartbeat_at")}
    settle, claim, renew = said["'done'"], said["taken"], heard.said[-1]
    assert await buffers(pg, *claim, mode) < MOST
    assert await buffers(pg, *renew, mode) < 100 * 15
    # Those a hundred are settled by now: found by their key, and passed over.
    assert await buffers(pg, *settle, mode) < 100 * 15
