"""The model phase: paid for once, never over budget, and a stand-in whose log would show otherwise."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta as td
from typing import Any

import httpx
import pytest

from apps.analysis import models
from apps.analysis.models import open_model
from apps.analysis.settings import Settings
from apps.analysis.tests import world
from apps.standins.model import Behaviour, Call, Model, scripted, throttling
from databases import Db
from rowmill import Dead
from rowmill.testing import Kit

INFO = {"website": {"text": "words"}, "prompt": {"text": "Title: Chairs", "hash": "f" * 64, "tokens": 100}}
MODEL = "model-analysis"


async def test_an_answer_outlives_the_run_that_asked_for_it(jobs: Db, settings: Settings, model: Model) -> None:
    """E6: a run that lost its row after the model had answered; the next worker does not ask again."""
    (key,) = world.insert(jobs, status=MODEL, extractedInfo=INFO)
    mill = world.mill_on(jobs, world.calm(settings))
    async with Kit(mill) as kit:
        (lost,) = await kit.claim(MODEL)
        kit.advance(td(minutes=6))
        assert len(await kit.sweep(MODEL)) == 1  # taken from it, as from one that is killed or cut off
        assert (await kit.run(lost)).outcome == "lost"
        assert world.row(jobs, key)["status"] == MODEL
        kit.advance(td(minutes=1))
        stepped = await kit.step(MODEL)
    assert stepped is not None
    assert stepped.outcome == "done"
    assert world.row(jobs, key)["extractedInfo"]["analysis"]["summary"] == "A site named Chairs."
    assert [call.status for call in model.calls] == [200]


async def test_without_a_key_rows_wait_before_the_model_and_lose_no_attempt(jobs: Db, settings: Settings) -> None:
    """E6: what somebody forgot to set is told, and no row dies of it."""
    (key,) = world.insert(jobs, status=MODEL, extractedInfo=INFO)
    mill = world.mill_on(jobs, replace(world.calm(settings), model_key=""))
    told = []
    mill.on_event(lambda event: told.append(event.name))
    async with Kit(mill) as kit:
        for _ in range(4):
            stepped = await kit.step(MODEL)
            assert stepped is not None
            assert stepped.outcome == "snooze"
            kit.advance(td(minutes=2))
    assert "no_model_key" in told
    assert world.row(jobs, key)["retryCount"] == 0


async def test_the_budget_holds_what_a_call_may_use_and_gives_back_what_it_did_not(
    jobs: Db, settings: Settings, model: Model
) -> None:
    """E6: tokens per minute and per day; a row for which none are left waits, and loses no attempt."""
    keys = world.insert(jobs, 4, status=MODEL, extractedInfo=INFO)
    # 100 + 600 are taken before a call; 4 + 28 are used.
    mill = world.mill_on(
        jobs, replace(world.calm(settings), prompt_tokens=100, tokens_per_minute=740, tokens_per_day=790)
    )
    outcomes = []
    async with Kit(mill) as kit:
        mill.lanes[MODEL].handler = _impatient(mill.lanes[MODEL].handler)
        for _ in range(3):
            stepped = await kit.step(MODEL)
            assert stepped is not None
            outcomes.append(stepped.outcome)
        assert outcomes == ["done", "done", "snooze"]  # 32 + 32 + 700 is more than 740
        kit.advance(td(seconds=70))
        stepped = await kit.step(MODEL)
        assert stepped is not None
        assert stepped.outcome == "done"
        kit.advance(td(seconds=70))
        stepped = await kit.step(MODEL)  # the minute has room, the day has not: 96 + 700 is more than 790
        assert stepped is not None
        assert stepped.outcome == "snooze"
    rows = [world.row(jobs, key) for key in keys]
    assert sorted(row["status"] for row in rows) == ["completed"] * 3 + [MODEL]
    assert {row["retryCount"] for row in rows} == {0}
    assert len(model.calls) == 3


def _impatient(handler):  # type: ignore[no-untyped-def]
    """The same handler, whose ``job.spend`` does not wait for a minute: the kit's time does not pass by itself."""

    async def run(job, model, answers, processors):  # type: ignore[no-untyped-def]
        spend = job.spend
        job.spend = lambda name, **asked: spend(name, **asked | {"wait": td(0)})
        return await handler(job, model, answers, processors)

    return run


