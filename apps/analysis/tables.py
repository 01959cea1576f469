"""The application's tables, on PostgreSQL and SQLite. ``python -m apps.analysis.tables [URL]`` makes them.

``"AnalysisJob"`` is the queue and the result in one. ``"ModelAnswer"`` keeps what a model was paid for, and
``"AnalysisWorker"`` what each worker process says of its processors.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

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


async def create(database: Database) -> None:
    """Make the tables that are not there yet."""
    async with database.begin() as connection:
        if database.dialect.name == "postgresql":  # one at a time: two that make the same table would fail
            await connection.execute(sa.text("select pg_advisory_xact_lock(7304118)"))
        await connection.run_sync(metadata.create_all)


async def _main(url: str | None) -> None:
    for name, database in Mill(url).databases():
        try:
            await create(database)
            print(f"{name}: {', '.join(metadata.tables)}")
        finally:
            await database.close()


if __name__ == "__main__":
    try:
        asyncio.run(_main(sys.argv[1] if len(sys.argv) > 1 else None))
    except RowmillError as error:
        sys.exit(f"Error: {error.message}\nTry: {error.hint}")
