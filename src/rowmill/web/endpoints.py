"""The API's endpoints in one table: parameters, answers, scope and function of each.

The routes, the checks of what is sent, and the OpenAPI document all come from it. What is done is in ``ops``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from ..declare.states import SEEN, STUCK
from ..declare.task import Task
from ..errors import did_you_mean
from ..ops import overview, questions
from ..ops.directory import LaneDirectory
from ..ops.questions import OPERATORS, Filter, Wanted
from ..ops.row_actions import NO_ROW
from . import schemas as s
from .access import Identity, cache_of, directory_of, require
from .actions import ACTIONS, perform
from .problem import Problem


@dataclass(frozen=True)
class CheckedRequest:
    """A request whose parts have been checked."""

    request: Request
    who: Identity
    path: Mapping[str, str]
    query: dict[str, Any]
    body: dict[str, Any]

    def directory(self) -> LaneDirectory:
        """The lanes that the sender may see, and of them those that the query names."""
        lanes = self.query.get("lane")
        named = [lanes] if isinstance(lanes, str) else lanes
        return directory_of(self.request, self.query.get("env"), named)

    def lane(self) -> tuple[LaneDirectory, str, str]:
        """The lane that is read: the lanes that the sender may see, the environment, and its name."""
        require(self.request, "read", self.path["lane"])
        return directory_of(self.request), self.path["environment"], self.path["lane"]


# -- what each endpoint does with a request


async def _gates(call: CheckedRequest) -> Any:
    q = call.query
    return await questions.gates(call.directory(), q.get("lane"), q.get("key"), q.get("by"), q.get("limit") or 20)


async def _rows(call: CheckedRequest) -> Any:
    (directory, environment, lane), query = call.lane(), call.query
    filters, cursor = [_filter(text) for text in query.get("filter") or ()], query.get("after")
    if cursor is not None and cursor[:1] not in ("=", "~"):
        raise Problem(422, f"after={cursor!r} is not a value of next from an earlier page")
    queue = query.get("order") == "queue"
    if queue and (filters or cursor or query.get("search")):
        raise Problem(422, "order=queue is one page: it takes a state and a limit", hint="order=newest")
    wanted = Wanted(
        query.get("state"), tuple(filters), query.get("search") or "", cursor[1:] if cursor else None,
        query.get("order") == "oldest", (cursor or "").startswith("~"), query.get("limit") or 50,
    )  # fmt: skip
    return await questions.rows(await directory.view(environment, lane), wanted, queue=queue)


def _filter(text: str) -> Filter:
    column, sign, rest = text.partition(":")
    operator, _, value = rest.partition(":")
    if not sign:
        raise Problem(422, f"filter={text!r} is not column:operator:value", hint="filter=domain:eq:example.org")
    return Filter(column, operator, value)


async def _why(call: CheckedRequest) -> Any:
    document = await questions.why(*call.lane(), call.path["id"])
    if document["state"] == "none":
        raise Problem(404, f"no row of lane {call.path['lane']!r} has the id {call.path['id']!r}")
    return document


async def _edit(call: CheckedRequest) -> Any:
    given = {"ids": [call.path["id"]], **call.body}
    document = await perform(call.request, "schedule", call.path["environment"], call.path["lane"], given)
    for row in document["passed_over"]:
        raise Problem(404 if row["reason"] == NO_ROW else 409, f"{call.path['id']}: {row['reason']}")
    return document


def _task(call: CheckedRequest, scope: str) -> Task[..., Any]:
    known = call.request.app.state.mill.tasks
    task: Task[..., Any] | None = known.get(call.path["task"])
    if task is None:
        # Who may not see every lane is not told which names there are.
        require(call.request, scope)
        raise Problem(404, f"there is no task {call.path['task']!r}", hint=did_you_mean(call.path["task"], known))
    require(call.request, scope, task.queue)
    return task


def _environment(call: CheckedRequest, task: Task[..., Any], given: str | None) -> str:
    served = list(task.environments or call.request.app.state.directory.databases)
    if given is not None and given not in served:
        raise Problem(404, f"task {task.name!r} has no environment {given!r}", hint=did_you_mean(given, served))
    return given or served[0]


async def _enqueue(call: CheckedRequest) -> Any:
    task = _task(call, "enqueue")
    given = {"task": task.name, **call.body}
    return await perform(call.request, "enqueue", _environment(call, task, given.pop("env", None)), task.queue, given)


async def _job(call: CheckedRequest) -> Any:
    task, id = _task(call, "read"), int(call.path["id"])
    environment = _environment(call, task, call.query.get("env"))
    job = await task.handle(id, environment).status()
    if job is None or job.task != task.name:
        raise Problem(404, f"there is no job {id} of task {task.name!r}, or it is no longer kept")
    return {
        "task": job.task, "environment": environment, "id": job.id, "state": job.state, "attempts": job.attempts,
        "run_after": job.run_after.isoformat(), "progress": job.progress, "error": job.error, "result": job.result,
        "history": job.history, "children": job.children, "over": job.over,
    }  # fmt: skip


async def _audit(call: CheckedRequest) -> Any:
    first = call.request.app.state.directory.first
    return await questions.audit(first, call.query.get("limit") or 50, call.query.get("before"), call.who.lanes)


# -- the table


@dataclass(frozen=True)
class Endpoint:
    """One operation. ``scope`` None: no token is needed."""

    method: str
    path: str
    name: str
    about: str
    scope: str | None
    run: Callable[[CheckedRequest], Awaitable[Any]]
    answer: s.Schema
    query: Mapping[str, s.Schema] = field(default_factory=dict)
    body: s.Schema | None = None
    status: int = 200

    def place(self, name: str) -> s.Schema:
        """The pattern of a path parameter: a job's id is a number."""
        if name == "id" and "/jobs/" in self.path:
            return {"type": "string", "pattern": "^[0-9]{1,18}$", "description": "the job's id"}
        return PATHS[name]


