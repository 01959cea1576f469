"""The two searches: companies with their names, and inscriptions of movable rights, read from the pages' source."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

from selectolax.lexbor import LexborHTMLParser, LexborNode

from .errors import PageChanged
from .sites import COMPANIES, RIGHTS, Site
from .visit import Visit

_MOST_PAGES = 200


async def companies(visit: Visit, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the company register has under a name: the companies, and all names that they bear; each once, however
    often the register shows it.
    """
    await visit.open("search")
    await visit.fill("name", name)
    await visit.tick("terms")
    await visit.click("search")
    await visit.wait_for("results")
    found: dict[str, dict[str, Any]] = {}
    named: dict[tuple[str, str, str], dict[str, Any]] = {}
    for address in await visit.links("company"):
        await visit.open(address)
        await visit.wait_for("identification")
        company, names = parse_company(await visit.page.content(), visit.page.url)
        found[company["neq"]] = company
        named |= {(row["neq"], row["name"], row["kind"]): row for row in names}
    return list(found.values()), list(named.values())


async def inscriptions(visit: Visit, name: str) -> list[dict[str, Any]]:
    """What the movable-rights register has under a name, over all pages of the answer; each inscription once."""
    await visit.open("search")
    await visit.fill("name", name)
    await visit.click("search")
    found: dict[str, dict[str, Any]] = {}
    for _ in range(_MOST_PAGES):
        await visit.wait_for("results")
        found |= {row["number"]: row for row in parse_inscriptions(await visit.page.content(), visit.page.url)}
        following = await visit.links("next")
        if not following:
            return list(found.values())
        await visit.open(following[0])
    raise PageChanged(
        f"{visit.site.name} has more than {_MOST_PAGES} pages for {name!r}",
        hint="does its link to the next page ('next' in apps/registre/sites.py) lead in a circle?",
    )


def parse_company(source: str, address: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A company's page: the company, and its names."""
    page = LexborHTMLParser(source)
    assert page.body is not None
    read = _Reader(COMPANIES, address)
    neq = read.text(page.body, "neq")
    company = {
        "neq": neq,
        "name": read.text(page.body, "company_name"),
        "status": read.text(page.body, "status"),
        "address": read.text(page.body, "address"),
        "registered_on": read.day(page.body, "registered_on"),
    }
    names = [
        {"neq": neq, "name": read.text(row, "other_name_value"), "kind": read.text(row, "other_name_kind")}
        for row in page.css(COMPANIES.selectors["other_name"])
    ]
    return company, names


def parse_inscriptions(source: str, address: str) -> list[dict[str, Any]]:
    """The inscriptions on one page of results."""
    read = _Reader(RIGHTS, address)
    return [
        {
            "number": read.text(row, "number"),
            "nature": read.text(row, "nature"),
            "registered_on": read.day(row, "registered_on"),
            "debtor": read.text(row, "debtor"),
            "creditor": read.text(row, "creditor"),
            "amount_cents": read.cents(row, "amount"),
        }
        for row in LexborHTMLParser(source).css(RIGHTS.selectors["inscription"])
    ]


class _Reader:
    """Reads parts of a page by the names they have in ``sites.py``."""

    def __init__(self, site: Site, address: str) -> None:
        self.site, self.address = site, address

    def text(self, node: LexborNode, name: str) -> str:
        found = node.css_first(self.site.selectors[name])
        if found is None:
            raise self._changed(f"there is no {name} ({self.site.selectors[name]}) on it")
        return " ".join(found.text().split())

    def day(self, node: LexborNode, name: str) -> date:
        written = self.text(node, name)
        try:
            return date.fromisoformat(written)
        except ValueError:
            raise self._changed(f"{name} is {written!r}, and no day such as 2026-01-31") from None

    def cents(self, node: LexborNode, name: str) -> int:
        """``12 345,67 $`` with any kind of space."""
        written = self.text(node, name)
        found = re.fullmatch(r"(\d[\d\s]*),(\d\d)\s*\$", written)
        if found is None:
            raise self._changed(f"{name} is {written!r}, and no amount such as 1 234,56 $")
        return int(re.sub(r"\s", "", found[1])) * 100 + int(found[2])

    def _changed(self, what: str) -> PageChanged:
        return PageChanged(
            f"the page {self.address} of {self.site.name} has changed: {what}",
            hint="compare the page with its selectors, and correct them in apps/registre/sites.py; then retry the row",
        )
