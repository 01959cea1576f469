"""A job's way through the three phases: what each writes, which rows it takes, and what failures do to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from datetime import timedelta as td

import pytest

from apps.analysis.settings import Settings
from apps.analysis.tests import world
from apps.standins import sites
from apps.standins.internet import Answer, Internet
from apps.standins.model import Behaviour, Model, scripted
from databases import Db, as_time
from rowmill.testing import Kit

PHASES = ("website-analysis", "prompt-forming", "model-analysis")


async def test_a_website_goes_through_three_phases_status_and_current_step_together(
    jobs: Db, settings: Settings, net: Internet, model: Model
) -> None:
    """E1: not-started, prompt-forming, model-analysis, completed; each phase adds what it found."""
    settings = world.calm(settings)
    (key,) = world.insert(jobs, url="https://chairs.example/")
    seen = [world.row(jobs, key)]
    async with Kit(world.mill_on(jobs, settings)) as kit:
        for phase in PHASES:
            stepped = await kit.step(phase)
            assert stepped is not None
            assert stepped.outcome == "done", stepped.error
            seen.append(world.row(jobs, key))
            assert [await kit.step(other) for other in PHASES] == [None] * 3  # E2: untouched for 30 s
            kit.advance(td(seconds=31))
    ways = ["not-started", "prompt-forming", "model-analysis", "completed"]
    assert [(row["status"], row["currentStep"], row["inProgress"]) for row in seen] == [(w, w, False) for w in ways]
    assert [sorted(row["extractedInfo"] or ()) for row in seen] == [
        [], ["website"], ["prompt", "website"], ["analysis", "model", "prompt", "website"],
    ]  # fmt: skip
    info = seen[-1]["extractedInfo"]
    assert "garden chairs" in info["website"]["text"]
    assert info["website"]["contacts"]["emails"] == ["info@chairs.example"]
    assert info["analysis"]["summary"] == "A site named Page / at chairs.example."
    assert seen[-1]["retryCount"] == 0
    assert [call.status for call in model.calls] == [200]
    assert len(net.visits_of("chairs.example")) == 1


async def test_discovery_takes_the_ten_oldest_rows_that_are_free_and_untouched(jobs: Db, settings: Settings) -> None:
    """E2: up to 10, oldest first, inProgress false, retryCount below 3, untouched for 30 s; the claim writes
    inProgress and updatedAt, where status and currentStep still agree.
    """
    settings = replace(world.calm(settings), pace_starts=100)
    now = datetime.now(UTC)
    world.insert(jobs, inProgress=True)
    world.insert(jobs, retryCount=3)
    world.insert(jobs, currentStep="prompt-forming")
    (touched,) = world.insert(jobs, updatedAt=now - td(seconds=10), createdAt=now - td(days=9))
    # The oldest have the last ids, and were touched last: neither order is that of their age.
    keys = [world.insert(jobs, createdAt=now - td(hours=age))[0] for age in range(1, 12)][::-1]
    mill = world.mill_on(jobs, settings)
    assert {(lane.poll, lane.batch) for lane in mill.lanes.values()} == {(td(minutes=1), 10)}
    async with Kit(mill) as kit:
        assert [claim.id for claim in await kit.claim(PHASES[0], 10)] == keys[:10]
        held = world.row(jobs, keys[0])
        assert (held["inProgress"], held["status"], held["currentStep"]) == (True, "not-started", "not-started")
        assert as_time(held["updatedAt"]) > now - td(seconds=5)
        assert held["lockedBy"].startswith("test-worker")
        kit.advance(td(seconds=21))
        assert [claim.id for claim in await kit.claim(PHASES[0], 10)] == [touched, keys[10]]


async def test_a_phase_starts_at_most_three_in_five_seconds(jobs: Db, settings: Settings) -> None:
    """E5: 3 starts per phase and cycle of 5 s, over all workers; each phase has a pace of its own."""
    for status in ("not-started", "prompt-forming"):
        world.insert(jobs, 8, status=status)
    mill = world.mill_on(jobs, world.calm(settings))
    async with Kit(mill) as kit:
        taken = []
        for _ in range(3):
            taken.append([len(await kit.claim(phase, 10)) for phase in PHASES])
            assert [len(await kit.claim(phase, 10)) for phase in PHASES] == [0, 0, 0]
            kit.advance(td(seconds=5.2))
    assert taken == [[3, 3, 0], [3, 3, 0], [2, 2, 0]]


async def test_phases_go_in_priority_order_and_one_without_rows_or_room_is_skipped(
    jobs: Db, settings: Settings
) -> None:
    """E5: website-analysis, prompt-forming, model-analysis. With room for one run at a time, the order shows."""
    info = '{"website": {"text": "words"}}'
    later = world.insert(jobs, 2, status="prompt-forming", extractedInfo=info, createdAt=datetime(2020, 1, 1))
    first = world.insert(jobs, 2, status="not-started")
    mill = world.mill_on(
        jobs, replace(settings, untouched_seconds=20)
    )  # what a phase gives, the next does not take yet
    ended: list[tuple[str, str]] = []
    mill.on_event(lambda e: ended.append((e.fields["lane"], e.fields["id"])) if e.name == "job_settled" else None)
    worker = mill.worker(concurrency=1, drain=False)
    mill.on_event(lambda e: worker.stop() if len(ended) == 4 else None)
    await worker.run()
    assert ended == [(PHASES[0], key) for key in first] + [(PHASES[1], key) for key in later]


async def test_a_failing_site_backs_off_exponentially_and_then_stays_as_dead(
    jobs: Db, settings: Settings, net: Internet
) -> None:
    """E6: the wait in runAfter doubles; after 3 failures inProgress = false, retryCount = 3, same phase, dead."""
    net.sites["broken.example"] = sites.refusing(500)
    (key,) = world.insert(jobs, url="https://broken.example/")
    waits = []
    mill = world.mill_on(jobs, world.calm(settings))
    async with Kit(mill) as kit:
        for count in (1, 2, 3):
            stepped = await kit.step(PHASES[0])
            assert stepped is not None
            assert stepped.outcome == ("dead" if count == 3 else "retry")
            found = world.row(jobs, key)
            assert (found["retryCount"], found["inProgress"], found["status"]) == (count, False, "not-started")
            if count < 3:
                waits.append((as_time(found["runAfter"]) - as_time(found["updatedAt"])).total_seconds())
            kit.advance(td(minutes=10))
        kit.advance(td(days=2))
        assert await kit.step(PHASES[0]) is None
    assert 15 <= waits[0] <= 30 < waits[1] <= 60, waits
    assert "500" in found["error"]
    assert found["currentStep"] == "not-started"


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (sites.refusing(404), "the site answers 404"),
        (sites.circling(), "more than 5 redirects"),
        (sites.saying(b"%PDF", content_type="application/pdf"), "not a web page but application/pdf"),
    ],
)
async def test_what_will_never_be_a_page_is_given_up_at_once(
    lite: Db, settings: Settings, net: Internet, site: sites.Site, reason: str
) -> None:
    """E6: a permanent failure is not tried three times; the row stays in its phase with retryCount = 3."""
    await _tables(lite)
    net.sites["odd.example"] = site
    (key,) = world.insert(lite, url="https://odd.example/")
    async with Kit(world.mill_on(lite, settings)) as kit:
        stepped = await kit.step(PHASES[0])
    assert stepped is not None
    assert (stepped.outcome, stepped.error) == ("dead", reason)
    assert world.row(lite, key)["retryCount"] == 3


async def test_a_site_that_asks_for_patience_does_not_hold_up_the_others(
    lite: Db, settings: Settings, net: Internet
) -> None:
    """E5, E6: 503 with Retry-After is one site's failure, not a throttle of the phase."""
    await _tables(lite)
    net.sites["tired.example"] = lambda request: Answer("later", 503, {"retry-after": "3600"})
    world.insert(lite, url="https://tired.example/")
    world.insert(lite, url="https://lively.example/")
    async with Kit(world.mill_on(lite, settings)) as kit:
        outcomes = [stepped.outcome for _ in range(2) if (stepped := await kit.step(PHASES[0]))]
    assert outcomes == ["retry", "done"]


