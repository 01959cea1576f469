"""The statements that a database is sent, and whether each keeps to a lane's shard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from rowmill.store.database import Database
from rowmill.store.postgres_database import SingleStatement, Together


@contextmanager
def recording(database: Database) -> Iterator[list[str]]:
    """Every statement from here on, as it is sent."""
    sent: list[str] = []
    verbs = ("read", "write", "transact", "read_within")
    before = {name: getattr(database, name) for name in verbs}

    def noted(verb: Any) -> Any:
        if isinstance(verb, SingleStatement):
            sent.append(verb.sql)
            return verb

        def work(run: Any) -> Any:
            def noting(sql: str, parameters: Any = ()) -> Any:
                sent.append(sql)
                return run(sql, parameters)

            return verb(noting)

        return Together(work) if isinstance(verb, Together) else work

    def wrapped(name: str) -> Any:
        async def method(verb: Any, *args: Any, **options: Any) -> Any:
            return await before[name](noted(verb), *args, **options)

        return method

    def executed(_: Any, __: Any, statement: str, *___: Any) -> None:
        sent.append(statement)

    for name in verbs:
        setattr(database, name, wrapped(name))
    sa.event.listen(sa.Engine, "before_cursor_execute", executed)
    try:
        yield sent
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", executed)
        for name in verbs:
            delattr(database, name)


_QUOTED = re.compile(r"'(?:[^']|'')*'")


def astray(text: str, table: str, column: str) -> list[str]:
    """The parts of a statement that name the table without the shard beside it: in the same parentheses."""
    plain = _QUOTED.sub("''", text)
    named = re.compile(rf'\b(?:from|join|update)\s+(?:\w+\.)?"?{table}"?(?![\w.])')
    kept = re.compile(rf'(?<![\w"])(?:\w+\.)?"?{column}"?\s*(?:=|in\b)')
    found, open_parts = [], [""]
    for sign in plain + ";":
        if sign == "(":
            open_parts[-1] += "()"
            open_parts.append("")
        elif (sign == ")" and len(open_parts) > 1) or sign == ";":
            part = open_parts.pop()
            if len(named.findall(part)) > len(kept.findall(part)) and " where 0 " not in part:
                found.append(" ".join(part.split()))
            open_parts = open_parts or [""]
        else:
            open_parts[-1] += sign
    return found