def _question(
    path: str,
    name: str,
    about: str,
    run: Callable[[CheckedRequest], Awaitable[Any]],
    answer: s.Schema,
    query: Mapping[str, s.Schema] = MappingProxyType({}),
) -> Endpoint:
    """A question for the scope read."""
    return Endpoint("GET", path, name, about, "read", run, answer, query)


def _action(path: str, name: str, about: str, answer: s.Schema, body: s.Schema, status: int = 200) -> Endpoint:
    """An action on a lane; without a lane in the path, on what the body names."""

    async def run(call: CheckedRequest) -> Any:
        lane = call.path.get("lane") or call.body.get("lane")
        given = {name: value for name, value in call.body.items() if name != "lane"}
        return await perform(call.request, name, call.path["environment"], lane, given)

    return Endpoint("POST", path, name, about, ACTIONS[name][0], run, answer, body=body, status=status)


_ENV = s.listed(s.text("an environment", most=200), maxItems=20, description="only these environments")
_SOME = s.listed(s.text("a lane", most=200), maxItems=100, description="only these lanes")
_LIMIT = s.whole("maximum number", least=1, most=500)
_LANE = "/environments/{environment}/lanes/{lane}"
_WHOLE = s.text("default: the whole environment", most=200, least=1)
_KEYED = {
    "key": s.text("of a gate by key", most=500),
    "by": s.text("the gate's column, if the lane has gates by several", most=500),
}
_FAMILY = s.text("the family's fingerprint", most=100, least=1)
_SPAN = s.maybe(s.number("seconds from now; null: no more", most=1e9))

