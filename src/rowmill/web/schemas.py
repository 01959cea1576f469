"""The documents of the API, as JSON Schema: what is sent, and what is answered."""

from __future__ import annotations

from typing import Any

from ..declare.states import SEEN

Schema = dict[str, Any]

#: Text that both databases keep.
TEXT = "^[^\\u0000]*$"


def text(about: str = "", *, most: int = 1000, least: int = 0, **more: Any) -> Schema:
    """Text of a bounded length."""
    description = {"description": about} if about else {}
    return {"type": "string", "minLength": least, "maxLength": most, "pattern": TEXT, **description, **more}


def word(*options: str, about: str = "") -> Schema:
    return {"type": "string", "enum": list(options), **({"description": about} if about else {})}


def whole(about: str = "", *, least: int = 0, most: int = 2**31 - 1, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **({"description": about} if about else {}), **more}


def number(about: str = "", *, least: float = 0, most: float = 1e9) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most, **({"description": about} if about else {})}


def flag(about: str = "") -> Schema:
    return {"type": "boolean", **({"description": about} if about else {})}


def moment(about: str = "") -> Schema:
    """A time, in ISO form; without a zone it is UTC."""
    return {"type": "string", "format": "date-time", "maxLength": 40, **({"description": about} if about else {})}


def maybe(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": schema, **more}


def request(*required: str, **properties: Schema) -> Schema:
    """An object that a request sends: nothing but what is named."""
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, **({"required": list(required)} if required else {})}


def one_of(schema: Schema, *names: str) -> Schema:
    """An object that says exactly one of these."""
    return {**schema, "oneOf": [{"required": [name]} for name in names]}


def response(_further: bool = False, /, **properties: Schema) -> Schema:
    """An object that is answered: all that is named is there. ``_further``: and, by the lane's roles, more."""
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return schema if _further else {**schema, "additionalProperties": False}


