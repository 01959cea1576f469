"""A transaction for handlers and callers: a SQLAlchemy connection that also takes SQL text."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from .dialect import dialect_named
from .handler_connections import shielded


class Tx:
    """A SQLAlchemy async connection inside a transaction, whose ``execute`` also takes SQL text with ``:names``."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection

    async def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run a statement: SQLAlchemy Core, or SQL text."""
        work = self.connection.execute(as_statement(statement), parameters)
        return await (shielded(work) if dialect_named(self.connection.dialect.name).one_writer else work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


class PlainTx:
    """The same for sync functions, over a plain connection."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run a statement: SQLAlchemy Core, or SQL text."""
        return self.connection.execute(as_statement(statement), parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def as_statement(statement: Any) -> Any:
    """Wrap SQL text as a statement; return anything else as it is."""
    return sa.text(statement) if isinstance(statement, str) else statement
