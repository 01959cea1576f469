"""Rows put into a user's own table, as an application would: plain INSERTs, or COPY for many."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from ..tables import Enrichment


class PostgresRows:
    """Each call is one transaction, and wakes idle workers with its commit."""

    def __init__(self, dsn: str, table: Enrichment) -> None:
        self.dsn, self.table = dsn, table

    async def open(self) -> None:
        import asyncpg

        self.connection = await asyncpg.connect(self.dsn)

    async def setup(self) -> None:
        for statement in self.table.ddl():
            await self.connection.execute(statement)

    async def add(self, number: int) -> None:
        link, url, domain, *_ = self.table.rows([number])[0]
        await self.connection.fetchval(
            f"""with new as (insert into {self.table.name_for(number)} (link_canonical_id, url, domain)
                values ($1, $2, $3)) select pg_notify('rowmill', '')""",
            link,
            url,
            domain,
        )

    async def add_many(self, numbers: Sequence[int]) -> None:
        async with self.connection.transaction():
            for name in self.table.names:
                mine = [number for number in numbers if self.table.name_for(number) == name]
                await self.connection.copy_records_to_table(
                    name, records=self.table.rows(mine), columns=self.table.columns
                )
            await self.connection.execute("select pg_notify('rowmill', '')")


class SqliteRows:
    """The same on a SQLite file, with the journal and the durability that rowmill itself uses."""

    def __init__(self, path: str, table: Enrichment) -> None:
        self.path, self.table = path, table

    async def open(self) -> None:
        self.connection = sqlite3.connect(self.path, isolation_level=None, timeout=30)
        self.connection.execute("pragma journal_mode = wal")
        self.connection.execute("pragma synchronous = normal")

    async def setup(self) -> None:
        for statement in self.table.ddl(sqlite=True):
            self.connection.execute(statement)

    def _values(self, numbers: Sequence[int]) -> list[tuple[Any, ...]]:
        rows = self.table.rows(numbers)
        return [(link.hex, url, domain, f"{due:%Y-%m-%d %H:%M:%S.%f}") for link, url, domain, due in rows]

    def _insert(self) -> str:
        return f"insert into {self.table.names[0]} ({', '.join(self.table.columns)}) values (?, ?, ?, ?)"

    async def add(self, number: int) -> None:
        self.connection.execute(self._insert(), self._values([number])[0])

    async def add_many(self, numbers: Sequence[int]) -> None:
        self.connection.execute("begin immediate")
        self.connection.executemany(self._insert(), self._values(numbers))
        self.connection.execute("commit")


def rows(dsn: str, table: Enrichment) -> PostgresRows | SqliteRows:
    """A database by URL, or a SQLite file by its path."""
    return PostgresRows(dsn, table) if "://" in dsn else SqliteRows(dsn, table)
