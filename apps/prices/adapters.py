"""Sources as adapters: what is asked of a site, and what its answer says.

One request for each run, since runs are what a source's rate counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
from selectolax.lexbor import LexborNode

from apps import guard
from apps.markup import parse, storable

from .coin import Coin
from .points import PRICE_TYPES, Found

#: An amount as it is written in dollars. Nothing may stand beside it that would make it another one.
_AMOUNT = re.compile(r"(?<![\d.,'-])((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d{1,2})?)(?![\d.,']*\d)", re.ASCII)
_FOREIGN = re.compile(r"[€£¥₹₽₩]|\b(?!US\b)[A-Z]{1,2}\s?\$|\b(?:AUD|CAD|CHF|CNY|EUR|GBP|INR|JPY)\b")
CURRENCY = "USD"
DEAREST = 10**11
MOST_BYTES = 5_000_000


class BadAnswer(Exception):
    """The source answered, and not with what this adapter can read. Another try would get the same."""


@dataclass(frozen=True)
class Adapter:
    """How one kind of source is asked and read."""

    path: str
    params: Callable[[Coin], dict[str, str]]
    read: Callable[[httpx.Response], list[Found]]

    async def collect(self, http: httpx.AsyncClient, base_url: str, coin: Coin) -> list[Found]:
        """Everything the source has under this coin's name."""
        async with http.stream("GET", base_url.rstrip("/") + self.path, params=self.params(coin)) as answer:
            answer.raise_for_status()
            body = await guard.body(answer, MOST_BYTES)
        told = {name: answer.headers[name] for name in ("content-type", "date") if name in answer.headers}
        return self.read(httpx.Response(200, headers=told, content=body, request=answer.request))


def _listing(answer: httpx.Response) -> list[Found]:
    """A shop's listing: what it asks today. Items have no id of their own."""
    page = parse(answer.text)
    if page.css_first("ul.listing") is None:
        raise BadAnswer("no listing on the page: has its layout changed?")
    today = _today(answer)
    return [
        _found(
            title=_text(item, ".title"),
            url=_address(answer, _attribute(item, "a", "href")),
            price_cents=cents(_text(item, ".price")),
            price_type="ask",
            day=today,
            condition=item.attributes.get("data-condition"),
        )
        for item in page.css("ul.listing > li")
    ]


def _auction(answer: httpx.Response) -> list[Found]:
    """An auction house's results: hammer prices, and the highest bids of lots that are still open."""
    page = parse(answer.text)
    if page.css_first("table.results") is None:
        raise BadAnswer("no results on the page: has its layout changed?")
    found = []
    for row in page.css("table.results tbody tr"):
        sold = row.attributes.get("data-state") == "sold"
        found.append(
            _found(
                title=_text(row, ".lot"),
                url=_address(answer, _attribute(row, "a", "href")),
                price_cents=cents(_text(row, ".hammer" if sold else ".bid")),
                price_type="sold" if sold else "bid",
                day=_day(_attribute(row, "time", "datetime")),
                condition=_text(row, ".grade").lower() or None,
                external_id=row.attributes.get("data-lot"),
            )
        )
    return found


def _api(answer: httpx.Response) -> list[Found]:
    """A price guide's JSON."""
    try:
        said = answer.json()
        if (currency := said.get("currency", CURRENCY)) != CURRENCY:
            raise BadAnswer(f"prices in {currency!r}, and not in {CURRENCY}")
        return [_item(item) for item in said["items"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadAnswer(f"the answer is not a list of prices: {type(error).__name__} {error}") from error


def _item(item: Mapping[str, Any]) -> Found:
    if item["type"] not in PRICE_TYPES:
        raise BadAnswer(f"a price of type {item['type']!r}; known are {', '.join(PRICE_TYPES)}")
    return _found(
        title=str(item["title"]),
        url=str(item["url"]),
        price_cents=cents(str(item["price"])),
        price_type=item["type"],
        day=_day(str(item["date"])),
        condition=item.get("grade"),
        external_id=str(item["id"]) if item.get("id") is not None else None,
    )


#: By ``sources.kind``.
ADAPTERS = {
    "listing": Adapter("/search", lambda coin: {"q": coin.title}, _listing),
    "api": Adapter("/v1/prices", lambda coin: _asked(coin), _api),
    "auction": Adapter("/results", lambda coin: {"q": coin.title}, _auction),
}


def _asked(coin: Coin) -> dict[str, str]:
    given = {"year": coin.year, "mint": coin.mintmark, "denomination": coin.denomination, "series": coin.series}
    return {"q": coin.title} | {name: str(value) for name, value in given.items() if value is not None}


def _found(*, title: str, url: str, condition: str | None, external_id: str | None = None, **rest: Any) -> Found:
    """An item, its texts as the database takes them, and no longer than anybody reads."""
    try:
        urlsplit(url)
    except ValueError:
        raise BadAnswer(f"{url[:100]!r} is not an address") from None
    condition, external_id = (str(text)[:100] if text else None for text in (condition, external_id))
    texts = {"title": title[:300], "url": url[:2000], "condition": condition, "external_id": external_id}
    return Found(**storable(texts), **rest)


def cents(text: str) -> int:
    """``$1,234.50`` in cents, exactly. What could be read as another amount, or is of another currency, is refused: a
    wrong price is worse than none.
    """
    amounts = _AMOUNT.findall(text)
    if len(amounts) != 1 or _FOREIGN.search(text):
        raise BadAnswer(f"{text[:100]!r} is not a price in {CURRENCY}")
    found = int(Decimal(amounts[0].replace(",", "")) * 100)
    if found > DEAREST:
        raise BadAnswer(f"{text[:100]!r} is more than any coin is worth")
    return found


def _address(answer: httpx.Response, link: str) -> str:
    try:
        return urljoin(str(answer.url), link)
    except ValueError:
        raise BadAnswer(f"{link[:100]!r} is not an address") from None


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        raise BadAnswer(f"{text[:100]!r} is not a day") from None


def _today(answer: httpx.Response) -> date:
    """The day on which the source itself says that it answered."""
    try:
        return datetime.strptime(answer.headers["Date"], "%a, %d %b %Y %H:%M:%S GMT").date()
    except (KeyError, ValueError):
        return datetime.now(UTC).date()


def _text(node: LexborNode, selector: str) -> str:
    found = node.css_first(selector)
    if found is None:
        raise BadAnswer(f"an item without {selector}: has the layout changed?")
    return " ".join(found.text().split())


def _attribute(node: LexborNode, selector: str, name: str) -> str:
    found = node.css_first(selector)
    value = found.attributes.get(name) if found is not None else None
    if not value:
        raise BadAnswer(f"an item without {selector} {name}: has the layout changed?")
    return value
