"""The tables of the five systems: what a claim, an outcome and a sweep write to them, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from datetime import timedelta as td
from typing import Any

import pytest

import systems
from databases import Db, Row
from rowmill import Dead, Mill, Retry
from rowmill.testing import Kit
from rows import after, changed, starting, whole

#: In the tables below: the time of the statement, the worker's id, the text of the error.
NOW, ME, WORDS = object(), object(), object()


@dataclass(frozen=True)
class Case:
    """One lane, and the columns that each verb writes to a row of it. Nothing else may change."""

    lane: str
    table: str
    system: str
    claimed: Row
    done: Row
    #: At the first failure, where the lane tries again.
    retried: Row | None
    dead: Row
    swept: Row
    insert: str = ""
    values: Row = field(default_factory=dict)

    def __str__(self) -> str:
        return self.lane

    def populate(self, db: Db, n: int = 1, **columns: Any) -> list[Any]:
        return getattr(systems, f"insert_{self.insert or self.lane}")(db, n, **self.values | columns)


_HELD = {"worker_id": ME, "processing_started_at": NOW, "heartbeat_at": NOW}
_FREE = dict.fromkeys(_HELD)
_OCR = {"ocr_worker_id": ME, "ocr_started_at": NOW, "ocr_heartbeat_at": NOW}
_LOCK = {"locked_by": ME, "locked_at": NOW}
_FREE_OCR, _UNLOCK = dict.fromkeys(_OCR), dict.fromkeys(_LOCK)


def _phase(name: str, phase: str, following: str) -> Case:
    back = {"inProgress": False, "lockedBy": None, "heartbeatAt": None, "updatedAt": NOW, "retryCount": 1}
    return Case(
        name,
        "AnalysisJob",
        "analysis",
        claimed={"inProgress": True, "lockedBy": ME, "heartbeatAt": NOW, "updatedAt": NOW},
        done={"status": following, "currentStep": following, "inProgress": False, "updatedAt": NOW},
        retried=back | {"runAfter": td(seconds=15), "error": WORDS},
        dead={"inProgress": False, "retryCount": 3, "error": WORDS, "updatedAt": NOW},
        swept=back,
        insert="analysis",
        values={"status": phase},
    )


CASES = [
    Case(
        "extraction",
        "extraction_queue",
        "registre",
        claimed={"status_id": 2} | _HELD,
        done={"status_id": 3},
        retried=None,
        dead={"status_id": 4, "error_message": WORDS},
        swept={"status_id": 1} | _FREE,
    ),
    Case(
        "req",
        "search_sessions",
        "registre",
        claimed={"status": "scraping_company_data", "updated_at": NOW} | _HELD,
        done={"status": "pending_name_selection", "req_completed": True, "updated_at": NOW},
        retried=None,
        dead={"status": "failed", "updated_at": NOW},
        swept={"status": "pending_company_selection", "updated_at": NOW} | _FREE,
    ),
    Case(
        "rdprm",
        "rdprm_searches",
        "registre",
        claimed={"status": "in_progress"} | _HELD,
        done={"status": "completed", "completed_at": NOW},
        retried=None,
        dead={"status": "failed", "completed_at": NOW},
        swept={"status": "pending"} | _FREE,
    ),
    Case(
        "ocr",
        "extraction_queue",
        "registre",
        claimed={"status_id": 6, "ocr_attempts": 1} | _OCR,
        done={"status_id": 5},
        retried={"status_id": 3, "ocr_error": WORDS} | _FREE_OCR,
        dead={"status_id": 4, "ocr_error": WORDS},
        swept={"status_id": 3} | _FREE_OCR,
    ),
    Case(
        "enrichment",
        "enrichment_jobs",
        "enrichment",
        claimed={"status": "running", "attempts": 1, "updated_at": NOW} | _LOCK,
        done={"status": "succeeded", "updated_at": NOW},
        retried={"status": "failed", "run_after": td(minutes=5), "last_error": WORDS, "updated_at": NOW} | _UNLOCK,
        dead={"status": "dead", "last_error": WORDS, "updated_at": NOW},
        swept={"status": "queued", "updated_at": NOW} | _UNLOCK,
    ),
    Case(
        "scrape",
        "scrape_jobs",
        "prices",
        claimed={"status": "running", "heartbeat_at": NOW} | _LOCK,
        done={"status": "succeeded", "completed_at": NOW},
        retried={"status": "retryable", "next_retry_at": td(minutes=1), "retry_count": 1, "error_message": WORDS}
        | {"heartbeat_at": None}
        | _UNLOCK,
        dead={"status": "failed", "completed_at": NOW, "retry_count": 1, "error_message": WORDS},
        swept={"status": "pending", "attempts": 1, "heartbeat_at": None} | _UNLOCK,
    ),
    _phase("website_analysis", "not-started", "prompt-forming"),
    _phase("prompt_forming", "prompt-forming", "model-analysis"),
    _phase("model_analysis", "model-analysis", "completed"),
]

pytestmark = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Db]:
    """One database of each kind for this file, with the tables of all systems."""
    if request.param == "sqlite":
        db = Db(f"sqlite:///{tmp_path_factory.mktemp('systems') / 'systems.db'}")
        systems.create(db)
        yield db
        return
    server = request.getfixturevalue("server")
    db = Db(server.create_database("test_systems"))
    systems.create(db)
    yield db
    server.drop("test_systems")


@pytest.fixture
def db(home: Db) -> Db:
    """The file's database, empty: many small tests share it, since making one takes longer than they do."""
    tables = ("rdprm_searches", "search_sessions", "extraction_queue", "enrichment_jobs", "scrape_jobs", "sources")
    home.execute("; ".join(f'delete from "{table}"' for table in (*tables, "AnalysisJob")))
    return home