@pytest.mark.parametrize("url", ["http://localhost/", "http://10.0.0.1/", "http://a.169-254-169-254.ip.example/"])
async def test_addresses_inside_the_own_network_are_never_fetched(
    lite: Db, settings: Settings, net: Internet, url: str
) -> None:
    """E1: a user who may enter an address must not reach what only this machine can reach; nor by a redirect."""
    await _tables(lite)
    net.sites["innocent.example"] = sites.redirecting(url)
    world.insert(lite, url=url)
    world.insert(lite, url="http://innocent.example/")
    async with Kit(world.mill_on(lite, settings)) as kit:
        for _ in range(2):
            stepped = await kit.step(PHASES[0])
            assert stepped is not None
            assert "not on the public internet" in str(stepped.error)
    assert {visit.host for visit in net.visits} == {"innocent.example"}


async def test_a_stuck_row_is_released_with_one_more_retry(jobs: Db, settings: Settings) -> None:
    """E6: in progress over 5 minutes without a sign of life: back in its phase, retryCount + 1, at most 3."""
    (key,) = world.insert(jobs, status="prompt-forming")
    mill = world.mill_on(jobs, world.calm(settings))
    assert {lane.sweep_every for lane in mill.lanes.values()} == {td(minutes=5)}
    async with Kit(mill) as kit:
        for count in (1, 2, 3):
            assert len(await kit.claim(PHASES[1])) == 1
            kit.advance(td(minutes=4, seconds=50))
            assert await kit.sweep(PHASES[1]) == []
            kit.advance(td(seconds=20))
            assert [swept.id for phase in PHASES for swept in await kit.sweep(phase)] == [key]
            found = world.row(jobs, key)
            assert (found["inProgress"], found["retryCount"], found["lockedBy"]) == (False, count, found["lockedBy"])
            assert found["status"] == found["currentStep"] == "prompt-forming"
            kit.advance(td(minutes=2))
        assert await kit.claim(PHASES[1]) == []


