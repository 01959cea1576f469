"""Tokens and the audit log of the dashboard and the API: ``rowmill_tokens`` and ``rowmill_audit``.

Both tables are in the Mill's first environment. Only the SHA-256 of a token is stored. A token has 256 random bits, so
nobody can guess it and a slower hash would add nothing. A login creates a session: a token that expires soon, and is
valid only as long as the token that it was made from.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DeclarationError, did_you_mean
from ..database import Database, Run
from ..dialect import iso_time
from . import schema

SCOPES = ("read", "operate", "enqueue")
#: Hours until a login expires, and days that the audit log is kept.
SESSION_HOURS, AUDIT_DAYS = 12, 180
_COLUMNS = "id, name, scopes, lanes, session_of, created_at, created_by, expires_at, used_at, revoked_at"
_ENTRY = "id, at, who, token, address, action, environment, lane, target, outcome, detail"
_LONGEST = 2000
#: Seconds between two checks for expired entries of the audit log.
_FORGET_EVERY = 3600.0


@dataclass(frozen=True, slots=True)
class Token:
    """A stored token, without its secret."""

    id: str
    name: str
    scopes: frozenset[str]
    #: None: all lanes.
    lanes: frozenset[str] | None
    #: The token that opened this session; None: it is not a session.
    session_of: str | None
    created_at: str
    created_by: str
    expires_at: str | None
    used_at: str | None
    revoked_at: str | None
    #: Not revoked and not expired, by the database's time.
    valid: bool

    def value(self) -> dict[str, Any]:
        """The token as plain values, for scripts."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "session_of"}
        lanes = None if self.lanes is None else sorted(self.lanes)
        return {**values, "scopes": [scope for scope in SCOPES if scope in self.scopes], "lanes": lanes}


def digest(secret: str) -> str:
    """The digest that is stored for a token."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class _AccessTable:
    """One of the two tables."""

    name: str

    def __init__(self, database: Database) -> None:
        self.database, self.sql = database, database.sql
        self.table, self.now = database.own(self.name), database.sql.now

    async def ensure(self) -> None:
        """Create the tables if they are missing; raises DeclarationError if the role may not."""
        await schema.need(self.database, schema.ACCESS)

    async def exists(self) -> bool:
        """Whether the table exists."""
        return await self.database.read(lambda run: schema.exists(self.database, run, self.name))


class Tokens(_AccessTable):
    """The tokens of a Mill."""

    name = "rowmill_tokens"

    async def create(
        self, name: str, scopes: Collection[str], lanes: Collection[str] | None, days: float | None, by: str
    ) -> tuple[Token, str]:
        """Create a token; returns it with its secret, which is shown only once."""
        await self.ensure()
        if not name.strip() or not scopes:
            raise DeclarationError("a token needs a name and a scope", hint="--scope read")
        if [token for token in await self.all() if token.name == name and token.valid]:
            raise DeclarationError(f"there is already a token {name!r}", hint="another name, or revoke that one first")
        ends = None if days is None else self.sql.later(str(days * 86400))
        return await self._add(name, scopes, lanes, None, by, ends)

    async def open_session(self, token: Token) -> tuple[Token, str]:
        """Create a session with a token's rights. Returns it with its secret, and deletes expired sessions."""
        gone = f"delete from {self.table} where session_of is not null and expires_at < {self.now}"
        await self.database.write(lambda run: run(gone, ()))
        ends = self.sql.later(str(SESSION_HOURS * 3600))
        return await self._add(token.name, token.scopes, token.lanes, token.id, token.created_by, ends)

    async def _add(
        self,
        name: str,
        scopes: Collection[str],
        lanes: Collection[str] | None,
        of: str | None,
        by: str,
        ends: str | None,
    ) -> tuple[Token, str]:
        secret, id = f"rm_{secrets.token_urlsafe(32)}", secrets.token_hex(5)
        marks = self.sql.marks(7)
        text = f"""insert into {self.table}
  (id, name, digest, scopes, lanes, session_of, created_by, created_at, expires_at)
values ({", ".join(marks)}, {self.now}, {ends or "null"})"""
        listed = None if lanes is None else json.dumps(sorted(lanes))
        values = (id, name, digest(secret), " ".join(s for s in SCOPES if s in scopes), listed, of, by)
        await self.database.write(lambda run: run(text, values))
        rows = await self._read(f"id = {self.sql.mark(1)}", (id,))
        return rows[0], secret

    async def find(self, secret: str) -> Token | None:
        """The token with this secret, if it is valid. A session is valid only as long as its token."""
        rows = await self._read(f"digest = {self.sql.mark(1)}", (digest(secret),))
        if not rows or not rows[0].valid:
            return None
        if rows[0].session_of is not None:
            parents = await self._read(f"id = {self.sql.mark(1)}", (rows[0].session_of,))
            if not parents or not parents[0].valid:
                return None
        return rows[0]

    async def used(self, token: Token) -> None:
        """Record the use of a token; the use of a session counts for its token."""
        ids = (token.id, token.session_of or token.id)
        marks = self.sql.marks(2)
        text = f"update {self.table} set used_at = {self.now} where id in ({', '.join(marks)})"
        await self.database.write(lambda run: run(text, ids))

    async def any(self) -> bool:
        """Whether a token was ever created. Revoked tokens count, so revoking the last one does not open the server."""
        if not await self.exists():
            return False
        text = f"select 1 from {self.table} where session_of is null limit 1"
        return bool(await self.database.read(lambda run: run(text, ())))

    async def all(self) -> list[Token]:
        """Every token except sessions, the newest last."""
        return await self._read("session_of is null", ()) if await self.exists() else []

    async def revoke(self, word: str) -> Token | None:
        """Revoke a token by its id or its name, and all its sessions. Returns None if there is no such token."""
        valid = [token for token in await self.all() if token.valid and word in (token.id, token.name)]
        if not valid:
            return None
        marks = self.sql.marks(2)
        text = f"""update {self.table} set revoked_at = {self.now}
where revoked_at is null and (id = {marks[0]} or session_of = {marks[1]})"""
        await self.database.write(lambda run: run(text, (valid[0].id, valid[0].id)))
        return (await self._read(f"id = {self.sql.mark(1)}", (valid[0].id,)))[0]

    async def close_session(self, token: Token) -> None:
        """Log out."""
        text = f"delete from {self.table} where session_of is not null and id = {self.sql.mark(1)}"
        await self.database.write(lambda run: run(text, (token.id,)))

    async def _read(self, test: str, values: Sequence[Any]) -> list[Token]:
        valid = f"case when revoked_at is null and (expires_at is null or expires_at > {self.now}) then 1 else 0 end"
        text = f"select {_COLUMNS}, {valid} from {self.table} where {test} order by created_at, id"
        rows = await self.database.read(lambda run: run(text, tuple(values)))
        return [_token(row) for row in rows]


