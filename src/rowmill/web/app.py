"""The web application: the dashboard's pages, the API, the login, behind one guard.

    uvicorn.run(application(mill))

A request finds on ``request.app.state``: ``mill``, ``directory`` (its lanes in its environments, with databases that
are open as long as the application lives), ``cache`` (answers that viewers share), ``authenticator`` (tokens),
``audit``; and on ``request.state.who`` who sent it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.templating import Jinja2Templates

from ..errors import RowmillError
from ..mill import Mill
from ..ops.access import Audit, Tokens
from ..ops.cached_mill import CachedMill
from ..ops.directory import LaneDirectory
from . import access, api, pages, problem
from .guard import BODY_LIMIT, LOOPBACK, Guard

HERE = Path(__file__).parent
#: Seconds a lane's binding to its table is used before the table is looked at again, and that a start may wait.
_FRESH = 60.0
_START = 5.0

templates = Jinja2Templates(HERE / "templates")


def application(
    mill: Mill,
    *,
    hosts: Collection[str] | None = LOOPBACK,
    may_open: bool = True,
    inserts: Collection[str] = (),
    body_limit: int = BODY_LIMIT,
) -> Starlette:
    """The dashboard and the API of a Mill, as an ASGI application.

    ``hosts``: the names the server is reached by (None: any). ``may_open``: without any token, everybody who reaches
    it may do everything; only right on a loopback address. ``inserts``: lanes over tables of your own whose rows the
    API may create. ``body_limit``: bytes of a request.
    """
    mill.select(None)
    if inserts:
        mill.select(inserts)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with LaneDirectory(mill, fresh=_FRESH) as directory:
            app.state.directory, app.state.cache = directory, CachedMill(directory)
            app.state.authenticator = access.Authenticator(Tokens(directory.first), may_open=may_open)
            app.state.audit = Audit(directory.first)
            await _prepare(mill)
            try:
                yield
            finally:
                if (standing := getattr(app.state, "standing", None)) is not None:
                    await standing.close()
                await mill.close()

    routes: list[BaseRoute] = [*access.routes(templates)]
    routes += [*api.routes(templates), *pages.routes(templates)]
    routes.append(Mount("/static", StaticFiles(directory=HERE / "static")))
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Guard, hosts=hosts, limit=body_limit)],
        exception_handlers={
            HTTPException: problem.handle,
            RowmillError: problem.handle,
            TimeoutError: problem.handle,
            Exception: problem.handle,
        },
    )
    app.state.mill, app.state.inserts = mill, frozenset(inserts)
    return app


async def _prepare(mill: Mill) -> None:
    """Create what tasks need; if the database is down or the role may not, requests report it later."""
    if mill.tasks:
        try:
            async with asyncio.timeout(_START):
                await mill.prepare()
        except (RowmillError, TimeoutError) as error:
            problem.log.warning("rowmill's own tables do not exist and could not be created: %s", error)
