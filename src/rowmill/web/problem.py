"""Errors as answers: ``application/problem+json`` (RFC 9457) for programs, a page for people."""

from __future__ import annotations

import html
import http
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import Scope

from ..errors import Busy, DatabaseError, DeclarationError, KeyTaken, Refused, RowmillError, Unreachable, WrongArguments
from ..ops.directory import NotFound

log = logging.getLogger("rowmill.web")

#: The statuses that say something about rowmill's own errors; the first that fits.
_STATUSES: tuple[tuple[type[RowmillError], int], ...] = (
    (NotFound, 404),
    (Unreachable, 503),
    (Busy, 503),
    (Refused, 422),
    (KeyTaken, 409),
    (WrongArguments, 422),
    (DeclarationError, 422),
    (DatabaseError, 503),
    (RowmillError, 422),
)


class Problem(HTTPException):
    """Ends a request with a status, what is wrong and what to do. ``further`` stands beside them in the document."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        hint: str | None = None,
        headers: dict[str, str] | None = None,
        **further: Any,
    ) -> None:
        super().__init__(status, detail, headers)
        self.hint, self.further = hint, further
        #: Whether the audit log has it already.
        self.audited = False

    def document(self) -> dict[str, Any]:
        title = http.HTTPStatus(self.status_code).phrase
        document = {"type": "about:blank", "title": title, "status": self.status_code, "detail": self.detail}
        return {**document, **({"hint": self.hint} if self.hint else {}), **self.further}


def for_programs(scope: Scope) -> bool:
    """Whether a request comes from a program: by its path, or because it does not ask for HTML."""
    path = scope["path"]
    if path.startswith("/api/") or path in ("/api", "/metrics", "/healthz", "/readyz"):
        return True
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return b"text/html" not in accepted


def answer(scope: Scope, problem: Problem) -> Response:
    """The answer to a request that cannot be served."""
    if for_programs(scope):
        headers = problem.headers or {}
        return JSONResponse(
            problem.document(), problem.status_code, headers=headers, media_type="application/problem+json"
        )
    if problem.status_code == 401:
        return RedirectResponse("/login", 303)
    title = http.HTTPStatus(problem.status_code).phrase
    hint = f"<p><b>Try:</b> {html.escape(problem.hint)}</p>" if problem.hint else ""
    page = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" href="/static/style.css">
</head><body><main><h1>{title}</h1><p>{html.escape(str(problem.detail))}</p>{hint}<p><a href="/">Back</a></p></main>
</body></html>"""
    return HTMLResponse(page, problem.status_code, headers=problem.headers)


def of(error: Exception) -> Problem:
    """The problem for an error. An internal error shows no details."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, RowmillError):
        status = next(status for kind, status in _STATUSES if isinstance(error, kind))
        further = {"id": error.id} if isinstance(error, KeyTaken) else {}
        headers = {"Retry-After": "5"} if status == 503 else None
        return Problem(status, error.message, hint=error.hint, headers=headers, **further)
    if isinstance(error, TimeoutError):
        return Problem(503, "this took too long", hint="try again later, or ask for less", headers={"Retry-After": "5"})
    log.error("request failed", exc_info=error)
    return Problem(500, "internal error in rowmill; see its log")


async def handle(request: Request, error: Exception) -> Response:
    """For Starlette: any error as an answer."""
    return answer(request.scope, of(error))
