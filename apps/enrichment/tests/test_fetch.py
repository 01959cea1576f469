"""Fetching: redirects, limits, charsets, robots rules, and what is kept of a page."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from apps.enrichment import fetch
from apps.enrichment.fetch import Fetcher, FetchFailed, Moved, Refused
from apps.enrichment.settings import Settings
from apps.standins import sites
from apps.standins.internet import Answer, Internet
from waiting import eventually


async def facts(net: Internet, url: str, **settings: object) -> dict[str, object]:
    async with fetch.fetcher(Settings(internet=net.address, **settings)) as fetcher:  # type: ignore[arg-type]
        return await fetcher.facts(url)


async def test_what_a_page_says_of_itself_is_found(net: Internet) -> None:
    """C7: title, description, canonical address, icon, Open Graph, JSON-LD and language."""
    net.default = sites.page(lang="de-CH")
    assert await facts(net, "https://a.example/x") == {
        "title": "Page /x at a.example",
        "description": "What is at /x at a.example",
        "canonical_url": "https://a.example/x",
        "icon_url": "https://a.example/icon.png",
        "open_graph": {"og:title": "Page /x at a.example", "og:type": "article", "og:image": "/image.png"},
        "json_ld": [{"@type": "Article", "headline": "Page /x at a.example"}],
        "language": "de-ch",
        "final_url": "https://a.example/x",
        "http_status": 200,
        "content_type": "text/html; charset=utf-8",
    }


async def test_a_bare_or_broken_page_is_no_failure(net: Internet) -> None:
    """C7: what is not there is not found; a picture has no title."""
    net.sites["bare.example"] = sites.saying("<p>no head", content_type="text/html")
    net.sites["empty.example"] = sites.saying("", 204)
    net.sites["odd.example"] = sites.saying(
        "<title>\x00 A \n B</title><meta name=Description content='D'><html lang='1'><link rel='canonical' href='http://['>"
        "<link rel='shortcut icon' href='data:x'><base href='/b/'><meta property='og:locale' content='fr_CA'>"
        "<script type='application/ld+json'>{broken</script><script type='application/ld+json'>[1, {\"a\": 2}]</script>"
    )
    net.sites["picture.example"] = sites.saying(b"\x89PNG", content_type="image/png")
    assert (await facts(net, "https://bare.example/"))["title"] is None
    assert (await facts(net, "https://empty.example/"))["http_status"] == 204
    odd = await facts(net, "https://odd.example/")
    assert (odd["title"], odd["description"], odd["language"]) == ("A B", "D", "fr-ca")
    assert (odd["canonical_url"], odd["icon_url"], odd["json_ld"]) == (None, None, [1, {"a": 2}])
    picture = await facts(net, "https://picture.example/")
    assert picture == {"final_url": "https://picture.example/", "http_status": 200, "content_type": "image/png"}


@pytest.mark.parametrize(
    ("real", "said"),
    [("utf-8", None), ("utf-8", "iso-8859-1x"), ("latin-1", "utf-8"), ("cp1252", "latin-1"), ("utf-16", None),
     ("koi8-r", "koi8-r"), ("shift_jis", "shift_jis")],
)  # fmt: skip
async def test_charsets_are_believed_only_where_they_are_right(net: Internet, real: str, said: str | None) -> None:
    """C7: by the header, the byte order mark, the page's own word, or what it looks like."""
    words = {"koi8-r": "Привет, мир", "shift_jis": "日本語のページ"}.get(real, "Über Café Zürich")
    net.default = sites.mislabelled(words, real, said)
    assert (await facts(net, "https://a.example/"))["title"] == words


async def test_a_body_is_read_no_further_than_its_limit(net: Internet) -> None:
    """C7: neither one without end nor one that unpacks to gigabytes fills the memory; what was read counts."""
    net.sites["endless.example"] = sites.endless()
    packed = gzip.compress(b"<title>Bomb</title>" + b" " * 200_000_000, 9)
    net.sites["bomb.example"] = lambda request: (
        Answer(status=404)
        if request.path == "/robots.txt"
        else Answer(packed, headers={"content-type": "text/html", "content-encoding": "gzip"})
    )
    assert (await facts(net, "https://endless.example/", fetch_bytes=200_000))["title"] == "Endless"
    assert (await facts(net, "https://bomb.example/", fetch_bytes=200_000))["title"] == "Bomb"


async def test_slow_cut_and_missing_sites_fail_in_words_without_the_address(net: Internet) -> None:
    """C7, C12: what goes wrong is told with the host and never with the path or the query."""
    net.sites["slow.example"] = sites.page(latency=30)
    net.sites["gone.example"] = sites.dropping()
    net.sites["half.example"] = sites.saying("x", 200)
    net.sites["half.example"] = sites.dropping(in_the_middle=True)
    net.sites["error.example"] = sites.refusing(500)
    net.sites["out.example"] = sites.redirecting("ftp://files.example/")
    expected = {
        "slow.example": "timed out after 1 s: slow.example",
        "gone.example": "RemoteProtocolError: gone.example",
        "half.example": "RemoteProtocolError: half.example",
        "error.example": "HTTP 500: error.example",
        "out.example": "leads out of the web: out.example",
        "no.invalid": "ConnectError: no.invalid",
    }
    for host, words in expected.items():
        with pytest.raises(FetchFailed) as failed:
            await facts(net, f"https://{host}/private?token=secret", fetch_seconds=1)
        assert str(failed.value) == words


