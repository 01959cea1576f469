"""What is particular to one of the five systems: who is eligible, how long a row waits, when it is given up."""

from __future__ import annotations

from datetime import UTC, datetime
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

import systems
from databases import Db
from rowmill import Mill, Retry
from rowmill.testing import Kit
from rows import after, changed, empty, whole


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


async def never(job: Any) -> None:
    raise AssertionError("no handler runs here: claims are settled by hand")


def mill_of(db: Db, system: str, *lanes: str, **overrides: Any) -> Mill:
    systems.create(db, system)
    mill = Mill(db.url)
    for lane in lanes:
        getattr(systems, lane)(mill, never, **overrides)
    return mill


def ago(**past: float) -> datetime:
    return datetime.now(UTC) - td(**past)


# -- A: registre


async def test_a_session_whose_company_search_is_complete_is_not_searched_again(db: Db) -> None:
    """A4, A5: REQ rows are eligible only while req_completed is false."""
    mill = mill_of(db, "registre", "req")
    systems.insert_req(db, 2, req_completed=True)
    (open_one,) = systems.insert_req(db)
    systems.insert_req(db, status="failed")
    async with Kit(mill) as kit:
        assert [c.id for c in await kit.claim(count=10)] == [open_one]


async def test_only_waiting_rows_of_a_kind_are_eligible(db: Db) -> None:
    """A4, A11: extraction takes status 1, OCR status 3, RDPRM pending, and no others."""
    mill = mill_of(db, "registre", "extraction", "ocr", "rdprm")
    by_status = {status: systems.insert_extraction(db, status_id=status)[0] for status in range(1, 7)}
    rdprm = {s: systems.insert_rdprm(db, status=s)[0] for s in ("pending", "in_progress", "completed", "failed")}
    async with Kit(mill) as kit:
        assert [c.id for c in await kit.claim("extraction", 10)] == [by_status[1]]
        assert [c.id for c in await kit.claim("ocr", 10)] == [by_status[3]]
        assert [c.id for c in await kit.claim("rdprm", 10)] == [rdprm["pending"]]


async def test_two_workers_that_want_the_same_row_get_one_each_without_an_error(db: Db) -> None:
    """A5, B2: one gets it, the other goes on to the next."""
    mill = mill_of(db, "registre", "extraction")
    first, second = systems.insert_extraction(db, 2)
    async with Kit(mill, worker_id="a") as a, Kit(mill, worker_id="b") as b:
        assert [c.id for c in await a.claim()] == [first]
        assert [c.id for c in await b.claim()] == [second]
        assert await a.claim() == []
    assert [r["worker_id"] for r in db.query("select worker_id from extraction_queue order by id")] == ["a", "b"]


async def test_at_a_workers_start_two_minutes_of_silence_are_enough(db: Db) -> None:
    """A12: 2 minutes at start, 5 during the run; a reclaim is never final, however often."""
    mill = mill_of(db, "registre", "extraction")
    (key,) = systems.insert_extraction(db)
    lane = mill.lanes["extraction"]
    assert lane.startup_lease == td(minutes=2)
    async with Kit(mill) as kit:
        store = await kit.store()
        for _ in range(10):
            assert [c.id for c in await kit.claim()] == [key]
            kit.advance(td(minutes=3))
            assert await store.sweep(lane.lease) == []
            assert [s.poison for s in await store.sweep(lane.startup_lease)] == [False]
        (claim,) = await kit.claim()
        assert (await kit.settle(claim)).written
    assert whole(db, "extraction_queue", key)["status_id"] == 3


async def test_a_document_goes_through_extraction_and_ocr_on_one_table(db: Db) -> None:
    """A8, A11, B2, B3: 1, 2, 3, 6, 5: the done of one lane is the ready of the next."""
    systems.create(db, "registre")
    mill = Mill(db.url)
    seen: list[tuple[str, int]] = []

    async def handle(job: Any) -> None:
        seen.append((job.lane, db.value("select status_id from extraction_queue where id = ?", job.id)))

    systems.extraction(mill, handle)
    systems.ocr(mill, handle)
    (key,) = systems.insert_extraction(db)
    async with Kit(mill) as kit:
        assert await kit.step("ocr") is None
        assert (await kit.step("extraction")).outcome == "done"
        extracted = whole(db, "extraction_queue", key)
        assert await kit.step("extraction") is None
        assert (await kit.step("ocr")).outcome == "done"
    finished = whole(db, "extraction_queue", key)
    assert seen == [("extraction", 2), ("ocr", 6)]
    assert extracted["status_id"] == 3
    assert finished["status_id"] == 5
    assert changed(extracted, finished).keys() == {
        "status_id", "ocr_worker_id", "ocr_started_at", "ocr_heartbeat_at", "ocr_attempts",
    }  # fmt: skip


