"""The gated claim for any gates: one transaction that walks the keys, locks, counts and takes.

A unit is what the gates of a lane see of a row: its keys, one for each group of gates. Units take turns. Each step
first locks the gate rows of some units and then counts the running rows. So the count stays valid until the commit; no
other claim takes rows of these keys before that. On SQLite the single writer has the same effect.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..database import Run
from ..lane.claim import Claim
from .gate_binding import BoundGates, KeylessShare
from .gate_rows import GateChange, GateRows, Spot
from .rules import LAG_SHARE, Allowed, GateState, Window, allowance, rate_in_force, refill_delay, tokens_now

if TYPE_CHECKING:
    from ..lane.lane_store import LaneStore

Unit = tuple[Any, ...]
#: Units locked in one step, and units read by one claim at most. The next claim continues with the rest.
_STEP, _MOST = 32, 2048
#: Seconds after which rows that running rows hold back are checked again, if no time is known.
HELD_AGAIN, _LEAST_WAIT = 1.0, 0.005


class LockingClaim:
    """The gated claim of one lane in this worker."""

    def __init__(self, store: LaneStore, dims: Sequence[BoundGates], rows: GateRows) -> None:
        self.store, self.rows, self.say = store, rows, store.statements
        self._dims = dims
        self.keyed = [dim for dim in dims if dim.phrase is not None]
        self.whole = [dim for dim in dims if dim.phrase is None]
        #: The last unit that got rows, by the keys that its rows have.
        self._last: dict[tuple[BoundGates, ...], Unit] = {}
        self.share = KeylessShare()
        self._kind = _BY_DIALECT[store.database.dialect.name]

    def of(self, store: LaneStore) -> LockingClaim:
        """The same for the store of one of the lane's shards."""
        return LockingClaim(store, self._dims, self.rows)

    async def claim(self, count: int) -> list[Claim]:
        """Claim rows of as many units as needed."""
        began = time.monotonic()
        step = await self.store.database.transact(
            lambda run: self._kind(self, run, count).take(), tolerant=self.store.tolerant
        )
        claims = self.store.make_claims([row for _, row in step.rows], began)
        for claim, (keys, _) in zip(claims, step.rows, strict=True):
            claim.gates = keys
        self.store.look_again = None
        if len(claims) < count and step.wait is not None:
            self.store.look_again = time.monotonic() + max(step.wait, _LEAST_WAIT)
        return claims

    def text(self, key: tuple[Any, ...], render: Callable[[], str]) -> str:
        """Return a cached statement. It is rendered again when the ready condition, or a test's clock, has changed."""
        texts, full = self.store._texts, (("gates", *key), self.store.clock.shift, self.store.passed.version)
        if full not in texts:
            texts[full] = render()
        return texts[full]

    def presences(self) -> Iterator[tuple[BoundGates, ...]]:
        """The combinations of keys that rows may have: all keys and, if keys may be NULL, each smaller set."""
        for chosen in itertools.product(*([True, False] if dim.nullable else [True] for dim in self.keyed)):
            yield tuple(dim for dim, there in zip(self.keyed, chosen, strict=True) if there)


