"""Gemini as provider, against a stand-in that speaks its protocol: answers, quotas, refusals, failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta as td
from typing import Any

import pytest

from apps.ocr.standin import Refusal, Standin
from apps.ocr.tests.office import Office, small_print
from databases import Db
from rowmill.testing import Kit

PAGE = "ACTE NOTARIÉ\n\nNuméro d'inscription : 24681012\n\nDate de présentation : 1er août 1987\n\nVendeur : Zoé Côté"


@pytest.fixture
def gemini() -> Iterator[Standin]:
    with Standin(says=lambda page: PAGE) as standin:
        yield standin


@pytest.fixture
def office(lite: Db, gemini: Standin, make_office: Callable[..., Office]) -> Office:
    return make_office(lite, gemini_key="a key", gemini_url=gemini.url, gemini_model="gemini-of-the-test", dpi=72)


async def test_with_a_key_gemini_reads_and_boosts(office: Office, gemini: Standin) -> None:
    """B4: one request per page, one for the whole; the model is the one that is set."""
    (key,) = office.add()
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "done"
    assert gemini.asked == [("read", "gemini-of-the-test"), ("boost", "gemini-of-the-test")]
    row = office.row(key)
    assert row["ocr_text"].splitlines()[-1] == "Vendeur : Zoé Côté"
    fields = json.loads(row["ocr_fields"])
    assert (fields["number"], fields["date"]) == ("24681012", "1987-08-01")
    assert (fields["parties"], fields["reader"]) == ([{"role": "vendeur", "name": "Zoé Côté"}], "gemini-of-the-test")


async def test_without_a_key_nothing_leaves_the_machine(office: Office, gemini: Standin) -> None:
    """B4: the local engine reads."""
    (key,) = office.add(small_print())
    async with Kit(office.mill(gemini_key="")) as kit:
        assert (await kit.step()).outcome == "done"
    assert gemini.asked == []
    assert json.loads(office.row(key)["ocr_fields"])["reader"] == "rapidocr"


@pytest.mark.parametrize(
    ("refusal", "seconds"),
    [
        (Refusal.too_many(seconds=90), 90),
        (Refusal.too_many(info=40), 40),
        (Refusal.too_many(), 60),
        (Refusal.too_many(info=33, quota="PerDay"), 3600),
    ],
)
async def test_a_quota_that_is_used_up_closes_the_lane_for_all_and_costs_no_attempt(
    refusal: Refusal, seconds: float, office: Office, gemini: Standin
) -> None:
    """B4, B5: until the time that Gemini says; a day's quota for an hour."""
    first, second = office.add(n=2)
    gemini.refusals.append(refusal)
    mill = office.mill()
    async with Kit(mill) as kit, Kit(mill, worker_id="worker-2") as other:
        assert (await kit.step()).outcome == "snooze"
        row = office.row(first)
        assert (row["status_id"], row["ocr_attempts"], row["ocr_error"]) == (3, 0, None)
        kit.advance(td(seconds=seconds - 5))
        assert await other.step() is None
        kit.advance(td(seconds=10))
        assert [(await other.step()).outcome for _ in range(2)] == ["done", "done"]
    assert [office.row(key)["ocr_attempts"] for key in (first, second)] == [1, 1]


async def test_a_days_quota_stops_the_requests_and_kills_no_document(office: Office, gemini: Standin) -> None:
    """B4: however long it lasts."""
    keys = office.add(n=3)
    gemini.most = 2
    async with Kit(office.mill()) as kit:
        for _ in range(12):
            await kit.step()
            kit.advance(td(hours=1, minutes=1))
    assert sorted(office.row(key)["status_id"] for key in keys) == [3, 3, 5]
    assert gemini.refused == 11