async def test_a_throttled_model_costs_no_retry_and_a_broken_one_does(
    jobs: Db, settings: Settings, model: Model
) -> None:
    """E6: 429 with Retry-After puts the row off; 500 and answers that are no analysis count as failures."""
    model.behave = scripted(
        Behaviour(429, retry_after=2), Behaviour(500), Behaviour(text="I cannot say."), Behaviour(429, retry_after=2)
    )
    (key,) = world.insert(jobs)
    mill = world.mill_on(jobs, world.calm(settings))
    outcomes, retries = [], []
    async with Kit(mill) as kit:
        for phase in (*PHASES, *[PHASES[2]] * 4):
            stepped = await kit.step(phase)
            assert stepped is not None
            outcomes.append(stepped.outcome)
            retries.append(world.row(jobs, key)["retryCount"])
            await _forget_throttle(kit)
            kit.advance(td(minutes=5))
    assert outcomes == ["done", "done", "snooze", "retry", "retry", "snooze", "done"]
    assert retries == [0, 0, 0, 1, 2, 2, 2]
    assert [call.status for call in model.calls] == [429, 500, 200, 429, 200]


async def test_gemini_is_asked_through_its_own_protocol(lite: Db, net: Internet) -> None:
    """E1: the model phase speaks to Gemini as well; its throttle is told in the body."""
    await _tables(lite)
    with Model(behave=scripted(Behaviour(429, retry_after=7))) as model:
        settings = world.settings_of(net, model, provider="gemini", model_name="gemini-test")
        (key,) = world.insert(lite)
        mill = world.mill_on(lite, world.calm(settings))
        outcomes = []
        async with Kit(mill) as kit:
            for phase in (*PHASES, PHASES[2]):
                stepped = await kit.step(phase)
                assert stepped is not None
                outcomes.append((stepped.outcome, stepped.error))
                await _forget_throttle(kit)
                kit.advance(td(minutes=5))
    assert [outcome for outcome, _ in outcomes] == ["done", "done", "snooze", "done"], outcomes
    assert {(call.provider, call.status) for call in model.calls} == {("gemini", 429), ("gemini", 200)}
    assert model.calls[-1].key.startswith(key)
    assert world.row(lite, key)["extractedInfo"]["model"] == "gemini-test"


async def _forget_throttle(kit: Kit) -> None:
    """The kit moves the database's time; how long the model is left alone goes by this process's."""
    (await kit._resources.get(["model"]))["model"]._closed_until = 0.0


async def _tables(db: Db) -> None:
    await asyncio.to_thread(world.create, db)
