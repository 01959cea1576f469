"""A short form of `make chaos`: real processes, real faults, every row accounted for.

Why processes: the faults are kill -9, SIGSTOP, a crash of the server and hosts that are cut off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos import fleet, hosts
from chaos import stage as stages
from chaos.bout import fight
from chaos.faults import Fault
from chaos.faults.hands import Edit
from chaos.faults.processes import Kill, LiteKill, Stop
from chaos.faults.restarts import Immediate
from chaos.stage import Ground, Stage

#: Alone these take a few seconds each; on a machine that has other work, its processes start slowly.
pytestmark = pytest.mark.timeout(400)
UNFENCED = Path(__file__).parents[1] / "support" / "unfenced.py"


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with stages.ground() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "times"),
    [(Kill, 3), (Stop, 1), (Immediate, 1), (Edit, 3), (LiteKill, 2)],
    ids=lambda v: getattr(v, "name", ""),
)
def test_no_row_is_lost_doubled_or_stuck(ground: Ground, kind: type[Fault], times: int) -> None:
    """X1: whatever breaks, and the work goes on after it."""
    fault = kind(ground)
    fault.workers = 2
    result = fight(fault, times, 600)
    assert result.injected == len(result.recoveries) == times
    assert result.verdict.found == {"lost": [], "doubled": [], "stale": [], "stuck": []}
    assert result.unfelt is None
    assert result.verdict.rows >= 600
    assert result.verdict.runs >= result.verdict.rows - result.verdict.by_hand


class StopUnfenced(Stop):
    def stage(self) -> contextlib.AbstractContextManager[Stage]:
        return stages.postgres(self.ground.server, self.ground.folder, app=(str(UNFENCED),))


def test_without_the_fence_the_suite_finds_outcomes_written_twice(ground: Ground) -> None:
    """X1: the check sees the real thing: a worker that stood still writes over what others have done since."""
    fault = StopUnfenced(ground)
    fault.workers = 2
    result = fight(fault, 1, 600)
    assert result.unfelt is None
    assert result.verdict.count("doubled") + result.verdict.count("stale") > 0


def test_two_hosts_drain_one_database_and_one_is_cut_off_meanwhile(ground: Ground) -> None:
    """X1: `rowmill run` in network namespaces."""
    if why := hosts.unable():
        pytest.skip(why)
    found = fleet.run(ground, 2, 2, 1500, lease=stages.LEASE)
    assert found.drained.verdict.found == {"lost": [], "doubled": [], "stale": [], "stuck": []}
    assert found.faults == []
    assert all(found.shares.values())
