"""The stand-in internet behaves as its sites say, and its log tells the truth."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest

from apps.standins import internet, sites
from apps.standins.internet import Internet


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    named = {
        "page.example": sites.page(),
        "slow.example": sites.page(latency=0.2),
        "shut.example": sites.refusing(),
        "circle.example": sites.circling(),
        "captcha.example": sites.captcha(),
        "rules.example": sites.robots("User-agent: *\nDisallow: /private", sites.page()),
        "endless.example": sites.endless(),
        "latin.example": sites.mislabelled("Café", "latin-1", "utf-8"),
        "gone.example": sites.dropping(),
        "half.example": sites.dropping(in_the_middle=True),
        "tired.example": sites.failing(2, sites.page()),
    }
    with Internet(named) as net:
        yield net


async def test_hosts_are_told_apart_by_name_over_http_and_https(net: Internet) -> None:
    """X3: one server speaks for every host name, with or without TLS in the address."""
    async with httpx.AsyncClient(transport=net.transport()) as client:
        page = await client.get("https://page.example/a?b=c")
        assert "Page /a at page.example" in page.text
        assert (await client.get("http://nobody.example/")).status_code == 404
        assert (await client.get("http://shut.example/")).status_code == 403
        assert "Disallow" in (await client.get("http://rules.example/robots.txt")).text
        assert "human" in (await client.get("http://captcha.example/")).text
        assert [(await client.get("http://tired.example/")).status_code for _ in range(3)] == [500, 500, 200]
        assert (await client.get("http://latin.example/")).content.count(b"Caf\xe9") == 2
    (visit,) = net.visits_of("page.example")
    assert (visit.path, visit.query, visit.status) == ("/a", {"b": "c"}, 200)


async def test_what_misbehaves_does_so_on_the_wire(net: Internet) -> None:
    """X3: circles, cut connections and bodies without end reach the client as such."""
    async with httpx.AsyncClient(transport=net.transport(), follow_redirects=True) as client:
        with pytest.raises(httpx.TooManyRedirects):
            await client.get("http://circle.example/")
        for host in ("gone", "half"):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"http://{host}.example/")
        size = 0
        async with client.stream("GET", "http://endless.example/") as answer:
            async for piece in answer.aiter_bytes():
                size += len(piece)
                if size > 1_000_000:
                    break
        assert size > 1_000_000


async def test_the_log_says_how_many_were_open_at_once(net: Internet) -> None:
    """C8: the limit per domain is judged by this log, so it must be able to show a breach."""
    async with httpx.AsyncClient(transport=net.transport()) as client:
        await asyncio.gather(*(client.get(f"http://slow.example/{n}") for n in range(3)))
        await client.get("http://slow.example/last")
    assert net.most_at_once()["slow.example"] == 3
    assert all(visit.end - visit.start >= 0.2 for visit in net.visits_of("slow.example"))


def test_names_resolve_to_public_and_on_request_to_private_addresses() -> None:
    """X3: a DNS for tests of what may be reached."""
    assert internet.resolve("page.example") == internet.resolve("PAGE.example.") != internet.resolve("b.example")
    assert internet.resolve("a.10-0-0-1.ip.example") == ["10.0.0.1"]
    assert internet.resolve("--1.ip6.example") == ["::1"]
    assert internet.resolve("192.0.2.1") == ["192.0.2.1"]
    with pytest.raises(socket.gaierror):
        internet.resolve("nowhere.invalid")
