"""What a model was paid for, kept from the moment it is there, whatever becomes of the run that asked.

An answer is stored in a transaction of its own before its row is settled. A run that is repeated (its process was
killed, or it had lost its row) finds it under the row's id and the prompt's hash, and asks nobody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import sqlalchemy as sa

from apps.markup import storable
from rowmill import Job, Mill
from rowmill.store import Database

from .models import Reply
from .tables import answers


class Answers:
    """The answers of all environments of a Mill."""

    def __init__(self, databases: dict[str, Database]) -> None:
        self._databases = databases

    async def find(self, job: Job, prompt_hash: str) -> Reply | None:
        """What a model answered to this prompt of this job, if it ever did."""
        table = answers.c
        wanted = sa.select(table.text, table.model, table.inputTokens, table.outputTokens).where(
            table.jobId == str(job.id), table.promptHash == prompt_hash
        )
        async with self._databases[job.environment].begin() as connection:
            row = (await connection.execute(wanted)).one_or_none()
        return Reply(*row) if row is not None else None

    async def keep(self, job: Job, prompt_hash: str, reply: Reply) -> None:
        """Store an answer; one that is there already stays."""
        values = {
            "jobId": str(job.id), "promptHash": prompt_hash, "model": reply.model, "text": storable(reply.text),
            "inputTokens": reply.input_tokens, "outputTokens": reply.output_tokens,
        }  # fmt: skip
        database = self._databases[job.environment]
        if database.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert
        else:
            from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
        async with database.begin() as connection:
            await connection.execute(insert(answers).values(values).on_conflict_do_nothing())


@asynccontextmanager
async def open_answers(mill: Mill) -> AsyncIterator[Answers]:
    """Connections of their own: an answer is stored whatever else this process does with the database."""
    databases = dict(mill.databases())
    try:
        yield Answers(databases)
    finally:
        for database in databases.values():
            await database.close()
