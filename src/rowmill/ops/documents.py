"""Rows, counts, pauses, gates and workers as JSON documents: one form for the command line, the API and the pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from ..declare.gates import Group as Gates
from ..declare.lane import Lane
from ..declare.roles import COUNTERS, ROW_TIMES
from ..errors import RowmillError
from ..plural import counted, plural
from ..store import redact
from ..store.gates.gate_binding import BoundGates
from ..store.gates.pauses import Pause
from ..store.gates.shared_rate import SharedState
from ..store.inspect.gate_view import KeyView
from ..store.inspect.lane_view import MOST, SAMPLE, Counts, LaneView, Row, UncountedRows
from ..store.inspect.why_rules import Reason, WhyAnswer
from ..store.inspect.why_rules import ready_for as ready_for
from ..store.inspect.why_rules import span as span
from ..store.json_documents import DEPTH as DEPTH
from ..store.json_documents import too_deep as too_deep
from ..store.lane.row_keys import written
from ..store.lane.statements import INCARNATION


def from_now(seconds: float) -> str:
    """The time so many seconds from now, as ISO text in UTC."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def moment(value: Any) -> Any:
    """A time of a table as ISO text in UTC."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return datetime.fromtimestamp(value, UTC).isoformat()
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return value
    if isinstance(value, datetime):
        return (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)).isoformat()
    return value


def simple(value: Any) -> Any:
    """A column's value as JSON has it, or as text."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "\\x" + bytes(value).hex()
    return value


def role(view: LaneView, row: Row, name: str) -> Any:
    """The value a row has for a role; None where the lane does without."""
    column = view.binding.roles.get(name)
    value = row.values.get(column) if column else None
    if name == "worker" and value is not None and view.binding.incarnated:
        return str(value).partition(INCARNATION)[0]
    return value


def row_value(view: LaneView, row: Row, *, whole: bool = False) -> dict[str, Any]:
    """One row of a list; ``whole``: with all its columns instead, and the roles that each has.

    ``key`` is its id as text; ``ages`` are seconds by the database's clock, negative for what is to come.
    """
    names = ("worker", *COUNTERS, "error", "progress")
    roles = {name: role(view, row, name) for name in names if name in view.binding.roles}
    timed = {**view.binding.roles, **({"created_at": view.created} if view.created else {})}
    times = {name: moment(row.values.get(timed[name])) for name in ROW_TIMES if name in timed}
    document = {
        "environment": view.environment,
        "lane": view.lane.name,
        "id": list(row.id) if isinstance(row.id, tuple) else row.id,
        "key": written(row.id),
        "state": row.state,
        **roles,
        **times,
    }
    if row.state == "running":
        document |= {"running_seconds": row.ages.get("claimed_at"), "silent_seconds": row.silent_for}
    if not whole:
        return {**document, "ages": row.ages}
    columns = {column: simple(value) for column, value in row.values.items()}
    return {**document, "columns": columns, "roles": by_column(view)}


def by_column(view: LaneView) -> dict[str, list[str]]:
    """The roles that each column has."""
    columns: dict[str, list[str]] = {}
    for name, column in view.binding.roles.items():
        columns.setdefault(column, []).append(name)
    return columns


def counts_value(view: LaneView, counts: Counts) -> dict[str, Any]:
    """One lane's counts."""
    return {
        "environment": view.environment,
        "lane": view.lane.name,
        "table": view.binding.table.fullname,
        "counts": {state: None if n is None else min(n, MOST) for state, n in counts.states.items()},
        "at_least": [state for state, n in counts.states.items() if n is not None and n > MOST],
        "unknown": list(counts.unknown),
        "oldest_ready_seconds": counts.oldest_ready,
    }


def uncounted_value(rows: UncountedRows) -> dict[str, Any]:
    """Rows of a table that no lane counts."""
    kinds = [{"columns": {c: simple(v) for c, v in values.items()}, "rows": n} for values, n in rows.kinds]
    where = {"environment": rows.environment, "table": rows.table, "rows": rows.rows}
    return {**where, "at_least": rows.rows >= SAMPLE, "kinds": kinds}


def pause_value(pause: Pause, environment: str) -> dict[str, Any]:
    """A pause. ``until`` is null where it has no end."""
    endless = pause.left == math.inf
    return {
        "environment": environment,
        "lane": pause.target.lane or None,
        "by": pause.target.dim or None,
        "key": pause.target.key if pause.target.dim else None,
        "reason": pause.reason,
        "since": None if pause.since is None else from_now(-pause.since),
        "until": None if endless else from_now(pause.left),
        "seconds_left": None if endless else round(pause.left, 1),
    }


def worker_value(worker: dict[str, Any]) -> dict[str, Any]:
    """A worker as it is now: a silent one is dead; runs of a live one went on since its last heartbeat."""
    silent, alive = round(worker.pop("silent_for"), 1), worker.pop("alive")
    del worker["process"], worker["lock_id"]
    if alive:
        worker["current"] = [{**job, "seconds": round(job["seconds"] + silent, 1)} for job in worker["current"]]
    elif worker["state"] != "stopped":
        worker["state"] = "dead"
    return {**worker, "silent_seconds": silent}


