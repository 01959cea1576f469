"""Live pages: the parts that change are sent to the browser again.

A page's address with ``live=1`` is a stream of server-sent events. Blocks of its template whose names begin with
``live_`` are rendered again every few seconds; those that differ from what was sent go out, as HTML by name.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.templating import Jinja2Templates

from ..errors import RowmillError
from .access import VISIT, Identity
from .problem import Problem

Gather = Callable[[], Awaitable[dict[str, Any]]]
EVERY = 2.0
#: Streams at once in this process; viewers beyond that see a page that does not refresh.
_MOST = 100
#: Seconds between two looks whether the viewer's token still holds, and a stream's longest life.
_CHECK, _LIFE = 15.0, 3600.0
#: Tells the page that it stands still.
_AWAY = "event: away\ndata: {}\n\n"
_open = 0


async def respond(request: Request, templates: Jinja2Templates, name: str, gather: Gather) -> Response:
    """The page, or, with ``live=1``, the stream of its changes."""
    if request.query_params.get("live") != "1":
        return templates.TemplateResponse(request, name, await gather())
    if _open >= _MOST:
        raise Problem(503, "too many live pages are open", headers={"Retry-After": "30"})
    return StreamingResponse(
        _stream(request, templates, name, gather), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
    )


async def _stream(request: Request, templates: Jinja2Templates, name: str, gather: Gather) -> AsyncIterator[str]:
    global _open
    _open += 1
    try:
        sent: dict[str, str] = {}
        away = False
        checked = started = time.monotonic()
        yield "retry: 3000\n\n"
        while time.monotonic() - started < _LIFE:
            began = time.monotonic()
            if began - checked > _CHECK:
                try:
                    holds = await _still(request)
                except (RowmillError, TimeoutError):  # not to be known now: nothing is shown until it is
                    away = True
                    yield _AWAY
                    await asyncio.sleep(EVERY)
                    continue
                if not holds:
                    yield "event: gone\ndata: {}\n\n"
                    return
                checked = began
            try:
                blocks = render(request, templates, name, await _whole(gather))
            except (RowmillError, Problem, TimeoutError):  # what is shown is no longer true; the next look may be
                away = True
                yield _AWAY
            else:
                changed = {block: html for block, html in blocks.items() if sent.get(block) != html}
                sent |= changed
                yield f"data: {json.dumps(changed)}\n\n" if changed or away else ": still\n\n"
                away = False
            # Where a look is expensive, it must not become the database's main work.
            await asyncio.sleep(max(EVERY, 3 * (time.monotonic() - began)))
    finally:
        _open -= 1


async def _whole(gather: Gather) -> dict[str, Any]:
    """Finish the query even if the viewer leaves: a canceled query costs its connection."""
    task = asyncio.ensure_future(gather())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def _still(request: Request) -> bool:
    """Whether the viewer's token is still valid."""
    known: Identity = request.state.who
    try:
        identity: Identity = await request.app.state.authenticator.identify(request, request.cookies.get(VISIT, ""))
    except Problem:  # a token that was good when the stream began
        return False
    same = (identity.how, identity.name, identity.lanes) == (known.how, known.name, known.lanes)
    return same and "read" in identity.scopes


def render(request: Request, templates: Jinja2Templates, name: str, values: dict[str, Any]) -> dict[str, str]:
    """The blocks of a page that may change."""
    template = templates.env.get_template(name)
    context = template.new_context({"request": request, **values})
    return {
        block: "".join(template.blocks[block](context)).strip()
        for block in template.blocks
        if block.startswith("live_")
    }
