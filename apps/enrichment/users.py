"""Users and their tokens: ``python -m apps.enrichment.users NAME`` makes one and shows its token, once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
from typing import Any
from uuid import UUID

from .connect import connect
from .mill import create_tables


def token_hash(token: str) -> bytes:
    """What is kept of a token. It is long and random, so a plain hash tells nothing of it."""
    return hashlib.sha256(token.encode()).digest()


async def add(db: Any, name: str) -> tuple[UUID, str]:
    """A new user: his id, and the token that only he will know."""
    token = secrets.token_urlsafe(32)
    id = await db.fetchval("insert into users (name, token_hash) values ($1, $2) returning id", name, token_hash(token))
    return id, token


async def by_token(db: Any, token: str) -> UUID | None:
    """Who shows this token."""
    found: UUID | None = await db.fetchval("select id from users where token_hash = $1", token_hash(token))
    return found


async def _main(url: str, name: str) -> None:
    await create_tables(url)
    connection = await connect(url)
    try:
        _, token = await add(connection, name)
    finally:
        await connection.close()
    print(token)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not os.environ.get("ROWMILL_DATABASE_URL"):
        sys.exit("Try: ROWMILL_DATABASE_URL=postgresql://... python -m apps.enrichment.users NAME")
    asyncio.run(_main(os.environ["ROWMILL_DATABASE_URL"], sys.argv[1]))
