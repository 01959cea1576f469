"""The tables of registre and ocr, for PostgreSQL and SQLite, and the migration that makes them.

``extraction_queue`` is worked on by two applications, one behind the other: registre takes a document from 1 to 3,
ocr from 3 to 5. Each has columns of its own for holder, times and error, so neither overwrites the other's.
"""

from __future__ import annotations

import enum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn
from sqlalchemy.sql.functions import FunctionElement

from rowmill import Mill


class Status(enum.IntEnum):
    """``extraction_queue.status_id``."""

    EN_ATTENTE = 1
    EN_TRAITEMENT = 2
    COMPLETE = 3
    ERREUR = 4
    EXTRACTION_COMPLETE = 5
    OCR_PROCESSING = 6


class new_id(FunctionElement[str]):
    """A fresh UUID, made by the database."""

    inherit_cache = True


class right_now(FunctionElement[Any]):
    """The database's time, with a fraction: rows of one second keep their order."""

    inherit_cache = True


@compiles(new_id, "postgresql")
def _new_id_postgres(element: Any, compiler: Any, **options: Any) -> str:
    return "gen_random_uuid()"


@compiles(new_id, "sqlite")
def _new_id_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    return "(lower(hex(randomblob(16))))"


@compiles(right_now, "postgresql")
def _right_now_postgres(element: Any, compiler: Any, **options: Any) -> str:
    return "clock_timestamp()"


@compiles(right_now, "sqlite")
def _right_now_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now'))"


metadata = sa.MetaData()
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite numbers only an INTEGER key by itself
_UUID = sa.Uuid(as_uuid=False)
_TIME = sa.DateTime(timezone=True)
_JSON = sa.JSON().with_variant(JSONB(), "postgresql")
#: Room on each page, so that heartbeats stay on it.
_ROOM: dict[str, Any] = {"postgresql_with": {"fillfactor": 80}}


def _born(name: str = "created_at") -> sa.Column[Any]:
    return sa.Column(name, _TIME, nullable=False, server_default=right_now())


def _holder() -> list[sa.Column[Any]]:
    """Who holds the row, since when, and the last sign of life. The two search tables had none of the three."""
    return [
        sa.Column("worker_id", sa.Text),
        sa.Column("processing_started_at", _TIME),
        sa.Column("heartbeat_at", _TIME),
        sa.Column("error_message", sa.Text),
    ]