# -- B: ocr


async def test_extraction_errors_and_ocr_errors_stand_side_by_side(db: Db) -> None:
    """B6: neither overwrites the other, and a later success leaves both as they were."""
    mill = mill_of(db, "registre", "extraction", "ocr")
    (key,) = systems.insert_extraction(db)
    async with Kit(mill) as kit:
        await kit.settle((await kit.claim("extraction"))[0], OSError("no login"))
        assert whole(db, "extraction_queue", key)["error_message"] == "OSError: no login"
        db.execute("update extraction_queue set status_id = 3 where id = ?", key)
        await kit.settle((await kit.claim("ocr"))[0], Retry("blurred"))
        row = whole(db, "extraction_queue", key)
        assert (row["error_message"], row["ocr_error"]) == ("OSError: no login", "blurred")
        await kit.settle((await kit.claim("ocr"))[0])
    row = whole(db, "extraction_queue", key)
    assert (row["status_id"], row["error_message"], row["ocr_error"]) == (5, "OSError: no login", "blurred")


async def test_the_limit_of_ocr_attempts_is_each_rows_own(db: Db) -> None:
    """B5: ocr_max_attempts is a column."""
    mill = mill_of(db, "registre", "ocr")
    one, three = systems.insert_ocr(db, 2, ocr_max_attempts=lambda i: (1, 3)[i])
    async with Kit(mill) as kit:
        kinds: dict[Any, list[str]] = {one: [], three: []}
        while claims := await kit.claim():
            report = await kit.settle(claims[0], OSError("blurred"))
            kinds[claims[0].id] += [s.kind for s in report.written]
    assert kinds == {one: ["dead"], three: ["retry", "retry", "dead"]}
    assert [r["status_id"] for r in db.query("select status_id from extraction_queue")] == [4, 4]


async def test_a_document_that_kills_its_workers_is_given_up_three_sweeps_beyond_its_limit(db: Db) -> None:
    """B7: taken back more than 3 times beyond its limit it goes to 4, and says so; before that, back to 3."""
    mill = mill_of(db, "registre", "ocr")
    (key,) = systems.insert_ocr(db, ocr_max_attempts=2)
    async with Kit(mill) as kit:
        states = []
        for _ in range(6):
            assert [c.id for c in await kit.claim()] == [key]
            kit.advance(td(minutes=11))
            (swept,) = await kit.sweep()
            states.append((whole(db, "extraction_queue", key)["status_id"], swept.poison))
        assert await kit.claim() == []
    assert states == [(3, False)] * 5 + [(4, True)]
    row = whole(db, "extraction_queue", key)
    assert "taken back too often" in row["ocr_error"]
    assert row["ocr_worker_id"] == "test-worker"


# -- C: enrichment


async def test_a_failed_link_is_tried_again_after_five_minutes_and_not_before(db: Db) -> None:
    """C5, C6, C9: a failed row is claimed directly once run_after has passed."""
    mill = mill_of(db, "enrichment", "enrichment")
    (key,) = systems.insert_enrichment(db)
    async with Kit(mill) as kit:
        await kit.settle((await kit.claim())[0], TimeoutError("slow"))
        assert whole(db, "enrichment_jobs", key)["run_after"] == after(td(minutes=5))
        kit.advance(td(minutes=4, seconds=50))
        assert await kit.claim() == []
        kit.advance(td(seconds=11))
        (claim,) = await kit.claim()
        assert (claim.id, claim.attempt) == (key, 2)
        await kit.settle(claim, TimeoutError("slow again"))
    row = whole(db, "enrichment_jobs", key)
    assert (row["status"], row["attempts"], row["last_error"]) == ("dead", 2, "TimeoutError: slow again")


async def test_links_are_eligible_by_status_and_due_time(db: Db) -> None:
    """C6: queued or failed, and run_after passed."""
    mill = mill_of(db, "enrichment", "enrichment")
    due = [systems.insert_enrichment(db, status=s)[0] for s in ("queued", "failed")]
    for status in ("running", "succeeded", "dead"):
        systems.insert_enrichment(db, status=status, locked_at=ago(seconds=5))
    systems.insert_enrichment(db, run_after=ago(minutes=-5))
    async with Kit(mill) as kit:
        assert [c.id for c in await kit.claim(count=10)] == due


