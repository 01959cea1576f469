"""Who may use the dashboard and the API, and what was done there: tokens and the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import DeclarationError
from ..mill import Mill
from ..store import Database
from ..store.inspect.lane_view import check_file
from ..store.own.access import SCOPES as SCOPES
from ..store.own.access import SESSION_HOURS as SESSION_HOURS
from ..store.own.access import Audit as Audit
from ..store.own.access import Token as Token
from ..store.own.access import Tokens as Tokens
from ..store.own.access import check_scopes
from ..store.own.access import digest as digest

_LONGEST_NAME = 100


@asynccontextmanager
async def first_database(mill: Mill) -> AsyncIterator[Database]:
    """The first environment's database, where tokens and the audit log are."""
    ((_, database),) = mill.databases([next(iter(mill.environments))])
    try:
        check_file(database)
        yield database
    finally:
        await database.close()


async def tokens(mill: Mill) -> dict[str, Any]:
    """Every token, the newest last."""
    async with first_database(mill) as database:
        return {"tokens": [token.value() for token in await Tokens(database).all()]}


async def create_token(
    mill: Mill, name: str, scopes: Sequence[str], lanes: list[str] | None, days: float | None, by: str
) -> dict[str, Any]:
    """Make a token; its secret is in this document and nowhere else."""
    check_scopes(scopes)
    if lanes:
        mill.select(lanes)
    if len(name) > _LONGEST_NAME:
        raise DeclarationError(f"a token's name has at most {_LONGEST_NAME} characters")
    async with first_database(mill) as database:
        token, secret = await Tokens(database).create(name, scopes, lanes, days, by)
    return {"action": "create", **token.value(), "token": secret}


async def revoke_token(mill: Mill, name: str) -> dict[str, Any]:
    """Revoke a token. ``token`` is null if there is no valid one of this name."""
    async with first_database(mill) as database:
        token = await Tokens(database).revoke(name)
    return {"action": "revoke", "token": token.value() if token else None}


async def has_token(mill: Mill) -> bool:
    """Whether there is a valid token."""
    return any(token["valid"] for token in (await tokens(mill))["tokens"])
