"""A lane's gates as an operator sees them: the declarations, the state of each key, and what may be changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import Busy, DeclarationError, Refused, did_you_mean
from ..database import Run
from ..gates.gate_binding import BoundGates, bind_gates
from ..gates.gate_learning import GateLearning
from ..gates.gate_rows import GateChange, GateRows
from ..gates.rules import Allowed, GateState, Learned, allowances, rate_in_force, tokens_now
from ..lane.row_keys import Placeholders
from ..own import schema
from .lane_view import LaneView

#: The most keys that a list reads. With a table of the user's own, each key costs a query.
_CANDIDATES, _STEP = 500, 500
#: A gate's row in its initial state, except for its pause.
_FRESH: Mapping[str, Any] = {
    "tokens": None, "refilled_at": None, "delay": None, "cells": None, "streak": 0, "open_until": None,
    "closed_until": None, "most": None, "last_success_at": None, "last_failure_at": None,
}  # fmt: skip


#: Values that an operator may set, and the gate that each belongs to; None: any. Times are seconds from now.
SETTABLE: Mapping[str, str | None] = {
    "most": "concurrency", "tokens": "rate", "streak": "breaker", "open": "breaker", "delay": "rate", "closed": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeyView:
    """One key of one group of gates."""

    dim: BoundGates
    key: str
    state: GateState
    running: int
    #: What each gate allows.
    allowed: tuple[Allowed, ...]

    @property
    def held(self) -> list[Allowed]:
        """The gates that allow nothing."""
        return [allowed for allowed in self.allowed if allowed.most <= 0]

    @property
    def tokens(self) -> float | None:
        """The tokens in the bucket; None if there is no bucket, or no limit."""
        rate = self.dim.group.rate
        if rate is None or rate_in_force(rate, self.state) is None:
            return None
        return tokens_now(rate, self.state)

    @property
    def remarkable(self) -> bool:
        """Whether its state differs from that of an unused key."""
        state, tokens = self.state, self.tokens
        force = rate_in_force(self.dim.group.rate, state) if self.dim.group.rate else None
        drawn = tokens is not None and force is not None and tokens < force[1]
        return bool(self.held or self.running or state.streak or drawn) or (state.most, state.delay) != (None, None)


class LaneGates:
    """The gates of one lane in one environment. Made by ``lane_gates``."""

    def __init__(self, view: LaneView, dims: Sequence[BoundGates], rows: GateRows) -> None:
        self.view, self.dims, self.rows, self.statements = view, tuple(dims), rows, view.statements
        self.lane = view.lane

    # -- which group, which key

    def choose(self, by: str | None, *, keyed: bool, needs: Sequence[str] = ()) -> BoundGates:
        """Find a group by its key (with ``keyed`` False: the whole lane's group) that has every gate in ``needs``."""
        where = f"lane {self.lane.name!r}"
        dims = [dim for dim in self.dims if (dim.phrase is not None) == keyed]
        if not dims:
            what = "by a key" if keyed else "for the whole lane"
            raise DeclarationError(
                f"{where} has no gate {what}",
                hint=self._others(keyed) or "gates=[Concurrency(2, by=...)] in its declaration",
            )
        if by is not None:
            known = {name for dim in dims for name in (dim.label, dim.group.by or "")}
            if by not in known:
                raise DeclarationError(f"{where} has no gate by {by!r}", hint=did_you_mean(by, known))
            dims = [dim for dim in dims if by in (dim.label, dim.group.by)]
        elif len({dim.group.by for dim in dims}) > 1:
            raise DeclarationError(
                f"{where} has gates by several keys", hint=" or ".join(f"--by {dim.label!r}" for dim in dims)
            )
        able = [dim for dim in dims if all(getattr(dim.group, kind) is not None for kind in needs)]
        if not able:
            of = f" by {dims[0].group.by}" if keyed else " for the whole lane"
            raise DeclarationError(f"{where} has no {' and '.join(needs)} gate{of}", hint="rowmill gates lists them")
        return able[0]

    def _others(self, keyed: bool) -> str | None:
        others = [dim for dim in self.dims if (dim.phrase is not None) != keyed]
        if not others:
            return None
        return "leave the key out: its gates are for the whole lane" if keyed else f"name a key of {others[0].group.by}"

    async def known(self, dim: BoundGates, key: str) -> tuple[str, bool]:
        """Return a key as the gate's rows spell it, and whether any row of the lane's table has it."""
        if not dim.kind:
            test = f"cast({dim.phrase} as text) = :key{self.statements.shard()}"
            text = f"select {dim.phrase} from {self.statements.table} where {test} limit 1"
            return key, bool(await self.view.database.read(lambda run: run(text, {"key": key})))
        marks = Placeholders(self.view.binding)
        mark = marks.add(key)
        try:
            key_text = (await self.view.ask(f"select ({mark}::{dim.kind})::text", marks))[0][0]
        except Refused as error:
            raise DeclarationError(
                f"lane {self.lane.name!r}: {key!r} is not a key of {dim.group.by}: {error.message}",
                hint="rowmill gates lists keys",
            ) from error
        text = f"select 1 from {self.statements.table} where {dim.matches(mark)}{self.statements.shard()} limit 1"
        try:
            return key_text, bool(await self.view.ask(text, marks))
        except Busy:  # too many rows, and no index on this key
            return key_text, True

    # -- read

    async def keys(self, dim: BoundGates, limit: int, key: str | None = None) -> list[KeyView]:
        """Return the keys with a notable state, those held back first; or only the requested key, in any state."""
        views = await self.view.database.read(lambda run: self._keys(run, dim, key))
        shown = views if key is not None else [view for view in views if view.remarkable]
        shown.sort(key=lambda view: (not view.held, -view.running, -view.state.streak, view.key))
        return shown[:limit]

    def _keys(self, run: Run, dim: BoundGates, key: str | None) -> list[KeyView]:
        rows = self.rows
        counts = self.running(run, dim)
        if dim.phrase is None:
            wanted = [""]
        elif key is not None:
            wanted = [key]
        else:
            wanted = list(dict.fromkeys([*self._stated(run, dim), *counts]))[:_CANDIDATES]
        states = {key: GateState(key) for key in wanted}
        for start in range(0, len(wanted), _STEP):
            spots = [(dim.label, key) for key in wanted[start : start + _STEP]]
            states |= {key: state for (_, key), state in rows.read(run, spots).items()}
        views = []
        for key, state in dim.overlay(run, states).items():
            running = counts.get(key, 0)
            # Only the process itself knows whether it has room.
            allowed = [a for a in allowances(dim.group, state, running, 0) if "of this process" not in a.why]
            views.append(KeyView(dim, key, state, running, tuple(allowed)))
        return views

    def running(self, run: Run, dim: BoundGates) -> dict[str, int]:
        """Running rows by key."""
        source = f"from {self.statements.table} where {self.statements.running()}"
        if dim.phrase is None:
            return {"": run(f"select count(*) {source}", ())[0][0]}
        text = f"select {self.text(dim)} as k, count(*) as n {source} and {dim.phrase} is not null group by 1"
        return {row[0]: row[1] for row in run(f"{text} order by n desc limit {_CANDIDATES}", ())}

    def text(self, dim: BoundGates) -> str:
        """The SQL for a row's key, as text."""
        return f"cast({dim.phrase} as text)"

    def _stated(self, run: Run, dim: BoundGates) -> list[str]:
        """Keys with a stored state: in rowmill's table, and in the user's own."""
        rows, now = self.rows, self.rows.now()
        shut = f"(paused_until > {now} or closed_until > {now} or open_until > {now})"
        text = f"""select key from {rows.table} where {self._of([dim])}
and ({shut} or streak > 0 or most is not null or delay is not null or tokens is not null)
order by case when {shut} then 0 when streak > 0 then 1 else 2 end, refilled_at desc, key limit {_CANDIDATES}"""
        keys = [row[0] for row in run(text, ())]
        if (own := dim.breaker) is not None:
            names = dim.columns
            text = f"""select cast({own.key} as text) from {own.table}
where {own.quote(names.streak)} > 0 or {own.until(names.open_until)} > 0 limit {_CANDIDATES}"""
            keys = [*(row[0] for row in run(text, ())), *keys]
        return keys

    async def budgets(self) -> list[tuple[str, str | None]]:
        """The budgets of the environment: their names, and what was used of each."""
        text = (
            f"select dim, cells from {self.rows.table} where lane = '' and dim like 'budget:%' order by dim limit 100"
        )
        return [(row[0], row[1]) for row in await self.view.database.read(lambda run: run(text, ()))]

    # -- write

    @staticmethod
    def change(dim: BoundGates, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values that an operator sets (names as in ``SETTABLE``) to the columns of a key's row."""
        if "delay" in given and (dim.group.rate is None or dim.group.rate.adaptive is None):
            raise DeclarationError(
                "only an adaptive rate has a delay, and this rate is not adaptive", hint="tokens=..."
            )
        columns = {f"{name}_until" if name in ("open", "closed") else name: value for name, value in given.items()}
        if "open_until" in columns and "streak" not in columns and dim.group.breaker is not None:
            # An open breaker needs both a streak and a time, so set or clear both.
            columns["streak"] = 0 if columns["open_until"] is None else dim.group.breaker.failures
        return columns

    async def write(self, dim: BoundGates, key: str, values: Mapping[str, Any]) -> None:
        """Change a key's row. State in the user's own table is changed there."""
        await self.view.database.transact(lambda run: self._write(run, dim, [key], values))

    def _write(self, run: Run, dim: BoundGates, keys: Sequence[str], values: Mapping[str, Any]) -> None:
        self.rows.lock(run, [(dim.label, key) for key in keys], wait=True)
        changes = []
        for key in keys:
            learned = Learned(dict(values))
            if dim.breaker is not None:
                for name in ("last_success_at", "last_failure_at"):  # the user's own history
                    learned.values.pop(name, None)
                GateLearning(self.view.store, [dim], self.rows).write_own(run, dim, key, learned)
            if learned.values.get("tokens") is not None:
                learned.values["refilled_at"] = self.rows.epoch(run)
            changes.append(GateChange(dim.label, key, learned.values))
        self.rows.write(run, changes)

    async def count(self, dims: Sequence[BoundGates]) -> int:
        """Count the rows that a reset of all keys would write."""
        text = f"select count(*) from {self.rows.table} where {self._of(dims)}"
        return int((await self.view.database.read(lambda run: run(text, ())))[0][0])

    async def reset(self, dims: Sequence[BoundGates], key: str | None) -> int:
        """Reset gates to their initial state; pauses stay. Returns how many rows were written."""
        written = 0
        for dim in dims:
            if key is not None or dim.phrase is None:
                one = key if key is not None and dim.phrase is not None else ""
                written += await self.view.database.transact(lambda run, dim=dim, key=one: self._reset(run, dim, key))  # type: ignore[misc]
                continue
            last = ""
            while keys := await self._page(dim, last):
                await self.view.database.transact(lambda run, dim=dim, keys=keys: self._write(run, dim, keys, _FRESH))  # type: ignore[misc]
                written, last = written + len(keys), keys[-1]
        return written

    def _reset(self, run: Run, dim: BoundGates, key: str) -> int:
        """Reset one key, if it has a state: in rowmill's table, or in the user's own."""
        own = dim.overlay(run, {key: GateState(key)})[key]
        if not self.rows.read(run, [(dim.label, key)]) and not (own.streak or own.open_for):
            return 0
        self._write(run, dim, [key], _FRESH)
        return 1

    async def _page(self, dim: BoundGates, after: str) -> list[str]:
        text = f"""select key from {self.rows.table}
where {self._of([dim])} and key > {self.rows.literal(after)} order by key limit {_STEP}"""
        return [row[0] for row in await self.view.database.read(lambda run: run(text, ()))]

    def _of(self, dims: Sequence[BoundGates]) -> str:
        labels = ", ".join(self.rows.literal(dim.label) for dim in dims)
        return f"lane = {self.rows.literal(self.rows.lane)} and dim in ({labels})"


async def lane_gates(view: LaneView) -> LaneGates:
    """Bind a lane's gates for reading; raises DeclarationError for an invalid gate."""
    rows = GateRows.open(view.database, view.store.clock, view.lane.name)
    return LaneGates(view, await bind_gates(view.binding, view.database, view.statements, rows), rows)


async def has_table(view: LaneView) -> bool:
    """Whether the table of gates exists. The first worker or the first pause creates it."""
    return (await schema.taken(view.database)).has(schema.GATES)
