"""The words: states, roles, backoffs, delays and texts, as pure values."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime
from datetime import timedelta as td
from email.message import Message
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rowmill
from rowmill import exponential, fixed
from rowmill.declare import roles, states
from rowmill.declare.retry import classify, retry_after
from rowmill.errors import RowmillError, did_you_mean
from rowmill.plural import counted
from rowmill.store import bounded, redact

# -- states


def test_a_running_row_is_a_ready_one_with_the_running_values_over_it() -> None:
    """E1, E2: what the flag does not say, the untouched columns still do."""
    ready = {"status": "prompt-forming", "currentStep": "prompt-forming", "inProgress": False}
    assert states.overlay(ready, {"inProgress": True}) == ready | {"inProgress": True}
    assert states.overlay({"status": ["queued", "failed"]}, {"status": "running"}) == {"status": "running"}
    assert states.overlay("status = 'queued'", {"status": "running"}) == {"status": "running"}


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ({"s": 1}, {"s": 1}, True),
        ({"s": 1}, {"s": 2}, False),
        ({"s": [1, 2]}, {"s": 2}, True),
        ({"s": [1, 2]}, {"s": [3, 4]}, False),
        ({"s": None}, {"s": None}, True),
        ({"s": None}, {"s": "x"}, False),
        ({"s": [None, "x"]}, {"s": None}, True),
        ({"s": 1, "t": 1}, {"s": 1, "t": 2}, False),
        ({"s": 1}, {"t": 1}, True),
        ({"s": False}, {"s": True}, False),
        ({"s": 1}, {"s": True}, False),
        ({"s": "1"}, {"s": 1}, False),
    ],
)
def test_conditions_overlap_where_one_row_could_meet_both(one: Any, other: Any, overlap: bool) -> None:
    """A4, E2: also over several columns, lists and NULL."""
    assert states.overlaps(one, other) is overlap
    assert states.overlaps(other, one) is overlap


_VALUES = st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["a", "b"]), st.booleans())
_STATES = st.dictionaries(
    st.sampled_from(["s", "t", "u"]), st.one_of(_VALUES, st.lists(_VALUES, min_size=1)), min_size=1
)


@given(_STATES, st.dictionaries(st.sampled_from(["s", "t", "u"]), _VALUES, min_size=1))
def test_the_first_ready_values_are_ready_and_running_ones_are_running(ready: Any, running: Any) -> None:
    """C5, E2: where a row goes back to is a row that is taken again."""
    assert states.overlaps(states.first(ready), ready)
    assert states.overlaps(states.overlay(ready, running), running)


# -- roles


def fits_all(column: str, kind: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("declared", "columns", "found"),
    [
        ({}, ["worker", "claimed_at"], {"worker": "worker", "claimed_at": "claimed_at"}),
        ({}, ["locked_by", "locked_at"], {"worker": "locked_by", "claimed_at": "locked_at"}),
        ({}, ["lockedBy", "HeartbeatAt"], {"worker": "lockedBy", "heartbeat_at": "HeartbeatAt"}),
        ({}, ["worker_id", "locked_by"], {"worker": "locked_by"}),
        ({"worker": None}, ["worker"], {}),
        ({"worker": "w"}, ["worker", "w"], {"worker": "w"}),
        ({"reclaims": "attempts"}, ["attempts"], {"reclaims": "attempts"}),
        ({"failures": "n", "reclaims": "n"}, ["n"], {"failures": "n", "reclaims": "n"}),
        ({"failures": "attempts", "attempts": "attempts"}, ["attempts"], {"attempts": "attempts"}),
        ({}, ["lastError", "completed_at", "next_retry_at"],
         {"error": "lastError", "finished_at": "completed_at", "run_after": "next_retry_at"}),
        ({}, ["title", "url"], {}),
    ],
)  # fmt: skip
def test_columns_take_roles_by_their_names_and_by_declaration(declared: Any, columns: Any, found: Any) -> None:
    """C3, D1, E1: own names, usual twins, camel case; a column given to one role is not taken for another."""
    assert roles.resolve(declared, columns, fits_all) == found


def test_a_column_takes_a_role_only_if_its_type_fits() -> None:
    """DESIGN, roles: the next name is tried where the type of the first is wrong."""
    found = roles.resolve({}, ["worker", "locked_by"], lambda column, kind: column != "worker")
    assert found == {"worker": "locked_by"}


@pytest.mark.parametrize(
    ("name", "snake"), [("lockedBy", "locked_by"), ("LockedBy", "locked_by"), ("locked_by", "locked_by"),
                        ("LOCKED_BY", "locked_by"), ("retryCount2", "retry_count2"), ("runAfterUTC", "run_after_utc")]
)  # fmt: skip
def test_camel_case_counts_as_snake_case(name: str, snake: str) -> None:
    """E1: camel-case columns."""
    assert roles.snake(name) == snake


# -- backoffs

_DELAYS = st.timedeltas(td(milliseconds=1), td(days=30))


@given(_DELAYS, _DELAYS, st.integers(1, 10_000), st.integers())
def test_an_exponential_wait_is_between_half_and_all_of_what_it_doubles_to(
    base: td, cap: td, attempt: int, seed: int
) -> None:
    """D4, E6: base * 2^(attempt - 1), at most the cap; jitter takes away half at most."""
    random.seed(seed)
    whole = exponential(base, cap=cap, jitter=False)(attempt)
    doubled = base.total_seconds() * 2.0 ** min(attempt - 1, 60)
    assert whole.total_seconds() == pytest.approx(min(cap.total_seconds(), doubled), abs=1e-6)
    jittered = exponential(base, cap=cap)(attempt)
    assert whole / 2 - td(microseconds=1) <= jittered <= whole


@given(_DELAYS, _DELAYS, st.integers(1, 200))
def test_an_exponential_wait_never_gets_shorter(base: td, cap: td, attempt: int) -> None:
    """D4: monotone, and it reaches the cap."""
    backoff = exponential(base, cap=cap, jitter=False)
    assert backoff(attempt) <= backoff(attempt + 1) <= cap
    assert backoff(200) == cap


@given(_DELAYS, st.integers(0, 10_000))
def test_a_fixed_wait_is_always_the_same(delay: td, attempt: int) -> None:
    """C9: five minutes are five minutes."""
    assert fixed(delay)(attempt) == delay


def test_prices_wait_a_minute_then_two_then_four_and_never_more_than_a_day() -> None:
    """D4: base_delay_minutes * 2^retry_count, at most 24 hours."""
    backoff = exponential(td(minutes=1), cap=td(hours=24), jitter=False)
    assert [backoff(n) for n in (1, 2, 3, 4)] == [td(minutes=m) for m in (1, 2, 4, 8)]
    assert backoff(50) == td(hours=24)


# -- numbers with their noun


def test_one_is_not_many() -> None:
    """Issue: "1 steps", "1 errors"."""
    assert [counted(n, "row") for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert [counted(n, "row is", "rows are") for n in (1, 2)] == ["1 row is", "2 rows are"]


def test_every_plural_is_made_in_one_place() -> None:
    """Issue: one helper for all of them; no number is followed by a bare plural where people read it."""
    source = Path(rowmill.__file__).parent
    by_hand = re.compile(r"""['"]{2} if [^\n]{1,40}== 1 else ['"]s|['"]s['"] if |== 1 else ['"]\w+s['"]""")
    nouns = "rows|gates|steps|errors|warnings|lanes|jobs|workers|failures|attempts|keys|schedules"
    bare = re.compile(rf"\{{(?!ASK_ABOVE|there)[^{{}}]*\}} (?:{nouns})\b|(?<!state )\}}\}} (?:{nouns})\b")
    files = [*(source / "cli").glob("*.py"), *(source / "web").rglob("*.py"), *(source / "web").rglob("*.html")]
    files += [source / "store" / "inspect" / name for name in ("why_rules.py", "health.py")]
    files += (source / "ops").glob("*.py")
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if by_hand.search(line) or bare.search(line)
    ]
    assert found == []


# -- what an exception means


class Failed(Exception):
    """As the usual clients raise it."""


def http(status: int, headers: dict[str, str] | None = None, where: str = "response") -> Failed:
    error = Failed()
    if where == "response":
        error.response = SimpleNamespace(status_code=status, headers=headers or {})  # type: ignore[attr-defined]
    else:
        setattr(error, where, status)
        error.headers = headers or {}  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("where", ["response", "status", "code", "status_code"])
def test_a_throttled_answer_of_any_client_is_a_rate_limit(where: str) -> None:
    """D1: HTTP 429 and 503, with Retry-After where the server gave it."""
    assert classify(http(429, {"Retry-After": "7"}, where)) == ("rate", td(seconds=7))
    assert classify(http(503, {}, where)) == "rate"
    assert classify(TimeoutError()) == "transient"


@pytest.mark.parametrize("where", ["response", "status", "code", "status_code"])
def test_a_plain_4xx_of_any_client_is_permanent(where: str) -> None:
    """D1: the same request gets the same answer; 408, 409 and 425 are a matter of the moment, and so is 5xx."""
    for status in (400, 401, 403, 404, 405, 410, 422, 451, 499):
        assert classify(http(status, {"Retry-After": "7"}, where)) == "permanent"
    for status in (301, 408, 409, 425, 500, 502, 504):
        assert classify(http(status, {}, where)) == "transient"


def test_only_an_http_status_makes_an_error_permanent() -> None:
    """X1: an exit code, or a number that is no status, says nothing."""
    for error in (SystemExit(404), Failed("HTTP 404"), http(4004, where="code"), http(True, where="code")):
        assert classify(error) == "transient"


def test_the_clients_own_errors_are_read() -> None:
    """D1: httpx, requests, aiohttp and urllib, as each raises a 404."""
    httpx = pytest.importorskip("httpx")
    request = httpx.Request("GET", "http://x.example")
    with pytest.raises(httpx.HTTPStatusError) as raised:
        httpx.Response(404, request=request).raise_for_status()
    errors: list[BaseException] = [raised.value, HTTPError("http://x.example", 404, "Not Found", Message(), None)]
    errors += [http(404, where="response"), http(404, where="status")]  # requests, aiohttp
    assert {classify(error) for error in errors} == {"permanent"}


@pytest.mark.parametrize(
    ("headers", "delay"),
    [
        ({"Retry-After": "120"}, td(minutes=2)),
        ({"retry-after": " 5 "}, td(seconds=5)),
        ({"Retry-After": "0"}, td(0)),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT", "Date": "Wed, 21 Oct 2015 07:27:30 GMT"}, td(seconds=30)),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, td(0)),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT", "Date": "yesterday"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "1.5"}, None),
        ({}, None),
        (None, None),
        ("no headers", None),
    ],
)
def test_retry_after_is_a_delay_in_seconds_or_a_date(headers: Any, delay: td | None) -> None:
    """D1: seconds, or a date by the response's own clock; nonsense is no delay."""
    assert retry_after(headers) == delay


