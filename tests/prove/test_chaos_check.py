"""The chaos suite's check can fail: it is fed what must not happen, and names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.__main__ import failings
from chaos.bout import Result
from chaos.check import KINDS, Entry, Row, Verdict, check
from chaos.figures import Figures
from chaos.fleet import Fleet, Idle
from chaos.records import Run, read
from chaos.report import write

LEASE = 3.0

#: Row 1: claimed by a, run, done.
CLAIMED = Entry(1, "queued", "running", worker="a", at=10.0)
DONE = Entry(1, "running", "done", "a", 10.0, 10.0, "a", "a.1", at=11.0)
RUN = Run("a.1", 1, "a", 10.0, 10.1, 10.9, "done", True)
#: The lease of a runs out, b takes the row and ends it.
SWEPT = Entry(1, "running", "queued", "a", 10.0, 10.0, swept=True, at=13.5)
BY_B = Entry(1, "queued", "running", worker="b", at=13.6)
DONE_BY_B = Entry(1, "running", "done", "b", 13.6, 13.6, "b", "b.1", at=14.0)
RUN_OF_B = Run("b.1", 1, "b", 13.6, 13.7, 13.9, "done", True)


def judged(ledger: Sequence[Entry], runs: Sequence[Run], row: Row | None = None, effects: int = 0) -> Verdict:
    rows = {} if row is None else {1: row}
    return check([1], rows, ledger, runs, {1: effects}, LEASE)


def kinds(verdict: Verdict) -> set[str]:
    return {kind for kind in KINDS if verdict.count(kind)}


def test_a_row_that_was_claimed_run_and_settled_once_is_fine() -> None:
    """X1: nothing is found where nothing is wrong."""
    assert judged([CLAIMED, DONE], [RUN], Row("done", "a.1")).clean


def test_a_run_that_outlived_its_lease_and_wrote_nothing_is_counted_and_is_fine() -> None:
    """X1: at least once: both ran at the same time, one by its lease."""
    late = Run("a.1", 1, "a", 10.0, 10.1, 13.8, "done", True)
    verdict = judged([CLAIMED, SWEPT, BY_B, DONE_BY_B], [late, RUN_OF_B], Row("done", "b.1"))
    assert verdict.clean
    assert verdict.outlived == 1
    assert verdict.swept == verdict.from_living == 1


@pytest.mark.parametrize(("killed", "fine"), [(11.9, True), (12.5, False)])
def test_the_rows_of_a_killed_worker_may_be_taken_at_once_and_not_before_that(killed: float, fine: bool) -> None:
    """X1: its lease need not run out."""
    early = Entry(1, "running", "queued", "a", 10.0, 11.5, swept=True, at=12.0)
    taken, rows = replace(BY_B, at=12.1), {1: Row("done", "b.1")}
    ledger = [CLAIMED, early, taken, replace(DONE_BY_B, held_since=12.1, beat_at=12.1)]
    verdict = check([1], rows, ledger, [replace(RUN_OF_B, since=12.1)], {1: 0}, LEASE, {"a": killed})
    assert (not verdict.count("doubled")) is fine


LOST = {
    "gone": judged([CLAIMED, DONE], [RUN]),
    "done, but nobody ran it": judged([CLAIMED, DONE], [], Row("done", "a.1")),
    "done, but its run was cut": judged([CLAIMED, DONE], [Run("a.1", 1, "a", 10.0, 10.1, 10.9)], Row("done", "a.1")),
    "without its effect": judged([CLAIMED, DONE], [RUN], Row("done", "a.1", "finish")),
    "without a recorded outcome": judged([CLAIMED], [RUN], Row("done", "a.1")),
}
DOUBLED = {
    "two outcomes": judged([CLAIMED, DONE, BY_B, DONE_BY_B], [RUN, RUN_OF_B], Row("done", "b.1")),
    "two effects": judged([CLAIMED, DONE], [RUN], Row("done", "a.1", "finish"), effects=2),
    "claimed while held": judged(
        [CLAIMED, Entry(1, "running", "running", "a", 10.0, 10.0, "b", at=11.0), DONE_BY_B],
        [RUN_OF_B],
        Row("done", "b.1"),
    ),
    "swept too early": judged(
        [CLAIMED, Entry(1, "running", "queued", "a", 10.0, 12.0, swept=True, at=13.5), BY_B, DONE_BY_B],
        [RUN_OF_B],
        Row("done", "b.1"),
    ),
    "run at once": judged(
        [CLAIMED, Entry(1, "running", "queued", "a", 10.0, 10.0, at=13.5), BY_B, DONE_BY_B],
        [Run("a.1", 1, "a", 10.0, 10.1, 13.8, "failed"), RUN_OF_B],
        Row("done", "b.1"),
    ),
}
BY_HAND = Entry(1, "running", "done", "a", 10.0, 10.0, "a", "by hand", by_hand=True, at=10.5)
OVER = Entry(1, "done", "done", "a", 10.0, 10.0, "a", "a.1", at=11.0)
STALE = {
    "over another's claim": judged(
        [CLAIMED, SWEPT, BY_B, Entry(1, "running", "done", "b", 13.6, 13.6, "b", "a.1", at=14.0)], [RUN, RUN_OF_B],
        Row("done", "a.1"),
    ),
    "over what was written by hand": judged([CLAIMED, BY_HAND, OVER], [RUN], Row("done", "a.1")),
    "of its own earlier claim": judged(
        [CLAIMED, SWEPT, replace(BY_B, worker="a"), Entry(1, "running", "done", "a", 13.6, 13.6, "a", "a.1")],
        [RUN],
        Row("done", "a.1"),
    ),
    "sent back under its holder": judged(
        [CLAIMED, Entry(1, "running", "queued", "a", 10.0, 10.0, at=11.0), BY_B, DONE_BY_B], [RUN, RUN_OF_B],
        Row("done", "b.1"),
    ),
}  # fmt: skip
STUCK = {
    state: judged([CLAIMED], [Run("a.1", 1, "a", 10.0, 10.1, 10.9)], Row(state, None))
    for state in ("running", "queued", "dead")
}


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        pytest.param(kind, verdict, id=f"{kind}: {name}")
        for kind, cases in {"lost": LOST, "doubled": DOUBLED, "stale": STALE, "stuck": STUCK}.items()
        for name, verdict in cases.items()
    ],
)
def test_what_must_not_happen_is_named(kind: str, verdict: Verdict) -> None:
    """X1: each is found for what it is, by the row's own number."""
    assert kind in kinds(verdict)
    assert verdict.count(kind) == 1
    assert all(words.startswith("row 1: ") for words in verdict.found[kind])


