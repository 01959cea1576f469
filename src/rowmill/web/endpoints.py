"""The API's endpoints, in one table: what each takes and answers, who may, and what it does.

The routes, the checks of what is sent, and the OpenAPI document all come from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..store.inspect.pages import OPERATORS
from . import handlers
from . import schemas as s
from .handlers import CheckedRequest


@dataclass(frozen=True)
class Endpoint:
    """One operation. ``scope`` None: anybody may."""

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
        """What may stand at a place of its path: a job's id is a number."""
        if name == "id" and "/jobs/" in self.path:
            return {"type": "string", "pattern": "^[0-9]{1,18}$", "description": "the job's id"}
        return PATHS[name]


_ENV = s.listed(s.text("an environment", most=200), maxItems=20, description="only these environments")
_SOME = s.listed(s.text("a lane", most=200), maxItems=100, description="only these lanes")
_LIMIT = s.whole("at most so many", least=1, most=500)
_LANE = "/environments/{environment}/lanes/{lane}"
_WHOLE = s.text("default: the whole environment", most=200, least=1)
_KEYED = {
    "key": s.text("of a gate by key", most=500),
    "by": s.text("what the key is of, where gates have several", most=500),
}
_FAMILY = s.text("the family's fingerprint", most=100, least=1)
_SPAN = s.maybe(s.number("seconds from now; null: no more", most=1e9))

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "GET",
        "/lanes",
        "lanes",
        "The lanes and environments, as they are declared.",
        "read",
        handlers.lanes,
        s.told(environments=s.STRINGS, lanes=s.listed(s.LANE)),
    ),
    Endpoint(
        "GET",
        "/status",
        "status",
        "Rows of every lane by state, and what is paused: as `rowmill status`.",
        "read",
        handlers.status,
        s.told(lanes=s.listed(s.COUNTS), paused=s.listed(s.PAUSE), elsewhere=s.listed(s.OBJECT), errors=s.ERRORS),
        {"env": _ENV, "lane": _SOME},
    ),
    Endpoint(
        "GET",
        "/workers",
        "workers",
        "Who works, on what: as `rowmill workers`.",
        "read",
        handlers.workers,
        s.told(workers=s.listed(s.WORKER), errors=s.ERRORS),
        {"env": _ENV, "all": s.flag("those that have stopped, too")},
    ),
    Endpoint(
        "GET",
        "/stuck",
        "stuck",
        "Running rows without a sign of life: as `rowmill stuck`.",
        "read",
        handlers.stuck,
        s.told(rows=s.listed(s.ROW), errors=s.ERRORS),
        {"env": _ENV, "lane": _SOME, "limit": _LIMIT},
    ),
    Endpoint(
        "GET",
        "/health",
        "health",
        "What slows the queues down, and what to do about it.",
        "read",
        handlers.health,
        s.told(environments=s.listed(s.told(environment=s.STRING, findings=s.listed(s.OBJECT), errors=s.ERRORS))),
        {"env": _ENV},
    ),
    Endpoint(
        "GET",
        f"{_LANE}/rows",
        "rows",
        "A lane's rows by key, the newest first, page by page.",
        "read",
        handlers.rows,
        s.told(rows=s.listed(s.ROW), next=s.maybe(s.STRING), looked_at=s.maybe(s.INTEGER)),
        {
            "state": s.word(*s.STATES, about="only rows in this state"),
            "filter": s.listed(
                s.text(most=600), maxItems=10, description=f"column:operator:value; {', '.join(OPERATORS)}"
            ),
            "search": s.text("in any text column, or the id", most=200),
            "order": s.word("newest", "oldest"),
            "after": s.text("what the page before said under next", most=600, least=1),
            "limit": _LIMIT,
        },
    ),
    Endpoint(
        "POST",
        f"{_LANE}/rows",
        "insert",
        "Make a row of a lane, where the server allows it.",
        "enqueue",
        handlers.acts("insert"),
        s.WHOLE_ROW,
        body=s.sent("columns", columns={"type": "object", "maxProperties": 200}),
        status=201,
    ),
    Endpoint("GET", f"{_LANE}/rows/{{id}}/why", "why", "Why a row is not running.", "read", handlers.why, s.WHY),
    Endpoint("GET", f"{_LANE}/rows/{{id}}", "row", "One row, with all its columns.", "read", handlers.row, s.WHOLE_ROW),
    Endpoint(
        "PATCH",
        f"{_LANE}/rows/{{id}}",
        "edit",
        "Let a row that has not begun run at another time.",
        "operate",
        handlers.edit,
        s.WRITTEN,
        body=s.sent("run_after", run_after=s.moment("from when on it may run")),
    ),
    Endpoint(
        "POST",
        f"{_LANE}/retry",
        "retry",
        "Make rows ready at once, with all their attempts before them.",
        "operate",
        handlers.acts("retry"),
        s.WRITTEN,
        body=s.one_of(s.sent(ids=s.IDS, state=s.word("dead", "canceled", "waiting", "excluded")), "ids", "state"),
    ),
    Endpoint(
        "POST",
        f"{_LANE}/cancel",
        "cancel",
        "Rows are not to be worked on.",
        "operate",
        handlers.acts("cancel"),
        s.WRITTEN,
        body=s.one_of(
            s.sent(
                ids=s.IDS,
                state=s.word("ready", "waiting", "excluded", "running"),
                reason=s.text("what the error column says"),
                running=s.flag("running rows too: their outcome is dropped"),
            ),
            "ids",
            "state",
        ),
    ),
    Endpoint(
        "POST",
        f"{_LANE}/release",
        "release",
        "Take running rows back from their holder; no attempt is lost.",
        "operate",
        handlers.acts("release"),
        s.WRITTEN,
        body=s.one_of(
            s.sent(
                ids=s.IDS,
                worker=s.text("all rows this worker holds", least=1),
                stuck={"const": True, "description": "all without a sign of life"},
            ),
            "ids",
            "worker",
            "stuck",
        ),
    ),
    Endpoint(
        "POST",
        "/environments/{environment}/pause",
        "pause",
        "Claim nothing more: of an environment, a lane, or a key.",
        "operate",
        handlers.acts("pause"),
        s.told(True, action=s.STRING, environment=s.STRING, until=s.maybe(s.STRING)),
        body=s.sent(
            lane=_WHOLE,
            **_KEYED,
            reason=s.text("what others read"),
            seconds=s.number("ends after this", least=0.001, most=315_360_000),
            until=s.moment("ends then"),
        ),
    ),
    Endpoint(
        "POST",
        "/environments/{environment}/resume",
        "resume",
        "End a pause.",
        "operate",
        handlers.acts("resume"),
        s.told(action=s.STRING, environment=s.STRING, resumed=s.maybe(s.PAUSE), still_paused=s.listed(s.PAUSE)),
        body=s.sent(lane=_WHOLE, **_KEYED),
    ),
    Endpoint(
        "GET",
        "/gates",
        "gates",
        "How every gate stands by key, those that hold rows back first.",
        "read",
        handlers.gates,
        s.told(gates=s.listed(s.GATE), budgets=s.listed(s.OBJECT), errors=s.ERRORS),
        {"env": _ENV, "lane": s.text("only this lane", most=200, least=1), **_KEYED, "limit": _LIMIT},
    ),
    Endpoint(
        "POST",
        f"{_LANE}/gates/set",
        "set_gate",
        "Change how a gate stands; without a key, the whole lane's.",
        "operate",
        handlers.acts("set_gate"),
        s.told(True, action=s.STRING, environment=s.STRING, lane=s.STRING, by=s.maybe(s.STRING)),
        body=s.sent(
            **_KEYED,
            most=s.maybe(s.whole("another limit for this key")),
            tokens=s.number(),
            streak=s.whole(),
            delay_seconds=_SPAN,
            open_seconds=_SPAN,
            closed_seconds=_SPAN,
        ),
    ),
    Endpoint(
        "POST",
        f"{_LANE}/gates/reset",
        "reset_gates",
        "Gates as fresh as at the beginning; pauses stay.",
        "operate",
        handlers.acts("reset_gates"),
        s.told(action=s.STRING, environment=s.STRING, lane=s.STRING, key=s.maybe(s.STRING), count=s.INTEGER),
        body=s.sent(**_KEYED, all=s.flag("all keys")),
    ),
    Endpoint(
        "GET", "/tasks", "tasks", "Tasks, and what each takes.", "read", handlers.tasks, s.told(tasks=s.listed(s.TASK))
    ),
    Endpoint(
        "POST",
        "/tasks/{task}",
        "enqueue",
        "Enqueue a job, or many: arguments are checked by the handler's types.",
        "enqueue",
        handlers.enqueue,
        s.told(task=s.STRING, environment=s.STRING, lane=s.STRING, ids=s.listed(s.INTEGER)),
        body=s.one_of(
            s.sent(
                args={"type": "object", "description": "the handler's arguments by name"},
                many=s.listed(s.OBJECT, minItems=1, maxItems=10_000, description="the arguments of each of many jobs"),
                run_after=s.moment("not before"),
                delay_seconds=s.number("not before so many seconds from now"),
                priority=s.whole("lower goes first", least=-32768, most=32767),
                key=s.text("no second job with this key while one is unfinished", most=500, least=1),
                env=s.text("default: the first that the task is served in", most=200, least=1),
            ),
            "args",
            "many",
        ),
        status=201,
    ),
    Endpoint(
        "GET",
        "/tasks/{task}/jobs/{id}",
        "job",
        "How a job stands: its result, its history, its children.",
        "read",
        handlers.job,
        s.JOB,
        {"env": s.text("default: the first that the task is served in", most=200, least=1)},
    ),
    Endpoint(
        "GET",
        "/overview",
        "overview",
        "Every environment with its lanes: counts, rates over time, when the backlog is done.",
        "read",
        handlers.overview,
        s.told(environments=s.listed(s.told(True, environment=s.STRING, lanes=s.listed(s.OBJECT), errors=s.ERRORS))),
        {"hours": s.whole("how far back", least=1, most=168)},
    ),
    Endpoint(
        "GET",
        "/errors",
        "errors",
        "Failures in families, those that were seen last first: as `rowmill errors`.",
        "read",
        handlers.errors,
        s.told(hours=s.NUMBER, environments=s.listed(s.FAMILIES)),
        {"hours": s.whole("how far back", least=1, most=720)},
    ),
    Endpoint(
        "POST",
        f"{_LANE}/errors/retry",
        "retry_family",
        "Make the rows of one family of failures ready: those that are dead, or wait to be tried again.",
        "operate",
        handlers.acts("retry_family"),
        s.OF_FAMILY,
        body=s.sent("error", error=_FAMILY),
    ),
    Endpoint(
        "POST",
        f"{_LANE}/errors/bury",
        "bury_family",
        "The rows of one family of failures are not to be tried again.",
        "operate",
        handlers.acts("bury_family"),
        s.OF_FAMILY,
        body=s.sent("error", error=_FAMILY, reason=s.text("what the error column says")),
    ),
    Endpoint(
        "GET",
        "/audit",
        "audit",
        "What was done, by whom, and how it ended: the newest first.",
        "operate",
        handlers.audit,
        s.told(entries=s.listed(s.ENTRY), next=s.maybe(s.INTEGER)),
        {"limit": _LIMIT, "before": s.whole("what the page before said under next", most=2**53)},
    ),
)
#: What stands in a path.
PATHS: Mapping[str, s.Schema] = {
    "environment": s.text("an environment's name", most=200, least=1),
    "lane": s.text("a lane's name", most=200, least=1),
    "task": s.text("a task's name", most=200, least=1),
    "id": s.text("the row's key; a composite one: a,b", most=500, least=1),
}
