"""A lane on PostgreSQL: the verbs that run its statements."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import sqlalchemy as sa

from ...clock import Clock
from ..database import Database, Run
from ..gates.gate_binding import BoundGates
from ..gates.locking_claim import LockingClaim
from ..json_documents import clean, plain
from ..postgres_database import SingleStatement, Together, rows_of
from .binding import Binding
from .claim import Claim, Settlement, Swept, encoding, fences
from .lane_store import LaneStore
from .postgres_statements import MOST, PostgresStatements
from .replan import Replan
from .sweep import sweep
from .waits import waiting_values

#: Rows that were taken, one full claim after another, from which on the head is worth passing over.
_FAR = 20_000
#: A claim from the head that took longer, so often in a row: one is a busy server, several are a long transaction.
_SLOW, _SLOW_PER_ROW, _SLOW_IN_A_ROW = 0.020, 0.00005, 3
#: Seconds from one claim from the head to the next: far on, where they are slow, and as a multiple of what one took.
_AGAIN_FAR, _AGAIN_SLOW, _AGAIN_SHARE = 0.25, 1.0, 10.0


class ClaimStart:
    """Where a claim begins to look: at the head of its index, or at a remembered lower bound. Times are monotonic.

    Every row that was claimed leaves an entry at the head of the index, and until a vacuum comes, each claim from the
    head walks them all: 8 µs a row became 13 after 300,000 rows. Behind a long transaction, where no vacuum can take
    them away, there is no end to it. A claim from where the last one ended walks none of them. What comes in below that
    (an urgent row, a retry, a row that was taken back or that somebody had locked) is found by claims from the head,
    made in between.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, ...] | None = None
        self._taken = self._slow = 0
        self._cost, self._head_at = 0.0, -math.inf
        #: When a claim that came back short proves nothing, and is to be made again.
        self.look_again: float | None = None

    def bound(self, now: float) -> tuple[Any, ...] | None:
        """Where a claim that is made now begins; None: at the head."""
        return self._last if now < self._again_at() else None

    def _again_at(self) -> float:
        least = _AGAIN_SLOW if self._slow >= _SLOW_IN_A_ROW else _AGAIN_FAR
        return self._head_at + max(least, _AGAIN_SHARE * self._cost)

    def claimed(
        self, last: tuple[Any, ...] | None, *, full: bool, count: int, began: float, now: float, bounded: bool
    ) -> None:
        """A claim was made. ``last``: the place in the order of the last row it brought.

        That is the bound from then on, also where a claim from the head came less far than the one before it: what has
        come in below is then taken in order, however much it is.
        """
        self._taken = self._taken + count if full else 0
        if not bounded:
            self._cost, self._head_at = now - began, now
            self._slow = self._slow + 1 if self._cost > _SLOW + _SLOW_PER_ROW * count else 0
        self.look_again = None
        if self._slow >= _SLOW_IN_A_ROW or self._taken >= _FAR:
            self._last = last if last is not None and None not in last else self._last
            if bounded and not full:
                self.look_again = self._again_at()
        else:
            self._last = None
            if bounded:
                self.look_again = now