async def test_redirects_are_followed_within_a_domain_and_not_for_ever(net: Internet) -> None:
    """C7: five at most; a circle ends there."""
    net.sites["circle.example"] = sites.circling()
    net.sites["chain.example"] = sites.by_path({"/a": sites.redirecting("/b?x#y"), "/b": sites.page()})
    assert (await facts(net, "https://chain.example/a"))["final_url"] == "https://chain.example/b?x"
    with pytest.raises(FetchFailed, match="more than 5 redirects"):
        await facts(net, "https://circle.example/")
    # robots.txt, the link, five redirects; the last is written down when its answer is out.
    await asyncio.to_thread(eventually, lambda: len(net.visits_of("circle.example")) >= 1 + 6, 10)
    assert len(net.visits_of("circle.example")) == 1 + 6


async def test_a_redirect_to_another_domain_is_left_to_that_domain_s_turn(net: Internet) -> None:
    """C8: the limit per domain holds for redirects too: nobody goes there without its turn."""
    net.sites["short.example"] = sites.redirecting("https://www.long.example/x")
    with pytest.raises(Moved) as moved:
        await facts(net, "https://short.example/")
    assert (moved.value.url, moved.value.domain, moved.value.hops) == ("https://www.long.example/x", "long.example", 1)
    assert net.visits_of("www.long.example") == []


async def test_robots_rules_are_asked_once_and_kept(net: Internet) -> None:
    """C10: a page that the rules forbid is not fetched, the others are."""
    net.default = sites.robots(
        "User-agent: rowmill-enrichment\nDisallow: /private\n\nUser-agent: *\nDisallow: /", sites.page()
    )
    async with fetch.fetcher(Settings(internet=net.address)) as fetcher:
        for path in ("/a", "/b", "/private/c"):
            if path.startswith("/private"):
                with pytest.raises(Refused, match=r"robots: a\.example"):
                    await fetcher.facts(f"https://a.example{path}")
            else:
                await fetcher.facts(f"https://a.example{path}")
    assert [visit.path for visit in net.visits] == ["/robots.txt", "/a", "/b"]
    assert "rowmill-enrichment" in net.visits[0].headers["user-agent"]


@pytest.mark.parametrize(("status", "allowed"), [(404, True), (403, True), (410, True), (500, False), (503, False)])
async def test_robots_rules_that_are_missing_allow_and_those_that_fail_do_not(
    net: Internet, status: int, allowed: bool
) -> None:
    """C10: by RFC 9309; a site that cannot say is a failure to try again, not a refusal."""
    net.default = sites.robots("no", sites.page(), status)
    if allowed:
        assert (await facts(net, "https://a.example/"))["http_status"] == 200
        return
    with pytest.raises(FetchFailed, match=f"HTTP {status} for robots.txt") as failed:
        await facts(net, "https://a.example/")
    assert not isinstance(failed.value, Refused)


async def test_a_captcha_in_place_of_a_page_is_known_and_one_beside_comments_is_none(net: Internet) -> None:
    """C10: by the title, by a challenge's header, or by a widget on a page that was refused."""
    widget = "<div class='g-recaptcha' data-sitekey='x'></div>"
    net.sites["plain.example"] = sites.captcha()
    net.sites["refused.example"] = sites.saying(f"<title>Sorry</title>{widget}", 403)
    net.sites["cloud.example"] = lambda request: (
        Answer(status=404) if request.path == "/robots.txt" else Answer("", 403, {"cf-mitigated": "challenge"})
    )
    net.sites["comments.example"] = sites.page(body=widget)
    net.sites["shut.example"] = sites.refusing(403)
    for host in ("plain", "refused", "cloud"):
        with pytest.raises(Refused, match=f"captcha: {host}"):
            await facts(net, f"https://{host}.example/")
    assert (await facts(net, "https://comments.example/"))["http_status"] == 200
    with pytest.raises(Refused, match="forbidden: shut"):
        await facts(net, "https://shut.example/")


async def test_nothing_is_kept_of_a_visit_but_what_was_found(net: Internet) -> None:
    """C13: no body, also not one that JSON-LD repeats; and no cookie goes back."""
    text = "word " * 3_000
    data = json.dumps({"@type": "Article", "articleBody": text, "headline": text, "x": [{"text": text}] * 10})
    head = f"<script type='application/ld+json'>{data}</script><meta property='og:description' content='{text}'>"
    page = sites.page(head=head, body=f"<p>{text}</p>")
    net.default = lambda request: Answer(page(request).body, headers={**sites.HTML, "set-cookie": "who=you; Path=/"})
    net.sites["a.example"] = sites.robots("", net.default)
    async with fetch.fetcher(Settings(internet=net.address)) as fetcher:
        await _twice(fetcher)
        found = await fetcher.facts("https://a.example/3")
    assert found["json_ld"][-1] == {"@type": "Article", "headline": text[:1_000], "x": [{}] * 10}
    assert all(len(json.dumps(value)) < 3_000 for value in found.values())
    assert all("cookie" not in visit.headers for visit in net.visits)


async def _twice(fetcher: Fetcher) -> None:
    await fetcher.facts("https://a.example/1")
    await fetcher.facts("https://a.example/2")
