"""The pages of the three registers, as a Starlette application."""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.templating import Jinja2Templates

from . import holdings
from .documents import document

Page = Callable[[Request], Awaitable[Response]]

_templates = Jinja2Templates(Path(__file__).parent / "pages")
_HEADINGS = {
    "actes": ("Actes", "Numéro d'inscription"),
    "plans_cadastraux": ("Plans cadastraux", "Numéro de lot"),
    "index": ("Index des immeubles", "Numéro de lot"),
}
_PER_PAGE = 3


@dataclass
class Conduct:
    """How the registers behave; may be changed while they are up."""

    user: str = "client"
    password: str = "secret"
    #: Seconds until a session expires, and the time that every page takes.
    session_seconds: float = 600.0
    delay: float = 0.0
    #: What numbers that begin with 8 take on top.
    slow: float = 1.0
    #: Registers (foncier, req, rdprm) whose search form has changed, and those that are closed.
    changed: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    #: The PDFs' number of pages, and what is served in their place.
    pages: int = 1
    broken_pdf: bytes | None = None
    #: What becomes of a download in the middle: "stalls", or "breaks" off.
    half_way: str = ""
    #: token -> when its session expires
    sessions: dict[str, float] = field(default_factory=dict)
    #: logins, refused_logins, searches, downloads
    counts: Counter[str] = field(default_factory=Counter)
    #: What was asked for, in order: (register, number or name)
    asked: list[tuple[str, str]] = field(default_factory=list)
    #: Called with each request's path, in the server's thread: for tests that wait for a moment.
    watch: Callable[[str], None] | None = None

    def expire(self) -> None:
        """End every session."""
        self.sessions.clear()


class Gatehouse:
    """Before every page: its delay, and a register that is closed."""

    def __init__(self, app: Any, conduct: Conduct) -> None:
        self.app, self.conduct = app, conduct

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.conduct.watch is not None:
            self.conduct.watch(scope["path"])
        await asyncio.sleep(self.conduct.delay)
        register = scope["path"].split("/")[1]
        if register in self.conduct.closed:
            closed = PlainTextResponse("Service interrompu pour entretien.", 503, {"Retry-After": "600"})
            await closed(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _show(request: Request, template: str, **values: Any) -> Response:
    return _templates.TemplateResponse(request, template, values)


def application(conduct: Conduct) -> Starlette:
    """The three registers."""

    def members_only(register: str) -> Callable[[Page], Page]:
        """Without a session that is alive, every page leads to the login."""

        def wrap(page: Page) -> Page:
            @functools.wraps(page)
            async def guarded(request: Request) -> Response:
                token = request.cookies.get(f"{register}_session", "")
                if conduct.sessions.get(token, 0.0) < time.monotonic():
                    return RedirectResponse(f"/{register}/connexion", 303)
                return await page(request)

            return guarded

        return wrap

    def login(register: str, name: str, home: str) -> Page:
        async def connexion(request: Request) -> Response:
            if request.method == "GET":
                return _show(request, "connexion.html", register=name, error=None)
            form = await request.form()
            if (form.get("code"), form.get("mot_de_passe")) != (conduct.user, conduct.password):
                conduct.counts["refused_logins"] += 1
                error = "Code d'utilisateur ou mot de passe invalide."
                return _show(request, "connexion.html", register=name, error=error)
            conduct.counts["logins"] += 1
            token = secrets.token_hex(16)
            conduct.sessions[token] = time.monotonic() + conduct.session_seconds
            answer = RedirectResponse(home, 303)
            answer.set_cookie(f"{register}_session", token, httponly=True)
            return answer

        return connexion

    @members_only("foncier")
    async def home(request: Request) -> Response:
        return _show(request, "foncier_accueil.html")

    @members_only("foncier")
    async def land_search(request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in _HEADINGS:
            return PlainTextResponse("Page introuvable.", 404)
        if request.method == "GET":
            heading, label = _HEADINGS[kind]
            return _show(
                request, "foncier_recherche.html", kind=kind, heading=heading, number_label=label,
                circonscriptions=holdings.CIRCONSCRIPTIONS, changed="foncier" in conduct.changed,
            )  # fmt: skip
        number = str((await request.form()).get("numero") or "")
        conduct.counts["searches"] += 1
        conduct.asked.append((kind, number))
        if holdings.slow(number):
            await asyncio.sleep(conduct.slow)
        none = not number or holdings.refused(number)
        return _show(request, "foncier_resultat.html", kind=kind, number=number, refused=none)

    @members_only("foncier")
    async def land_document(request: Request) -> Response:
        kind, number = request.path_params["kind"], request.query_params.get("numero", "")
        conduct.counts["downloads"] += 1
        data = conduct.broken_pdf
        if data is None:
            data, _ = await asyncio.to_thread(document, number, kind, conduct.pages)
        headers = {"Content-Disposition": f'attachment; filename="{kind}.pdf"', "Content-Length": str(len(data))}

        async def sent() -> AsyncIterator[bytes]:
            yield data[: len(data) // 2]
            if conduct.half_way == "stalls":
                await asyncio.sleep(600)  # the visitor leaves before
            if conduct.half_way == "breaks":
                raise ConnectionAbortedError
            yield data[len(data) // 2 :]

        return StreamingResponse(sent(), media_type="application/pdf", headers=headers)

    async def company_search(request: Request) -> Response:
        return _show(request, "req_recherche.html", changed="req" in conduct.changed)

    async def company_results(request: Request) -> Response:
        asked = request.query_params.get("nom", "")
        conduct.counts["searches"] += 1
        conduct.asked.append(("req", asked))
        return _show(request, "req_resultats.html", asked=asked, companies=holdings.companies(asked))

    async def company_page(request: Request) -> Response:
        found = holdings.company(request.query_params.get("nom", ""), request.path_params["neq"])
        if found is None:
            return PlainTextResponse("Entreprise introuvable.", 404)
        return _show(request, "req_entreprise.html", company=found)

    @members_only("rdprm")
    async def rights_search(request: Request) -> Response:
        return _show(request, "rdprm_recherche.html", changed="rdprm" in conduct.changed)

    @members_only("rdprm")
    async def rights_results(request: Request) -> Response:
        asked = request.query_params.get("nom", "")
        at = int(request.query_params.get("page", "1"))
        if at == 1:
            conduct.counts["searches"] += 1
            conduct.asked.append(("rdprm", asked))
        found = holdings.inscriptions(asked)
        more = request.url.include_query_params(page=at + 1) if len(found) > at * _PER_PAGE else None
        shown = found[(at - 1) * _PER_PAGE : at * _PER_PAGE]
        return _show(request, "rdprm_resultats.html", inscriptions=shown, following=more)

    both = ["GET", "POST"]
    return Starlette(
        routes=[
            Route("/foncier/connexion", login("foncier", "Registre foncier", "/foncier/accueil"), methods=both),
            Route("/foncier/accueil", home),
            Route("/foncier/recherche/{kind}", land_search, methods=both),
            Route("/foncier/document/{kind}", land_document),
            Route("/req/recherche", company_search),
            Route("/req/resultats", company_results),
            Route("/req/entreprise/{neq}", company_page),
            Route("/rdprm/connexion", login("rdprm", "RDPRM", "/rdprm/recherche"), methods=both),
            Route("/rdprm/recherche", rights_search),
            Route("/rdprm/resultats", rights_results),
        ],
        middleware=[Middleware(Gatehouse, conduct=conduct)],
    )