async def test_who_is_told_to_wait_makes_the_others_of_his_process_wait(
    lite: Db, settings: Settings, model: Model
) -> None:
    """E6: after a 429 nobody asks before Retry-After is over."""
    await asyncio.to_thread(world.create, lite)
    model.behave = scripted(Behaviour(429, retry_after=60))
    world.insert(lite, 3, status=MODEL, extractedInfo=INFO)
    async with Kit(world.mill_on(lite, settings)) as kit:
        outcomes = [stepped.outcome for _ in range(3) if (stepped := await kit.step(MODEL))]
    assert outcomes == ["snooze"] * 3
    assert len(model.calls) == 1


async def test_a_prompt_that_the_model_refuses_is_given_up(lite: Db, settings: Settings, model: Model) -> None:
    """E6: 400 is permanent; it is not asked three times."""
    await asyncio.to_thread(world.create, lite)
    model.behave = scripted(Behaviour(400))
    (key,) = world.insert(lite, status=MODEL, extractedInfo=INFO)
    async with Kit(world.mill_on(lite, settings)) as kit:
        stepped = await kit.step(MODEL)
    assert stepped is not None
    assert stepped.outcome == "dead"
    assert "refuses the prompt: 400" in str(stepped.error)
    assert world.row(lite, key)["retryCount"] == 3


def test_answers_of_models_are_read_leniently_and_never_wrongly() -> None:
    """E1: JSON, also in a fence; what lacks a part is no analysis; what no database takes is left out."""
    said = '{"summary": "S\\u0000 \\ud83d\\ude00", "category": "c", "audience": "a", "keywords": ["k"], "more": 1}'
    read = {"summary": "S \N{GRINNING FACE}", "category": "c", "audience": "a", "keywords": ["k"]}
    assert models.read(said) == models.read(f"```json\n{said}\n```") == read
    partial = said.replace('"keywords": ["k"]', '"keywords": {"k": 1}')
    empty = '{"summary": "", "category": 1, "audience": 1, "keywords": 1}'
    for bad in ("no", "[]", '{"summary": "only"}', empty, said[:-9], partial, "[" * 100_000):
        with pytest.raises(models.BadAnswer, match="the model's answer"):
            models.read(bad)


def test_an_answer_without_end_is_cut() -> None:
    """E1: what is stored of it is no longer than an analysis is."""
    words = ["w" * 9999] * 999
    read = models.read(json.dumps({"summary": "s" * 99_999, "category": "c", "audience": "a", "keywords": words}))
    assert (len(read["summary"]), len(read["keywords"]), len(read["keywords"][0])) == (2000, 20, 100)


