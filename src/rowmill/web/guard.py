"""What every request passes first: a proxy that is trusted or not, the name it came by, its size, who sent it, and
whether the sender meant to.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ..errors import DeclarationError
from .access import FIELD, HEADER, VISIT, Authenticator, Identity, forwarded
from .problem import Problem, answer, log, of

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
BODY_LIMIT = 1024 * 1024
_SAFE = ("GET", "HEAD", "OPTIONS", "TRACE")
#: Asked by machines that know neither the server's name nor a token; they tell nothing but that all is well.
_PROBES = ("/healthz", "/readyz")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
        " connect-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: with that, browsers send a form's origin as null.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """ASGI middleware. ``hosts``: the names that the server is reached by; None: any."""

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] | None, limit: int = BODY_LIMIT) -> None:
        self.app, self.hosts, self.limit = app, hosts, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request, visit = HTTPConnection(scope), secrets.token_urlsafe(24)
        new = VISIT not in request.cookies
        send = _with_security_headers(scope, send, visit if new else None)
        try:
            if scope["path"] not in _PROBES:
                self._check_host(request)
            if scope["method"] not in _SAFE:
                receive = _replayed(await self._body(request, receive), receive)
            if scope["path"] not in _PROBES and not scope["path"].startswith("/static/"):
                authenticator: Authenticator = scope["app"].state.authenticator
                identity = await authenticator.identify(request, visit if new else request.cookies[VISIT])
                scope.setdefault("state", {})["who"] = identity
                if identity.how == "open" and _cross_site(request):
                    hint = "open the address yourself, or ask for tokens: rowmill token create APP NAME"
                    raise Problem(
                        403, "a page of another site sent this request, and this server needs no token", hint=hint
                    )
                if scope["method"] not in _SAFE and identity.how != "token":
                    receive = await _refuse_cross_site(scope, receive, identity)
        except Exception as error:
            await answer(scope, of(error))(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check_host(self, request: HTTPConnection) -> None:
        """Refuse unknown host names, so that no other site can reach this server by DNS rebinding."""
        given = request.headers.get("host", "")
        if self.hosts is not None and _name(given) not in self.hosts:
            raise Problem(421, f"this server is not known as {given!r}", hint="rowmill serve --allow-host NAME")

    async def _body(self, request: HTTPConnection, receive: Receive) -> bytes:
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.limit:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Problem(400, "the request was cut off")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.limit:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> Problem:
        return Problem(413, f"a request may have at most {self.limit:,} bytes", headers={"Connection": "close"})


def _cross_site(request: HTTPConnection) -> bool:
    """Whether a browser says that a page of another site sent this. Another port is another site."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()
    except ValueError:  # http://[bad
        return True


async def _refuse_cross_site(scope: Scope, receive: Receive, identity: Identity) -> Receive:
    """Refuse cross-site requests: a cookie or a loopback address does not show that the user wanted them."""
    request = HTTPConnection(scope)
    if _cross_site(request):
        raise Problem(403, "the request was sent by a page of another site")
    if scope["path"].startswith("/api/"):
        # Without a session: the API takes JSON alone, which no form can send, and no other site's script unasked.
        if identity.how == "session":
            _compare(request.headers.get(HEADER, ""), identity)
        return receive
    body = (await receive()).get("body", b"")
    given = request.headers.get(HEADER)
    if given is None:
        form = await Request(scope, _replayed(body, receive)).form(max_files=1, max_fields=1000)
        given = str(form.get(FIELD, ""))
        await form.close()
    _compare(given, identity)
    return _replayed(body, receive)


def _compare(given: str, identity: Identity) -> None:
    if not identity.csrf or not hmac.compare_digest(given.encode(), identity.csrf.encode()):
        raise Problem(
            403, "this form is stale, or belongs to another login", hint="reload the page and submit it again"
        )


def _name(host: str) -> str:
    """``[::1]:8000`` and ``Localhost:8000`` without the port."""
    match = re.fullmatch(r"\[([0-9a-f:.]+)\](?::\d+)?|([^:]*)(?::\d+)?", host.strip().lower())
    return (match[1] or match[2] or "").rstrip(".") if match else ""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Replay a body that has been read, then pass on further messages."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_security_headers(scope: Scope, send: Send, visit: str | None) -> Send:
    """Add security headers to every answer."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if not scope["path"].startswith("/static/"):
                headers.setdefault("Cache-Control", "no-store")
            if visit is not None and headers.get("content-type", "").startswith("text/html"):
                secure = "; Secure" if scope.get("scheme") == "https" else ""
                headers.append("Set-Cookie", f"{VISIT}={visit}; Path=/; HttpOnly; SameSite=Lax{secure}")
        await send(message)

    return send_with_headers


# -- proxies in front of ``rowmill serve``

#: Addresses that are warned about, each once.
_MOST = 100


class Proxies:
    """ASGI middleware: takes the client's address and the scheme from ``X-Forwarded-For`` and ``X-Forwarded-Proto`` of
    trusted addresses, and warns where another address sends such headers.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        inner: Any = app
        self._believing = ProxyHeadersMiddleware(inner, [check_address(address) for address in trusted])
        self._warned: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and forwarded(name.decode("latin-1") for name, _ in scope["headers"]):
            address = (scope.get("client") or ("",))[0]
            if address not in self._believing.trusted_hosts:
                self._warn(address)
        await self._believing(scope, receive, send)  # type: ignore[arg-type]

    def _warn(self, address: str) -> None:
        if address not in self._warned and len(self._warned) < _MOST:
            self._warned.add(address)
            log.warning(
                "forwarded headers from %s are ignored: the Secure flag of cookies, the audit log's addresses and the"
                " login limit go by the proxy, not by its clients. Try: rowmill serve --trust-proxy %s",
                address, address,
            )  # fmt: skip


def check_address(text: str) -> str:
    """An address or a network, in the form that is compared; raises DeclarationError for anything else."""
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise DeclarationError(
            f"--trust-proxy: {text!r} is not an address or a network", hint="--trust-proxy 10.0.0.0/8"
        ) from None
    return str(network) if network.num_addresses > 1 else str(network.network_address)