class Audit(_AccessTable):
    """The entries of the audit log."""

    name = "rowmill_audit"
    _forgot = -_FORGET_EVERY

    async def record(self, entry: Mapping[str, str | None]) -> int:
        """Add an entry: who, token, address, action, environment, lane, target, outcome, detail. Returns its id."""
        names = [name for name in _ENTRY.split(", ") if name not in ("id", "at")]
        marks = self.sql.marks(len(names))
        text = f"insert into {self.table} (at, {', '.join(names)}) values ({self.now}, {', '.join(marks)}) returning id"
        values = tuple(None if (value := entry.get(name)) is None else _clean(value) for name in names)
        return int((await self.database.write(lambda run: run(text, values)))[0][0])

    async def complete(self, id: int, outcome: str, detail: str | None) -> None:
        """Add the outcome of an action to its entry."""
        marks = self.sql.marks(2)
        text = f"update {self.table} set outcome = {marks[0]}, detail = {marks[1]} where id = {int(id)}"
        values = (_clean(outcome), None if detail is None else _clean(detail))
        await self.database.write(lambda run: run(text, values))

    async def entries(
        self, limit: int, before: int | None = None, lanes: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """The newest entries first, before an id; ``lanes``: only actions on these lanes."""
        if not await self.exists():
            return []
        tests = [] if before is None else [f"id < {int(before)}"]
        values: tuple[str, ...] = ()
        if lanes is not None:
            values = tuple(sorted(lanes))
            tests.append(f"lane in ({', '.join(self.sql.marks(len(values)))})" if values else "1 = 0")
        where = f" where {' and '.join(tests)}" if tests else ""
        text = f"select {_ENTRY} from {self.table}{where} order by id desc limit {int(limit)}"

        def verb(run: Run) -> list[dict[str, Any]]:
            return [dict(zip(_ENTRY.split(", "), row, strict=True)) for row in run(text, values)]

        return [{**entry, "at": iso_time(entry["at"])} for entry in await self.database.read(verb)]

    async def forget_in_time(self) -> None:
        """Delete old entries, unless that happened recently."""
        if (now := time.monotonic()) - self._forgot >= _FORGET_EVERY:
            self._forgot = now
            await self.forget()

    async def forget(self) -> None:
        """Delete entries older than half a year."""
        text = f"delete from {self.table} where at < {self.sql.later(str(-86400 * AUDIT_DAYS))}"
        await self.database.write(lambda run: run(text, ()))


def check_scopes(scopes: Sequence[str]) -> None:
    """Refuse an unknown scope."""
    for scope in scopes:
        if scope not in SCOPES:
            raise DeclarationError(f"there is no scope {scope!r}", hint=did_you_mean(scope, SCOPES))


def _clean(value: str) -> str:
    """Text that both databases can store, with a bounded length."""
    return value.replace("\0", " ").encode("utf-8", "replace").decode()[:_LONGEST]


def _token(row: Sequence[Any]) -> Token:
    id, name, scopes, lanes, of, created, by, expires, used, revoked, valid = row
    limited = None if lanes is None else frozenset(json.loads(lanes))
    return Token(
        id, name, frozenset(scopes.split()), limited, of, str(iso_time(created)), by,
        iso_time(expires), iso_time(used), iso_time(revoked), bool(valid),
    )  # fmt: skip
