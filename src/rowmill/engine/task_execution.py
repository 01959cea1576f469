"""From a claimed job to its task's handler: the same run as any lane's, with the task's own policy and record."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..declare.arguments import Unfit, encode
from ..declare.outcome import Dead, Done, NotForThisVersion
from ..declare.task import Queue, Task
from ..errors import UnreadableValue
from ..events import logger
from ..store.jobs.job_rows import moment
from ..store.lane.claim import Claim, Settlement
from ..store.lane.settlements import tail
from .execute import Execution, RunPlan
from .lane_state import LaneState
from .resources import Resources

#: What a row keeps of its failed runs, and of each run's traceback.
HISTORY, TRACEBACK = 20, 4000


class TaskExecution(Execution):
    """How the jobs of one queue are run: each by its own task."""

    def __init__(self, held: LaneState, resources: Resources, threads: Callable[[], ThreadPoolExecutor]) -> None:
        super().__init__(held, resources, threads)
        self._plans: dict[str, RunPlan] = {}
        self._task_at = self.store.binding.columns.index("task")

    def plan(self, claim: Claim) -> RunPlan:
        """By the task that the row is of."""
        name = claim.row[self._task_at]
        plan = self._plans.get(name)
        if plan is None:
            task = self._task(claim)
            timeout = task.timeout.total_seconds() if task.timeout else self._plan.timeout
            plan = self._plans[name] = self._planned(task.invoke, task.handler, task.resources(), timeout)
        return plan

    def _task(self, claim: Claim) -> Task[Any, Any]:
        lane = self.lane
        assert isinstance(lane, Queue)
        return lane.tasks[claim.row[self._task_at]]

    def _decided(self, claim: Claim, ended: Any) -> Settlement:
        """What the handler returned is the job's result; how it failed goes into the job's history."""
        task = self._task(claim)
        if isinstance(ended, NotForThisVersion):
            self._leave_to_newer(task, ended)
        settlement = super()._decided(claim, _result(task, ended))
        settlement.cause = ended if isinstance(ended, BaseException) else None
        if settlement.kind in ("retry", "dead"):
            settlement.columns = {"history": self._history(claim, settlement)}
        return settlement

    def _leave_to_newer(self, task: Task[Any, Any], ended: NotForThisVersion) -> None:
        """A rolling deploy: jobs that this version of a task cannot run are not claimed again by it."""
        assert isinstance(self.lane, Queue)
        if self.lane.narrow(task.name):
            logger.warning("arguments_unknown", extra={"fields": {
                "lane": self.lane.name, "task": task.name, "error": ended.reason,
                "hint": "jobs with such arguments are left to workers with a newer version of the task",
            }})  # fmt: skip
        self.store.forget_texts()

    def _history(self, claim: Claim, settlement: Settlement) -> list[dict[str, Any]]:
        try:
            told = self.store.value(claim.row, "history") or []
        except UnreadableValue:
            told = []
        cause = settlement.cause
        shown = "".join(traceback.format_exception(cause)) if cause is not None and cause.__traceback__ else None
        entry = {
            "attempt": claim.attempt,
            "started_at": moment(claim.claimed_at).isoformat(),
            "outcome": settlement.kind,
            "error": settlement.error,
            "traceback": None if shown is None else tail(shown, TRACEBACK, self.store.database.encoding),
            "worker": claim.worker,
        }
        return [*told[1 - HISTORY :], entry]


def _result(task: Task[Any, Any], ended: Any) -> Any:
    """A handler's value as an outcome with the column it goes to."""
    if isinstance(ended, Done):
        return Done({"result": dict(ended.columns)}) if ended.columns else ended
    if isinstance(ended, (BaseException, type)) or inspect.iscoroutine(ended):
        return ended
    for hint in (task.signature.returns, Any):
        try:
            return Done({"result": encode(ended, hint)})
        except Unfit as unfit:
            words = str(unfit)
    return Dead(f"the handler returned a {type(ended).__name__}, which cannot be kept as a result: it needs {words}")
