"""A small internet on loopback: any number of host names, one server, and its own log of every request.

::

    from apps.standins import internet, sites

    with internet.Internet({"slow.example": sites.page(latency=0.5), "shut.example": sites.refusing()}) as net:
        async with httpx.AsyncClient(transport=net.transport()) as client:
            await client.get("https://slow.example/a")  # TLS is left out on the way; the Host header says who is meant
        net.visits              # [Visit(host="slow.example", path="/a", start=..., end=...)]
        net.most_at_once()      # {"slow.example": 1}
        net.address             # "127.0.0.1:40123": for other processes

In another process: ``internet.transport(address)`` for an httpx client, or ``internet.Wire(address)`` where a client
takes a network backend of httpcore. Names are resolved by ``resolve``: a name in ``.invalid`` does not exist,
``10-0-0-1.ip.example`` is 10.0.0.1, and every other name has an address that looks public.

A **site** is a function from a ``Request`` to an ``Answer``; those in ``sites`` are slow, refuse, lead in circles, ask
for a captcha, never end. A host that is not named gets the ``default`` site. Times are of ``time.monotonic``, which on
one machine is the same clock in all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import httpcore
import httpx

_PIECE = 65536
_PATIENCE = 10.0


@dataclass(frozen=True)
class Request:
    """What a site is asked. ``path`` is without the query; ``body`` is there for POST."""

    method: str
    host: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What a site says, and how: after ``latency`` seconds; ``endless``: the body again and again, until the client
    hangs up; ``drops``: the connection is cut instead of an answer, ``cut_off``: in the middle of it; ``together``: not
    before as many are asking as the barrier waits for.
    """

    body: bytes | str = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/html; charset=utf-8"})
    latency: float = 0.0
    endless: bool = False
    drops: bool = False
    cut_off: bool = False
    together: asyncio.Barrier | None = None


@dataclass
class Visit:
    """One request, as the server saw it: from when it was read to when its answer left, or nobody was there for it."""

    host: str
    path: str
    query: Mapping[str, str]
    start: float
    end: float
    status: int
    headers: Mapping[str, str]


Site = Callable[[Request], Answer]


class Internet:
    """The server, in a thread of its own. ``sites`` by host name; ``default`` answers for all the others."""

    def __init__(self, sites: Mapping[str, Site] | None = None, default: Site | None = None) -> None:
        self.sites: dict[str, Site] = dict(sites or {})
        self.default = default or (lambda request: Answer("no such site", 404))
        self.visits: list[Visit] = []
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stand-in-internet", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._wait(asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=1000))
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()

    def transport(self) -> httpx.AsyncHTTPTransport:
        """For ``httpx.AsyncClient(transport=...)``: every host name leads here."""
        return transport(self.address)

    def visits_of(self, host: str, path: str | None = None) -> list[Visit]:
        """The requests that a host got, in the order in which they ended."""
        return [v for v in list(self.visits) if v.host == host and path in (None, v.path)]

    def most_at_once(self, group: Callable[[str], str | None] = str) -> dict[str, int]:
        """For each host (or what ``group`` makes of it) the largest number of requests open at one instant."""
        return most_at_once((group(v.host) or "", v.start, v.end) for v in list(self.visits))

    # -- the server

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE)

    async def _close(self) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await _read(reader)) is not None:
                if not await self._serve(request, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer, and note it down; whether the connection may be used again."""
        start, answer = time.monotonic(), self.sites.get(request.host, self.default)(request)
        try:
            if answer.latency:
                await asyncio.sleep(answer.latency)
            if answer.together is not None:
                await answer.together.wait()
        finally:
            # Before the answer leaves: a client that has it finds the visit noted.
            visit = Visit(
                request.host, request.path, request.query, start, time.monotonic(), answer.status, request.headers
            )
            self.visits.append(visit)
        try:
            return await _write(answer, request, writer)
        finally:
            if answer.endless:
                visit.end = time.monotonic()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    first, *lines = head[:-4].split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    host = headers.get("host", "").partition(":")[0].lower()
    return Request(method, host, parts.path, dict(parse_qsl(parts.query, keep_blank_values=True)), headers, body)


async def _write(answer: Answer, request: Request, writer: asyncio.StreamWriter) -> bool:
    if answer.drops:
        return False
    body = answer.body.encode() if isinstance(answer.body, str) else answer.body
    length = "transfer-encoding: chunked" if answer.endless else f"content-length: {len(body) + answer.cut_off}"
    head = [f"HTTP/1.1 {answer.status} -", length, *(f"{name}: {value}" for name, value in answer.headers.items())]
    writer.write("\r\n".join([*head, "", ""]).encode("latin-1", "replace"))
    if request.method == "HEAD":
        return True
    if not answer.endless:
        writer.write(body)
        await writer.drain()
        return not answer.cut_off
    piece = body or b" " * _PIECE
    while True:  # ends with the client: drain raises, or the server cancels
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()


# -- the way there


def resolve(host: str) -> list[str]:
    """The addresses of a name, as this internet's DNS has them."""
    with contextlib.suppress(OSError):
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        return [host]
    name = host.lower().rstrip(".")
    if name == "localhost":
        return ["127.0.0.1"]
    if name.endswith((".invalid", ".localhost")):
        raise socket.gaierror(socket.EAI_NONAME, f"there is no host {host!r}")
    if name.endswith(".ip.example"):
        return [name.removesuffix(".ip.example").rpartition(".")[2].replace("-", ".")]
    if name.endswith(".ip6.example"):
        return [name.removesuffix(".ip6.example").rpartition(".")[2].replace("-", ":")]
    number = zlib.crc32(name.encode())
    return [f"11.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"]


class Wire(httpcore.AsyncNetworkBackend):
    """Every connection, whatever its address, ends at the stand-in; TLS is left out."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._real = httpcore.AnyIOBackend()

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:  # fmt: skip
        return _Plain(await self._real.connect_tcp(self._host, self._port, timeout=timeout))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Plain(httpcore.AsyncNetworkStream):
    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        self.read, self.write, self.aclose = inner.read, inner.write, inner.aclose  # type: ignore[method-assign]
        self.get_extra_info = inner.get_extra_info  # type: ignore[method-assign]

    async def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return self


def transport(address: str) -> httpx.AsyncHTTPTransport:
    """A transport of httpx through which every host name leads to the stand-in at this address."""
    made = httpx.AsyncHTTPTransport(verify=False)
    made._pool = httpcore.AsyncConnectionPool(network_backend=Wire(address), max_connections=100, keepalive_expiry=5)
    return made


def most_at_once(spans: Iterable[tuple[str, float, float]]) -> dict[str, int]:
    """For each key the largest number of spans (key, start, end) that share an instant."""
    edges: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for key, start, end in spans:
        edges[key] += [(start, 1), (end, -1)]
    found = {}
    for key, steps in edges.items():
        now = most = 0
        for _, step in sorted(steps):  # at the same instant ends go first
            now += step
            most = max(most, now)
        found[key] = most
    return found
