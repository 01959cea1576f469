"""From an address to what is worth knowing of its page: robots rules, redirects, limits of time and size.

What goes wrong is told in words that may be kept and sent on: they name the host and never the whole address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

import httpx

from apps import guard
from apps.guard import Forbidden, Resolve
from apps.markup import decode
from rowmill import domain

from .page import Page
from .robots import MOST_BYTES, Robots
from .settings import Settings

_HTML = ("text/html", "application/xhtml+xml")
#: From this size on a page is read in a thread: the others should not wait for it.
_LARGE = 50_000


class FetchFailed(Exception):
    """A page could not be had; perhaps the next time."""


class Refused(FetchFailed):
    """The site does not want us: ``robots``, ``captcha`` or ``forbidden`` (403). The words begin with which."""

    def __init__(self, kind: str, host: str) -> None:
        super().__init__(f"{kind}: {host}")
        self.kind = kind


class Moved(Exception):
    """The page is at another domain, whose turn it is not: it is fetched from there as a run of that domain."""

    def __init__(self, url: str, domain: str, hops: int) -> None:
        super().__init__(domain)
        self.url, self.domain, self.hops = url, domain, hops


class Fetcher:
    """Fetches pages for one process."""

    def __init__(self, client: httpx.AsyncClient, settings: Settings) -> None:
        self._client, self._settings = client, settings
        self._robots = Robots(self._rules, settings.user_agent, settings.robots_seconds)

    async def facts(self, url: str, within: str | None = None, hops: int = 0) -> dict[str, Any]:
        """What is worth knowing of the page: columns of its row. ``within``: the domain whose turn it is."""
        host, seconds = urlsplit(url).hostname or "?", self._settings.fetch_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(url, within or domain(url), hops)
        except TimeoutError:
            raise FetchFailed(f"timed out after {seconds:g} s: {host}") from None
        except Forbidden as error:
            raise FetchFailed(str(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchFailed(f"{type(error).__name__}: {host}") from None

    async def _follow(self, url: str, within: str | None, hops: int) -> dict[str, Any]:
        while True:
            host = urlsplit(url).hostname or "?"
            if not await self._robots.allow(url):
                raise Refused("robots", host)
            async with self._client.stream("GET", url) as answer:
                if not answer.has_redirect_location:
                    return await self._read(answer, url, host)
                hops, target = hops + 1, _target(url, answer.headers["location"], host)
            if hops > self._settings.redirects:
                raise FetchFailed(f"more than {self._settings.redirects} redirects: {host}")
            there = domain(target)
            if there and there != within:
                raise Moved(target, there, hops)
            url = target

    async def _read(self, answer: httpx.Response, url: str, host: str) -> dict[str, Any]:
        status, kind = answer.status_code, answer.headers.get("content-type", "text/html")
        is_html = kind.partition(";")[0].strip().lower() in _HTML
        body = await guard.body(answer, self._settings.fetch_bytes) if is_html else b""
        large = len(body) > _LARGE
        page = await asyncio.to_thread(_page, body, answer, url) if large else _page(body, answer, url)
        if answer.headers.get("cf-mitigated") == "challenge" or page.asks_for_a_human(status):
            raise Refused("captcha", host)
        if status == 403:
            raise Refused("forbidden", host)
        if not answer.is_success:
            raise FetchFailed(f"HTTP {status}: {host}")
        seen = {"final_url": url, "http_status": status, "content_type": kind[:100]}
        if not is_html:
            return seen
        facts = page.facts()
        facts["language"] = facts["language"] or (answer.headers.get("content-language") or "")[:10].lower() or None
        return facts | seen

    async def _rules(self, url: str) -> str | None:
        """A site's robots.txt. Where it leads to another domain it counts as not there: it is not that one's turn."""
        home = domain(url)
        for _ in range(self._settings.redirects + 1):
            host = urlsplit(url).hostname or "?"
            async with self._client.stream("GET", url) as answer:
                if answer.has_redirect_location:
                    url = _target(url, answer.headers["location"], host)
                    if domain(url) != home:
                        return None
                elif answer.is_success:
                    return decode(await guard.body(answer, MOST_BYTES), "utf-8")
                elif answer.is_client_error and answer.status_code != 429:
                    return None
                else:
                    raise FetchFailed(f"HTTP {answer.status_code} for robots.txt: {host}")
        return None


def _target(url: str, location: str, host: str) -> str:
    """Where a redirect leads, without a fragment, a user or a password."""
    try:
        parts = urlsplit(urljoin(url, location))
    except ValueError:
        raise FetchFailed(f"leads to what is no address: {host}") from None
    if parts.scheme not in ("http", "https"):
        raise FetchFailed(f"leads out of the web: {host}")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))


def _page(body: bytes, answer: httpx.Response, url: str) -> Page:
    return Page(decode(body, answer.charset_encoding), url)


@asynccontextmanager
async def fetcher(settings: Settings, resolve: Resolve | None = None) -> AsyncIterator[Fetcher]:
    """A fetcher as the settings say: over the internet, or over the stand-in for it."""
    headers = {"user-agent": settings.user_agent, "accept": "text/html,*/*;q=0.5"}
    async with guard.client(
        settings.internet, settings.fetch_seconds, headers, private=settings.allow_private,
        connections=max(settings.concurrency, 10), resolve=resolve,
    ) as client:  # fmt: skip
        yield Fetcher(client, settings)