def test_retry_after_a_date_without_the_servers_clock_is_counted_from_now() -> None:
    """D1: a date to come."""
    delay = retry_after({"Retry-After": format_datetime(datetime.now(UTC) + td(minutes=10), usegmt=True)})
    assert delay is not None
    assert td(minutes=9) < delay <= td(minutes=10)


@given(st.one_of(st.text(), st.integers().map(str), st.dates().map(str)))
def test_retry_after_never_raises_whatever_a_server_says(text: str) -> None:
    """X1: a header from outside cannot stop the engine, and never asks for a time before now."""
    delay = retry_after({"Retry-After": text})
    assert delay is None or delay >= td(0)


# -- texts


@given(st.text(st.characters(), max_size=300), st.integers(1, 200))
def test_bounded_text_fits_and_any_column_takes_it(text: str, most: int) -> None:
    """Issue, settle: error text of bounded length, without what no column takes."""
    short = bounded(text, most)
    assert len(short) <= most
    assert "\x00" not in short
    assert short.encode("utf-8").decode("utf-8") == short


def test_text_that_fits_is_left_as_it_is_and_longer_text_shows_that_it_was_cut() -> None:
    """Issue, settle: nothing is cut without a sign."""
    assert bounded("it's ü\U0001f600") == "it's ü\U0001f600"
    assert bounded("x" * 2000) == "x" * 2000
    assert bounded("x" * 2001) == "x" * 1999 + "…"
    assert bounded("a\x00b\ud800c") == "a\\x00b?c"


