"""Gates over real processes: limits hold at every instant, no matter which process dies.

Why processes: those that die are killed with runs in hand, which count until they are swept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from databases import Db
from gate_farm import GateFarm, events, most_at_once
from waiting import eventually

MakeFarm = Callable[..., GateFarm]
KEYS = 200


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[MakeFarm]:
    farms: list[GateFarm] = []

    def make(db: Db, gates: str, **environment: str) -> GateFarm:
        farms.append(GateFarm(tmp_path, db, gates, **environment))
        return farms[-1]

    yield make
    for each in farms:
        each.close()


def work_while_one_is_killed_every_second(here: GateFarm, kills: int) -> None:
    """Four processes with work for all; once a second the oldest is killed and replaced, so often at least, and until a
    run was cut off by it; then until all rows are done.
    """
    workers = [here.start(f"w{n}") for n in range(4)]

    def goes_on(until: Callable[[], bool]) -> None:
        def look() -> bool:
            if here.counts().get("queued", 0) < 2 * KEYS:
                here.fill(2 * KEYS, KEYS)
            return until()

        eventually(look)

    goes_on(lambda: len(here.working()) == 4)
    for n in range(10 * kills):
        if n >= kills and here.cut_off():
            break
        began = time.monotonic()
        goes_on(lambda began=began: time.monotonic() - began > 1.0 and workers[0].pid in here.working())  # type: ignore[misc]
        here.kill(workers.pop(0))
        workers.append(here.start(f"w{n + 4}"))
    eventually(lambda: set(here.counts()) == {"done"}, seconds=60, every=0.2)
    here.stop()


def assert_limit_kept(here: GateFarm, limit: int) -> None:
    """By the handlers' own records; with rows that were cut off, swept and run again among them."""
    runs = here.runs()
    most = most_at_once(runs)
    assert len(most) == KEYS
    assert max(most.values()) == limit
    assert any(event["event"] == "row_swept" for event in events(here.events))
    assert len(runs) > here.counts()["done"]


def test_never_more_of_a_key_than_its_limit_while_processes_are_killed(db: Db, farm: MakeFarm) -> None:
    """C8; issue: four processes, 200 keys, k = 2, one killed every second, on both databases."""
    here = farm(db, 'Concurrency(2, by="domain")', LEASE="1.5")
    work_while_one_is_killed_every_second(here, kills=5)
    assert_limit_kept(here, 2)


def test_two_keyed_gates_keep_their_limits_while_processes_are_killed(pg: Db, farm: MakeFarm) -> None:
    """C8; issue: the same where gates look at two keys, and the claim is a transaction of several statements."""
    here = farm(pg, '[Concurrency(2, by="domain"), Concurrency(40, by="source_id")]', LEASE="1.5")
    work_while_one_is_killed_every_second(here, kills=3)
    assert_limit_kept(here, 2)
    by_source = {str(row["id"]): str(row["source_id"]) for row in pg.query("select id, source_id from pages")}
    most = most_at_once((by_source[row], start, end) for row, start, end in here.runs(by="id"))
    assert len(most) == 7
    assert max(most.values()) <= 40
