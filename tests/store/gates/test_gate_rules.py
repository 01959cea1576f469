"""Gates by their laws: SQL and Python say the same of a gate's row, and no sequence of events breaks a limit."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta as td
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gated
from databases import Db
from rowmill import Breaker, Concurrency, Mill, Rate
from rowmill.declare.gates import Adaptive, Group, Pace  # fmt: skip
from rowmill.store.gates.rules import Ended, GateState, Window, allowance, learn, refill_delay, tokens_now
from rowmill.testing import Kit

SHAPES: dict[str, list[Any]] = {"turns": [], "walk": [Concurrency(10_000)]}
# -- the database against the words

ahead = st.one_of(st.none(), st.sampled_from([-3600.0, -60.0, 60.0, 3600.0]))
rows = st.fixed_dictionaries(
    {
        "running": st.integers(0, 4),
        "most": st.one_of(st.none(), st.integers(0, 5)),
        "streak": st.integers(0, 5),
        "open_until": ahead,
        "closed_until": ahead,
        "paused_until": ahead,
        "tokens": st.one_of(st.none(), st.sampled_from([-1.5, 0.0, 0.3, 1.0, 2.7, 9.0])),
        "refilled_at": st.sampled_from([-90.3, -30.3, -0.3, 30.3]),
    }
)
GROUP = Group("domain", "domain", Concurrency(3, by="domain"), None,
              Rate(4, by="domain", burst=4), Breaker(3, td(minutes=5), by="domain"))  # fmt: skip


def expected(row: dict[str, Any]) -> int:
    state = GateState(
        tokens=row["tokens"], elapsed=-row["refilled_at"], streak=row["streak"], open_for=row["open_until"],
        closed_for=row["closed_until"], paused_for=row["paused_until"], most=row["most"],
    )  # fmt: skip
    return int(min(allowance(GROUP, state, row["running"], 0).most, 9))


@pytest.mark.parametrize("way", SHAPES)
async def test_the_claim_lets_through_what_the_words_say(db: Db, way: str) -> None:
    """For any state of gate rows and any number of running rows, on both databases and by both ways."""
    gated.make(db)
    mill = Mill(db.url)
    gates = [gate for gate in (GROUP.concurrency, GROUP.rate, GROUP.breaker) if gate is not None]
    gated.lane(mill, gates=[*gates, *SHAPES[way]])
    examples: list[list[dict[str, Any]]] = []

    @settings(deadline=None, max_examples=12, database=None)
    @given(st.lists(rows, min_size=6, max_size=6))
    def collect(several: list[dict[str, Any]]) -> None:
        examples.append(several)

    collect()
    async with Kit(mill) as kit:
        await kit.store()
        for several in examples:
            put(db, several)
            claims = await kit.claim(count=1000)
            found = [sum(c.gates["domain"] == f"d{i}" for c in claims if c.gates) for i in range(len(several))]
            assert found == [expected(row) for row in several]


def put(db: Db, several: list[dict[str, Any]]) -> None:
    """Nine ready rows of each key, some that run, and its gate's row."""
    db.execute("delete from pages")
    db.execute("delete from rowmill_gates")
    pages = []
    for i, row in enumerate(several):
        pages += [{"domain": f"d{i}", "status": "queued"}] * 9
        pages += [{"domain": f"d{i}", "status": "running"}] * row["running"]
    db.insert("pages", pages)
    for i, row in enumerate(several):
        times = {name: moment(db, row[name]) for name in ("open_until", "closed_until", "paused_until", "refilled_at")}
        texts = {"most": row["most"], "streak": row["streak"], "tokens": row["tokens"]}
        plain = {name: "null" if value is None else str(value) for name, value in texts.items()}
        names, values = zip(*(times | plain).items(), strict=True)
        db.execute(
            f"insert into rowmill_gates (lane, dim, key, {', '.join(names)})"
            f" values ('crawl', 'domain', 'd{i}', {', '.join(values)})"
        )


def moment(db: Db, seconds: float | None) -> str:
    if seconds is None:
        return "null"
    if db.dialect == "postgresql":
        return f"now() + interval '{seconds} seconds'"
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{seconds:+} seconds')"


# -- the words alone


