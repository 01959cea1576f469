"""How a run ends: the five outcomes, exceptions and what they mean, and what a broken policy does."""

from __future__ import annotations

import asyncio
import functools
from datetime import timedelta as td
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from databases import Db
from rowmill import Cancel, Dead, Done, Mill, Retry, Snooze, fixed
from rowmill.testing import Kit, Stepped
from rows import after, empty, having, whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


def table(db: Db) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table jobs (id integer primary key, status text not null default 'ready', worker text,"
        f" claimed_at {time}, attempts integer default 0, run_after {time}, error text, result text)"
    )
    db.execute("insert into jobs (id) values (1)")


async def stepped(db: Db, ended: Any, **options: Any) -> Stepped:
    """One run of a handler that returns or raises this."""
    table(db)
    mill = Mill(db.url)

    @mill.lane("jobs", **STATES | {"max_attempts": 3, "backoff": fixed(td(minutes=2))} | options)
    async def lane(job: Any) -> Any:
        if isinstance(ended, BaseException):
            raise ended
        return ended

    async with Kit(mill) as kit:
        step = await kit.step()
        assert step is not None
        return step


def row(db: Db) -> dict[str, Any]:
    return whole(db, "jobs", 1)


DAY = "Wed, 21 Oct 2015"


class Throttled(Exception):
    """As an HTTP client raises it: with a response that has a status and headers."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(
            status_code=status, headers={n.replace("_", "-").title(): v for n, v in headers.items()}
        )


@pytest.mark.parametrize("raised", [True, False], ids=["raised", "returned"])
async def test_an_outcome_may_be_returned_or_raised(db: Db, raised: bool) -> None:
    """DESIGN, outcomes: Done, Retry, Snooze, Dead and Cancel, with what each writes."""
    expected: list[tuple[Any, str, int, Any, Any]] = [
        (Done({"result": "x"}), "done", 1, None, None),
        (Retry("slow", after=td(minutes=9)), "ready", 1, td(minutes=9), "slow"),
        (Retry("slow"), "ready", 1, td(minutes=2), "slow"),
        (Retry(td(minutes=9)), "ready", 1, td(minutes=9), "the handler asked for a retry"),
        (Snooze(td(hours=3)), "ready", 0, td(hours=3), None),
        (Dead("gone"), "dead", 1, None, "gone"),
        (Dead(), "dead", 1, None, "dead"),
        (Cancel("unwanted"), "canceled", 1, None, "unwanted"),
    ]
    table(db)
    mill = Mill(db.url)
    ends = [ended for ended, *_ in expected]
    options = {"max_attempts": 3, "backoff": fixed(td(minutes=2)), "canceled": {"status": "canceled"}}

    @mill.lane("jobs", **STATES | options)
    async def lane(job: Any) -> Any:
        ended = ends.pop(0)
        if raised:
            raise ended
        return ended

    async with Kit(mill) as kit:
        for ended, status, attempts, due, error in expected:
            db.execute("update jobs set status = 'ready', attempts = 0, run_after = null, error = null")
            await kit.step()
            now = row(db)
            assert (now["status"], now["attempts"], now["error"]) == (status, attempts, error), ended
            assert now["run_after"] == (after(due) if due else None), ended


async def test_a_snoozed_row_may_be_snoozed_for_ever(db: Db) -> None:
    """DESIGN, outcomes: Snooze costs no attempt, so it never reaches the limit."""
    table(db)
    mill = Mill(db.url)
    attempts = []

    @mill.lane("jobs", **STATES, max_attempts=2)
    async def lane(job: Any) -> Any:
        attempts.append(job.attempt)
        return Snooze(td(minutes=1)) if len(attempts) < 6 else None

    async with Kit(mill) as kit:
        while await kit.step():
            kit.advance(td(minutes=2))
    assert attempts == [1] * 6
    assert row(db)["status"] == "done"


async def test_cancel_ends_a_row_even_where_no_state_says_canceled(db: Db) -> None:
    """DESIGN, outcomes: a lane without a canceled state takes the dead one, with the reason."""
    step = await stepped(db, Cancel("unwanted"))
    assert step.outcome == "canceled"
    assert (row(db)["status"], row(db)["error"]) == ("dead", "unwanted")


async def test_an_exception_is_retried_by_the_lanes_policy(db: Db) -> None:
    """C9, D1: the error's type and words, and the backoff."""
    step = await stepped(db, ConnectionError("reset by peer"))
    assert step.outcome == "retry"
    assert row(db)["error"] == "ConnectionError: reset by peer"
    assert row(db)["run_after"] == after(td(minutes=2))