async def never(job: Any) -> None:
    raise AssertionError("no handler runs here: claims are settled by hand")


def mill_of(db: Db, case: Case, **overrides: Any) -> Mill:
    """A Mill with the case's one lane."""
    mill = Mill(db.url)
    backoff = {"backoff": lambda attempt: td(seconds=15)} if case.table == "AnalysisJob" else {}
    getattr(systems, case.lane)(mill, never, **backoff | overrides)
    return mill


def shown(mill: Mill, columns: Row) -> Row:
    """Expected values, with the words of the table above replaced by what they stand for."""
    meaning: dict[int, Callable[[], Any]] = {
        id(NOW): lambda: after(mill.clock.shift),
        id(ME): lambda: starting("test-worker"),
        id(WORDS): lambda: "broken",
    }

    def one(value: Any) -> Any:
        if isinstance(value, td):
            return after(mill.clock.shift + value)
        return meaning.get(id(value), lambda: value)()

    return {column: one(value) for column, value in columns.items()}


async def test_a_claim_writes_the_running_state_and_the_holder_and_a_renewal_the_heartbeat(db: Db, case: Case) -> None:
    """A6, B2, C6, D2, E2: the columns a claim writes; B8, D3: a renewal writes the heartbeat alone."""
    mill = mill_of(db, case)
    async with Kit(mill) as kit:
        (key,) = case.populate(db)
        before = whole(db, case.table, key)
        (claim,) = await kit.claim()
        assert claim.id == key
        held = whole(db, case.table, key)
        assert changed(before, held) == shown(mill, case.claimed)
        assert await kit.claim() == []
        beats = [c for c in case.claimed if c.lower().replace("_", "").endswith("heartbeatat")]
        if beats:  # C3 has none
            kit.advance(td(seconds=40))
            assert await (await kit.store()).renew([claim]) == [claim]
            assert changed(held, whole(db, case.table, key)) == shown(mill, dict.fromkeys(beats, NOW))