class _Claim:
    """One claim in progress."""

    def __init__(self, walk: LockingClaim, run: Run, count: int) -> None:
        self.walk, self.run, self.count = walk, run, count
        self.store, self.gate_rows, self.say = walk.store, walk.rows, walk.say
        self.rows: list[tuple[dict[str, str], Any]] = []
        self.wait: float | None = None
        self._walked = 0
        self._room: dict[Spot, float] = {}
        self._why: dict[Spot, Allowed] = {}
        self._states: dict[Spot, GateState] = {}
        self._used: dict[Spot, int] = {}
        #: Keys as the table stores them: on SQLite a number is not equal to its text.
        self._raw: dict[Spot, Any] = {}

    @property
    def left(self) -> int:
        return self.count - len(self.rows)

    def take(self) -> _Claim:
        """Walk until the claim is full or nothing is left."""
        if not self.run(self.walk.text(("unpaused",), lambda: f"select 1 where {self.say.unpaused()}"), ()):
            return self
        # The lane's own gate row comes first in the lock order. The claim waits for it: without it, it could take
        # nothing.
        whole = [(dim.label, "") for dim in self.walk.whole]
        self._hold(self.walk.whole, whole, wait=True)
        if all(self._room[spot] > 0 for spot in whole):
            presences = list(self.walk.presences())
            if len(presences) > 1:
                whole_count, self.count = self.count, self.walk.share.of(self.count)
                for present in presences[:0:-1]:
                    self._walk(present)
                self.count = whole_count
            for present in presences:
                self._walk(present)
        else:
            self._note_wait(whole)
        self._write()
        return self

    def _walk(self, present: tuple[BoundGates, ...]) -> None:
        """Walk the units after the one that got rows last, then those from the start up to it."""
        start = self.walk._last.get(present) if present else None
        for after, until in [(start, None), (None, start)] if start is not None else [(None, None)]:
            while self.left > 0 and self._walked < _MOST:
                units = self._units(present, after, until, min(_STEP, self.left))
                if not units:
                    break
                after = units[-1]
                self._walked += len(units)
                self._serve(present, units)
                if not present:
                    break
        if self._walked >= _MOST and self.left > 0:
            self.wait = 0.0

    def _serve(self, present: tuple[BoundGates, ...], units: list[Unit]) -> None:
        keys = [{dim.label: str(part) for dim, part in zip(present, unit, strict=True)} for unit in units]
        wanted = dict.fromkeys(spot for parts in keys for spot in parts.items())
        self._raw |= {(dim.label, str(part)): part for unit in units for dim, part in zip(present, unit, strict=True)}
        self._hold(present, [spot for spot in wanted if spot not in self._room], wait=False)
        open_units = list(range(len(units)))
        while open_units and self.left > 0:
            asked: list[tuple[int, int]] = []
            left = self.left
            for i in list(open_units):
                spots = [*keys[i].items(), *((dim.label, "") for dim in self.walk.whole)]
                room = min((self._room.get(spot, 0.0) for spot in spots), default=math.inf)
                most = int(min(room, left))
                if most <= 0:
                    # What is kept for others of this step may come back: they may have fewer rows.
                    if left > 0 and not asked:
                        self._note_wait(spots)
                        open_units.remove(i)
                    continue
                asked.append((i, most))
                for spot in spots:
                    self._room[spot] -= most
                left -= most
            if not asked:
                break
            got = self._take(present, [(units[i], most) for i, most in asked])
            for (i, most), rows in zip(asked, got, strict=True):
                spots = [*keys[i].items(), *((dim.label, "") for dim in self.walk.whole)]
                for spot in spots:
                    self._room[spot] += most - len(rows)
                    self._used[spot] = self._used.get(spot, 0) + len(rows)
                self.rows += [(keys[i], row) for row in rows]
                if rows and present:
                    self.walk._last[present] = units[i]
                if len(rows) < most:
                    open_units.remove(i)

    def _note_wait(self, spots: Sequence[Spot]) -> None:
        """Rows of this unit are ready but held back: record how long to wait."""
        waits = []
        for spot in spots:
            if self._room.get(spot, 0.0) > 0:
                continue
            allowed = self._why.get(spot)
            if allowed is None:
                waits.append(0.02)  # another session holds the key at this moment
            elif self._used.get(spot) or allowed.most > 0:
                waits.append(self._next_token(spot))
            else:
                waits.append(allowed.wait if allowed.wait is not None else HELD_AGAIN)
        wait = max(waits, default=HELD_AGAIN)
        self.wait = wait if self.wait is None else min(self.wait, wait)

    def _next_token(self, spot: Spot) -> float:
        """This claim took all tokens: return the seconds until the next one."""
        group = next(dim.group for dim in (*self.walk.keyed, *self.walk.whole) if dim.label == spot[0])
        if group.rate is not None and (force := rate_in_force(group.rate, self._states[spot])) and force[0] > 0:
            return min((1.0 + LAG_SHARE) / force[0], HELD_AGAIN)
        if group.pace is not None:
            return min(group.pace.seconds, HELD_AGAIN)
        return HELD_AGAIN

    # -- gate rows

    def _hold(self, dims: Sequence[BoundGates], spots: list[Spot], *, wait: bool) -> None:
        """Lock gate rows, then count running rows, then compute how many may start."""
        if not spots:
            return
        long = [spot for spot in spots if self.gate_rows.too_long(spot[1])]
        self._why |= dict.fromkeys(long, Allowed(0, "too long a key"))
        spots = [spot for spot in spots if spot not in self._why]
        states = self.gate_rows.lock(self.run, spots, wait=wait)
        for dim in dims:
            mine = {key: state for (label, key), state in states.items() if label == dim.label}
            counts = self._running(dim, list(mine))
            for key, state in dim.overlay(self.run, mine).items():
                allowed = allowance(dim.group, state, *counts.get(key, (0, 0)))
                self._states[dim.label, key], self._why[dim.label, key] = state, allowed
                self._room[dim.label, key] = allowed.most
        for spot in (*spots, *self._why):
            self._room.setdefault(spot, 0.0)

    def _running(self, dim: BoundGates, keys: list[str]) -> dict[str, tuple[int, int]]:
        """Running rows by key, and how many of them this process runs, if a gate needs that."""
        if not keys or not (dim.group.counts_running or dim.group.process is not None):
            return {}
        text = self.walk.text(("count", dim.label), lambda: self._count(dim))
        if dim.phrase is None:
            n, mine = self.run(text, self._worker_value(dim))[0]
            return {"": (n, mine)}
        return self._running_by_key(text, dim, keys)

    def _worker_value(self, dim: BoundGates) -> Any:
        """This worker, as a parameter of ``_count``."""
        raise NotImplementedError

    def _running_by_key(self, text: str, dim: BoundGates, keys: list[str]) -> dict[str, tuple[int, int]]:
        raise NotImplementedError

    def _count(self, dim: BoundGates) -> str:
        """The statement that counts the running rows, and how many of them this worker runs."""
        raise NotImplementedError

    def _count_all(self, dim: BoundGates, worker_mark: str) -> str:
        """The same count without a key."""
        say = self.say
        worker = say.roles.get("worker") if dim.group.process is not None else None
        mine = f"count(case when {say.name(worker)} = {worker_mark} then 1 end)" if worker else "0"
        return f"select count(*), {mine} from {say.table} where {say.beyond.running()}"

    def _write(self) -> None:
        changes = []
        groups = {dim.label: dim.group for dim in (*self.walk.whole, *self.walk.keyed)}
        taken = {spot: used for spot, used in self._used.items() if used}
        timed = any(groups[label].rate or groups[label].pace for label, _ in taken)
        # The time at which the rows are taken: never earlier than their claimed_at.
        now = self.gate_rows.epoch(self.run) if timed else 0.0
        for (label, key), used in sorted(taken.items()):
            change, state = GateChange(label, key, {"touched_at": 0.0}), self._states[label, key]
            if (rate := groups[label].rate) is not None:
                tokens = tokens_now(rate, state)
                if tokens < math.inf:
                    # Keep a refill time that was delayed, or that another clock reading moved further ahead.
                    delay = max(-state.elapsed, 0.0) + refill_delay(rate, state, now - state.at)
                    change.values |= {"tokens": tokens - used, "refilled_at": state.at + delay}
            if (pace := groups[label].pace) is not None:
                window = Window.read(pace.seconds, state.cells, state.at)
                window.add(used, now)
                change.values["cells"] = window.text()
            changes.append(change)
        self.gate_rows.write(self.run, changes)

    # -- the lane's rows

    def _units(self, present: tuple[BoundGates, ...], after: Unit | None, until: Unit | None, most: int) -> list[Unit]:
        """The next units that have a ready row, in the order of their keys: a loose index scan."""
        if not present:
            return [()] if after is None else []
        text = self.walk.text(
            ("units", *(dim.label for dim in present), after is None, until is None),
            lambda: self._next_units(present, after is not None, until is not None),
        )
        return self._fetch_units(text, present, after, until, most)

    def _fetch_units(
        self, text: str, present: tuple[BoundGates, ...], after: Unit | None, until: Unit | None, most: int
    ) -> list[Unit]:
        raise NotImplementedError

    def _next_units(self, present: tuple[BoundGates, ...], after: bool, until: bool) -> str:
        """The statement of ``_units``. ``after`` and ``until``: whether it starts after a unit, and ends with one."""
        raise NotImplementedError

    def _of_units(self, present: tuple[BoundGates, ...]) -> tuple[str, list[str]]:
        """The parts of a unit, and the conditions for a ready row that has exactly these keys."""
        tests = [self.say.ready(), *(f"{dim.phrase} is not null" for dim in present if dim.nullable)]
        tests += [f"{dim.phrase} is null" for dim in self.walk.keyed if dim not in present]
        return ", ".join(str(dim.phrase) for dim in present), tests

    def _take(self, present: tuple[BoundGates, ...], asked: list[tuple[Unit, int]]) -> list[list[Any]]:
        """Claim up to this many rows of each unit. Returns the rows of each unit, in order."""
        absent = [f"{dim.phrase} is null" for dim in self.walk.keyed if dim not in present]
        return self.store.take_units(self.run, present, absent, asked)


