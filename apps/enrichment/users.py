"""Users and their tokens: ``python -m apps.enrichment.users NAME`` makes one and shows its token, once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
from typing import Any

import asyncpg

from rowmill import RowmillError

from .connect import connect, database_url
from .mill import create_tables


def token_hash(token: str) -> bytes:
    """What is kept of a token. It is long and random, so a plain hash tells nothing of it."""
    return hashlib.sha256(token.encode()).digest()


async def add(db: Any, name: str) -> tuple[Any, str]:
    """A new user: his id, and the token that only he will know."""
    token = secrets.token_urlsafe(32)
    id = await db.fetchval("insert into users (name, token_hash) values ($1, $2) returning id", name, token_hash(token))
    return id, token


async def by_token(db: Any, token: str) -> Any:
    """Who shows this token; None: nobody."""
    return await db.fetchval("select id from users where token_hash = $1", token_hash(token))


async def _main(name: str) -> None:
    url = database_url(os.environ)
    for note in await create_tables(url):
        print(f"Note: {note}", file=sys.stderr)
    connection = await connect(url)
    try:
        _, token = await add(connection, name)
    except asyncpg.PostgresError as error:
        raise RowmillError(
            f"the user could not be added: {error}", hint="a row of users by hand, with sha256(token) as its token_hash"
        ) from error
    finally:
        await connection.close()
    print(token)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Try: ROWMILL_DATABASE_URL=postgresql://... python -m apps.enrichment.users NAME")
    try:
        asyncio.run(_main(sys.argv[1]))
    except RowmillError as error:
        sys.exit(f"Error: {error.message}\nTry: {error.hint}")
