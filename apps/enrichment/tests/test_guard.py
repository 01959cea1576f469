"""What may be reached: nothing but the public internet, whatever the address, the redirect or the DNS says."""

from __future__ import annotations

import pytest

from apps.enrichment import fetch
from apps.enrichment.fetch import FetchFailed
from apps.enrichment.settings import Settings
from apps.guard import is_public
from apps.standins import internet, sites
from apps.standins.internet import Internet

PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "2001:db8::1", "64:ff9b:1::7f00:1", "64:ff9b:1::1", "64:ff9b:1:fffe::a9fe:a9fe", "::7f00:1",
    "::127.0.0.1", "::a9fe:a9fe", "::ffff:0:7f00:1", "100::1", "4000::1", "5f00::1",
]  # fmt: skip


def test_only_addresses_that_anybody_could_reach_are_public() -> None:
    """C7: loopback, private, link-local, shared and reserved ranges, and addresses hidden in others, are not."""
    assert [address for address in PRIVATE if is_public(address)] == []
    for address in ("93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::808:808"):
        assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://169.254.169.254/latest/meta-data",
        "http://192-168-0-1.ip.example/", "https://169-254-169-254.ip.example/", "http://--ffff-7f00-1.ip6.example/",
    ],
)  # fmt: skip
async def test_a_private_address_is_refused_by_number_and_by_name(net: Internet, url: str) -> None:
    """C7: no request leaves for it."""
    net.default = sites.page()
    async with fetch.fetcher(Settings(internet=net.address)) as fetcher:
        with pytest.raises(FetchFailed, match="not on the public internet"):
            await fetcher.facts(url)
    assert net.visits == []


async def test_a_redirect_to_a_private_address_is_refused(net: Internet) -> None:
    """C7: also behind a redirect, in the same domain or as its own run in another, and for robots.txt."""
    inside = "http://10-0-0-1.ip.example/admin"
    net.default = sites.redirecting(inside)
    net.sites["a.ip.example"] = lambda request: internet.Answer("", 302, {"location": inside})
    async with fetch.fetcher(Settings(internet=net.address), _public_but_inside) as fetcher:
        with pytest.raises(fetch.Moved):
            await fetcher.facts("https://out.example/")
        with pytest.raises(FetchFailed, match="not on the public internet"):
            await fetcher.facts(inside)
        with pytest.raises(FetchFailed, match="not on the public internet"):
            await fetcher.facts("http://a.ip.example/")
    assert {visit.host for visit in net.visits} == {"out.example", "a.ip.example"}


async def _public_but_inside(host: str) -> list[str]:
    return ["93.184.215.14"] if host == "a.ip.example" else internet.resolve(host)


async def test_a_name_that_changes_its_address_is_looked_at_each_time(net: Internet) -> None:
    """C7: DNS rebinding: what is connected to is what was looked at, and a mixed answer is refused."""
    net.default = lambda request: internet.Answer("<title>x</title>", headers={"connection": "close"})
    answers = [["93.184.215.14"], ["93.184.215.14"], ["127.0.0.1"], ["93.184.215.14", "10.0.0.1"]]
    asked = []

    async def rebinding(host: str) -> list[str]:
        asked.append(host)
        return answers[len(asked) - 1]

    async with fetch.fetcher(Settings(internet=net.address), rebinding) as fetcher:
        assert (await fetcher.facts("http://twice.example/"))["title"] == "x"  # robots.txt, and the page
        for _ in range(2):
            with pytest.raises(FetchFailed, match="not on the public internet"):
                await fetcher.facts("http://twice.example/")
    assert len(net.visits) == 2


async def test_private_addresses_are_reached_where_that_is_allowed(net: Internet) -> None:
    """C7: links inside a company, where ENRICHMENT_ALLOW_PRIVATE says so."""
    net.default = sites.page()
    async with fetch.fetcher(Settings(internet=net.address, allow_private=True)) as fetcher:
        assert (await fetcher.facts("http://10-0-0-1.ip.example/x"))["http_status"] == 200


async def test_a_proxy_of_the_environment_is_no_way_around(net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: the guard is the only way out."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    net.default = sites.page()
    async with fetch.fetcher(Settings(internet=net.address)) as fetcher:
        assert (await fetcher.facts("http://a.example/"))["http_status"] == 200
