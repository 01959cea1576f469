"""Authentication and authorisation: tokens, sessions, the login page, and protection of forms against forgery.

Where there is no token at all and the server listens on a loopback address only, everybody who gets there may do
everything. As soon as one token was made, or the server is reached from elsewhere, a token is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from weakref import WeakValueDictionary

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.templating import Jinja2Templates

from ..ops.access import SCOPES, SESSION_HOURS, Token, Tokens, digest
from ..ops.cached_mill import CachedMill
from ..ops.directory import LaneDirectory
from . import audit
from .problem import Problem

COOKIE, VISIT = "rowmill_session", "rowmill_visit"
#: A form's hidden field, and the header that does for programs in a browser.
FIELD, HEADER = "csrf", "x-csrf-token"
#: Failed logins from one address, within so many seconds, before it has to wait.
_FAILURES, _WINDOW, _ADDRESSES = 10, 60.0, 10_000
#: Headers of proxies, beside X-Forwarded-For and its kind.
_PROXY_HEADERS = ("forwarded", "via", "x-real-ip")
#: Seconds between two notes that a token was used, and between two looks whether there is one.
_NOTE_EVERY, _LOOK_EVERY = 60.0, 2.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request. ``how``: ``token`` (in a header), ``session`` (a cookie), ``open`` (no token is needed) or
    ``none``.
    """

    name: str
    how: str
    scopes: frozenset[str] = frozenset()
    #: None: all lanes.
    lanes: frozenset[str] | None = None
    token: Token | None = None
    #: What this one's forms are bound to; empty where a browser has nothing to send by itself.
    secret: str = ""

    def may(self, scope: str, lane: str | None = None) -> bool:
        """Whether the sender has a scope for a lane; without a lane, for all lanes."""
        return scope in self.scopes and (self.lanes is None or (lane is not None and lane in self.lanes))

    @property
    def signature(self) -> str:
        """The sender's name for the reason that a row keeps; an operator, if no token is needed."""
        return "an operator" if self.how == "open" else self.name

    def sees(self, lane: str) -> bool:
        """Whether the sender may see a lane."""
        return self.may("read", lane)

    @property
    def csrf(self) -> str:
        """The token that a form must send against cross-site requests."""
        return hmac.new(self.secret.encode(), b"rowmill form", sha256).hexdigest() if self.secret else ""


NOBODY = Identity("nobody", "none")


def who(request: HTTPConnection) -> Identity:
    """Who sent this request."""
    identity: Identity = request.state.who
    return identity


