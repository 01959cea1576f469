"""What is taken out of a text before it leaves, and what stays readable; and what two failures have in common."""

from __future__ import annotations

import ipaddress
import time
import uuid
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.scrub import scrubbed, scrubbed_value
from rowmill.store.own.fingerprint import fingerprint, shape

LEAKS = {
    "GET https://shop.example/cart?user=42&sid=abc failed": ["user=42", "sid", "abc"],
    "https://ada:hunter2@shop.example/x#top": ["ada", "hunter2", "top"],
    "postgresql://app:s3cret@10.0.0.7:5432/db refused": ["s3cret", "10.0.0.7"],
    "redirected to /login?next=%2Fme&token=deadbeef": ["next=", "deadbeef"],
    "mail to ada.lovelace+x@example.co.uk bounced": ["ada.lovelace", "example.co.uk"],
    "mail to ada%40example.org bounced": ["ada", "example.org"],
    "Authorization: Bearer abcDEF123456.x-y": ["abcDEF123456"],
    '{"Authorization": "Basic YWRhOmh1bnRlcjI="}': ["YWRhOmh1bnRlcjI"],
    "Cookie: sid=31d4d96e407aad42; theme=dark": ["31d4d96e407aad42", "dark"],
    "{'api_key': 'k-1 2', 'page': 2}": ["k-1 2"],
    "password=hunter2, retrying": ["hunter2"],
    "DB_PASSWORD: 'correct horse'": ["correct horse"],
    "key sk-proj-Abcdefgh12345678 is revoked": ["Abcdefgh12345678"],
    "AIzaSyA1234567890abcdefghijklmnop said no": ["AIza"],
    "jwt eyJhbGciOi.eyJzdWIiOiIx.sig": ["eyJhbGciOi", "eyJzdWIiOiIx"],
    "signed 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822c": ["9f86d081884c7d"],
    "from 192.168.1.17: refused, and 192.168.1.18.": ["192.168.1.17", "192.168.1.18"],
    "from [2001:db8::8a2e:370:7334]:443 and fe80::1%eth0": ["2001:db8", "7334", "fe80"],
}
KEPT = {
    "HTTP 403 at https://shop.example/cart?user=42": ["HTTP 403", "https://shop.example/cart"],
    "at 12:34:56 on 2026-11-16T01:02:03 in shop.py:12": ["12:34:56", "2026-11-16T01:02:03", "shop.py:12"],
    "unified-worker-7d3f7f0e-5d1c-4c2e-9f43-0d2ab8f1a001": ["7d3f7f0e-5d1c-4c2e-9f43-0d2ab8f1a001"],
    "SyntaxError: unexpected token < in JSON; std::vector": ["unexpected token < in JSON", "std::vector"],
    "rowmill 1.2.3, Python 3.11.2": ["1.2.3", "3.11.2"],
}


@pytest.mark.parametrize("text", LEAKS)
def test_nothing_personal_or_secret_is_left_in_a_text(text: str) -> None:
    """C12: query strings, e-mail addresses, secrets and IP addresses are taken out."""
    left = scrubbed(text)
    assert not [leak for leak in LEAKS[text] if leak in left], left


@pytest.mark.parametrize("text", KEPT)
def test_what_says_where_and_why_is_kept(text: str) -> None:
    """C12: a scrubbed failure is still one that can be understood."""
    assert all(kept in scrubbed(text) for kept in KEPT[text]), scrubbed(text)


def test_a_key_may_say_that_its_value_is_secret() -> None:
    """C12: also where the value itself gives nothing away."""
    given: dict[str, Any] = {"headers": {"Set-Cookie": "x"}, "userToken": "x", "note": ["a@b.example"], "n": 3}
    assert scrubbed_value(given | {"session_id": "x", "query_string": "x", "x-forwarded-for": "x"}) == {
        "headers": {"Set-Cookie": "[secret]"}, "userToken": "[secret]", "note": ["[email]"], "n": 3,
        "session_id": "[secret]", "query_string": "[secret]", "x-forwarded-for": "[secret]",
    }  # fmt: skip


@given(
    st.text(max_size=40),
    st.emails(),
    st.ip_addresses(),
    st.text("abcXYZ059%&=+-_.", min_size=1, max_size=40),
    st.text(),
)
@settings(max_examples=150, deadline=None)
def test_no_surrounding_text_brings_an_address_through(
    before: str, email: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address, query: str, after: str
) -> None:
    """C12: whatever stands around them."""
    left = scrubbed(f"{before} {email} {ip} http://h.example/p?q={query} {after}")
    assert f"q={query}" not in left
    assert f" {ip} " not in f" {left} ".replace(f"{before} ", " ", 1)