def why_value(answer: WhyAnswer, environment: str, lane: str, key: str) -> dict[str, Any]:
    """Why a row is not running."""
    where = {"environment": environment, "lane": lane, "id": key, "state": answer.state}
    times = _times(answer.wait)
    goes_on = answer.state == "done" or (answer.state == "running" and answer.wait is None)
    return {
        **where,
        "reasons": [_reason_value(reason) for reason in answer.reasons],
        "runs_at": times["until"],
        "runs_in_seconds": times["seconds"],
        "by_itself": None if goes_on else answer.wait != math.inf,
    }


def _reason_value(reason: Reason) -> dict[str, Any]:
    since = {"since": None if reason.since is None else from_now(-reason.since)}
    return {"code": reason.code, "text": reason.text, **since, **_times(reason.wait)}


def _times(wait: float | None) -> dict[str, Any]:
    """``until`` and ``seconds`` are null where the end is not known, or there is none."""
    if wait is None or wait == math.inf:
        return {"until": None, "seconds": None}
    return {"until": from_now(wait), "seconds": round(wait, 1)}


def declared(group: Gates) -> list[str]:
    """A group's gates, in words."""
    phrases = []
    if group.concurrency is not None:
        phrases.append(f"at most {group.concurrency.limit} running")
    if group.process is not None:
        phrases.append(f"at most {group.process.limit} running in each process")
    if (rate := group.rate) is not None:
        if rate.adaptive is not None:
            phrases.append(f"adaptive rate, {rate.adaptive.least:g} to {rate.adaptive.most:g} s between starts")
        elif rate.source is not None:
            phrases.append(f"rate from {rate.source.table}.{rate.source.column} per {per(rate.per.total_seconds())}")
        else:
            starts = f"{rate.n:g} {plural(rate.n, 'start')} per {per(rate.per.total_seconds())}"
            phrases.append(f"{starts}, burst of {rate.capacity(rate.n):g}")
    if group.breaker is not None:
        cooldown = span(group.breaker.cooldown.total_seconds())
        phrases.append(f"breaker after {counted(group.breaker.failures, 'failure')}, for {cooldown}")
    if group.pace is not None:
        phrases.append(f"pace of {counted(group.pace.n, 'start')} per {per(group.pace.seconds)}")
    if group.closes:
        phrases.append("closed by refusals")
    return phrases


def shared_value(lane: Lane, state: SharedState | RowmillError) -> dict[str, Any]:
    """A rate over all environments; how many starts count now is null where its database does not answer."""
    assert lane.shared_rate is not None
    assert lane.shared_rate.shared is not None
    known, error = (state, None) if isinstance(state, SharedState) else (None, state.message)
    return {
        "lane": lane.name,
        "shared": redact(lane.shared_rate.shared),
        "limit": lane.shared_rate.n,
        "per_seconds": lane.shared_rate.per.total_seconds(),
        "used": round(known.used, 3) if known else None,
        "wait_seconds": _finite(known.wait) if known else None,
        "error": error,
    }


def per(seconds: float) -> str:
    return {1.0: "s", 60.0: "min", 3600.0: "h", 86400.0: "d"}.get(seconds, f"{seconds:g} s")


def gate_value(view: LaneView, dim: BoundGates, keys: Sequence[KeyView], limit: int) -> dict[str, Any]:
    """One group of gates with its first keys, up to ``limit``."""
    return {
        "environment": view.environment,
        "lane": view.lane.name,
        "by": dim.group.by,
        "label": dim.label,
        "declared": declared(dim.group),
        "keys": [key_value(key) for key in keys[:limit]],
        "more": len(keys) > limit,
    }


def key_value(view: KeyView) -> dict[str, Any]:
    """One key's state; durations in seconds, past ones left out."""
    state, group = view.state, view.dim.group
    open_circuit = any("break" in allowed.why for allowed in view.held)
    return {
        "key": view.key if view.dim.phrase is not None else None,
        "held_back": [{"by": a.why, "seconds": _finite(a.wait)} for a in view.held],
        "running": view.running if group.counts_running else None,
        "most": _most(view),
        "most_by_hand": state.most is not None and group.concurrency is not None,
        "tokens": None if view.tokens is None else round(view.tokens, 3),
        "streak": state.streak if group.breaker is not None else None,
        "half_open": group.breaker is not None and state.streak >= group.breaker.failures and not open_circuit,
        "delay_seconds": state.delay,
        "open_seconds": _ahead(state.open_for),
        "closed_seconds": _ahead(state.closed_for),
        "paused": (state.paused_for or 0.0) > 0,
        "paused_seconds": _ahead(state.paused_for),
        "reason": state.reason if (state.paused_for or 0.0) > 0 else None,
    }


def _most(view: KeyView) -> int | None:
    limit = view.dim.group.concurrency
    if limit is None:
        return None
    return view.state.most if view.state.most is not None else limit.limit


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == math.inf else round(seconds, 3)


def _ahead(seconds: float | None) -> float | None:
    return _finite(seconds) if seconds is not None and seconds > 0 else None
