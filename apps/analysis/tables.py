"""The application's tables, on PostgreSQL and SQLite. ``python -m apps.analysis.tables [URL]`` makes them, and
adds to the original's own ``"AnalysisJob"`` the columns that it lacks.

``"AnalysisJob"`` is the queue and the result in one. ``"ModelAnswer"`` keeps what a model was paid for, and
``"AnalysisWorker"`` what each worker process says of its processors.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from apps import migrations
from rowmill import Mill, RowmillError
from rowmill.store import Database

metadata = sa.MetaData()
_json = sa.JSON().with_variant(JSONB(), "postgresql")
_time = sa.DateTime(timezone=True)


def _born(name: str) -> sa.Column[Any]:
    return sa.Column(name, _time, nullable=False, server_default=sa.func.now())


jobs = sa.Table(
    "AnalysisJob",
    metadata,
    sa.Column("id", sa.Text, primary_key=True, default=lambda: uuid4().hex),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False, server_default="not-started"),
    sa.Column("currentStep", sa.Text, nullable=False, server_default="not-started"),
    sa.Column("inProgress", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("retryCount", sa.Integer, nullable=False, server_default="0"),
    sa.Column("extractedInfo", _json),
    _born("createdAt"),
    _born("updatedAt"),
    # What rowmill adds: who holds the row, his last sign of life, when it may be tried again, and why it failed.
    sa.Column("lockedBy", sa.Text),
    sa.Column("heartbeatAt", _time),
    sa.Column("runAfter", _time),
    sa.Column("error", sa.Text),
    postgresql_with={"fillfactor": 80},  # room on each page for heartbeats
)

answers = sa.Table(
    "ModelAnswer",
    metadata,
    sa.Column("jobId", sa.Text, primary_key=True),
    sa.Column("promptHash", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("inputTokens", sa.Integer, nullable=False),
    sa.Column("outputTokens", sa.Integer, nullable=False),
    _born("createdAt"),
)

workers = sa.Table(
    "AnalysisWorker",
    metadata,
    sa.Column("worker", sa.Text, primary_key=True),
    sa.Column("report", _json, nullable=False),
    _born("reportedAt"),
)

# What a claim looks for: rows of a phase, the oldest first; and, few at a time, the rows that are in progress.
_idle = sa.not_(jobs.c.inProgress)
_phase = (jobs.c.status, jobs.c.currentStep)
sa.Index("AnalysisJob_idle", *_phase, jobs.c.createdAt, jobs.c.id, postgresql_where=_idle, sqlite_where=_idle)
sa.Index("AnalysisJob_running", jobs.c.status, postgresql_where=jobs.c.inProgress, sqlite_where=jobs.c.inProgress)


async def create(database: Database) -> list[str]:
    """Make the tables that are not there yet, and the columns that the original's own table lacks; what was made.

    What is there already is only looked at: to alter a table would wait for all who are reading it.
    """
    async with database.begin() as connection:
        if database.dialect.name == "postgresql":  # one at a time: two that make the same table would fail
            await connection.execute(sa.text("select pg_advisory_xact_lock(7304118)"))
        return await connection.run_sync(_make)


def _make(connection: sa.Connection) -> list[str]:
    there = sa.inspect(connection)
    missing = [table for table in metadata.sorted_tables if not there.has_table(table.name)]
    metadata.create_all(connection, tables=missing)
    made = [table.name for table in missing]
    if jobs not in missing:
        present = {column["name"] for column in there.get_columns(jobs.name)}
        for column in (column for column in jobs.columns if column.name not in present):
            connection.exec_driver_sql(
                f'alter table "{jobs.name}" add column {migrations.definition(column, connection.dialect)}'
            )
            made.append(f"{jobs.name}.{column.name}")
    return made


async def read_jobs(database: Database) -> sa.Table:
    """``"AnalysisJob"`` as it is in this database: the original's key is a UUID, a number or text."""
    async with database.begin() as connection:
        return await connection.run_sync(lambda plain: sa.Table(jobs.name, sa.MetaData(), autoload_with=plain))


def new_job(table: sa.Table, url: str) -> dict[str, Any]:
    """The values of a new row; the original's program, not its table, filled in the key and the times."""
    values: dict[str, Any] = {"url": url, "createdAt": sa.func.now(), "updatedAt": sa.func.now()}
    if table.c.id.server_default is None and table.c.id.identity is None:
        kind = table.c.id.type.python_type
        values |= {} if kind is int else {"id": uuid4() if kind is UUID else uuid4().hex}
    states = {"status": "not-started", "currentStep": "not-started", "inProgress": False, "retryCount": 0}
    return values | states


def key_of(table: sa.Table, text: str) -> Any:
    """A key from an address; None where no row could have it."""
    kind = table.c.id.type.python_type
    try:
        key = kind(text)
    except ValueError:
        return None
    return None if kind is int and not -(2**63) <= key < 2**63 else key


async def create_all(mill: Mill) -> dict[str, list[str]]:
    """``create`` in every environment of a Mill, in order."""
    made: dict[str, list[str]] = {}
    for name, database in mill.databases():
        try:
            made[name] = await create(database)
        finally:
            await database.close()
    return made


def _main(url: str | None) -> None:
    for name, made in asyncio.run(create_all(Mill(url))).items():
        print(f"{name}: {', '.join(made) or 'nothing to do'}")


if __name__ == "__main__":
    try:
        _main(sys.argv[1] if len(sys.argv) > 1 else None)
    except RowmillError as error:
        sys.exit(f"Error: {error.message}\nTry: {error.hint}")
