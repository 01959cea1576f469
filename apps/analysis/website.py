"""Fetching a website: within limits of time and size, and never from inside the network that this runs in."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from rowmill import Dead

from .settings import Settings

_AGENT = "rowmill-analysis/1.0"
_MOST_REDIRECTS = 5
Resolve = Callable[[str], Awaitable[list[str]]]


@dataclass(frozen=True)
class Page:
    """What was fetched: where it was in the end, and what it said."""

    url: str
    source: str
    headers: httpx.Headers


class Unwell(Exception):
    """A site may answer better another time. It says nothing of other sites: what it asks for in Retry-After must not
    hold up a whole phase.
    """


class Web:
    """The way to websites. A page that will never be there ends a run as ``Dead``; all else raises, to be retried."""

    def __init__(self, client: httpx.AsyncClient, seconds: float, most: int) -> None:
        self._client, self._seconds, self._most = client, seconds, most

    async def fetch(self, url: str) -> Page:
        """The page at an address, through redirects."""
        try:
            async with asyncio.timeout(self._seconds), self._client.stream("GET", url) as answer:
                if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
                    raise Unwell(f"the site answers {answer.status_code}")
                if answer.status_code >= 400:
                    raise Dead(f"the site answers {answer.status_code}")
                kind = answer.headers.get("content-type", "text/html").partition(";")[0].strip().lower()
                if kind not in ("text/html", "application/xhtml+xml", "text/plain", ""):
                    raise Dead(f"not a web page but {kind}")
                return Page(str(answer.url), await self._text(answer), answer.headers)
        except httpx.TooManyRedirects:
            raise Dead(f"more than {_MOST_REDIRECTS} redirects") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Dead(f"not an address of a website: {error}") from None
        except TimeoutError:
            raise TimeoutError(f"the site took more than {self._seconds:g} s") from None

    async def _text(self, answer: httpx.Response) -> str:
        """The body as text, as much of it as is wanted."""
        body = bytearray()
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) >= self._most:
                break
        charset = answer.charset_encoding or "utf-8"
        try:
            return bytes(body[: self._most]).decode(charset, errors="replace")
        except LookupError:  # a charset that nobody knows
            return bytes(body[: self._most]).decode(errors="replace")


class Guarded(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only. The address that was checked is the one connected to, so a name that
    resolves to another one a moment later gains nothing.
    """

    def __init__(self, wire: httpcore.AsyncNetworkBackend, resolve: Resolve, allow_private: bool) -> None:
        self._wire, self._resolve, self._allow_private = wire, resolve, allow_private

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        try:
            addresses = await self._resolve(host)
        except OSError as error:
            raise httpcore.ConnectError(f"{host}: {error}") from None
        for address in addresses:
            if not self._allow_private and not ipaddress.ip_address(address.partition("%")[0]).is_global:
                raise Dead(f"{host} is at {address}, which is not a public address")
        return await self._wire.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def resolve(host: str) -> list[str]:
    """The addresses of a name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@asynccontextmanager
async def open_web(settings: Settings) -> AsyncIterator[Web]:
    """The internet, or the stand-in for it that the settings name."""
    wire: httpcore.AsyncNetworkBackend = httpcore.AnyIOBackend()
    names = resolve
    if settings.internet:
        from apps.standins import internet

        async def names(host: str) -> list[str]:
            return internet.resolve(host)

        wire = internet.Wire(settings.internet)
    transport = httpx.AsyncHTTPTransport()
    transport._pool = httpcore.AsyncConnectionPool(
        network_backend=Guarded(wire, names, settings.allow_private), max_connections=100, keepalive_expiry=5,
        ssl_context=httpx.create_ssl_context(),
    )  # fmt: skip
    async with httpx.AsyncClient(
        transport=transport, follow_redirects=True, max_redirects=_MOST_REDIRECTS, timeout=settings.fetch_seconds,
        headers={"user-agent": _AGENT, "accept": "text/html"}, trust_env=False,
    ) as client:  # fmt: skip
        yield Web(client, settings.fetch_seconds, settings.fetch_bytes)
