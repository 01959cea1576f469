"""What needs no database: keys, matches, answers of sites, settings."""

from __future__ import annotations

import gzip
import hashlib
import json
from datetime import date

import httpx
import pytest

from apps.prices.adapters import ADAPTERS, BadAnswer, cents
from apps.prices.coin import Coin, NotACoin
from apps.prices.points import Found
from apps.prices.settings import Settings
from rowmill import RowmillError

MORGAN = Coin("1921-D Morgan Dollar", 1921, "D", "dollar", "Morgan")
FOUND = Found("1921-D  Morgan\tDollar", "https://Shop.example/item/7?ref=x#top", 12_50, "ask", date(2026, 5, 4))


def test_an_item_with_an_id_of_its_own_is_known_by_it() -> None:
    """D5: ext_{external_id}."""
    with_id = Found("a", "u", 1, "sold", date(2026, 1, 1), external_id="LOT-9")
    assert with_id.dedupe_key == "ext_LOT-9"


def test_an_item_without_an_id_is_known_by_what_it_is() -> None:
    """D5: hash_ and 16 hex digits over URL without query and fragment, folded title, cents, day and type."""
    text = "https://shop.example/item/7|1921-d morgan dollar|1250|2026-05-04|ask"
    assert FOUND.dedupe_key == "hash_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    assert FOUND.dedupe_key == "hash_eca41fa2e705abba"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"url": "https://shop.example/item/7"}, True),
        ({"title": " 1921-D MORGAN dollar "}, True),
        ({"condition": "proof"}, True),
        ({"url": "https://shop.example/item/8"}, False),
        ({"title": "1921-D Morgan Dollar toned"}, False),
        ({"price_cents": 1251}, False),
        ({"day": date(2026, 5, 5)}, False),
        ({"price_type": "bid"}, False),
    ],
)
def test_only_what_makes_it_another_offer_makes_another_key(change: dict[str, object], same: bool) -> None:
    """D5: each part of the hash counts, and nothing else."""
    other = Found(**vars(FOUND) | change)  # type: ignore[arg-type]
    assert (other.dedupe_key == FOUND.dedupe_key) is same


def test_the_cache_key_is_source_and_coin_joined_by_bars() -> None:
    """D9: source_id, year, mintmark, denomination, series, title; empty where there is none."""
    assert MORGAN.cache_key(3) == "3|1921|D|dollar|Morgan|1921-D Morgan Dollar"
    assert Coin("Sovereign").cache_key(3) == "3|||||Sovereign"


def test_a_better_match_is_stronger_and_another_year_is_none() -> None:
    """D5: match_strength, by which a conflict is decided."""
    whole, partly = MORGAN.match_strength("1921 D Morgan silver dollar, toned"), MORGAN.match_strength("Morgan dollar")
    assert 1 >= whole > partly > 0
    assert MORGAN.match_strength("1921-D Morgan Dollar") == 1
    assert MORGAN.match_strength("1922-D Morgan Dollar") == 0


@pytest.mark.parametrize(
    "wrong", [None, [], {}, {"title": " "}, {"title": "x", "year": "soon"}, {"title": "x", "series": 3}]
)
def test_query_params_that_name_no_coin_are_refused_by_name(wrong: object) -> None:
    """D1: what is wrong is said."""
    with pytest.raises(NotACoin, match="query_params"):
        Coin.of(wrong)


def test_what_query_params_lack_comes_from_the_intake() -> None:
    """D1, D9: also a title, made of the other parts where there is none; what the job says itself goes first."""
    intake = {"title": None, "year": "1921", "mintmark": "D", "denomination": 1, "series": " Morgan "}
    assert Coin.of({}, intake) == Coin("1921-D Morgan 1", 1921, "D", "1", "Morgan")
    assert Coin.of({"title": "Peace", "year": 1922, "series": ""}, intake) == Coin("Peace", 1922, "D", "1", "Morgan")
    with pytest.raises(NotACoin, match="coin_intakes: year 'old' is not a year"):
        Coin.of({}, {"year": "old"})


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("US $1,234.50", 123450),
        ("12", 1200),
        ("$0.07", 7),
        ("1,000,000.00", 100000000),
        ("$5.5 each", 550),
        ("$007", 700),
    ],
)
def test_prices_are_read_exactly(text: str, amount: int) -> None:
    """D5: price in cents."""
    assert cents(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        "€5.00", "12,50 €", "1.234,50", "£7", "CA $5", "A$5", "5 EUR", "-5", "$1,23", "$12.345", "1'234.50", "$5 - $9",
        "free", "", "٣٤", "$999,999,999,999.00",
    ],
)  # fmt: skip
def test_an_amount_that_could_be_another_one_is_no_price(text: str) -> None:
    """D5, D6: another currency, another way to write numbers, a range, a debt: a wrong price is worse than none."""
    with pytest.raises(BadAnswer, match=r"not a price|more than any coin"):
        cents(text)