ANY: Schema = {}
OBJECT: Schema = {"type": "object"}
STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
STRINGS = listed(STRING)
SECONDS = maybe(NUMBER)
ID = {
    "description": "the row's key; a list where it has several columns",
    "type": ["string", "integer", "number", "array"],
}
IDS = listed(
    {"anyOf": [text(most=500, least=1), {"type": "integer"}]},
    minItems=1, maxItems=1000, description="rows by their ids; a composite key as text: a,b",
)  # fmt: skip
FAILURE = response(environment=STRING, lane=maybe(STRING), error=STRING, hint=maybe(STRING), unreachable=flag())
ERRORS = listed(FAILURE)
PAUSE = response(
    environment=STRING, lane=maybe(STRING), by=maybe(STRING), key=maybe(STRING), reason=maybe(STRING),
    since=maybe(STRING), until=maybe(STRING), seconds_left=SECONDS,
)  # fmt: skip
RESUMED = response(
    action=STRING, environment=STRING, lane=maybe(STRING), by=maybe(STRING), key=maybe(STRING), resumed=maybe(PAUSE),
    still_paused=listed(PAUSE),
)  # fmt: skip
RESET = response(
    action=STRING, environment=STRING, lane=STRING, key=maybe(STRING), by=maybe(STRING), count=INTEGER,
    known=flag("a row has the key"),
)  # fmt: skip
COUNTS = response(
    environment=STRING, lane=STRING, table=STRING, paused=flag(), at_least=STRINGS, unknown=STRINGS,
    counts={"type": "object", "additionalProperties": maybe(INTEGER)}, oldest_ready_seconds=SECONDS,
)  # fmt: skip
ROW = response(True, environment=STRING, lane=STRING, id=ID, key=STRING, state=maybe(word(*SEEN)))
HELD_BY_DEAD = response(
    environment=STRING, lane=STRING, worker=STRING, evidence=STRING, rows=INTEGER, until=maybe(STRING),
    swept=flag("a live worker serves the lane and will take the rows back"),
)  # fmt: skip
WHOLE_ROW = response(
    True, environment=STRING, lane=STRING, id=ID, key=STRING, state=maybe(word(*SEEN)), columns=OBJECT, roles=OBJECT
)  # fmt: skip
WRITTEN = response(
    environment=STRING, lane=STRING, action=STRING, error=maybe(STRING), count=INTEGER,
    more=flag("time ran out: send it again"), ids=maybe(STRINGS),
    passed_over=listed(response(id=STRING, reason=STRING)),
)  # fmt: skip
KEY = {
    "key": maybe(STRING), "held_back": listed(response(by=STRING, seconds=SECONDS)), "running": maybe(INTEGER),
    "most": maybe(INTEGER), "most_by_hand": flag(), "tokens": SECONDS, "streak": maybe(INTEGER), "half_open": flag(),
    "delay_seconds": SECONDS, "open_seconds": SECONDS, "closed_seconds": SECONDS, "paused": flag(),
    "paused_seconds": SECONDS, "reason": maybe(STRING),
}  # fmt: skip
GATE = response(
    environment=STRING, lane=STRING, by=maybe(STRING), label=STRING, declared=STRINGS, keys=listed(response(**KEY)),
    more=flag("there are more keys than were asked for"),
)  # fmt: skip
REASON = response(code=STRING, text=STRING, since=maybe(STRING), until=maybe(STRING), seconds=SECONDS)
WHY = response(
    environment=STRING, lane=STRING, id=STRING, state=STRING, reasons=listed(REASON), runs_at=maybe(STRING),
    runs_in_seconds=SECONDS, by_itself=maybe(flag()),
)  # fmt: skip
LOG_LINE = response(
    at=STRING, level=STRING, text=STRING, id=maybe(STRING) | {"description": "in a chunk: the row that it is about"}
)  # fmt: skip
RUN_LOG = response(
    run=INTEGER, at=STRING, attempt=INTEGER, worker=STRING, outcome=STRING,
    dropped=INTEGER | {"description": "earlier lines that did not fit"}, lines=listed(LOG_LINE),
)  # fmt: skip
LOGS = response(
    environment=STRING, lane=STRING, id=STRING, kept=flag("false: logs are not kept here"), runs=listed(RUN_LOG)
)
WORKER = response(
    True, id=STRING, incarnation=STRING, host=STRING, pid=INTEGER, lanes=STRINGS, environments=STRINGS, state=STRING,
    started_at=STRING, seen_at=STRING, silent_seconds=NUMBER, current=listed(OBJECT), completed=INTEGER,
    failed=INTEGER, lost=INTEGER, version=STRING,
    process_gone=flag("the host that answers has no such process any more"),
    lock_missing=flag("its session with the database is gone"),
)  # fmt: skip
LANE = response(
    lane=STRING, table=STRING, queue=flag("of tasks"), environments=STRINGS, priority=INTEGER, concurrency=INTEGER,
    max_attempts=maybe(INTEGER), gates=listed(STRINGS), insert=flag("rows may be made through the API"),
)  # fmt: skip
TASK = response(
    task=STRING, lane=STRING, cron=maybe(STRING), max_attempts=INTEGER, environments=STRINGS, takes=STRING,
    needs=STRINGS,
)  # fmt: skip
JOB = response(
    task=STRING, environment=STRING, id=INTEGER, state=STRING, attempts=INTEGER, run_after=STRING, progress=ANY,
    error=maybe(STRING), result=ANY, history=listed(OBJECT), children=OBJECT, over=flag(),
)  # fmt: skip
ENTRY = response(
    id=INTEGER, at=STRING, who=STRING, token=maybe(STRING), address=maybe(STRING), action=STRING,
    environment=maybe(STRING), lane=maybe(STRING), target=maybe(STRING), outcome=STRING, detail=maybe(STRING),
)  # fmt: skip
FAMILY = response(
    True, environment=STRING, lane=STRING, fingerprint=STRING, shape=STRING, count=INTEGER, rows=INTEGER,
    buckets=listed(INTEGER), example=OBJECT, **{"class": maybe(STRING)},
)  # fmt: skip
FAMILIES = response(environment=STRING, recorded=flag(), unknown=STRINGS, families=listed(FAMILY), errors=ERRORS)
PROBLEM = response(True, type=STRING, title=STRING, status=INTEGER, detail=STRING)