async def test_a_key_that_is_refused_is_the_operators_matter_and_kills_no_document(
    office: Office, gemini: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    """B4: the lane closes for five minutes, and the log says what to check."""
    gemini.key = "another key"
    (key,) = office.add()
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "snooze"
        assert await kit.step() is None
    assert (office.row(key)["status_id"], office.row(key)["ocr_attempts"]) == (3, 0)
    assert "check GEMINI_API_KEY" in caplog.text


async def test_a_service_that_fails_costs_attempts_and_opens_the_breaker(office: Office, gemini: Standin) -> None:
    """B5, B4: after so many failures in a row nothing is taken for a while, and then one document as a probe."""
    keys = office.add(n=4)
    gemini.refusals += [Refusal(500, "INTERNAL", "An internal error has occurred.")] * 2
    async with Kit(office.mill(breaker_failures=2, breaker_minutes=5.0)) as kit:
        assert [(await kit.step()).outcome for _ in range(2)] == ["retry", "retry"]
        assert await kit.step() is None
        kit.advance(td(minutes=6))
        assert [(await kit.step()).outcome for _ in range(4)] == ["done"] * 4
    assert {office.row(key)["status_id"] for key in keys} == {5}


async def test_a_service_that_cannot_be_reached_opens_the_breaker(lite: Db, make_office: Callable[..., Office]) -> None:
    """B5: whatever library was under the request."""
    office = make_office(lite, gemini_key="a key", gemini_url="http://127.0.0.1:9", breaker_failures=1)
    office.add(n=2)
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "retry"
        assert await kit.step() is None


async def test_an_answer_has_no_more_in_it_than_was_asked_for(
    pg: Db, make_office: Callable[..., Office], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3: what a database refuses is left out of every field, and so is what a document talked the model into."""
    party = {"role": "vendeur", "name": "Zoé\x00 Côté", "secret": "x"}
    told = {"text": "Vendeur\x00", "number": "1\x00", "date": None, "parties": [party], "pages": 7, "also": "this"}
    monkeypatch.setattr("apps.ocr.standin._boosted", lambda prompt: json.dumps(told))
    with Standin(says=lambda page: PAGE) as gemini:
        office = make_office(pg, gemini_key="a key", gemini_url=gemini.url, gemini_model="a model", dpi=72)
        (key,) = office.add()
        async with Kit(office.mill()) as kit:
            assert (await kit.step()).outcome == "done"
    fields = {"number": "1", "parties": [{"role": "vendeur", "name": "Zoé Côté"}], "pages": 1}
    row = office.row(key)
    assert (row["status_id"], row["ocr_text"]) == (5, "Vendeur")
    assert json.loads(row["ocr_fields"]) == fields | {"reader": "a model", "booster": "a model"}


@pytest.mark.parametrize("finish", ["MAX_TOKENS", "SAFETY", "RECITATION"])
async def test_half_an_answer_is_a_failure(finish: str, office: Office, gemini: Standin) -> None:
    """B5: a text that was cut off is never stored as if it were whole."""
    gemini.finish = finish
    (key,) = office.add()
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "retry"
    row = office.row(key)
    assert (row["status_id"], row["ocr_text"]) == (3, None)
    assert finish in row["ocr_error"]


async def test_a_blank_page_is_no_failure(lite: Db, make_office: Callable[..., Office]) -> None:
    """B3: there is nothing to boost either."""
    with Standin(says=lambda page: "") as blank:
        office = make_office(lite, gemini_key="a key", gemini_url=blank.url, dpi=72)
        (key,) = office.add()
        async with Kit(office.mill()) as kit:
            assert (await kit.step()).outcome == "done"
    assert office.row(key)["ocr_text"] == ""
    assert [asked for asked, _ in blank.asked] == ["read"]


async def test_a_page_that_gemini_cannot_take_is_dead_with_advice(office: Office, gemini: Standin) -> None:
    """B5: it would be refused again."""
    gemini.refusals.append(Refusal(400, "INVALID_ARGUMENT", "Unable to process input image."))
    (key,) = office.add()
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "dead"
    assert "Unable to process input image" in office.row(key)["ocr_error"]
    assert "Try:" in office.row(key)["ocr_error"]


async def test_all_workers_together_ask_no_more_than_the_budget(office: Office, gemini: Standin) -> None:
    """B4: a document that would go over it is put off, without an attempt; a day's budget is not waited for."""
    keys = office.add(n=3)
    mill: Any = office.mill(gemini_per_day=4)
    async with Kit(mill) as kit, Kit(mill, worker_id="worker-2") as other:
        outcomes = [(await each.step()).outcome for each in (kit, other, kit)]
    assert outcomes == ["done", "done", "snooze"]
    assert len(gemini.asked) == 4
    assert sorted(office.row(key)["ocr_attempts"] for key in keys) == [0, 1, 1]