class _PostgresClaim(_Claim):
    """One statement for all keys of a step."""

    def _worker_value(self, dim: BoundGates) -> Any:
        return (self.store.worker,) if dim.group.process is not None else ()

    def _running_by_key(self, text: str, dim: BoundGates, keys: list[str]) -> dict[str, tuple[int, int]]:
        rows = self.run(text, (json.dumps(keys), *self._worker_value(dim)))
        return {key: (running, mine) for key, running, mine in rows}

    def _count(self, dim: BoundGates) -> str:
        """$1: the keys, if any; then the worker, if needed."""
        if dim.phrase is None:
            return self._count_all(dim, "$1::text")
        return f"""select s.key, r.* from jsonb_array_elements_text($1::text::jsonb) as s(key)
cross join lateral ({self._count_all(dim, "$2::text")} and {dim.matches("s.key")}) r"""

    def _fetch_units(
        self, text: str, present: tuple[BoundGates, ...], after: Unit | None, until: Unit | None, most: int
    ) -> list[Unit]:
        return [tuple(row) for row in self.run(text, (most, *(after or ()), *(until or ())))]

    def _next_units(self, present: tuple[BoundGates, ...], after: bool, until: bool) -> str:
        """$1: how many units; then the parts of the unit to start after, and of the unit to end with."""
        say, width = self.say, len(present)
        names, tests = self._of_units(present)
        marks = [f"${i}::text::{present[(i - 2) % width].kind}" for i in range(2, 2 + 2 * width)]
        behind, end = marks[:width], marks[width:] if after else marks[:width]
        tests += [f"({names}) <= ({', '.join(end)})"] if until else []
        first = " and ".join([*tests, *([f"({names}) > ({', '.join(behind)})"] if after else [])])
        listed = ", ".join(f"{dim.phrase} as k{i}" for i, dim in enumerate(present))
        on = " and ".join([*tests, f"({names}) > ({', '.join(f'k.k{i}' for i in range(width))})"])
        return f"""with recursive k as (
  (select {listed} from {say.table} where {first} order by {names} limit 1)
  union all
  select _n.* from k cross join lateral (
    select {listed} from {say.table} where {on} order by {names} limit 1) _n
)
select {", ".join(f"k{i}::text" for i in range(width))} from k limit $1::bigint"""