KINDS = st.sampled_from([
    st.integers(0, 10**12).map(str), st.uuids().map(str), st.ip_addresses(v=4).map(str),
    st.from_regex(r"https?://[a-z]{1,9}\.example(/[a-z0-9]{1,5}){0,3}(\?[a-z]=[a-z0-9]{1,5})?", fullmatch=True),
    st.from_regex(r"[a-z]{1,9}(\.[a-z0-9]{1,5})?@[a-z]{1,9}\.example", fullmatch=True),
    st.from_regex(r"'[a-zA-Z0-9 ./:@-]{0,30}'", fullmatch=True),
    st.from_regex(r"(/[a-z_]{1,9}){1,4}/[a-z]{1,9}\.(py|txt)", fullmatch=True),
    st.from_regex(r"0x[0-9a-f]{6,16}", fullmatch=True),
])  # fmt: skip


@given(KINDS.flatmap(lambda kind: st.tuples(kind, kind)))
@settings(max_examples=150, deadline=None)
def test_failures_that_differ_in_their_values_alone_are_one_family(pair: tuple[str, str]) -> None:
    """D10: numbers, ids, URLs, addresses, paths and quoted values do not tell failures apart."""
    one, other = (f"ValueError: cannot read {value} of the table" for value in pair)
    assert shape(one) == shape(other)
    assert fingerprint(one) == fingerprint(other)


@given(st.text(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_text_has_a_short_shape_that_is_its_own(text: str) -> None:
    """D10: whatever a handler raises."""
    assert len(shape(text)) <= 300
    assert len(fingerprint(text)) == 12
    assert fingerprint(text) == fingerprint(text)


def test_different_failures_are_different_families() -> None:
    """D10: what a failure says counts, and so does its class."""
    said = ["TimeoutError: timed out", "ValueError: timed out", "HTTP 403", "forbidden", "KeyError: 'a'", "", "dead"]
    said += ["can't open the file, don't know why", "can't close the file, don't know why"]
    assert len({fingerprint(text) for text in said}) == len(said)
    assert fingerprint(None) == fingerprint("")


@pytest.mark.parametrize("said", [
    "HTTP {}", "HTTP {} for https://x.example/404", "HTTP/1.1 {} from the proxy", "HTTP error {}",
    "HTTPStatusError: Client error '{} {phrase}' for url 'https://x.example/1'\nFor more: https://m.example/{}",
    "http status code: {}",
    "HTTPError: {} Client Error: {phrase} for url: https://x.example/1",
    "ClientResponseError: {}, message='{phrase}', url='https://x.example/1'",
    "HTTPError: HTTP Error {}: {phrase}", "the site answered {} {phrase}", "status={}", "status_code: {}",
    'Error code: {} - {{"error": {{"message": "no"}}}}', '{{"error": {{"code": {}, "message": "no"}}}}',
])  # fmt: skip
def test_http_statuses_are_families_of_their_own(said: str) -> None:
    """D10: a 404 and a 503 are two failures, whichever client says so; what else differs is left out as ever."""
    texts = {
        s: said.format(s.value, s.value, phrase=s.phrase) for s in (HTTPStatus(404), HTTPStatus(410), HTTPStatus(503))
    }
    assert len({fingerprint(text) for text in texts.values()}) == 3
    assert all(str(status.value) in shape(text) for status, text in texts.items())
    one, other = (f"{texts[HTTPStatus(404)]} after {seconds} s" for seconds in (404, 503))
    assert shape(one) == shape(other)


def test_other_numbers_are_no_status() -> None:
    """D10: 404 rows are as many as 503 rows."""
    for said in ("{} rows", "ValueError: {} is not a price", "exit code {}", "page {} of 9", "HTTP {}0", "status {}.5"):
        assert shape(said.format(404)) == shape(said.format(503))


@pytest.mark.parametrize("said", [
    "KeyError: '{}'", "AttributeError: 'NoneType' object has no attribute '{}'", "NameError: name '{}' is not defined",
    "TypeError: fetch() got an unexpected keyword argument '{}'",
])  # fmt: skip
def test_errors_about_different_names_are_families_of_their_own(said: str) -> None:
    """D10: a missing title and a missing price are two mistakes; an id that is missing from a dict is a value."""
    assert fingerprint(said.format("title")) != fingerprint(said.format("price"))
    assert "title" in shape(said.format("title"))
    assert fingerprint(said.format("user-17")) == fingerprint(said.format("user-18"))


def test_a_shape_reads_like_the_failure() -> None:
    """D10: the shape is what an operator sees."""
    said = f"HTTPError: 503 for https://x.example/p/1?q=2 after 3.5 s (job {uuid.uuid4()}, [1, 2, 3])"
    assert shape(said) == "HTTPError: 503 for <url> after <n> s (job <id>, [<n>])"
    assert (
        shape("KeyError: 'title' in /srv/app/read.py line 7 at 0x7f3a9c00")
        == "KeyError: title in <path> line <n> at <id>"
    )
    assert shape("job_17 of run a6Gd93jX at 2026-11-16 01:02:03+00:00") == "job_<n> of run <id> at <time>"


def test_a_hostile_text_costs_no_more_than_a_long_one() -> None:
    """C12: no pattern goes back and forth over a text that was made for it."""
    began = time.process_time()
    for piece in ("a@", "1.", "::", "token=", "'", "/a", "-a1", "http://", "?a", "eyJ.", "bearer "):
        scrubbed(piece * 20_000)
        shape(piece * 20_000)
    assert time.process_time() - began < 20
