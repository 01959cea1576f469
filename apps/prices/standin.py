"""Three sites on loopback that speak as the real ones do: a shop's listing, a price guide's API, an auction house.

Each keeps a log of its requests, and can be made to fail, to throttle with 429 and Retry-After, or to be slow.
"""

from __future__ import annotations

import html
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, timedelta

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

GRADES = ("circulated", "uncirculated", "proof")


@dataclass(frozen=True)
class Seen:
    """One request, as the site saw it."""

    at: float
    site: str
    query: str
    status: int


@dataclass
class Mood:
    """How a site behaves at the moment."""

    #: Every request fails while this is set.
    failing: bool = False
    #: The answer to a failing site's visitors; 0: the connection is cut instead.
    status: int = 500
    #: More than this many within a second are refused, and told to stay away for so long.
    most_per_second: int | None = None
    retry_after: int = 1
    #: Seconds that an answer takes.
    latency: float = 0.0


@dataclass
class Sites:
    """The three sites, how they feel, and what they have seen."""

    url: str
    log: list[Seen] = field(default_factory=list)
    moods: dict[str, Mood] = field(default_factory=lambda: {name: Mood() for name in ("listing", "api", "auction")})

    def address(self, site: str) -> str:
        """Where a site is, as ``sources.base_url`` has it."""
        return f"{self.url}/{site}"

    def seen(self, site: str) -> list[Seen]:
        """A site's requests, in order."""
        return [seen for seen in self.log if seen.site == site]

    async def answer(self, request: Request) -> Response:
        """One request to one site."""
        site, query = request.url.path.split("/")[1], request.query_params.get("q", "")
        mood, at = self.moods[site], time.time()
        response = self._refusal(site, mood, at) or _PAGES[site](query)
        self.log.append(Seen(at, site, query, response.status_code))
        await anyio.sleep(mood.latency)
        return response

    def _refusal(self, site: str, mood: Mood, at: float) -> Response | None:
        if mood.failing:
            return PlainTextResponse("out of order", mood.status)
        recent = sum(1 for seen in self.log[-500:] if seen.site == site and seen.at > at - 1)
        if mood.most_per_second is not None and recent >= mood.most_per_second:
            return PlainTextResponse("slow down", 429, {"Retry-After": str(mood.retry_after)})
        return None


@dataclass(frozen=True)
class _Item:
    number: int
    title: str
    price: str
    grade: str
    day: date


def _items(site: str, query: str, count: int) -> list[_Item]:
    """What a site has under a name: always the same, with a wrong year and a mad price among it."""
    dice = random.Random(f"{site} {query}")
    worth = random.Random(query).uniform(20, 900)
    found = []
    for number in range(1, count + 1):
        grade = dice.choice(GRADES)
        price = worth * (1 + GRADES.index(grade)) * dice.uniform(0.85, 1.2) * (1.25 if site == "listing" else 1.0)
        title = f"{query}  {grade.title()}"
        if number == count and site == "listing":
            title, price = f"{query} Toned", price * 40  # somebody's dream
        if number == count - 1:
            title = "1804 something else altogether"
        day = date(2026, 1, 1) + timedelta(days=dice.randrange(200))
        found.append(_Item(dice.randrange(10**8), title, f"{price:,.2f}", grade, day))
    return found


def _listing(query: str) -> Response:
    items = "".join(
        f'<li data-condition="{item.grade}"><a href="/listing/item/{item.number}?ref=search#top">'
        f'<span class="title">{html.escape(item.title)}</span></a> <b class="price">US ${item.price}</b></li>'
        for item in _items("listing", query, 9)
        for _ in range(2 if item.number % 3 == 0 else 1)  # the shop shows some of them twice
    )
    return HTMLResponse(f'<!doctype html><title>Shop</title><ul class="listing">{items}</ul>')


def _api(query: str) -> Response:
    items = [
        {"id": f"pg-{item.number}", "title": item.title, "price": item.price.replace(",", ""), "type": "ask",
         "url": f"https://guide.example/{item.number}", "date": item.day.isoformat(), "grade": item.grade}
        for item in _items("api", query, 7)
    ]  # fmt: skip
    return JSONResponse({"items": items, "currency": "USD"})


def _auction(query: str) -> Response:
    rows = "".join(
        f'<tr data-lot="{item.number}" data-state="{"open" if n % 4 == 0 else "sold"}">'
        f'<td class="lot"><a href="/auction/lot/{item.number}">{html.escape(item.title)}</a></td>'
        f'<td class="grade">{item.grade}</td><td><time datetime="{item.day}">{item.day:%d %B %Y}</time></td>'
        f'<td class="{"bid" if n % 4 == 0 else "hammer"}">${item.price}</td></tr>'
        for n, item in enumerate(_items("auction", query, 10), 1)
    )
    return HTMLResponse(f'<!doctype html><title>Auctions</title><table class="results"><tbody>{rows}</tbody></table>')


_PAGES = {"listing": _listing, "api": _api, "auction": _auction}


@contextmanager
def serving() -> Iterator[Sites]:
    """The sites on a free port, in a thread of this process, until the block ends."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        sites = Sites(f"http://127.0.0.1:{listening.getsockname()[1]}")
        routes = [
            Route("/listing/search", sites.answer),
            Route("/api/v1/prices", sites.answer),
            Route("/auction/results", sites.answer),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="stand-in", daemon=True)
        thread.start()
        try:
            yield sites
        finally:
            server.should_exit = True
            thread.join(10)
