"""The lane of ocr over ``extraction_queue``: what a claim, a failure, a sweep and a success write."""

from __future__ import annotations

import asyncio
import enum
import json
from datetime import UTC, datetime
from datetime import timedelta as td

from apps.ocr.__main__ import active_workers
from apps.ocr.tests.office import Office, small_print
from apps.registre.lanes import extraction
from apps.registre.standin.pdfs import document_pdf
from databases import as_time
from rowmill.clock import Clock
from rowmill.ops.row_actions import Operator, Selection
from rowmill.store import Database
from rowmill.store.inspect.lane_view import view_lane
from rowmill.testing import Kit


async def test_a_claim_is_written_to_ocrs_own_columns(office: Office) -> None:
    """B2: status 6, ocr_worker_id, ocr_started_at and one attempt more, in one conditional update."""
    (key,) = office.add(worker_id="registre-7")
    async with Kit(office.mill(), worker_id="worker-1") as kit:
        assert len(await kit.claim()) == 1
        row = office.row(key)
        assert (row["status_id"], row["ocr_worker_id"], row["ocr_attempts"]) == (6, "worker-1", 1)
        assert row["ocr_started_at"] is not None
        assert row["worker_id"] == "registre-7"
        assert await kit.claim() == []


async def test_only_documents_that_are_complete_are_taken_oldest_first(office: Office) -> None:
    """B2: status 3, and no other."""
    for status in (1, 2, 4, 5, 6):
        office.add(b"", status_id=status)
    newest, oldest, middle = office.add(b"", n=3)
    days = {newest: 1, oldest: 3, middle: 2}
    for key, ago in days.items():
        office.db.execute("update extraction_queue set created_at = ? where id = ?", datetime.now(UTC) - td(ago), key)
    async with Kit(office.mill()) as kit:
        taken = [(await kit.claim())[0].id for _ in days]
        assert await kit.claim() == []
    assert taken == [oldest, middle, newest]


async def test_workers_that_meet_over_a_document_each_get_another(office: Office) -> None:
    """B2: who loses the race for document A goes on to document B, without an error."""
    keys = office.add(b"", n=6)
    async with Kit(office.mill(), worker_id="worker-1") as one, Kit(office.mill(), worker_id="worker-2") as two:
        taken = await asyncio.gather(*(kit.claim() for kit in (one, two) * 3))
    assert sorted(claim.id for claims in taken for claim in claims) == sorted(keys)
    assert {office.row(key)["ocr_attempts"] for key in keys} == {1}


async def test_a_document_is_downloaded_read_boosted_and_stored(office: Office) -> None:
    """B3, B1: the text and its fields are in the row, its status is 5, and no file is left."""
    data, text = document_pdf("24681012", "actes", 2, seed=3)
    (key,) = office.add(data)
    async with Kit(office.mill(), worker_id="worker-1") as kit:
        await kit.drain()
    row = office.row(key)
    assert (row["status_id"], row["ocr_error"]) == (5, None)
    assert row["ocr_text"].startswith("ACTE NOTARIÉ\nCirconscription foncière : ")
    fields = row["ocr_fields"] if isinstance(row["ocr_fields"], dict) else json.loads(row["ocr_fields"])
    assert fields["number"] == "24681012"
    assert len(fields["parties"]) == 2
    assert all(f"{party['role'].capitalize()} : {party['name']}" in text for party in fields["parties"])
    assert (fields["pages"], fields["reader"]) == (2, "rapidocr")
    assert row["ocr_progress"] == "67% page 2 of 2"
    assert row["ocr_finished_at"] is not None
    assert office.left() == []


async def test_a_failure_goes_back_to_3_until_the_rows_own_limit_is_reached(office: Office) -> None:
    """B5: the limit is a column; at the limit the row is 4."""
    (twice,) = office.add(file_path="prod/gone.pdf", ocr_max_attempts=2)
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "retry"
        row = office.row(twice)
        assert (row["status_id"], row["ocr_attempts"], row["ocr_worker_id"]) == (3, 1, None)
        kit.advance(td(minutes=1))
        assert (await kit.step()).outcome == "dead"
        assert (office.row(twice)["status_id"], office.row(twice)["ocr_attempts"]) == (4, 2)
        (usual,) = office.add(file_path="prod/gone.pdf")
        for status in (3, 3, 4):
            await kit.step()
            assert office.row(usual)["status_id"] == status
            kit.advance(td(minutes=1))
    assert "prod/gone.pdf" in office.row(usual)["ocr_error"]
    assert "Try:" in office.row(usual)["ocr_error"]


async def test_errors_of_extraction_and_of_ocr_stand_side_by_side(office: Office) -> None:
    """B6: neither overwrites the other, and a later success leaves error_message as it was."""
    (key,) = office.add(small_print(), error_message="the registry was slow")
    path = office.row(key)["file_path"]
    office.db.execute(f"update extraction_queue set file_path = 'prod/gone.pdf' where id = {key}")
    async with Kit(office.mill()) as kit:
        await kit.step()
        row = office.row(key)
        assert row["error_message"] == "the registry was slow"
        assert "prod/gone.pdf" in row["ocr_error"]
        office.db.execute(f"update extraction_queue set file_path = '{path}' where id = {key}")
        kit.advance(td(minutes=1))
        assert (await kit.step()).outcome == "done"
    row = office.row(key)
    assert (row["status_id"], row["error_message"]) == (5, "the registry was slow")
    assert "prod/gone.pdf" in row["ocr_error"]


