"""A distributed profile on plain PostgreSQL: what the driver sends must be in forms that a distributed planner takes.

``pytest --distributed`` notes each statement as it is sent. When a test ends, the server's own parse tree of each one
that writes is judged (``statement_forms.py``), and a refused form fails the test. All tables are in one schema that is
not ``public``, as in a distributed schema.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable
from typing import Any, Self
from urllib.parse import urlsplit

import asyncpg
import pytest
from asyncpg.connection import Connection

import databases
from statement_forms import Catalog, refused_forms, told, writes

SCHEMA = "tenant"
#: Statements that are not judged, by what is in their text; each with the reason. DDL is, where it is refused by name.
EXCEPTED = {
    r"^alter table (?!.*\browmill_)": "rowmill migrate proposes it for the user's table, and he applies it",
}


class Profile:
    """Notes what is sent to each database, and judges it."""

    def __init__(self) -> None:
        #: By database: texts, each with the search path that its connection asked for.
        self._sent: dict[str, dict[str, str | None]] = {}
        #: What was judged, with other numbers.
        self._judged: set[str] = set()
        #: Texts whose tables were gone when their test ended; another test may have judged them.
        self._unread: dict[str, tuple[str, str]] = {}
        self._sends = _patched(self._note)

    def report(self) -> list[str]:
        """How many statements were judged, and those that no test could have judged, with the server's reason."""
        unread = [told(text, [why]) for form, (text, why) in self._unread.items() if form not in self._judged]
        return [f"{len(self._judged)} distinct statements judged, {len(unread)} could not be", *unread]

    def _note(self, connection: Any, text: str) -> None:
        # What a test itself says to its database is no business of the profile's.
        if any(re.search(pattern, text) for pattern in EXCEPTED):
            return
        if asyncio.get_running_loop() is databases._loop() or not writes(text) or _form(text) in self._judged:
            return
        params = connection._params
        path = (params.server_settings or {}).get("search_path")
        self._sent.setdefault(params.database, {})[text] = path

    def judge(self, url: str, database: str) -> list[str]:
        """The refused statements that were sent to this database, each with its reasons."""
        texts = self._sent.pop(database, {})
        return databases._wait(self._refused(url, texts)) if texts else []

    async def _refused(self, url: str, texts: dict[str, str | None]) -> list[str]:
        connection = await asyncpg.connect(url, timeout=databases.PATIENCE, command_timeout=databases.PATIENCE)
        refused = []
        try:
            catalog = await Catalog.of(connection)
            for text, path in texts.items():
                await connection.execute(f"set search_path = {path}" if path else "reset search_path")
                try:
                    found = await refused_forms(connection, catalog, text)
                except asyncpg.PostgresError as error:
                    self._unread[_form(text)] = text, str(error)
                    continue
                self._judged.add(_form(text))
                if found:
                    refused.append(told(text, found))
        finally:
            await connection.close(timeout=databases.PATIENCE)
        return refused

    def check(self, url: str) -> None:
        """Fail if a refused statement was sent to this database."""
        refused = self.judge(url, urlsplit(url).path.lstrip("/"))
        assert not refused, "a distributed planner refuses:\n" + "\n\n".join(refused)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop noting."""
        Connection._get_statement, Connection.execute = self._sends


def _form(text: str) -> str:
    """A text without its numbers: some name a lock, or a limit."""
    return re.sub(r"\b\d+(\.\d+)?\b", "0", text)


def _patched(note: Callable[[Any, str], None]) -> tuple[Any, Any]:
    """Let every asyncpg connection of this process tell what it sends; what was there before."""
    before = Connection._get_statement, Connection.execute

    def noting(method: Any) -> Any:
        @functools.wraps(method)
        async def send(self: Any, query: str, *args: Any, **options: Any) -> Any:
            note(self, query)
            return await method(self, query, *args, **options)

        return send

    Connection._get_statement, Connection.execute = (noting(method) for method in before)
    return before


#: The one of this run of pytest, if it has one.
session: Profile | None = None


def check_later(request: pytest.FixtureRequest, url: str) -> None:
    """With the profile on: let a test fail at its end if it sent a refused statement to this database."""
    if (profile := session) is not None:
        request.addfinalizer(lambda: profile.check(url))