class _SqliteClaim(_Claim):
    """One statement for each key: SQLite has no round trip to save."""

    def _worker_value(self, dim: BoundGates) -> Any:
        return {"worker": self.store.worker}

    def _running_by_key(self, text: str, dim: BoundGates, keys: list[str]) -> dict[str, tuple[int, int]]:
        counts = {}
        for key in keys:
            raw = self._raw.get((dim.label, key), key)
            running, mine = self.run(text, self._worker_value(dim) | {"key": raw})[0]
            counts[key] = (running, mine)
        return counts

    def _count(self, dim: BoundGates) -> str:
        """:worker, and one :key, if any."""
        text = self._count_all(dim, ":worker")
        return text if dim.phrase is None else f"{text} and {dim.matches(':key')}"

    def _fetch_units(
        self, text: str, present: tuple[BoundGates, ...], after: Unit | None, until: Unit | None, most: int
    ) -> list[Unit]:
        units: list[Unit] = []
        while len(units) < most:
            values = {f"a{i}": part for i, part in enumerate(after or ())}
            rows = self.run(text, values | {f"u{i}": part for i, part in enumerate(until or ())})
            if not rows:
                break
            if after is None:  # from the second unit on, there is one to start after
                return [tuple(rows[0]), *self._units(present, tuple(rows[0]), until, most - 1)]
            after = tuple(rows[0])
            units.append(after)
        return units

    def _next_units(self, present: tuple[BoundGates, ...], after: bool, until: bool) -> str:
        """One unit. The parts of the unit to start after are :a0 and so on, of the unit to end with :u0."""
        names, tests = self._of_units(present)
        behind, end = (", ".join(f":{letter}{i}" for i in range(len(present))) for letter in "au")
        tests += [f"({names}) <= ({end})"] if until else []
        tests += [f"({names}) > ({behind})"] if after else []
        return f"select {names} from {self.say.table} where {' and '.join(tests)} order by {names} limit 1"


_BY_DIALECT: dict[str, type[_Claim]] = {"postgresql": _PostgresClaim, "sqlite": _SqliteClaim}
