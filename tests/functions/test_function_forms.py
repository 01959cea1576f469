"""Statements inside of lanes' functions are in forms that a distributed planner takes (docs/explanation/scale.md)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_functions
import test_functions_inputs
import test_gated_functions

from databases import Db
from rowmill import Mill
from sqlworker import install_now
from statement_forms import refused


def _plain(shape: str) -> Callable[[Db], Mill]:
    def declare(pg: Db) -> Mill:
        mill = Mill(pg.url)
        test_functions.SHAPES[shape](pg, mill)
        return mill

    return declare


SHAPES: dict[str, Callable[[Db], Mill]] = {
    **{shape: _plain(shape) for shape in test_functions.SHAPES},
    "inputs": lambda pg: test_functions_inputs.declared(pg, stale="write"),
    "breaker": lambda pg: test_gated_functions.declared(pg, test_gated_functions.SOURCES),
    "rate": lambda pg: test_gated_functions.declared(pg, test_gated_functions.LISTED, test_gated_functions.SOURCES),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_functions_of_a_lane_are_taken_by_a_distributed_planner(pg: Db, shape: str) -> None:
    """Issue 24: of the golden files, and of every other shape."""
    install_now(pg, SHAPES[shape](pg))
    assert refused(pg) == []