def test_rows_that_a_hand_deleted_or_ended_are_accounted_for() -> None:
    """X1: neither lost nor stuck."""
    assert judged([CLAIMED, Entry(1, "running", "deleted", by_hand=True)], [RUN]).clean
    assert judged([CLAIMED, BY_HAND], [RUN], Row("done", "by hand")).clean


def test_the_handlers_own_files_are_read_with_the_time_of_a_death(tmp_path: Path) -> None:
    """X1: a run without an end of its own ended with its process."""
    (tmp_path / "77-abc").write_text("start 1 5 9.9 w1 99.0 10.0\nend 1 done 10.5\nstart 2 6 10.8 w1 99.5 11.0\n")
    done, cut = read(tmp_path, {77: 12.0})
    assert done == Run("77-abc.1", 5, "w1", 9.9, 10.0, 10.5, "done", True, 99.0)
    assert cut == Run("77-abc.2", 6, "w1", 10.8, 11.0, 12.0, "cut", False, 99.5)


def test_the_report_tells_what_was_found_and_what_was_not_tried(tmp_path: Path) -> None:
    """X1: a fault that cannot be tried here is never left out in silence."""
    bad = Result("kill", injected=3, recoveries=[0.5, 2.0], verdict=DOUBLED["two outcomes"], origin="make")
    kept = tmp_path / "figures.json"
    idle = Fleet(Result("fleet", origin="fleet"), 1, [Idle(1, 60.0, 30, 3)], {"host1": 5})
    Figures({"kill": bad, "cut": Result("cut", not_tried="no namespaces")}, idle).write(kept)
    write(tmp_path / "r.md", Figures.read(kept), "18")
    text = (tmp_path / "r.md").read_text()
    assert "| kill | 3 | 1 | 0 | 1 | 0 | 0 | 1.25 | 2.00 | 0 |" in text
    assert "doubled: row 1: 2 outcomes were recorded" in text
    assert "Not tried: cut: no namespaces." in text
    assert "| 1 | 30 | 30.0 | 3.0 |" in text


def test_the_command_fails_over_anything_that_is_not_zero_and_over_a_fault_that_nobody_felt() -> None:
    """X1: the exit code tells."""
    assert not failings([Result("kill", verdict=judged([CLAIMED, DONE], [RUN], Row("done", "a.1")))], None)
    assert failings([Result("kill", verdict=STUCK["queued"])], None) == ["kill: stuck"]
    assert failings([Result("kill", unfelt="no trace")], None) == ["kill: it was not felt: no trace"]


def test_a_fleet_whose_idle_workers_cost_more_as_they_get_more_is_a_fault() -> None:
    """X1: bounded, and not worse than linear."""
    fleet = Fleet(Result("fleet"), 1, [Idle(1, 60.0, 30, 3), Idle(10, 60.0, 310, 30)], {"host1": 5})
    assert not fleet.faults
    fleet.idle.append(Idle(50, 60.0, 5000, 150))
    assert fleet.faults == ["50 idle workers cost 100 statements a minute each"]