@given(st.floats(0.5, 3600), st.integers(1, 8), st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 4)), max_size=60))
def test_no_window_ever_holds_more_than_its_limit(seconds: float, limit: int, steps: list[tuple[float, int]]) -> None:
    """E5: in any order of comers, as long as each asks first; and what is waited for is then there."""
    now, text, taken = 1_700_000_000.0, None, []
    for pause, amount in steps:
        now += pause * seconds
        window = Window.read(seconds, text, now)
        wait = window.wait(amount, limit, now)
        if wait == 0:
            window.add(amount, now)
            taken.append((now, amount))
            text = window.text()
        elif wait < math.inf:
            assert wait <= seconds * 62 / 60
            later = Window.read(seconds, text, now + wait + 1e-3 * seconds)
            assert later.wait(amount, limit, now + wait + 1e-3 * seconds) == 0
    for at, _ in taken:
        assert sum(amount for other, amount in taken if at <= other < at + seconds) <= limit


@given(
    st.floats(0.1, 100), st.integers(1, 6),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 4), st.floats(0, 0.05)), max_size=60),
)  # fmt: skip
def test_no_bucket_ever_gives_more_than_burst_and_rate(
    n: float, burst: int, steps: list[tuple[float, int, float]]
) -> None:
    """D7: starts up to some time after the claim told the time; counted from when they start, over any window."""
    rate = Rate(n, per=td(seconds=1), burst=burst)
    group = Group("", None, rate=rate)
    now, state, refilled, starts = 0.0, GateState(), 0.0, []
    for pause, asked, late in steps:
        now += pause / n
        state = replace(state, elapsed=now - refilled)
        used = int(min(allowance(group, state, 0, 0).most, asked))
        if used > 0:
            starts += [now + late] * used
            refilled = max(now, refilled) + refill_delay(rate, state, late)
            state = replace(state, tokens=tokens_now(rate, state) - used)
            now += late  # the row is locked until then
    for i, first in enumerate(starts):
        for j in range(i, len(starts)):
            assert j - i + 1 <= burst + n * (starts[j] - first) + 1e-4


words = st.sampled_from(["", "transient", "permanent", "rate", None])


@given(st.integers(1, 4), st.integers(0, 6), st.one_of(st.none(), st.floats(-50, 50)), st.lists(words, max_size=12))
def test_a_streak_is_the_failures_since_the_last_success(
    failures: int, streak: int, open_for: float | None, ends: list[str | None]
) -> None:
    """D8: and the breaker is open from the run on that makes it full; it turns once."""
    group = Group("", None, breaker=Breaker(failures, td(minutes=1), counts=("transient", "rate")))
    state = GateState(streak=streak, open_for=open_for)
    learned = learn(group, state, [Ended(word) for word in ends])
    wanted = streak
    for word in ends:
        wanted = 0 if word == "" else wanted + (word in ("transient", "rate"))
    assert learned.values.get("streak", streak) == wanted
    assert not (learned.opened and learned.shut)
    assert learned.shut == (streak >= failures > wanted)
    if learned.opened:
        assert wanted >= failures
        assert learned.values["open_until"] == 60.0
    # Each in a batch of its own comes to the same.
    one_by_one = state
    for word in ends:
        values = learn(group, one_by_one, [Ended(word)]).values
        opened = values.get("open_until", one_by_one.open_for)
        one_by_one = replace(one_by_one, streak=values.get("streak", one_by_one.streak), open_for=opened)
    assert one_by_one.streak == wanted
    assert one_by_one.open_for == learned.values.get("open_until", open_for)


@given(st.floats(0.01, 60), st.floats(0, 100), words, st.floats(0.1, 10))
def test_errors_never_speed_an_adaptive_rate_up(delay: float, latency: float, word: str | None, target: float) -> None:
    group = Group("", None, rate=Rate(1, adaptive=Adaptive(target, 1.0, 0.0, 60.0)))
    after = learn(group, GateState(delay=delay), [Ended(word, latency)]).values.get("delay", delay)
    assert 0 <= after <= 60
    if word:
        assert after >= delay
    if word == "rate":
        assert after >= min(2 * delay, 60)


@given(st.integers(1, 5))
def test_a_window_survives_its_text(n: int) -> None:
    window = Window(60.0)
    window.add(n, 1_700_000_000.0)
    assert Window.read(60.0, window.text(), 1_700_000_001.0).used == n
    state = GateState(cells=window.text(), at=1_700_000_001.0)
    assert allowance(Group("", None, pace=Pace(n, 60.0)), state, 0, 0).most == 0