@pytest.mark.parametrize(
    ("error", "delay"),
    [
        (Throttled(429, retry_after="30"), td(seconds=30)),
        (Throttled(503, retry_after=f"{DAY} 07:28:00 GMT", date=f"{DAY} 07:18:00 GMT"), td(minutes=10)),
        (Throttled(429), td(minutes=2)),
        (Throttled(429, retry_after="soon"), td(minutes=2)),
        (Throttled(409, retry_after="30"), td(minutes=2)),
    ],
    ids=str,
)
async def test_a_server_that_says_when_is_asked_again_then(db: Db, error: Exception, delay: td) -> None:
    """D1: rate limits, with the server's own Retry-After."""
    step = await stepped(db, error)
    assert step.outcome == "retry"
    assert row(db)["run_after"] == after(delay)


async def test_what_a_server_does_not_have_is_not_asked_for_again(db: Db) -> None:
    """D1: a plain 4xx is permanent by default, and costs one attempt."""
    step = await stepped(db, Throttled(404, retry_after="30"))
    assert step.outcome == "dead"
    assert row(db)["status"] == "dead"


@pytest.mark.parametrize("header", ["9" * 30, "-5", "\u00b2", "1e9", "Wed, 99 Foo 9999 99:99:99 GMT", ""])
async def test_a_server_that_talks_nonsense_does_not_stop_the_engine(lite: Db, header: str) -> None:
    """X1: whatever the header says, the run ends and its row is written."""
    step = await stepped(lite, Throttled(429, retry_after=header))
    assert step.outcome == "retry"
    assert row(lite)["status"] == "ready"


CLASSIFIED: dict[str, tuple[Any, str, Any]] = {
    "permanent": ("permanent", "dead", None),
    "transient": ("transient", "ready", td(minutes=2)),
    "rate with a delay": (("rate", td(minutes=30)), "ready", td(minutes=30)),
    "an outcome": (Dead(), "dead", None),
    "an outcome with a reason": (Retry("my words", after=td(hours=1)), "ready", td(hours=1)),
    "a snooze": (Snooze(td(hours=2)), "ready", td(hours=2)),
    "done": (Done({"result": "good enough"}), "done", None),
    "nothing": (None, "ready", td(minutes=2)),
}


@pytest.mark.parametrize("kind", CLASSIFIED)
async def test_a_lane_may_say_what_its_exceptions_mean(lite: Db, kind: str) -> None:
    """D1, C10: classify, to a word, a word with a delay, or an outcome."""
    verdict, status, due = CLASSIFIED[kind]
    await stepped(lite, ValueError("broken"), classify=lambda error: verdict)
    now = row(lite)
    assert now["status"] == status
    assert now["run_after"] == (after(due) if due else None)
    if kind in ("permanent", "transient", "an outcome", "nothing"):
        assert now["error"] == "ValueError: broken"


