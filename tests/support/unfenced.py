"""The chaos suite's application with the fence taken out: a run writes its outcome over another worker's."""

from __future__ import annotations

import runpy

from rowmill.store.lane.statements import Statements

Statements.fence = lambda self, row, time, attempts, worker: "true"  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("chaos.app", run_name="__main__", alter_sys=False)