@pytest.mark.parametrize(
    ("wrong", "known", "words"),
    [
        ("stauts", ["status", "step"], "did you mean 'status'?"),
        ("STATUS", ["status"], "did you mean 'status'?"),
        ("inprogress", ["inProgress", "id"], "did you mean 'inProgress'?"),
        ("banana", ["b", "a"], "one of a, b"),
        ("x", [], "there are none"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_or_with_all(wrong: str, known: list[str], words: str) -> None:
    """STYLE 7: "did you mean"."""
    assert did_you_mean(wrong, known) == words


def test_an_error_shows_its_fix_behind_try() -> None:
    """STYLE 8: each message says the fix."""
    assert str(RowmillError("wrong", hint="this")) == "wrong\nTry: this"
    assert str(RowmillError("wrong")) == "wrong"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u:sec:ret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:sec@ret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:sec/ret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h/db?password=secret", None),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str | None) -> None:
    """Issue: messages that name the database do not tell its password, however it is written."""
    found = redact(url)
    assert shown is None or found == shown
    assert "sec" not in found
    assert "ret" not in found


def test_the_public_names_are_these() -> None:
    """STYLE 9: the public surface is listed and tested."""
    assert rowmill.__all__ == [
        "IS_NULL", "NOT_NULL", "NOW",
        "AppError", "Breaker", "BreakerColumns", "Budget", "Busy", "Call", "Cancel", "Claim",
        "Concurrency", "DatabaseError", "Dead", "DeclarationError", "Done", "Event", "Handle",
        "InputsChanged", "Job",
        "Joined", "Keep", "Key", "KeyTaken", "Lane", "LostClaim", "Mill", "Outcome", "Queue", "Rate",
        "Refused", "Retry", "RowmillError", "Schedules", "Settled", "Snooze", "Status", "SyncJob", "Task",
        "TaskCanceled", "TaskFailed", "Unreachable", "UnreadableValue", "Wait", "WorkerIdTaken", "WrongAnswer",
        "WrongArguments", "WrongResult", "configure_logs", "domain", "exponential", "fixed", "from_table",
        "injected", "next_tick",
    ]  # fmt: skip
    assert all(hasattr(rowmill, name) for name in rowmill.__all__)
    assert all((getattr(rowmill, name).__doc__ or "").strip() for name in rowmill.__all__)
