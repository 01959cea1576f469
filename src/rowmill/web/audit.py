"""What was done through the dashboard and the API, written down: who, what, when, how it ended."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from starlette.requests import HTTPConnection

from ..errors import RowmillError
from ..store.access import Audit

log = logging.getLogger("rowmill.audit")


async def record(
    request: HTTPConnection,
    action: str,
    *,
    environment: str | None = None,
    lane: str | None = None,
    target: str | None = None,
    outcome: str = "done",
    detail: str | None = None,
    identity: Any = None,
) -> None:
    """Write an action down, in the log and in ``rowmill_audit``. ``outcome``: done, nothing, refused or failed.

    What was done stands, also where it cannot be written down: then the log alone has it, and says so.
    """
    identity = identity or request.state.who
    token = identity.token
    entry: dict[str, str | None] = {
        "who": identity.name,
        "token": (token.session_of or token.id) if token is not None else None,
        "address": request.client.host if request.client else None,
        "action": action,
        "environment": environment,
        "lane": lane,
        "target": target,
        "outcome": outcome,
        "detail": detail,
    }
    log.info("%s", {name: value for name, value in entry.items() if value is not None})
    audit: Audit = request.app.state.audit
    try:
        await audit.ensure()
        await audit.record(entry)
    except RowmillError as error:
        log.error("not written to rowmill_audit: %s", error.message)
        return
    with contextlib.suppress(RowmillError):  # a role that may not delete keeps them all
        await audit.forget_in_time()
