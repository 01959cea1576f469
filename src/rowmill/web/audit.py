"""The audit log of the dashboard and the API: who did what, when, and with which outcome."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from starlette.requests import HTTPConnection

from ..errors import RowmillError
from ..ops.access import Audit

log = logging.getLogger("rowmill.audit")


class Entry:
    """One action in the audit log. ``write`` adds it to the log and to ``rowmill_audit``; a second call of ``write``
    completes the row that the first one added.

    An action is done also where ``rowmill_audit`` cannot be written: then only the log has it.
    """

    def __init__(
        self,
        request: HTTPConnection,
        action: str,
        *,
        environment: str | None = None,
        lane: str | None = None,
        target: str | None = None,
        identity: Any = None,
    ) -> None:
        identity = identity or request.state.who
        token = identity.token
        self._audit: Audit = request.app.state.audit
        self._id: int | None = None
        self._told: dict[str, str | None] = {
            "who": identity.name,
            "token": (token.session_of or token.id) if token is not None else None,
            "address": request.client.host if request.client else None,
            "action": action,
            "environment": environment,
            "lane": lane,
            "target": target,
        }

    async def write(self, outcome: str, detail: str | None = None) -> None:
        """``outcome``: started, done, nothing, refused or failed."""
        entry = {**self._told, "outcome": outcome, "detail": detail}
        # One line in the log for each action: how it ended.
        level = logging.DEBUG if outcome == "started" else logging.INFO
        log.log(level, "%s", {name: value for name, value in entry.items() if value is not None})
        try:
            if self._id is not None:
                await self._audit.complete(self._id, outcome, detail)
                return
            await self._audit.ensure()
            self._id = await self._audit.record(entry)
        except RowmillError as error:
            log.error("could not write to rowmill_audit: %s", error.message)
            return
        with contextlib.suppress(RowmillError):  # a role that may not delete keeps them all
            await self._audit.forget_in_time()


async def record(
    request: HTTPConnection, action: str, *, outcome: str = "done", detail: str | None = None, **details: Any
) -> None:
    """Write an action that has ended to the audit log."""
    await Entry(request, action, **details).write(outcome, detail)