ENDPOINTS: tuple[Endpoint, ...] = (
    _question(
        "/lanes",
        "lanes",
        "The lanes and environments, as they are declared.",
        lambda call: questions.lanes(call.directory(), call.request.app.state.inserts),
        s.response(environments=s.STRINGS, lanes=s.listed(s.LANE)),
    ),
    _question(
        "/status",
        "status",
        "Rows of every lane by state, and what is paused: as `rowmill status`.",
        lambda call: questions.status(call.directory()),
        s.response(lanes=s.listed(s.COUNTS), paused=s.listed(s.PAUSE), elsewhere=s.listed(s.OBJECT), errors=s.ERRORS),
        {"env": _ENV, "lane": _SOME},
    ),
    _question(
        "/workers",
        "workers",
        "Workers and what each runs, as `rowmill workers`.",
        lambda call: questions.workers(call.directory(), everyone=bool(call.query.get("all"))),
        s.response(workers=s.listed(s.WORKER), errors=s.ERRORS),
        {"env": _ENV, "all": s.flag("include stopped workers")},
    ),
    _question(
        "/stuck",
        "stuck",
        "Running rows without a heartbeat for longer than the lease, as `rowmill stuck`.",
        lambda call: questions.stuck(call.directory(), call.query.get("limit") or 100),
        s.response(rows=s.listed(s.ROW), held_by_dead=s.listed(s.HELD_BY_DEAD), errors=s.ERRORS),
        {"env": _ENV, "lane": _SOME, "limit": _LIMIT},
    ),
    _question(
        "/health",
        "health",
        "What slows the queues down, and what to do about it.",
        lambda call: overview.health(call.directory(), cache_of(call.request)),
        s.response(
            environments=s.listed(s.response(environment=s.STRING, findings=s.listed(s.OBJECT), errors=s.ERRORS))
        ),
        {"env": _ENV, "lane": _SOME},
    ),
    _question(
        f"{_LANE}/rows",
        "rows",
        "A lane's rows by key, the newest first, page by page; with order=queue as `rowmill jobs`.",
        _rows,
        s.response(
            rows=s.listed(s.ROW),
            next=s.maybe(s.STRING),
            more=s.flag("there are more rows than these"),
            looked_at=s.maybe(s.INTEGER),
            errors=s.ERRORS,
        ),
        {
            "state": s.word(*SEEN, STUCK, about="only rows in this state"),
            "filter": s.listed(
                s.text(most=600), maxItems=10, description=f"column:operator:value; {', '.join(OPERATORS)}"
            ),
            "search": s.text("in any text column, or the id", most=200),
            "order": s.word("newest", "oldest", "queue", about="queue: one page, as `rowmill jobs`"),
            "after": s.text("the value of next from the previous page", most=600, least=1),
            "limit": _LIMIT,
        },
    ),
    _action(
        f"{_LANE}/rows",
        "insert",
        "Create a row in a lane, if the server allows it.",
        s.WHOLE_ROW,
        body=s.request("columns", columns={"type": "object", "maxProperties": 200}),
        status=201,
    ),
    _question(f"{_LANE}/rows/{{id}}/why", "why", "Why a row is not running.", _why, s.WHY),
    _question(
        f"{_LANE}/rows/{{id}}/logs",
        "logs",
        "What the last runs of a row logged, the last run first.",
        lambda call: questions.logs(*call.lane(), call.path["id"], call.query.get("run")),
        s.LOGS,
        {"run": s.whole("only this run, counted back: 1 is the last", least=1, most=100)},
    ),
    _question(
        f"{_LANE}/rows/{{id}}",
        "row",
        "One row, with all its columns.",
        lambda call: questions.row(*call.lane(), call.path["id"]),
        s.WHOLE_ROW,
    ),
    Endpoint(
        "PATCH",
        f"{_LANE}/rows/{{id}}",
        "edit",
        "Reschedule a row that has not started.",
        "operate",
        _edit,
        s.WRITTEN,
        body=s.request("run_after", run_after=s.moment("when it may run")),
    ),
    _action(
        f"{_LANE}/retry",
        "retry",
        "Make rows ready now, with all their attempts.",
        s.WRITTEN,
        body=s.one_of(s.request(ids=s.IDS, state=s.word("dead", "canceled", "waiting", "excluded")), "ids", "state"),
    ),
    _action(
        f"{_LANE}/cancel",
        "cancel",
        "Cancel rows.",
        s.WRITTEN,
        body=s.one_of(
            s.request(
                ids=s.IDS,
                state=s.word("ready", "waiting", "excluded", "running"),
                reason=s.text("text for the error column"),
                running=s.flag("also running rows; their outcome is dropped"),
            ),
            "ids",
            "state",
        ),
    ),
    _action(
        f"{_LANE}/release",
        "release",
        "Take running rows back from their worker; this costs no attempt.",
        s.WRITTEN,
        body=s.one_of(
            s.request(
                ids=s.IDS,
                worker=s.text("all rows this worker holds", least=1),
                stuck={"const": True, "description": "all stuck rows"},
            ),
            "ids",
            "worker",
            "stuck",
        ),
    ),
    _action(
        "/environments/{environment}/pause",
        "pause",
        "Pause an environment, a lane or a key: nothing more is claimed.",
        s.response(True, action=s.STRING, environment=s.STRING, until=s.maybe(s.STRING), notes=s.STRINGS),
        body=s.request(
            lane=_WHOLE,
            **_KEYED,
            reason=s.text("what others read"),
            seconds=s.number("ends after this", least=0.001, most=315_360_000),
            until=s.moment("ends then"),
        ),
    ),
    _action(
        "/environments/{environment}/resume",
        "resume",
        "End a pause.",
        s.RESUMED,
        body=s.request(lane=_WHOLE, **_KEYED),
    ),
    _question(
        "/gates",
        "gates",
        "The state of every gate by key, those that hold rows back first.",
        _gates,
        s.response(
            gates=s.listed(s.GATE),
            paused=s.listed(s.PAUSE),
            shared=s.listed(s.OBJECT),
            budgets=s.listed(s.OBJECT),
            errors=s.ERRORS,
        ),
        {"env": _ENV, "lane": s.text("only this lane", most=200, least=1), **_KEYED, "limit": _LIMIT},
    ),
    _action(
        f"{_LANE}/gates/set",
        "set_gate",
        "Change a gate's state; without a key, that of the whole lane.",
        s.response(True, action=s.STRING, environment=s.STRING, lane=s.STRING, by=s.maybe(s.STRING)),
        body=s.request(
            **_KEYED,
            most=s.maybe(s.whole("another limit for this key")),
            tokens=s.number(),
            streak=s.whole(),
            delay_seconds=_SPAN,
            open_seconds=_SPAN,
            closed_seconds=_SPAN,
        ),
    ),
    _action(
        f"{_LANE}/gates/reset",
        "reset_gates",
        "Clear the state of gates; pauses stay.",
        s.RESET,
        body=s.request(**_KEYED, all=s.flag("all keys")),
    ),
    _question(
        "/tasks",
        "tasks",
        "Tasks, and what each takes.",
        lambda call: questions.tasks(call.directory()),
        s.response(tasks=s.listed(s.TASK)),
    ),
    Endpoint(
        "POST",
        "/tasks/{task}",
        "enqueue",
        "Enqueue a job, or many: arguments are checked by the handler's types.",
        "enqueue",
        _enqueue,
        s.response(task=s.STRING, environment=s.STRING, lane=s.STRING, ids=s.listed(s.INTEGER)),
        body=s.one_of(
            s.request(
                args={"type": "object", "description": "the handler's arguments by name"},
                many=s.listed(s.OBJECT, minItems=1, maxItems=10_000, description="the arguments of each of many jobs"),
                run_after=s.moment("not before"),
                delay_seconds=s.number("delay in seconds"),
                priority=s.whole("lower goes first", least=-32768, most=32767),
                key=s.text("no second job with this key while one is unfinished", most=500, least=1),
                env=s.text("default: the first that the task is served in", most=200, least=1),
            ),
            "args",
            "many",
        ),
        status=201,
    ),
    _question(
        "/tasks/{task}/jobs/{id}",
        "job",
        "The state of a job: its result, its history, its children.",
        _job,
        s.JOB,
        {"env": s.text("default: the first that the task is served in", most=200, least=1)},
    ),
    _question(
        "/overview",
        "overview",
        "Every environment with its lanes: counts, rates over time, when the backlog is done.",
        lambda call: overview.overview(call.directory(), cache_of(call.request), call.query.get("hours") or 1),
        s.response(
            environments=s.listed(s.response(True, environment=s.STRING, lanes=s.listed(s.OBJECT), errors=s.ERRORS))
        ),
        {"env": _ENV, "lane": _SOME, "hours": s.whole("how far back", least=1, most=168)},
    ),
    _question(
        "/errors",
        "errors",
        "Failures by family, the most recent first, as `rowmill errors`.",
        lambda call: overview.errors(call.directory(), cache_of(call.request), call.query.get("hours") or 24),
        s.response(hours=s.NUMBER, environments=s.listed(s.FAMILIES)),
        {"env": _ENV, "lane": _SOME, "hours": s.whole("how far back", least=1, most=720)},
    ),
    _action(
        f"{_LANE}/errors/retry",
        "retry_family",
        "Make the rows of one family of failures ready: those that are dead, or wait for a retry.",
        s.WRITTEN,
        body=s.request("error", error=_FAMILY),
    ),
    _action(
        f"{_LANE}/errors/bury",
        "bury_family",
        "Cancel the rows of one family of failures that wait for a retry.",
        s.WRITTEN,
        body=s.request("error", error=_FAMILY, reason=s.text("text for the error column")),
    ),
    Endpoint(
        "GET",
        "/audit",
        "audit",
        "The audit log: who did what, and the result, newest first.",
        "operate",
        _audit,
        s.response(entries=s.listed(s.ENTRY), next=s.maybe(s.INTEGER)),
        {"limit": _LIMIT, "before": s.whole("the value of next from the previous page", most=2**53)},
    ),
)
#: The parameters of paths.
PATHS: Mapping[str, s.Schema] = {
    "environment": s.text("an environment's name", most=200, least=1),
    "lane": s.text("a lane's name", most=200, least=1),
    "task": s.text("a task's name", most=200, least=1),
    "id": s.text("the row's key; a composite one: a,b", most=500, least=1),
}
