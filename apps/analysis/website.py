"""Fetching a website: within limits of time and size, and never from inside the network that this runs in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from apps import guard
from apps.markup import decode
from rowmill import Dead

from .settings import Settings

_AGENT = "rowmill-analysis/1.0"
_MOST_REDIRECTS = 5


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
                body = await guard.body(answer, self._most)
                return Page(str(answer.url), decode(body, answer.charset_encoding), answer.headers)
        except guard.Forbidden as error:
            raise Dead(str(error)) from None
        except httpx.TooManyRedirects:
            raise Dead(f"more than {_MOST_REDIRECTS} redirects") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Dead(f"not an address of a website: {error}") from None
        except TimeoutError:
            raise TimeoutError(f"the site took more than {self._seconds:g} s") from None


@asynccontextmanager
async def open_web(settings: Settings) -> AsyncIterator[Web]:
    """The internet, or the stand-in for it that the settings name."""
    async with guard.client(
        settings.internet, settings.fetch_seconds, {"user-agent": _AGENT, "accept": "text/html"},
        private=settings.allow_private, connections=100, follow_redirects=True, max_redirects=_MOST_REDIRECTS,
    ) as client:  # fmt: skip
        yield Web(client, settings.fetch_seconds, settings.fetch_bytes)
