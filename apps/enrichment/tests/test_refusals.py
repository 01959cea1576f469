"""Sites that do not want us: how often they are asked, and what is put down."""

from __future__ import annotations

from datetime import timedelta as td

import pytest

from apps.enrichment.tests.conftest import App
from apps.standins import sites
from apps.standins.internet import Internet, Site

LATER = td(minutes=5)


def candidates(app: App) -> list[tuple[str, str, int]]:
    rows = app.db.query("select domain, reason, refusals from block_candidates order by domain")
    return [(row["domain"], row["reason"], row["refusals"]) for row in rows]


@pytest.mark.parametrize(
    ("site", "reason"),
    [(sites.robots("User-agent: *\nDisallow: /", sites.page()), "robots"), (sites.captcha(), "captcha")],
)
async def test_robots_rules_and_captchas_are_dead_at_once(app: App, net: Internet, site: Site, reason: str) -> None:
    """C10: no second try, and the domain is a candidate for blocking."""
    net.default = site
    await app.imported("https://www.no.example/")
    stepped = await app.kit.step("enrich")
    assert stepped is not None
    assert (stepped.outcome, stepped.attempt) == ("dead", 1)
    assert app.job("https://www.no.example/")["last_error"] == f"{reason}: www.no.example"
    assert candidates(app) == [("no.example", reason, 1)]


async def test_a_403_is_dead_at_its_second_occurrence(app: App, net: Internet) -> None:
    """C10: once may be an accident, twice is meant: dead, and the domain is a candidate, not before."""
    net.default = sites.refusing(403)
    await app.imported("https://no.example/")
    await app.kit.step("enrich")
    assert app.job("https://no.example/")["status"] == "failed"
    assert candidates(app) == []
    app.kit.advance(LATER)
    await app.kit.step("enrich")
    assert app.job("https://no.example/")["status"] == "dead"
    assert candidates(app) == [("no.example", "forbidden", 1)]


async def test_a_403_is_dead_at_once_where_the_domain_is_a_candidate(app: App, net: Internet) -> None:
    """C10: a domain that is known for it is not asked twice for each of its links."""
    net.default = sites.refusing(403)
    app.db.execute("insert into block_candidates (domain, reason) values ('no.example', 'captcha')")
    await app.imported("https://no.example/")
    stepped = await app.kit.step("enrich")
    assert stepped is not None
    assert (stepped.outcome, stepped.attempt) == ("dead", 1)
    assert candidates(app) == [("no.example", "captcha", 2)]


async def test_the_second_403_counts_whatever_was_between(app: App, net: Internet) -> None:
    """C10: occurrences are the row's own, also where its limit is higher; another failure is none of them."""
    net.default = sites.refusing(403)
    await app.imported("https://no.example/")
    app.db.execute("update enrichment_jobs set max_attempts = 9")
    for site, status in [
        (sites.refusing(500), "failed"), (sites.refusing(403), "failed"), (sites.refusing(500), "failed"),
        (sites.refusing(403), "dead"),
    ]:  # fmt: skip
        net.default = site
        await app.kit.step("enrich")
        assert app.job("https://no.example/")["status"] == status
        app.kit.advance(LATER)
    assert app.job("https://no.example/")["forbidden"] == 2


async def test_a_first_403_that_ends_a_row_makes_no_candidate(app: App, net: Internet) -> None:
    """C10: the row's second failure, but its first 403: it is dead by C9, and its domain is left alone."""
    net.default = sites.refusing(500)
    await app.imported("https://no.example/")
    await app.kit.step("enrich")
    app.kit.advance(LATER)
    net.default = sites.refusing(403)
    await app.kit.step("enrich")
    assert app.job("https://no.example/")["status"] == "dead"
    assert candidates(app) == []
