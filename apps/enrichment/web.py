"""The web side: creates imports, shows how they stand, and checks who may see them. It fetches nothing and works on
nothing; the workers find what is to be done in the database.

``uvicorn --factory apps.enrichment.web:app``, or ``python -m apps.enrichment.web``. Every request carries
``Authorization: Bearer TOKEN``. What is another user's is answered exactly like what is not there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rowmill import RowmillError

from . import users
from .connect import database_url, pool
from .settings import Settings

IMPORT = """id, source_type, status, total_items, processed_items, failed_items, created_at, started_at, finished_at,
    last_error"""
PAGE = 200
Handler = Callable[[Request, asyncpg.Pool, Any], Awaitable[Response]]


def app(url: str | None = None) -> Starlette:
    """The application over a database; by default where ``ROWMILL_DATABASE_URL`` says."""
    try:
        address = url or database_url(os.environ)
    except RowmillError as error:  # a server that starts a factory would show a traceback of it
        sys.exit(f"Error: {error.message}\nTry: {error.hint}")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with pool(address, 5) as opened:
            app.state.db = opened
            yield

    routes = [
        Route("/imports", _for_user(create), methods=["POST"]),
        Route("/imports", _for_user(overview), methods=["GET"]),
        Route("/imports/{id:uuid}", _for_user(show), methods=["GET"]),
        Route("/imports/{id:uuid}/cancel", _for_user(cancel), methods=["POST"]),
        Route("/imports/{id:uuid}/links", _for_user(links), methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _for_user(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Only with a token, and for the user that it belongs to."""

    async def endpoint(request: Request) -> Response:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        db = request.app.state.db
        user = await users.by_token(db, token.strip()) if kind.lower() == "bearer" and token.strip() else None
        if user is None:
            return _error(401, "no valid token", "Authorization: Bearer TOKEN", {"www-authenticate": "Bearer"})
        return await handler(request, db, user)

    return endpoint


async def create(request: Request, db: asyncpg.Pool, user: Any) -> Response:
    """``POST /imports`` with a bookmarks file as its body: an import that waits for a worker."""
    most = Settings.read().upload_bytes
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most:
            return _error(413, f"a bookmarks file has at most {most} bytes", "split it by folders")
    if not content:
        return _error(400, "the body is empty", "send the bookmarks file as the body of the request")
    async with db.acquire() as connection, connection.transaction():
        row = await connection.fetchrow(f"insert into import_jobs (user_id) values ($1) returning {IMPORT}", user)
        await connection.execute(
            "insert into import_files (import_job_id, content) values ($1, $2)", row["id"], bytes(content)
        )
    return _json(dict(row), 201)


async def overview(request: Request, db: asyncpg.Pool, user: Any) -> Response:
    """``GET /imports``: the user's imports, the newest first."""
    rows = await db.fetch(
        f"select {IMPORT} from import_jobs where user_id = $1 order by created_at desc limit {PAGE}", user
    )
    return _json([dict(row) for row in rows])


async def show(request: Request, db: asyncpg.Pool, user: Any) -> Response:
    """``GET /imports/ID``."""
    row = await db.fetchrow(
        f"select {IMPORT} from import_jobs where id = $1 and user_id = $2", request.path_params["id"], user
    )
    return _json(dict(row)) if row else _not_there()


async def cancel(request: Request, db: asyncpg.Pool, user: Any) -> Response:
    """``POST /imports/ID/cancel``: the worker that reads it loses it, and waiting links of its own are withdrawn."""
    id = request.path_params["id"]
    row = await db.fetchrow(
        f"""with gone as (
            update import_jobs set status = 'canceled', finished_at = now()
            where id = $1 and user_id = $2 and status in ('queued', 'running') returning *
        ), file as (delete from import_files using gone where import_job_id = gone.id)
        select {IMPORT} from gone""",
        id, user,
    )  # fmt: skip
    if row is not None:
        return _json(dict(row))
    if await db.fetchval("select true from import_jobs where id = $1 and user_id = $2", id, user):
        return _error(409, "the import is over", f"GET /imports/{id}")
    return _not_there()


async def links(request: Request, db: asyncpg.Pool, user: Any) -> Response:
    """``GET /imports/ID/links?after=N``: its bookmarks in their folders, and what is known of each, 200 at a time."""
    after = request.query_params.get("after", "-1")
    if not re.fullmatch(r"-?[0-9]{1,9}", after):
        return _error(400, f"after={after[:20]!r} is not a position", "after=199")
    id = request.path_params["id"]
    if not await db.fetchval("select true from import_jobs where id = $1 and user_id = $2", id, user):
        return _not_there()
    rows = await db.fetch(
        f"""select p.position, p.folder, p.title as bookmark, p.url, p.refused, e.status, e.title, e.description,
            e.icon_url, e.language, e.last_error
        from placements p left join enrichment_jobs e using (link_canonical_id)
        where p.import_job_id = $1 and p.position > $2 order by p.position limit {PAGE}""",
        id, int(after),
    )  # fmt: skip
    return _json([dict(row) for row in rows])


def _not_there() -> Response:
    return _error(404, "there is no such import", "GET /imports")


def _error(status: int, message: str, hint: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message, "try": hint}, status, headers)


def _json(value: Any, status: int = 200) -> Response:
    return JSONResponse(_plain(value), status)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, UUID) else value


if __name__ == "__main__":
    uvicorn.run(app())
