"""The tables of A and B: made, made again, and brought up to date where they were there before."""

from __future__ import annotations

from datetime import timedelta as td

from apps.registre import tables
from apps.registre.tables import Status
from databases import Db
from rowmill import Mill
from rowmill.testing import Kit


async def migrated(db: Db) -> list[str]:
    return (await tables.migrate_all(Mill({"prod": db.url})))["prod"]


async def test_the_tables_are_made_once_and_a_second_migration_changes_nothing(db: Db) -> None:
    """A, B: six tables and a view, on both databases."""
    done = await migrated(db)
    assert {words for words in done if words.startswith("table ")} == {
        f"table {name}" for name in tables.metadata.tables
    }
    assert "view ocr_active_workers" in done
    assert await migrated(db) == []


async def test_a_row_is_born_as_the_lanes_expect_it(db: Db) -> None:
    """A4, B5, A11: what an insert leaves out is pending, without a holder, with three attempts at OCR."""
    await migrated(db)
    db.execute("insert into extraction_queue (document_number) values ('1 234 567')")
    row = db.one("select * from extraction_queue")
    assert (row["status_id"], row["ocr_attempts"], row["ocr_max_attempts"]) == (Status.EN_ATTENTE, 0, 3)
    assert row["worker_id"] is None
    assert row["created_at"] is not None
    db.execute("insert into search_sessions (company_name) values ('Boulangerie')")
    session = db.one("select * from search_sessions")
    assert (session["status"], bool(session["req_completed"])) == ("pending_company_selection", False)
    db.execute("insert into rdprm_searches (search_session_id, search_name) values (?, 'Boulangerie')", session["id"])
    assert db.value("select status from rdprm_searches") == "pending"


def test_the_status_ids_are_those_of_the_business() -> None:
    """A11, B10: ERREUR is 4, OCR_PROCESSING is 6."""
    assert {status.name: status.value for status in Status} == {
        "EN_ATTENTE": 1, "EN_TRAITEMENT": 2, "COMPLETE": 3, "ERREUR": 4, "EXTRACTION_COMPLETE": 5, "OCR_PROCESSING": 6,
    }  # fmt: skip


async def test_search_tables_without_a_holder_get_their_columns_and_keep_their_rows(db: Db) -> None:
    """A6: worker_id, processing_started_at and heartbeat_at are added where they lack."""
    flag = "boolean not null default false"
    key = "uuid primary key default gen_random_uuid()" if db.dialect == "postgresql" else "text primary key"
    db.execute(f"""create table search_sessions (id {key}, company_name text not null,
        status text not null default 'pending_company_selection', req_completed {flag},
        created_at timestamp, updated_at timestamp)""")
    first = "6f2c1f0e-0000-4000-8000-000000000001"
    db.execute(f"insert into search_sessions (id, company_name) values ('{first}', 'Boulangerie')")
    done = await migrated(db)
    assert {"column search_sessions.worker_id", "column search_sessions.heartbeat_at"} <= set(done)
    assert "column search_sessions.company_name" not in done
    row = db.one("select * from search_sessions")
    assert (str(row["id"]), row["company_name"], row["worker_id"]) == (first, "Boulangerie", None)
    assert await migrated(db) == []


async def test_the_view_shows_who_is_in_ocr(db: Db) -> None:
    """B8: per worker the number of rows, and its oldest and newest start."""
    first = "2026-01-02 03:04:05"
    await migrated(db)
    for number, worker, start in (
        (1, "worker-1", first),
        (2, "worker-1", "2026-01-02 03:09:00"),
        (3, "worker-2", first),
    ):
        db.execute(f"""insert into extraction_queue (document_number, status_id, ocr_worker_id, ocr_started_at)
            values ('{number}', 6, '{worker}', '{start}')""")
    db.execute("insert into extraction_queue (document_number, status_id, ocr_worker_id) values ('4', 5, 'worker-1')")
    rows = db.query("select * from ocr_active_workers order by ocr_worker_id")
    assert [(row["ocr_worker_id"], row["active_jobs"]) for row in rows] == [("worker-1", 2), ("worker-2", 1)]
    assert rows[0]["newest_job"] > rows[0]["oldest_job"] == rows[1]["oldest_job"]


async def test_the_tables_carry_both_lanes_with_every_role(db: Db) -> None:
    """A6, B2: registre's roles are found by name but one; ocr's are mapped, and share no column with them."""
    await migrated(db)
    mill = Mill({"prod": db.url})

    @mill.lane(
        "extraction_queue", ready={"status_id": 3}, running={"status_id": 6}, done={"status_id": 5},
        dead={"status_id": 4},
        roles={
            "worker": "ocr_worker_id", "claimed_at": "ocr_started_at", "heartbeat_at": "ocr_heartbeat_at",
            "attempts": "ocr_attempts", "max_attempts": "ocr_max_attempts", "reclaims": "ocr_reclaims",
            "error": "ocr_error", "progress": "ocr_progress", "finished_at": "ocr_finished_at",
        },
        lease=td(minutes=10),
    )  # fmt: skip
    async def ocr(job):  # type: ignore[no-untyped-def]
        return {"ocr_text": "lu", "ocr_fields": {"numéro": "1"}}

    db.execute("insert into extraction_queue (document_number, status_id, error_message) values ('1', 3, 'before')")
    async with Kit(mill) as kit:
        stepped = await kit.step("ocr")
    assert stepped is not None
    row = db.one("select * from extraction_queue")
    assert (row["status_id"], row["ocr_attempts"], row["error_message"], row["worker_id"]) == (5, 1, "before", None)
