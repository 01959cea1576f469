"""Canonical links: one test per rule of canonical.py, named after it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.enrichment.canonical import MOST, NotALink, canonical, link_id


def same(*urls: str, as_: str) -> None:
    assert [canonical(url) for url in urls] == [as_] * len(urls)
    assert canonical(as_) == as_


def test_white_space() -> None:
    """C4: what an editor or a mail put into an address does not make it another one."""
    same(" https://a.example/x y\t", "https://a.exam\nple/xy\r\n", as_="https://a.example/xy")


def test_scheme() -> None:
    """C4: http and https in lower case stay two; anything else is not a link."""
    same("HTTPS://a.example/", as_="https://a.example/")
    same("Http://a.example/", as_="http://a.example/")
    for other in ("javascript:alert(1)", "place:sort=8", "file:///etc/passwd", "data:text/html,x", "about:blank", "/x"):
        with pytest.raises(NotALink, match="only http and https"):
            canonical(other)


def test_user_info() -> None:
    """C4: a password in an address is not kept."""
    same("https://ada:secret@a.example/x", "https://ada@a.example/x", as_="https://a.example/x")


def test_host_case() -> None:
    """C4: host names know no case, and no dot at their end."""
    same("https://A.EXAMPLE/X", "https://a.example./X", as_="https://a.example/X")


def test_idn() -> None:
    """C4: international names as DNS has them."""
    same("https://Bücher.example/", "https://xn--bcher-kva.example/", as_="https://xn--bcher-kva.example/")
    same("https://例え.example/", as_="https://xn--r8jz45g.example/")
    for bad in ("https://a..example/", "https://-\u0301.example/", "https:///x", "https://a b<c>.example/"):
        with pytest.raises(NotALink):
            canonical(bad)


def test_default_port() -> None:
    """C4: the port that goes without saying goes; others stay."""
    same("https://a.example:443/", "https://a.example:/", as_="https://a.example/")
    same("http://a.example:80", as_="http://a.example/")
    same("https://a.example:80/", as_="https://a.example:80/")
    same("http://[2001:DB8::1]:80/", as_="http://[2001:db8::1]/")
    for bad in ("http://a.example:99999/", "http://a.example:x/", "http://[::1/"):
        with pytest.raises(NotALink, match="not an address"):
            canonical(bad)


def test_dots() -> None:
    """C4: dots in a path are resolved, and never lead out of it."""
    same("https://a.example/x/./y/../z", "https://a.example/../x/z", as_="https://a.example/x/z")
    same("https://a.example", "https://a.example/..", as_="https://a.example/")


def test_escapes() -> None:
    """C4: the same letter is the same letter, escaped or not."""
    same("https://a.example/%7eada/%63af%c3%a9", "https://a.example/~ada/café", as_="https://a.example/~ada/caf%C3%A9")
    same("https://a.example/100%", as_="https://a.example/100%25")
    same("https://a.example/a%2fb", as_="https://a.example/a%2Fb")


def test_trailing_slash() -> None:
    """C4: a slash at the end says nothing, but for the root."""
    same("https://a.example/x/", "https://a.example/x//", as_="https://a.example/x")
    same("https://a.example//", as_="https://a.example/")


def test_tracking() -> None:
    """C4: where a visitor came from is no part of where he goes; the other parameters keep their order."""
    tracked = "https://a.example/?b=2&utm_source=x&UTM_Medium=y&a=1&fbclid=z&gclid=q&mc_eid=m&%75tm_term=t"
    same(tracked, as_="https://a.example/?b=2&a=1")
    same("https://a.example/?automatic=1&a&=", as_="https://a.example/?automatic=1&a&=")


def test_empty_query() -> None:
    """C4: a question without words is none."""
    same("https://a.example/x?", "https://a.example/x?&&", "https://a.example/x?utm_id=1", as_="https://a.example/x")


def test_fragment() -> None:
    """C4: a place in a page is no other page."""
    same("https://a.example/x#top", "https://a.example/x#!/y?z", as_="https://a.example/x")


def test_an_address_that_is_too_long_is_refused_by_its_length() -> None:
    """C4: nothing is cut off silently."""
    with pytest.raises(NotALink, match=f"{MOST} are the most"):
        canonical("https://a.example/" + "x" * MOST)


@given(
    st.text(max_size=40),
    st.text(alphabet="/.%2fFaeé?#&=utm_", max_size=30),
    st.sampled_from(["http", "https", "HTTPS"]),
)
def test_what_is_canonical_stays_as_it_is(any_text: str, path: str, scheme: str) -> None:
    """C4: the rules are done after one time, whatever the address; and nothing but NotALink is raised."""
    for url in (any_text, f"{scheme}://a.example/{path}", f"{scheme}://{any_text}/{path}"):
        try:
            found = canonical(url)
        except NotALink:
            continue
        assert canonical(found) == found
        assert link_id(found) == link_id(canonical(url))