extraction_queue = sa.Table(
    "extraction_queue",
    metadata,
    sa.Column("id", _NUMBER, sa.Identity(), primary_key=True),
    sa.Column("document_number", sa.Text, nullable=False),
    sa.Column("document_type", sa.Text),
    sa.Column("circonscription", sa.Text),
    sa.Column("cadastre", sa.Text),
    sa.Column("status_id", sa.Integer, nullable=False, server_default=str(Status.EN_ATTENTE.value)),
    *_holder(),
    _born(),
    # What the extraction leaves: where the PDF is in the object storage, and what it is.
    sa.Column("file_path", sa.Text),
    sa.Column("checksum", sa.Text),
    sa.Column("file_size", _NUMBER),
    # Written by ocr alone.
    sa.Column("ocr_worker_id", sa.Text),
    sa.Column("ocr_started_at", _TIME),
    sa.Column("ocr_heartbeat_at", _TIME),
    sa.Column("ocr_finished_at", _TIME),
    sa.Column("ocr_attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("ocr_max_attempts", sa.Integer, nullable=False, server_default="3"),
    sa.Column("ocr_reclaims", sa.Integer, nullable=False, server_default="0"),
    sa.Column("ocr_run_after", _TIME),
    sa.Column("ocr_error", sa.Text),
    sa.Column("ocr_progress", sa.Text),
    sa.Column("ocr_text", sa.Text),
    sa.Column("ocr_fields", _JSON),
    # What the claims of registre and of ocr walk.
    sa.Index("extraction_queue_by_status", "status_id", "created_at", "id"),
    **_ROOM,
)

search_sessions = sa.Table(
    "search_sessions",
    metadata,
    sa.Column("id", _UUID, primary_key=True, server_default=new_id()),
    sa.Column("company_name", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False, server_default="pending_company_selection"),
    sa.Column("req_completed", sa.Boolean, nullable=False, server_default=sa.false()),
    *_holder(),
    _born(),
    _born("updated_at"),
    sa.Index("search_sessions_by_status", "status", "req_completed", "created_at", "id"),
    **_ROOM,
)

rdprm_searches = sa.Table(
    "rdprm_searches",
    metadata,
    sa.Column("id", _UUID, primary_key=True, server_default=new_id()),
    sa.Column("search_session_id", _UUID, sa.ForeignKey("search_sessions.id"), nullable=False),
    sa.Column("search_name", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False, server_default="pending"),
    *_holder(),
    _born(),
    sa.Column("completed_at", _TIME),
    sa.Index("rdprm_searches_by_status", "status", "created_at", "id"),
    **_ROOM,
)

companies = sa.Table(
    "companies",
    metadata,
    sa.Column("id", _UUID, primary_key=True, server_default=new_id()),
    sa.Column("search_session_id", _UUID, sa.ForeignKey("search_sessions.id"), nullable=False),
    sa.Column("neq", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("status", sa.Text),
    sa.Column("address", sa.Text),
    sa.Column("registered_on", sa.Date),
    _born(),
    sa.UniqueConstraint("search_session_id", "neq"),
)

names = sa.Table(
    "names",
    metadata,
    sa.Column("id", _UUID, primary_key=True, server_default=new_id()),
    sa.Column("search_session_id", _UUID, sa.ForeignKey("search_sessions.id"), nullable=False),
    sa.Column("neq", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    _born(),
    sa.UniqueConstraint("search_session_id", "neq", "name", "kind"),
)

inscriptions = sa.Table(
    "inscriptions",
    metadata,
    sa.Column("id", _UUID, primary_key=True, server_default=new_id()),
    sa.Column("rdprm_search_id", _UUID, sa.ForeignKey("rdprm_searches.id"), nullable=False),
    sa.Column("search_session_id", _UUID, sa.ForeignKey("search_sessions.id"), nullable=False),
    sa.Column("number", sa.Text, nullable=False),
    sa.Column("nature", sa.Text, nullable=False),
    sa.Column("registered_on", sa.Date),
    sa.Column("debtor", sa.Text),
    sa.Column("creditor", sa.Text),
    sa.Column("amount_cents", _NUMBER),
    _born(),
    sa.UniqueConstraint("rdprm_search_id", "number"),
)

#: The workers that are in OCR at this moment: see B8.
OCR_VIEW = f"""create view ocr_active_workers as
select ocr_worker_id, count(*) as active_jobs, min(ocr_started_at) as oldest_job, max(ocr_started_at) as newest_job
from extraction_queue where status_id = {Status.OCR_PROCESSING.value} group by ocr_worker_id"""


def migrate(connection: sa.Connection) -> list[str]:
    """Make what is missing: tables, columns of tables that are there, the view. Says what it made."""
    there = sa.inspect(connection)
    known = set(there.get_table_names())
    missing = [table for table in metadata.sorted_tables if table.name not in known]
    _create(connection, known)
    done = [f"table {table.name}" for table in missing]
    for table in metadata.sorted_tables:
        if table.name not in known:
            continue
        present = {column["name"] for column in there.get_columns(table.name)}
        for column in table.columns:
            if column.name not in present:
                _add(connection, column)
                done.append(f"column {table.name}.{column.name}")
    if "ocr_active_workers" not in there.get_view_names():
        connection.exec_driver_sql(OCR_VIEW)
        done.append("view ocr_active_workers")
    return done


def _create(connection: sa.Connection, known: set[str]) -> None:
    """Make the tables that are missing. Their references take the type of the key they point to, as it is there."""
    fresh = sa.MetaData()
    for table in metadata.sorted_tables:
        if table.name in known:
            sa.Table(table.name, fresh, autoload_with=connection)
            continue
        made = table.to_metadata(fresh)
        for reference in made.foreign_keys:
            reference.parent.type = reference.column.type
        made.create(connection)


def key(value: Any) -> sa.ColumnElement[Any]:
    """A key of the business's own tables, a UUID or a number, as a value for a column that refers to it."""
    return sa.literal(value, _NUMBER) if isinstance(value, int) else sa.literal(str(value), _UUID)


def _add(connection: sa.Connection, column: sa.Column[Any]) -> None:
    """Add a column to a table that has rows: without what old rows could not fulfil."""
    copy = sa.Column(column.name, column.type, server_default=column.server_default)
    copy.nullable = column.nullable or column.server_default is None
    if connection.dialect.name == "sqlite" and isinstance(getattr(column.server_default, "arg", None), FunctionElement):
        copy.server_default, copy.nullable = None, True  # SQLite adds no column whose default it would have to compute
    text = CreateColumn(copy).compile(dialect=connection.dialect)
    connection.exec_driver_sql(f'alter table "{column.table.name}" add column {text}')


async def migrate_all(mill: Mill) -> dict[str, list[str]]:
    """``migrate`` in every environment of a Mill, in order."""
    done: dict[str, list[str]] = {}
    for name, database in mill.databases():
        try:
            async with database.begin() as connection:
                done[name] = await connection.run_sync(migrate)
        finally:
            await database.close()
    return done