def require(request: HTTPConnection, scope: str, lane: str | None = None, *, some: bool = False) -> Identity:
    """Who sent this request, if that one may; else the request ends here. ``some``: it is enough that there are lanes
    for which he may, since only those are shown.
    """
    identity = who(request)
    if identity.how == "none":
        raise Problem(
            401,
            "a token is required",
            hint="create one with rowmill token create APP NAME, and send it as Authorization: Bearer ...",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if scope not in identity.scopes:
        raise Problem(403, f"the token {identity.name!r} lacks the scope {scope}")
    if not some and not identity.may(scope, lane):
        what = f"lane {lane!r}" if lane is not None else "more than its lanes"
        raise Problem(403, f"the token {identity.name!r} is not for {what}")
    return identity


def directory_of(
    request: HTTPConnection, environments: Sequence[str] | None = None, lanes: Sequence[str] | None = None
) -> LaneDirectory:
    """The lanes that the sender may see, or those of them that are named."""
    identity, directory = who(request), request.app.state.directory
    for name in lanes or ():
        if not identity.sees(name):
            raise Problem(403, f"this token is not for lane {name!r}")
    part: LaneDirectory = directory.narrowed(environments, lanes, identity.sees)
    return part


def cache_of(request: HTTPConnection) -> CachedMill:
    """The cache of answers that all viewers share."""
    cache: CachedMill = request.app.state.cache
    return cache


class Limiter:
    """Counts failed logins by address; in memory, because an attacker cannot restart the server."""

    def __init__(self, failures: int = _FAILURES, window: float = _WINDOW) -> None:
        self._failures, self._window = failures, window
        self._failed: dict[str, list[float]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, address: str) -> asyncio.Lock:
        """A lock per address: simultaneous logins are checked one after another, so that each failure counts."""
        return self._turns.setdefault(address, asyncio.Lock())

    def wait(self, address: str) -> float:
        """Seconds until an address may try again; 0: now."""
        now = time.monotonic()
        recent = [at for at in self._failed.get(address, []) if now - at < self._window]
        if not recent:
            self._failed.pop(address, None)
            return 0.0
        self._failed[address] = recent
        return self._window - (now - recent[0]) if len(recent) >= self._failures else 0.0

    def failed(self, address: str) -> None:
        """Count one failed login."""
        if address not in self._failed and len(self._failed) >= _ADDRESSES:
            self._failed.pop(next(iter(self._failed)))
        self._failed.setdefault(address, []).append(time.monotonic())

    def check(self, address: str) -> None:
        """Refuse the request of an address that has to wait."""
        if (wait := self.wait(address)) > 0:
            raise Problem(429, "too many failed logins from this address", headers={"Retry-After": str(int(wait) + 1)})


class Authenticator:
    """Finds out who sent a request, by its token or its session."""

    def __init__(self, tokens: Tokens, *, may_open: bool) -> None:
        self.tokens, self.may_open, self.limiter = tokens, may_open, Limiter()
        #: Digests of tokens that were seen to be valid, with when their use was last noted.
        self._known: dict[str, float] = {}
        self._looked, self._closed = -_LOOK_EVERY, False

    async def identify(self, request: HTTPConnection, visit: str) -> Identity:
        """Who sent this; raises for a token that is not valid. ``visit``: what the forms of a browser are bound to
        that is not logged in.
        """
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme:
            if scheme.lower() != "bearer":
                raise _unauthorized("the Authorization header is not a Bearer token")
            return _identity(await self.token(request, given.strip()), "token", "")
        if secret := request.cookies.get(COOKIE):
            token = await self._find(secret)
            if token is not None and token.session_of is not None:
                return _identity(token, "session", secret)
        if await self._open(request):
            return Identity("open", "open", frozenset(SCOPES), secret=visit)
        return Identity("nobody", "none", secret=visit)

    async def token(self, request: HTTPConnection, secret: str) -> Token:
        """The token of a secret; counts wrong secrets."""
        address = request.client.host if request.client else ""
        async with contextlib.AsyncExitStack() as stack:
            if digest(secret) not in self._known:
                await stack.enter_async_context(self.limiter.turn(address))
            if digest(secret) not in self._known:  # who has shown a good one does not wait for what others tried
                self.limiter.check(address)
            token = await self._find(secret)
            if token is not None and token.session_of is None:
                return token
            self._known.pop(digest(secret), None)
            self.limiter.failed(address)
        refused = _unauthorized("this token is not valid: unknown, revoked or expired")
        await audit.record(
            request, "login", target=request.url.path, outcome="refused", detail=str(refused.detail), identity=NOBODY
        )
        raise refused

    async def _find(self, secret: str) -> Token | None:
        if not await self.closed(at_once=True):
            return None
        token = await self.tokens.find(secret)
        if token is None:
            return None
        kept, now = digest(secret), time.monotonic()
        if now - self._known.get(kept, -_NOTE_EVERY) >= _NOTE_EVERY:
            if len(self._known) >= _ADDRESSES:
                self._known.clear()
            self._known[kept] = now
            await self.tokens.used(token)
        return token

    async def closed(self, *, at_once: bool = False) -> bool:
        """Whether a token was ever created; a cached answer is a few seconds old at most."""
        if not self._closed and (at_once or time.monotonic() - self._looked >= _LOOK_EVERY):
            self._closed, self._looked = await self.tokens.any(), time.monotonic()
        return self._closed

    async def _open(self, request: HTTPConnection) -> bool:
        # What a proxy on this machine hands on comes from somewhere else.
        return self.may_open and not forwarded(request.headers) and not await self.closed()


def forwarded(headers: Iterable[str]) -> bool:
    """Whether a proxy has added one of these headers."""
    return any(name.startswith("x-forwarded-") or name in _PROXY_HEADERS for name in headers)


def _identity(token: Token, how: str, secret: str) -> Identity:
    return Identity(token.name, how, token.scopes, token.lanes, token, secret)


def _unauthorized(detail: str) -> Problem:
    return Problem(401, detail, headers={"WWW-Authenticate": "Bearer"})


# -- the login page


def routes(templates: Jinja2Templates) -> list[Route]:

    def page(request: Request, error: str = "", status: int = 200) -> Response:
        values = {"error": error, "csrf": who(request).csrf}
        return templates.TemplateResponse(request, "login.html", values, status)

    async def login(request: Request) -> Response:
        authenticator: Authenticator = request.app.state.authenticator
        if request.method in ("GET", "HEAD"):
            return RedirectResponse("/", 303) if who(request).how in ("session", "open") else page(request)
        form = await request.form()
        try:
            token = await authenticator.token(request, str(form.get("token", "")).strip())
        except Problem as problem:
            return page(request, str(problem.detail), problem.status_code)
        session, secret = await authenticator.tokens.open_session(token)
        await audit.record(request, "login", identity=_identity(session, "session", ""))
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE, secret, max_age=SESSION_HOURS * 3600, httponly=True, samesite="lax",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    async def logout(request: Request) -> Response:
        identity = who(request)
        if identity.how == "session" and identity.token is not None:
            await request.app.state.authenticator.tokens.close_session(identity.token)
            await audit.record(request, "logout")
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    return [Route("/login", login, methods=["GET", "POST"]), Route("/logout", logout, methods=["POST"])]