async def test_each_outcome_writes_its_own_columns_and_nothing_else(db: Db, case: Case) -> None:
    """A8 to A10, B3, B5, C9, D1, D4, D11, E1, E6: a final row keeps its worker and times, one that goes back has none.

    A first failure goes back or, where failures are final, is dead.
    """
    mill = mill_of(db, case)
    async with Kit(mill) as kit:
        keys = case.populate(db, 3)
        claims = await kit.claim(count=3)
        assert [claim.id for claim in claims] == keys
        before = {key: whole(db, case.table, key) for key in keys}
        kit.advance(td(minutes=1))
        retried = ("dead", case.dead) if case.retried is None else ("retry", case.retried)
        ends = [(None, "done", case.done), (Retry("broken"), *retried), (Dead("broken"), "dead", case.dead)]
        for claim, (ended, kind, columns) in zip(claims, ends, strict=True):
            report = await kit.settle(claim, ended)
            assert [s.kind for s in report.written] == [kind]
            assert changed(before[claim.id], whole(db, case.table, claim.id)) == shown(mill, columns)
        kit.advance(td(days=2))
        assert [claim.id for claim in await kit.claim(count=3)] == ([] if case.retried is None else keys[1:2])


async def test_failure_after_failure_a_row_dies_exactly_at_its_limit(db: Db, case: Case) -> None:
    """A8 (1), B5 (3), C9 (2), D1 (5 retries), E6 (3): how many runs a row gets."""
    runs = {"registre": 1, "enrichment": 2, "prices": 6, "analysis": 3}[case.system] if case.lane != "ocr" else 3
    mill = mill_of(db, case)
    async with Kit(mill) as kit:
        (key,) = case.populate(db)
        kinds = []
        while claims := await kit.claim():
            report = await kit.settle(claims[0], OSError("the site is down"))
            kinds += [s.kind for s in report.written]
            kit.advance(td(days=1))
        assert kinds == ["retry"] * (runs - 1) + ["dead"]
        assert {c: v for c, v in whole(db, case.table, key).items() if c in case.dead}.keys() == case.dead.keys()


async def test_a_swept_row_is_ready_again_without_a_holder(db: Db, case: Case) -> None:
    """A12, B7, C6, D3, E6: what a sweep writes, and when."""
    mill = mill_of(db, case)
    async with Kit(mill) as kit:
        (key,) = case.populate(db)
        (claim,) = await kit.claim()
        held = whole(db, case.table, key)
        lease = mill.lanes[case.lane].lease
        kit.advance(lease - td(seconds=30))
        assert await kit.sweep() == []
        assert whole(db, case.table, key) == held
        kit.advance(td(seconds=60))
        swept = await kit.sweep()
        assert [(s.id, s.poison) for s in swept] == [(key, False)]
        assert swept[0].worker == claim.worker
        assert changed(held, whole(db, case.table, key)) == shown(mill, case.swept)
        kit.advance(td(seconds=31))
        assert [c.id for c in await kit.claim()] == [key]


async def test_a_row_whose_holder_gives_signs_of_life_is_not_swept(db: Db, case: Case) -> None:
    """A12, B7, D3, E6, X1: a sweep never takes a row from a worker that is alive."""
    renew = {} if case.lane != "enrichment" else {"renew": "claimed_at"}
    mill = mill_of(db, case, **renew)
    async with Kit(mill) as kit:
        (key,) = case.populate(db)
        (claim,) = await kit.claim()
        lease = mill.lanes[case.lane].lease
        for _ in range(3):
            kit.advance(lease * 0.9)
            assert await (await kit.store()).renew([claim]) == [claim]
            assert await kit.sweep() == []
        before = whole(db, case.table, key)
        assert (await kit.settle(claim)).written
        assert changed(before, whole(db, case.table, key)).keys() == case.done.keys()


async def test_rows_are_taken_oldest_first_one_after_the_other(db: Db, case: Case) -> None:
    """A3, E2: first in, first out by the time of creation, not by the key."""
    mill = mill_of(db, case)
    async with Kit(mill) as kit:
        oldest_last = case.populate(db, 3)
        born = [c for c in whole(db, case.table, oldest_last[0]) if c in ("created_at", "createdAt", "run_after")]
        moved = ", ".join(f'"{c}" = ?' for c in born)
        for age, key in enumerate(oldest_last, start=1):
            moment = datetime.now(UTC) - td(hours=age)
            db.execute(f'update "{case.table}" set {moved} where id = ?', *[moment] * len(born), key)
        assert [(await kit.claim())[0].id for _ in range(3)] == oldest_last[::-1]
