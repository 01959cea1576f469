"""Sources as adapters: what is asked of a site, and what its answer says.

One request for each run, since runs are what a source's rate counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import urljoin

import httpx
from selectolax.lexbor import LexborHTMLParser, LexborNode

from .coin import Coin
from .points import PRICE_TYPES, Found

_AMOUNT = re.compile(r"\d[\d,]*(?:\.\d+)?")


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
        answer = await http.get(base_url.rstrip("/") + self.path, params=self.params(coin))
        answer.raise_for_status()
        return self.read(answer)


def _listing(answer: httpx.Response) -> list[Found]:
    """A shop's listing: what it asks today. Items have no id of their own."""
    page = LexborHTMLParser(answer.text)
    if page.css_first("ul.listing") is None:
        raise BadAnswer("no listing on the page: has its layout changed?")
    today = _today(answer)
    return [
        Found(
            title=_text(item, ".title"),
            url=urljoin(str(answer.url), _attribute(item, "a", "href")),
            price_cents=cents(_text(item, ".price")),
            price_type="ask",
            day=today,
            condition=item.attributes.get("data-condition"),
        )
        for item in page.css("ul.listing > li")
    ]


def _auction(answer: httpx.Response) -> list[Found]:
    """An auction house's results: hammer prices, and the highest bids of lots that are still open."""
    page = LexborHTMLParser(answer.text)
    if page.css_first("table.results") is None:
        raise BadAnswer("no results on the page: has its layout changed?")
    found = []
    for row in page.css("table.results tbody tr"):
        sold = row.attributes.get("data-state") == "sold"
        found.append(
            Found(
                title=_text(row, ".lot"),
                url=urljoin(str(answer.url), _attribute(row, "a", "href")),
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
        items = answer.json()["items"]
        return [_item(item) for item in items]
    except (ValueError, KeyError, TypeError) as error:
        raise BadAnswer(f"the answer is not a list of prices: {type(error).__name__} {error}") from error


def _item(item: Mapping[str, Any]) -> Found:
    if item["type"] not in PRICE_TYPES:
        raise BadAnswer(f"a price of type {item['type']!r}; known are {', '.join(PRICE_TYPES)}")
    return Found(
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


def cents(text: str) -> int:
    """``$1,234.50`` in cents, exactly."""
    amount = _AMOUNT.search(text)
    try:
        whole = Decimal(amount.group().replace(",", "")) * 100 if amount else None
    except InvalidOperation:  # pragma: no cover, the pattern lets nothing else through
        whole = None
    if whole is None:
        raise BadAnswer(f"{text!r} is not a price")
    return int(whole.to_integral_value())


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        raise BadAnswer(f"{text!r} is not a day") from None


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