async def collected(kind: str, body: str | bytes, headers: dict[str, str] | None = None) -> list[Found]:
    stream = httpx.ByteStream(body.encode() if isinstance(body, str) else body)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=stream))
    async with httpx.AsyncClient(transport=transport) as http:
        return await ADAPTERS[kind].collect(http, "http://site.example/", MORGAN)


async def test_what_a_source_sends_is_bounded_and_storable() -> None:
    """D5: null characters, half characters, texts without end: nothing that the database would refuse."""
    item = {"id": "x" * 999, "title": "Morgan\x00 \ud800" + "y" * 9999, "url": "http://a.example/" + "z" * 9999,
            "price": "5", "type": "ask", "date": "2026-01-01", "grade": "g" * 999}  # fmt: skip
    (found,) = await collected("api", json.dumps({"items": [item]}))
    assert found.title.startswith("Morgan yy")
    assert [len(part or "") for part in (found.title, found.url, found.condition, found.external_id)] == [
        298, 2000, 100, 100,
    ]  # fmt: skip


@pytest.mark.timeout(240)
async def test_a_source_that_sends_a_bomb_is_read_to_its_limit() -> None:
    """D1: packed gigabytes, tags inside each other without end: an answer that cannot be read, and soon."""
    bomb = gzip.compress(b"<div>" * 10_000_000, 1)
    with pytest.raises(BadAnswer, match="no listing"):
        await collected("listing", bomb, {"content-encoding": "gzip"})
    with pytest.raises(BadAnswer):
        await collected("api", "[" * 1_000_000)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("listing", "<p>We have moved</p>"),
        ("listing", '<ul class="listing"><li><a href="/x"><span class="title">t</span></a></li></ul>'),
        ("auction", '<table class="results"><tbody><tr data-state="sold"></tr></tbody></table>'),
        (
            "listing",
            '<ul class="listing"><li><a href="http://["><i class="title">t</i></a><b class="price">1</b></li></ul>',
        ),
        ("api", "<html>"),
        ("api", '{"items": [], "currency": "EUR"}'),
        ("api", "[]"),
        (
            "api",
            '{"items": [{"id": 1, "title": "", "url": "http://[", "price": "1", "type": "ask", "date": "2026-01-01"}]}',
        ),
        ("api", '{"items": [{"title": "x"}]}'),
        ("api", '{"items": [{"id": 1, "title": "x", "url": "u", "price": "1", "type": "rent", "date": "2026-01-01"}]}'),
        ("api", '{"items": [{"id": 1, "title": "x", "url": "u", "price": "-", "type": "ask", "date": "2026-01-01"}]}'),
    ],
)
async def test_an_answer_that_cannot_be_read_is_told_from_an_empty_one(kind: str, body: str) -> None:
    """D1: a permanent error, and not "no prices"; a site that has changed must not look like one without coins."""
    with pytest.raises(BadAnswer):
        await collected(kind, body)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("CACHE_ENABLED", "perhaps", "neither true nor false"),
        ("JOB_LOCK_TIMEOUT_SECONDS", "five", "not a number"),
        ("JOB_LOCK_TIMEOUT_SECONDS", "0", "not above 0"),
        ("JOB_LOCK_TIMEOUT_SECONDS", "30", "too long for a lock"),
        ("MAX_RETRIES", "2.5", "not a whole number"),
        ("MAX_RETRIES", "-1", "below 0"),
        ("MIN_MATCH", "7", "between 0 and 1"),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(variable: str, text: str, words: str) -> None:
    """D3, D9: the settings' mistakes are told before anything runs."""
    with pytest.raises(RowmillError, match=words) as told:
        Settings.read({variable: text})
    assert told.value.hint


def test_the_defaults_are_those_of_the_specification() -> None:
    """D1, D3, D4, D8, D9: numbers that the specification gives."""
    plain = Settings.read({"CACHE_ENABLED": ""})
    assert (plain.job_lock_timeout_seconds, plain.heartbeat_seconds, plain.sweep_seconds) == (300, 20, 60)
    assert (plain.max_retries, plain.breaker_failures, plain.breaker_pause_seconds) == (5, 5, 300)
    assert (plain.cache_ttl_seconds, plain.cache_enabled) == (3600, True)
    assert Settings.read({"CACHE_ENABLED": "false", "WORKER_ID": "w-1"}).cache_enabled is False