class Unspeakable(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def broken(*_: Any) -> Any:
    raise KeyError("my own bug")


#: A handler or a policy with a mistake of its own: what the run ends with, and the lane's options.
MISTAKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "classify raises": (ValueError("x"), {"classify": broken}),
    "classify answers a number for a delay": (ValueError("x"), {"classify": lambda e: ("rate", 30)}),
    "classify answers half a pair": (ValueError("x"), {"classify": lambda e: ("rate",)}),
    "classify answers an unknown word": (ValueError("x"), {"classify": lambda e: "temporary"}),
    "backoff raises": (ValueError("x"), {"backoff": broken}),
    "backoff answers a number": (ValueError("x"), {"backoff": lambda attempt: 30}),
    "backoff answers nothing": (ValueError("x"), {"backoff": lambda attempt: None}),
    "retry after a number": (Retry(after=30), {}),  # type: ignore[arg-type]
    "snooze for a number": (Snooze(30), {}),  # type: ignore[arg-type]
    "retry in the past": (Retry(after=td(days=-3)), {}),
    "dead with an exception": (Dead(ValueError("why")), {}),  # type: ignore[arg-type]
    "dead with a number": (Dead(404), {}),  # type: ignore[arg-type]
    "cancel with a dict": (Cancel({"why": 1}), {}),  # type: ignore[arg-type]
    "done with no columns at all": (Done(5), {}),  # type: ignore[arg-type]
    "an exception without words": (Unspeakable(), {}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_in_a_handler_or_a_policy_never_stops_the_engine(lite: Db, mistake: str) -> None:
    """X1: every row reaches an outcome; a user's own bug is written to the row, not raised into the worker."""
    ended, options = MISTAKES[mistake]
    step = await stepped(lite, ended, **options)
    assert step.outcome in ("retry", "snooze", "dead", "canceled")
    assert row(lite)["status"] in ("ready", "dead")
    assert row(lite)["worker"] is None or row(lite)["status"] == "dead"


@pytest.mark.parametrize("ended", [Snooze(td.max), Retry(after=td.max)], ids=["snooze", "retry"])
async def test_a_delay_beyond_all_calendars_does_not_leave_its_row_running(db: Db, ended: Any) -> None:
    """X1: every row reaches an outcome, also where the database cannot tell the time that was asked for."""
    await stepped(db, ended)
    assert row(db)["status"] in ("ready", "dead")


async def test_the_words_of_an_outcome_may_be_an_exception(lite: Db) -> None:
    """DESIGN, outcomes: ``raise Dead(error)`` says what the error said."""
    await stepped(lite, Dead(ValueError("no such page")))  # type: ignore[arg-type]
    assert row(lite)["error"] == having("no such page")


async def test_a_handler_that_exits_ends_its_run_and_not_the_worker(db: Db) -> None:
    """X1: sys.exit() in a handler, as a script turned into a handler has it, is a failure of that run."""
    table(db)
    mill = Mill(db.url)

    @mill.lane("jobs", **STATES, max_attempts=1)
    def lane(job: Any) -> None:
        raise SystemExit(3)

    async with Kit(mill) as kit:
        step = await kit.step()
    assert step is not None
    assert step.outcome == "dead"


async def test_a_run_past_its_timeout_fails_with_those_words(db: Db) -> None:
    """Issue, run: timeouts per lane; a handler's own TimeoutError is not taken for it."""
    table(db)
    mill = Mill(db.url)
    ends: list[Any] = [asyncio.Event().wait, None]

    @mill.lane("jobs", **STATES, timeout=td(milliseconds=30), max_attempts=9, backoff=fixed(td(0)))
    async def lane(job: Any) -> None:
        if (wait := ends.pop(0)) is not None:
            await wait()
        raise TimeoutError("the site was slow")

    async with Kit(mill) as kit:
        assert (await kit.step()).error == "timed out after 0.03 s"
        assert (await kit.step()).error == "TimeoutError: the site was slow"


async def test_a_handler_that_cancels_itself_has_failed(db: Db) -> None:
    """X1: a CancelledError of the handler's own making is a failure, not a stop."""
    step = await stepped(db, asyncio.CancelledError())
    assert step.outcome == "retry"


def wrapped(handler: Any) -> Any:
    """As a decorator of the user's own leaves an async handler: a plain function that returns an awaitable."""

    @functools.wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return wrapper


async def returning(job: Any) -> dict[str, str]:
    return {"result": "awaited"}


class Handler:
    """A handler that is an object."""

    async def __call__(self, job: Any) -> dict[str, str]:
        return await returning(job)


@pytest.mark.parametrize(
    "handler",
    [wrapped(returning), Handler(), functools.partial(returning), Handler().__call__],
    ids=["wrapped", "object", "partial", "method"],
)
async def test_a_handler_is_awaited_whichever_way_it_is_written(lite: Db, handler: Any) -> None:
    """DESIGN: async in the loop, sync in threads; what is awaitable is awaited, never dropped."""
    table(lite)
    mill = Mill(lite.url)
    mill.lane("jobs", name="jobs", **STATES)(handler)
    async with Kit(mill) as kit:
        step = await kit.step()
    assert step is not None
    assert (step.outcome, step.error) == ("done", None)
    assert row(lite)["result"] == "awaited"