async def test_a_queued_link_that_somebody_locked_a_moment_ago_is_left_alone(db: Db) -> None:
    """C6: locked_at null or older than 10 minutes, as a further condition of the lane."""
    limit = ":now - interval '10 minutes'" if db.dialect == "postgresql" else "datetime(:now, '-10 minutes')"
    mill = mill_of(db, "enrichment", "enrichment", where=f"locked_at is null or locked_at < {limit}")
    systems.insert_enrichment(db, locked_at=ago(minutes=1))
    (long_ago,) = systems.insert_enrichment(db, locked_at=ago(minutes=11))
    async with Kit(mill) as kit:
        assert [c.id for c in await kit.claim(count=10)] == [long_ago]
        kit.advance(td(minutes=10))
        assert len(await kit.claim(count=10)) == 1


async def test_a_batch_is_claimed_at_once_and_each_row_is_its_own(db: Db) -> None:
    """C6, C7: N rows in one transaction; one failure does not affect the others."""
    mill = mill_of(db, "enrichment", "enrichment")
    keys = systems.insert_enrichment(db, 12)
    async with Kit(mill) as kit:
        claims = await kit.claim(count=10)
        assert [c.id for c in claims] == keys[:10]
        await kit.settle(claims[3], OSError("no such host"))
        for claim in claims[:3] + claims[4:]:
            await kit.settle(claim)
    counts = db.query("select status, count(*) as n from enrichment_jobs group by status order by n")
    assert {r["status"]: r["n"] for r in counts} == {"failed": 1, "queued": 2, "succeeded": 9}


# -- D: prices


async def test_jobs_of_a_disabled_source_are_not_worked_on(db: Db) -> None:
    """D1: disabled sources."""
    mill = mill_of(db, "prices", "scrape")
    off, on = systems.insert_source(db, 2, enabled=lambda i: i == 1)
    systems.insert_scrape(db, 2, source_id=off)
    (job,) = systems.insert_scrape(db, source_id=on)
    async with Kit(mill) as kit:
        assert [c.id for c in await kit.claim(count=10)] == [job]
        db.execute("update sources set enabled = true")
        assert len(await kit.claim(count=10)) == 2


async def test_each_retry_of_a_price_waits_twice_as_long_up_to_a_day(db: Db) -> None:
    """D4: base_delay_minutes * 2^retry_count, at most 24 hours; D1: due again once next_retry_at has passed."""
    mill = mill_of(db, "prices", "scrape", max_attempts=14)
    (key,) = systems.insert_scrape(db)
    async with Kit(mill) as kit:
        for failure in range(13):
            minutes = min(2**failure, 24 * 60)
            await kit.settle((await kit.claim())[0], ConnectionError("reset"))
            row = whole(db, "scrape_jobs", key)
            assert row["next_retry_at"] == after(mill.clock.shift + td(minutes=minutes))
            assert (row["status"], row["retry_count"]) == ("retryable", failure + 1)
            kit.advance(td(minutes=minutes) - td(seconds=20))
            assert await kit.claim() == []
            kit.advance(td(seconds=21))


async def test_running_prices_without_a_heartbeat_are_swept_and_attempts_counts_it(db: Db) -> None:
    """D3: no heartbeat or one older than 300 s; attempts + 1; the previous locked_by is told."""
    mill = mill_of(db, "prices", "scrape")
    silent, old, fresh = systems.insert_scrape(
        db,
        3,
        status="running",
        locked_by=lambda i: f"w{i}",
        locked_at=ago(minutes=20),
        heartbeat_at=lambda i: (None, ago(seconds=301), ago(seconds=200))[i],
    )
    async with Kit(mill) as kit:
        swept = await kit.sweep()
    assert {(s.id, s.worker, s.poison) for s in swept} == {(silent, "w0", False), (old, "w1", False)}
    rows = {k: whole(db, "scrape_jobs", k) for k in (silent, old, fresh)}
    assert [(r["status"], r["attempts"], r["retry_count"]) for r in rows.values()] == [
        ("pending", 1, 0), ("pending", 1, 0), ("running", 0, 0),
    ]  # fmt: skip


async def test_a_price_that_kills_its_workers_ends_in_failed(db: Db) -> None:
    """D1, D3, X1: every row ends; a sweep is no failure, so retry_count stays."""
    mill = mill_of(db, "prices", "scrape", max_attempts=2, max_reclaims=1)
    (key,) = systems.insert_scrape(db)
    async with Kit(mill) as kit:
        poison = []
        for _ in range(4):
            assert await kit.claim()
            kit.advance(td(seconds=301))
            poison += [s.poison for s in await kit.sweep()]
    row = whole(db, "scrape_jobs", key)
    assert poison == [False, False, False, True]
    assert (row["status"], row["attempts"], row["retry_count"]) == ("failed", 4, 0)
    assert row["locked_by"] == "test-worker"


