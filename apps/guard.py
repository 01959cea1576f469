"""The way out, guarded: a connection is made only to a public address, and to the very address that was looked at.

The check is where the connection is made, so it holds for redirects, for robots.txt, for names that resolve to a
private address, and for those that do so only the second time they are asked. And what comes back is read no further
than is wanted, also where it was packed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import httpcore
import httpx

from apps.standins import internet as standin

Resolve = Callable[[str], Awaitable[list[str]]]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: All that is given out for the public internet. Outside of it are local NAT64 (64:ff9b:1::/48) and ::127.0.0.1.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class Forbidden(httpx.ConnectError):
    """An address that is not public."""


async def by_dns(host: str) -> list[str]:
    """The addresses of a name, as the system resolves it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_public(address: str) -> bool:
    """Whether anybody on the internet could reach it; an address inside another counts as what it stands for."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


class Guarded(httpcore.AsyncNetworkBackend):
    """Resolves, looks, and connects to what it looked at."""

    def __init__(
        self, resolve: Resolve = by_dns, inner: httpcore.AsyncNetworkBackend | None = None, *, private: bool = False
    ) -> None:
        """``private``: other addresses are reached, too."""
        self._resolve, self._inner, self._private = resolve, inner or httpcore.AnyIOBackend(), private

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._resolve(host)
        except (OSError, UnicodeError) as error:  # a timeout is one of them
            raise httpcore.ConnectError(f"{host} has no address") from error
        if not self._private and not all(is_public(address) for address in addresses):
            # All of them: one that mixes is up to something.
            raise Forbidden(f"{host} is not on the public internet")
        error: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses[:3]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failure:
                error = failure
        raise error

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise Forbidden("a socket on this machine is not on the public internet")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@asynccontextmanager
async def client(
    internet: str, seconds: float, headers: Mapping[str, str], *, private: bool, connections: int,
    resolve: Resolve | None = None, **options: Any,
) -> AsyncIterator[httpx.AsyncClient]:  # fmt: skip
    """An HTTP client that goes this way: over the internet, or over the stand-in at ``internet``."""
    wire = standin.Wire(internet) if internet else None
    if resolve is None:
        resolve = _by_stand_in if internet else by_dns
    transport = httpx.AsyncHTTPTransport()
    # httpx has no parameter for a network backend, its pool does.
    transport._pool = httpcore.AsyncConnectionPool(
        ssl_context=httpx.create_ssl_context(),
        max_connections=connections,
        # Few: the pool looks at all it keeps with every request, and the next link is hardly ever of the same host.
        max_keepalive_connections=20,
        keepalive_expiry=5,
        network_backend=Guarded(resolve, wire, private=private),
    )
    async with httpx.AsyncClient(
        transport=transport,
        headers={**headers, "accept-encoding": "gzip"},
        timeout=seconds,
        trust_env=False,  # a proxy from the environment would go around the guard
        **options,
    ) as opened:
        # Nobody is to be recognised by the next visit: cookies are not kept.
        opened.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        yield opened


async def _by_stand_in(host: str) -> list[str]:
    return standin.resolve(host)


async def body(answer: httpx.Response, most: int) -> bytes:
    """The body's first bytes. Unpacked by hand: a small answer may unpack to gigabytes."""
    packing = answer.headers.get("content-encoding", "identity").strip().lower()
    if packing not in ("identity", "gzip", "x-gzip", ""):
        raise httpx.DecodingError("an encoding that was not asked for")
    unpack = zlib.decompressobj(wbits=31) if "gzip" in packing else None
    found = bytearray()
    async for piece in answer.aiter_raw():
        try:
            found += unpack.decompress(piece, most - len(found)) if unpack else piece
        except zlib.error:
            raise httpx.DecodingError("a body that cannot be unpacked") from None
        if len(found) >= most:
            break
    return bytes(found[:most])