class PostgresLane(LaneStore):
    """The verbs on PostgreSQL."""

    _say = PostgresStatements

    def __init__(
        self, binding: Binding, database: Database, clock: Clock, worker: str, incarnation: str, gates: bool = False
    ) -> None:
        super().__init__(binding, database, clock, worker, incarnation)
        own = (database.own("rowmill_workers"), database.own("rowmill_gates") if gates else None)
        self.statements: PostgresStatements = self._say(binding, clock, *own)
        self.statements.passed = self.passed
        self.statements.stale_runs = database.own("rowmill_stale_runs")
        self._texts = {}
        self._boundable = self.statements.bound() is not None
        self._claim_start = ClaimStart()
        self._replan = Replan(slow=0.004, per_row=0.00003)
        # Asked of the fence itself: a state's own text may hold a dollar sign and a number, too.
        self._in_arrays = self.statements.in_arrays
        self._asks_for_worker = "\0" in self.statements.fence("t", "", "", "\0")

    def _text(self, key: Any, render: Any) -> str:
        """A statement is rendered once, and again only when a test has moved the time, or rows are passed over."""
        key = (key, self.clock.shift, self.passed.version)
        if key not in self._texts:
            self._texts[key] = render()
        return self._texts[key]

    # -- claim

    async def claim_ungated(self, count: int) -> list[Claim]:
        """From the head of the index, or, where dead entries have piled up there, from the remembered lower bound."""
        began = time.monotonic()
        boundable = self._boundable and not self.tolerant
        bound = self._claim_start.bound(began) if boundable else None
        rows = await self._claim(count, bound)
        now = time.monotonic()
        if now > self._replan.again_at and now - began > self._replan.slow + self._replan.per_row * count:
            self._replan.was_slow()
        if boundable:
            last = tuple(rows[-1][self._at[column]] for column, _ in self.binding.order) if rows else None
            self._claim_start.claimed(
                last, full=len(rows) == count, count=count, began=began, now=now, bounded=bound is not None
            )
            self.look_again = self._claim_start.look_again
        return self.make_claims(rows, began)

    def forget_bound(self) -> None:
        super().forget_bound()
        self._claim_start, self.look_again = ClaimStart(), None

    async def _claim(self, count: int, bound: tuple[Any, ...] | None) -> Sequence[Any]:
        most = MOST if count <= MOST else count
        key = ("claim", most, bound is not None)
        text = self._text(
            (*key, self._replan.number),
            lambda: self._replan.of(self._text(key, lambda: self.statements.claim(most, bounded=bound is not None))),
        )
        worker = (self.worker,) if "worker" in self.binding.roles else ()
        return await self.claim_rows(text, (count, *worker, *(bound or ())))

    async def claim_rows(self, text: str, values: tuple[Any, ...]) -> Sequence[Any]:
        """The rows that a claim of one statement took. Where no column shows afterwards which these were, the reply
        must be readable the first time.
        """
        return await self.database.write(rows_of(text, values), tolerant=self.tolerant or not self.marked)

    @property
    def claims_in_transaction(self) -> bool:
        return isinstance(self.gated, LockingClaim)

    def take_units(
        self, run: Run, present: Sequence[BoundGates], absent: Sequence[str], asked: Sequence[tuple[Any, int]]
    ) -> list[list[Any]]:
        phrases = [str(dim.phrase) for dim in present]
        kinds = [dim.kind for dim in present]
        text = self._text(
            ("units", *(dim.label for dim in present)), lambda: self.statements.claim_units(phrases, kinds, absent)
        )
        document = json.dumps([{"n": n} | {f"k{i}": part for i, part in enumerate(unit)} for unit, n in asked])
        worker = (self.worker,) if "worker" in self.binding.roles else ()
        taken: dict[Any, list[Any]] = {unit: [] for unit, _ in asked}
        keys_at = len(self._at) + bool(self.lane.inputs)
        for row in run(text, (document, *worker)):
            taken[tuple(row[keys_at:])].append(row)
        return [taken[unit] for unit, _ in asked]

    # -- settle, renew, read

    async def keep_step(self, claim: Claim, table: str, name: str, result: Any) -> bool:
        say = self.statements
        text = f"""{say._held(say.sent(extra=("_name text", "_result jsonb")))}
insert into {table} (job_id, name, result) select held._k0, held._name, held._result from held
on conflict (job_id, name) do update set result = excluded.result
returning 1"""
        document = self._document([claim], [{"_name": name, "_result": clean(result)}])
        return bool(await self.database.write(lambda run: run(text, self._parameters(document))))

    def _decoder(self, kind: sa.types.TypeEngine[Any]) -> Any:
        # asyncpg gives numbers as they are; its dialect's own processor wants to know the wire type.
        return None if isinstance(kind, (sa.Numeric, sa.Float)) else super()._decoder(kind)

    def _parameters(self, document: str) -> tuple[str, ...]:
        return (document, self.worker) if self._asks_for_worker else (document,)

    def _document(self, claims: Sequence[Claim], values: Sequence[dict[str, Any]] | None = None) -> str:
        rows = []
        times: dict[Any, Any] = {None: None}  # one claim's rows all have the same
        for i, claim in enumerate(claims):
            at = claim.claimed_at
            if at not in times:
                times[at] = plain(at)
            row: dict[str, Any] = {"_ord": i, "_at": times[at], "_n": claim.attempts}
            for k, part in enumerate(claim.key):
                row[f"_k{k}"] = part
            if claim.inputs is not None:
                row["_inputs"] = claim.inputs
            if values is not None:
                row.update(values[i])
            rows.append(row)
        return json.dumps(rows, default=plain, ensure_ascii=True)

    def inputs_of(self, row: Sequence[Any]) -> Any:
        return row[len(self._at)]

    def settling(self, group: Sequence[Settlement], *, compare: bool = True) -> Callable[[Run], set[int]]:
        kind, columns = group[0].kind, tuple(sorted(group[0].columns))
        if kind == "done" and not columns and self._in_arrays and not self.tolerant:
            text = self._text(("done", compare), lambda: self.statements.settle_done(compare=compare))
            arrays = self._arrays(group, compared=compare and bool(self.lane.inputs))
            return SingleStatement(text, arrays, lambda rows: set(rows[0][0] or ()))
        then = None
        if group[0].wait is not None and self.waits is not None:
            text, then = self.statements.settle_wait(group[0].wait.until, columns, self.waits.table)
        else:
            text = self._text(
                ("settle", kind, columns, compare), lambda: self.statements.settle(kind, columns, compare=compare)
            )
        if kind == "stale" and self.statements.bounded:
            then = self._text("note stale", self.statements.note_stale_runs)
        with encoding():
            values = [
                {
                    "_error": s.error,
                    "_delay": s.delay.total_seconds() if s.delay is not None else 0,
                    **{f"_v{i}": self._json(column, s.columns[column]) for i, column in enumerate(columns)},
                }
                for s in group
            ]
            document = self._document([s.claim for s in group], values)
        settle = SingleStatement(text, self._parameters(document), lambda rows: {row[0] for row in rows})
        return settle if then is None else Together(lambda run: self._settled(run, group, settle, then))

    def _settled(self, run: Run, group: Sequence[Settlement], settle: SingleStatement[set[int]], then: str) -> set[int]:
        """Write settlements, and ``then`` remember something of those that were written."""
        if written := settle(run):
            done = [s for i, s in enumerate(group) if i in written]
            values = [waiting_values(s.claim, s.wait) if s.wait is not None else {} for s in done]
            run(then, (self._document([s.claim for s in done], values),))
        return written

    def _arrays(self, group: Sequence[Settlement], *, compared: bool) -> tuple[Any, ...]:
        claims = [settlement.claim for settlement in group]
        known, places = fences(claims)
        keys = map(list, zip(*[claim.key for claim in claims], strict=True))
        sent: list[Any] = [*keys, [place + 1 for place in places]]
        if compared:
            sent.append([claim.inputs for claim in claims])
        if self.binding.fence_time:
            sent.append([at for at, _ in known])
        if "attempts" in self.binding.roles:
            sent.append([count for _, count in known])
        return (*sent, self.worker) if self._asks_for_worker else tuple(sent)

    def _json(self, column: str, value: Any) -> Any:
        if isinstance(value, datetime) and value.tzinfo and "without time zone" in self.binding.sql_types[column]:
            value = value.astimezone(ZoneInfo(self.lane.timezone or "UTC")).replace(tzinfo=None)
        value = self.encode(column, value)
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    def _read_claims(self, run: Run, claims: Sequence[Claim]) -> dict[int, tuple[bool, Sequence[Any]]]:
        text = self._text("read", self.statements.read)
        return {row[0]: (row[1], row[2:]) for row in run(text, self._parameters(self._document(claims)))}

    async def mine(self) -> list[Claim]:
        text = self._text("mine", lambda: self.statements.mine("$1::text", "$2"))
        values = (self.worker, self.opened_at) if self.binding.fence_time else (self.worker,)
        rows = await self.database.read(rows_of(text, values))
        return self.find_claims(rows)

    async def _renew(self, claims: Sequence[Claim]) -> list[Claim]:
        text = self._text("renew", self.statements.renew)
        document = self._document(claims)
        rows = await self.database.write(rows_of(text, self._parameters(document)))
        renewed = []
        for position, moment in rows:
            claim = claims[position]
            if self.binding.renew == "claimed_at":
                claim.claimed_at = moment  # the fence moves with the renewal
            renewed.append(claim)
        return renewed

    async def _progress(self, claim: Claim, value: Any) -> bool:
        text = self._text("progress", self.statements.progress)
        document = self._document([claim], [{"_v0": clean(value)}])
        return bool(await self.database.write(rows_of(text, self._parameters(document))))

    async def sweep(self, lease: timedelta, most: int = 1000) -> list[Swept]:
        text = self._text(("sweep", lease), lambda: self.statements.sweep(lease))

        def swept(row: Any) -> Swept:
            return Swept(row[2] if len(row) == 3 else tuple(row[2:]), row[0], row[1])

        return await sweep(self, lambda run: [swept(row) for row in run(text, (most,))], lease, most)

    def ready_probe(self) -> str:
        return self._text("ready", self.statements.ready_probe)

    def running_probe(self) -> str:
        return self._text("running", self.statements.running_probe)