@pytest.mark.parametrize(
    ("usage", "tokens"), [(None, 7 + 50), ({"prompt_tokens": 3, "completion_tokens": -4}, 3), ("lots", None)]
)
async def test_a_model_that_does_not_say_what_it_used_has_used_all(usage: Any, tokens: int | None) -> None:
    """E6: the budget is never counted too low; nonsense is no answer."""
    said = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    stream = httpx.ByteStream(json.dumps(said).encode())
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=stream))
    async with httpx.AsyncClient(transport=transport, base_url="http://model.example/v1/") as client:
        asking = models.OpenAI(client, "m", 50).ask("Title: Chairs", "key")
        if tokens is None:
            with pytest.raises(models.BadAnswer):
                await asking
        else:
            assert (await asking).tokens == tokens


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, 10), ({"retry-after": "0"}, 10), ({"retry-after": "soon"}, 10), ({"retry-after": "9" * 12}, 3600),
     ({"retry-after": "Fri, 01 Jan 2999 00:00:00 GMT"}, 3600), ({"retry-after": "-5"}, 10)],
)  # fmt: skip
async def test_a_throttle_without_a_sensible_time_is_heeded_for_a_sensible_one(
    headers: dict[str, str], seconds: int
) -> None:
    """E6: no Retry-After, a date, nonsense, a century."""
    transport = httpx.MockTransport(lambda request: httpx.Response(429, headers=headers))
    async with httpx.AsyncClient(transport=transport, base_url="http://model.example/v1/") as client:
        with pytest.raises(models.Throttled) as throttled:
            await models.OpenAI(client, "m", 50).ask("x", "key")
    assert throttled.value.after == td(seconds=seconds)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_makes_rows_wait_and_ends_none(status: int) -> None:
    """E6: no row is at fault, so none may end for it."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=httpx.ByteStream(b"no")))
    async with httpx.AsyncClient(transport=transport, base_url="http://model.example/v1/") as client:
        with pytest.raises(models.Throttled, match="refuses the API key") as refused:
            await models.OpenAI(client, "m", 50).ask("x", "key")
    assert refused.value.after == td(minutes=5)


async def test_what_a_lost_run_had_spent_stays_spent(jobs: Db, settings: Settings, model: Model) -> None:
    """E6: a worker that dies after it has taken from the budget: the next one finds that much less."""
    world.insert(jobs, 2, status=MODEL, extractedInfo=INFO)
    mill = world.mill_on(jobs, replace(world.calm(settings), prompt_tokens=100, tokens_per_minute=1300))
    async with Kit(mill) as kit:
        handler = mill.lanes[MODEL].handler

        async def dies(job, model, answers, processors):  # type: ignore[no-untyped-def]
            await job.spend("model", tokens=700)
            raise OSError("killed")  # it comes to the same: nothing is given back

        mill.lanes[MODEL].handler = dies
        assert (await kit.step(MODEL)).outcome == "retry"  # type: ignore[union-attr]
        mill.lanes[MODEL].handler = _impatient(handler)
        assert (await kit.step(MODEL)).outcome == "snooze"  # type: ignore[union-attr]
        kit.advance(td(seconds=70))
        assert (await kit.step(MODEL)).outcome == "done"  # type: ignore[union-attr]
    assert len(model.calls) == 1


@pytest.mark.parametrize("provider", ["openai", "gemini"])
async def test_the_stand_in_speaks_both_protocols_and_logs_every_call(provider: str) -> None:
    """X3: it answers, counts tokens, throttles, fails and remembers; its log tells all of it."""
    behave = scripted(Behaviour(), Behaviour(429, retry_after=3), Behaviour(500), Behaviour(400), Behaviour())
    with Model(behave=behave, remembers=True) as model:
        url = f"{model.url}/v1" if provider == "openai" else model.url
        settings = Settings(provider=provider, model_url=url, model_key="k", model_name="m", answer_tokens=50)
        async with open_model(settings) as asked:
            reply = await asked.ask("Title: Chairs", "key-1")
            assert models.read(reply.text)["summary"] == "A site named Chairs."
            with pytest.raises(models.Throttled) as throttled:
                await asked.ask("Title: Chairs", "key-2")
            assert throttled.value.after == td(seconds=3)
            assert td(0) < asked.throttled_for <= td(seconds=3)
            with pytest.raises(Exception, match="500"):
                await asked.ask("Title: Chairs", "key-2")
            with pytest.raises(Dead, match="refuses"):
                await asked.ask("Title: Chairs", "key-2")
            again = await asked.ask("Title: Chairs", "key-1")
    assert again == reply
    assert [(c.provider, c.key, c.status, c.replayed) for c in model.calls] == [
        (provider, "key-1", 200, False), (provider, "key-2", 429, False), (provider, "key-2", 500, False),
        (provider, "key-2", 400, False), (provider, "key-1", 200, True),
    ]  # fmt: skip
    assert model.tokens == reply.tokens == model.calls[0].tokens > 0
    assert model.answered() == {"key-1": 1}


async def test_the_stand_in_has_a_quota_of_its_own() -> None:
    """X3: more tokens in a time than it gives are refused with the time to wait, in whole seconds."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 10}
    with Model(behave=throttling(every=100), limit=(300, 30.0)) as model:
        async with httpx.AsyncClient() as client:
            answers = [await client.post(f"{model.url}/v1/chat/completions", json=body) for _ in range(3)]
            assert (await client.get(f"{model.url}/v1/models")).status_code == 404
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 0 < int(answers[2].headers["retry-after"]) <= 30
    assert model.statuses() == {200: 2, 429: 1}


def test_the_log_shows_the_busiest_time() -> None:
    """E6: the budget is judged by this, so it must be able to show a breach."""
    model = Model()
    times = [(0.0, 5), (1.0, 5), (1.5, 7), (9.0, 11), (9.9, 1)]
    model.calls += [Call(n, at, "openai", "m", "k", 200, tokens, 0) for n, (at, tokens) in enumerate(times)]
    assert [model.most_within(seconds) for seconds in (0.4, 1.0, 2.0, 8.0, 100.0)] == [11, 12, 17, 18, 29]