async def test_a_document_without_a_sign_of_life_for_ten_minutes_goes_back(office: Office) -> None:
    """B7: looked for every 5 minutes; the holder is cleared; one that gives signs of life, in a column of ocr's own,
    is let alone.
    """
    silent, living = office.add(b"", n=2)
    mill = office.mill()
    lane = mill.lanes["ocr"]
    assert (lane.lease, lane.sweep_every) == (td(minutes=10), td(minutes=5))
    async with Kit(mill, worker_id="worker-1") as kit:
        _, second = await kit.claim(count=2)
        kit.advance(td(minutes=9, seconds=50))
        assert await kit.sweep() == []
        await (await kit.store()).renew([second])
        kit.advance(td(seconds=20))
        assert len(await kit.sweep()) == 1
    row = office.row(silent)
    assert (row["status_id"], row["ocr_worker_id"], row["ocr_started_at"], row["ocr_reclaims"]) == (3, None, None, 1)
    row = office.row(living)
    assert row["status_id"] == 6
    assert row["ocr_heartbeat_at"] is not None
    assert row["heartbeat_at"] is None, "registre's own"


async def test_a_document_that_is_taken_back_more_than_three_times_beyond_its_limit_is_dead(office: Office) -> None:
    """B7: with a limit of 1 the fourth time brings it back once more, the fifth ends it as 4, with the reason."""
    (key,) = office.add(b"", ocr_max_attempts=1)
    async with Kit(office.mill()) as kit:
        for _ in range(4):
            assert len(await kit.claim()) == 1
            kit.advance(td(minutes=11))
            await kit.sweep()
            assert office.row(key)["status_id"] == 3
        assert len(await kit.claim()) == 1
        kit.advance(td(minutes=11))
        await kit.sweep()
    row = office.row(key)
    assert row["status_id"] == 4
    assert "taken back too often" in row["ocr_error"]
    assert row["error_message"] is None


async def test_the_view_shows_who_reads_and_heartbeats_do_not_move_it(office: Office) -> None:
    """B8: ocr_worker_id, active_jobs, oldest_job, newest_job; from the start of the run."""
    office.add(b"", n=3)
    office.add(b"", status_id=5, ocr_worker_id="worker-1")
    mill = office.mill()
    async with Kit(mill, worker_id="worker-1") as one, Kit(mill, worker_id="worker-2") as two:
        claims = await one.claim()
        one.advance(td(minutes=3))
        claims += await one.claim()
        await two.claim()
        before = await active_workers(mill)
        one.advance(td(minutes=4))
        await (await one.store()).renew(claims)
        after = await active_workers(mill)
    assert before == after
    assert [(row["environment"], row["ocr_worker_id"], row["active_jobs"]) for row in before] == [
        ("prod", "worker-1", 2),
        ("prod", "worker-2", 1),
    ]
    first, second = before
    assert as_time(first["newest_job"]) - as_time(first["oldest_job"]) >= td(minutes=3)
    assert second["newest_job"] == second["oldest_job"]


class Other(enum.IntEnum):
    """A table in which everything has another number."""

    COMPLETE = 30
    ERREUR = 40
    EXTRACTION_COMPLETE = 50
    OCR_PROCESSING = 41


async def test_a_table_with_other_status_ids_is_another_line_in_the_declaration(office: Office) -> None:
    """B10: the values are part of the declaration; here 41 is in OCR, 40 an error, and 30 waits, also once more."""
    (good,) = office.add(small_print(), status_id=30)
    (bad,) = office.add(b"no PDF", status_id=30)
    (gone,) = office.add(b"", status_id=30, file_path="prod/gone.pdf")
    async with Kit(office.mill(status=Other)) as kit:
        claims = await kit.claim(count=3)
        assert {office.row(key)["status_id"] for key in (good, bad, gone)} == {41}
        for claim in claims:
            await kit.run(claim)
    assert [office.row(key)["status_id"] for key in (good, bad, gone)] == [50, 40, 30]


async def test_registre_and_ocr_tell_their_dead_rows_apart(office: Office) -> None:
    """B6, B10: both end rows in status 4; a retry in one must not send the other's document into the wrong phase."""
    (never_stored,) = office.add(b"", status_id=4, file_path=None, error_message="not found")
    (unreadable,) = office.add(b"", status_id=4, error_message="first try failed", ocr_error="damaged")
    database = Database.open(office.db.url)
    try:
        for lane, mine, ready in ((extraction, never_stored, 1), (office.mill().lanes["ocr"], unreadable, 3)):
            view = await view_lane(lane, "prod", database, Clock())
            assert (await view.count()).states["dead"] == 1
            assert [keys async for keys in Operator(view).retry(Selection(("dead",)))] == [[(mine,)]]
            assert office.row(mine)["status_id"] == ready
    finally:
        await database.close()
    assert office.row(unreadable)["error_message"] == "first try failed"
