"""What each endpoint of the API does with a request whose parts have been checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ..errors import did_you_mean
from ..ops.environments import LaneDirectory
from . import documents, failure_families, views
from .access import Identity, require
from .actions import ActionTarget, perform, place
from .problem import Problem


@dataclass(frozen=True)
class CheckedRequest:
    """A request whose parts have been checked."""

    request: Request
    who: Identity
    path: Mapping[str, str]
    query: dict[str, Any]
    body: dict[str, Any]

    @property
    def lookout(self) -> LaneDirectory:
        found: LaneDirectory = self.request.app.state.lookout
        return found

    @property
    def here(self) -> ActionTarget:
        """The lane that is read."""
        require(self.request, "read", self.path["lane"])
        return place(self.request, self.path["environment"], self.path["lane"])

    def narrowed(self) -> tuple[Any, Any, Any, Any]:
        """What most looks take: where, what may be seen, and what was asked for."""
        return self.lookout, self.who.sees, self.query.get("env"), self.query.get("lane")


def acts(action: str) -> Callable[[CheckedRequest], Awaitable[Any]]:
    """An action on a lane, or, where the path names none, on what the body says."""

    async def run(call: CheckedRequest) -> Any:
        lane = call.path.get("lane") or call.body.get("lane")
        given = {name: value for name, value in call.body.items() if name != "lane"}
        return await perform(call.request, action, call.path["environment"], lane, given)

    return run


async def lanes(call: CheckedRequest) -> Any:
    """What is declared."""
    return documents.lanes(call.lookout, call.who.sees, call.request.app.state.inserts)


async def status(call: CheckedRequest) -> Any:
    """Rows by state."""
    return await documents.status(*call.narrowed())


async def workers(call: CheckedRequest) -> Any:
    """Who works."""
    return await documents.workers(*call.narrowed()[:3], bool(call.query.get("all")))


async def stuck(call: CheckedRequest) -> Any:
    """What hangs."""
    return await documents.stuck(*call.narrowed(), call.query.get("limit") or 100)


async def rows(call: CheckedRequest) -> Any:
    """A page of rows."""
    return await documents.rows(call.here, call.query)


async def row(call: CheckedRequest) -> Any:
    """One row."""
    return await documents.row(call.here, call.who.sees, call.path["id"])


async def why(call: CheckedRequest) -> Any:
    """Why it is not running."""
    return await documents.why(call.here, call.who.sees, call.path["id"])


async def edit(call: CheckedRequest) -> Any:
    """Let a row run at another time."""
    given = {"ids": [call.path["id"]], **call.body}
    found = await perform(call.request, "schedule", call.path["environment"], call.path["lane"], given)
    if not found["count"]:
        reason = found["passed_over"][0]["reason"]
        raise Problem(404 if reason.startswith("there is no") else 409, f"{call.path['id']}: {reason}")
    return found


async def gates(call: CheckedRequest) -> Any:
    """How gates stand."""
    q = call.query
    lane = q.get("lane")
    return await documents.gates(
        call.lookout, call.who.sees, q.get("env"), lane, q.get("key"), q.get("by"), q.get("limit") or 20
    )


async def tasks(call: CheckedRequest) -> Any:
    """Tasks."""
    return documents.tasks(call.lookout, call.who.sees)


def _task(call: CheckedRequest, scope: str) -> Any:
    known = call.lookout.mill.tasks
    task = known.get(call.path["task"])
    if task is None:
        # Who may not see every lane is not told which names there are.
        require(call.request, scope)
        raise Problem(404, f"there is no task {call.path['task']!r}", hint=did_you_mean(call.path["task"], known))
    require(call.request, scope, task.queue)
    return task


def _environment(call: CheckedRequest, task: Any, given: str | None) -> str:
    served = list(task.environments or (name for name, _ in call.lookout.databases))
    if given is not None and given not in served:
        raise Problem(404, f"task {task.name!r} has no environment {given!r}", hint=did_you_mean(given, served))
    return given or served[0]


async def enqueue(call: CheckedRequest) -> Any:
    """Enqueue jobs."""
    task = _task(call, "enqueue")
    given = {"task": task.name, **call.body}
    return await perform(call.request, "enqueue", _environment(call, task, given.pop("env", None)), task.queue, given)


async def job(call: CheckedRequest) -> Any:
    """How a job stands."""
    task, id = _task(call, "read"), int(call.path["id"])
    environment = _environment(call, task, call.query.get("env"))
    found = await task.handle(id, environment).status()
    if found is None or found.task != task.name:
        raise Problem(404, f"there is no job {id} of task {task.name!r}, or it is no longer kept")
    return {
        "task": found.task, "environment": environment, "id": found.id, "state": found.state,
        "attempts": found.attempts, "run_after": found.run_after.isoformat(), "progress": found.progress,
        "error": found.error, "result": found.result, "history": found.history, "children": found.children,
        "over": found.over,
    }  # fmt: skip


async def health(call: CheckedRequest) -> Any:
    """What slows the queues down."""
    asked = documents.chosen(*call.narrowed()[:3], None)["environments"]
    found = await views.health(views.sight_of(call.request), call.who.sees)
    return {"environments": [one for one in found["environments"] if asked is None or one["environment"] in asked]}


async def overview(call: CheckedRequest) -> Any:
    """All environments with their lanes: counts, rates, forecasts."""
    return await views.overview(views.sight_of(call.request), call.who.sees, call.query.get("hours") or 1)


async def errors(call: CheckedRequest) -> Any:
    """Failures in families."""
    return await failure_families.families(views.sight_of(call.request), call.who.sees, call.query.get("hours") or 24)


async def audit(call: CheckedRequest) -> Any:
    """What was done."""
    limit, before = call.query.get("limit") or 50, call.query.get("before")
    return await documents.entries(call.request.app.state.audit, call.who.lanes, limit, before)