# -- E: analysis


async def test_a_website_is_taken_only_when_free_untouched_and_not_exhausted(db: Db) -> None:
    """E2: inProgress = false, retryCount < 3, untouched for 30 s, up to 10, oldest first."""
    mill = mill_of(db, "analysis", "website_analysis")
    systems.insert_analysis(db, inProgress=True)
    systems.insert_analysis(db, retryCount=3)
    systems.insert_analysis(db, currentStep="prompt-forming")
    (touched,) = systems.insert_analysis(db, updatedAt=ago(seconds=10), createdAt=ago(days=9))
    keys = systems.insert_analysis(db, 11)
    async with Kit(mill) as kit:
        assert [c.id for c in await kit.claim(count=10)] == keys[:10]
        kit.advance(td(seconds=21))
        assert [c.id for c in await kit.claim(count=10)] == [touched, keys[10]]


async def test_an_exhausted_website_stays_in_its_phase_and_is_not_taken_again(db: Db) -> None:
    """E6: inProgress = false and retryCount = 3, by failures and by sweeps alike; backoff in runAfter doubles."""
    mill = mill_of(db, "analysis", "prompt_forming")
    failing, hanging = systems.insert_analysis(db, 2, status="prompt-forming")
    async with Kit(mill) as kit:
        while claims := await kit.claim(count=2):
            for claim in claims:
                if claim.id == failing:
                    await kit.settle(claim, OSError("no model"))
            kit.advance(td(minutes=6))
            await kit.sweep()
            kit.advance(td(minutes=1))
        kit.advance(td(days=3))
        assert await kit.claim(count=2) == []
        assert await kit.sweep() == []
    for key, words in ((failing, "OSError: no model"), (hanging, "taken back too often")):
        row = whole(db, "AnalysisJob", key)
        state = [row[c] for c in ("status", "currentStep", "inProgress", "retryCount")]
        assert state == ["prompt-forming", "prompt-forming", False, 3]
        assert words in row["error"]


async def test_phases_that_share_a_flag_do_not_touch_each_others_rows(db: Db) -> None:
    """E1, E2: the running condition of a phase is its ready condition with the flag turned."""
    mill = mill_of(db, "analysis", "website_analysis", "prompt_forming", "model_analysis")
    phases = {"website_analysis": "not-started", "prompt_forming": "prompt-forming", "model_analysis": "model-analysis"}
    keys = {lane: systems.insert_analysis(db, status=phase)[0] for lane, phase in phases.items()}
    async with Kit(mill) as kit:
        claims = {lane: (await kit.claim(lane, 10)) for lane in phases}
        assert {lane: [c.id for c in found] for lane, found in claims.items()} == {k: [v] for k, v in keys.items()}
        kit.advance(td(minutes=6))
        assert [s.id for s in await kit.sweep("prompt_forming")] == [keys["prompt_forming"]]
        assert (await kit.settle(claims["model_analysis"][0])).written
    rows = {lane: whole(db, "AnalysisJob", key) for lane, key in keys.items()}
    assert {lane: (r["status"], bool(r["inProgress"])) for lane, r in rows.items()} == {
        "website_analysis": ("not-started", True),
        "prompt_forming": ("prompt-forming", False),
        "model_analysis": ("completed", False),
    }


async def test_a_website_goes_through_all_three_phases(db: Db) -> None:
    """E1: not-started, prompt-forming, model-analysis, completed, with status and currentStep together."""
    systems.create(db, "analysis")
    mill = Mill(db.url)

    async def handle(job: Any) -> dict[str, Any]:
        return {"extractedInfo": {**(job["extractedInfo"] or {}), job.lane: job["currentStep"]}}

    lanes = ("website_analysis", "prompt_forming", "model_analysis")
    for lane in lanes:
        getattr(systems, lane)(mill, handle)
    (key,) = systems.insert_analysis(db)
    async with Kit(mill) as kit:
        for lane in lanes:
            assert (await kit.step(lane)).outcome == "done"
            assert all([await kit.step(other) is None for other in lanes])  # untouched for 30 s
            kit.advance(td(seconds=31))
    row = whole(db, "AnalysisJob", key)
    assert (row["status"], row["currentStep"], bool(row["inProgress"])) == ("completed", "completed", False)
    assert '"model_analysis": "model-analysis"' in row["extractedInfo"]
