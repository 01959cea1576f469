"""A lane on PostgreSQL: the verbs that run its statements."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from ...clock import Clock
from ..asyncpg_pool import SingleStatement, rows_of
from ..database import Database, Run
from ..gates.gate_binding import BoundGates
from ..gates.locking_claim import LockingClaim
from ..json_documents import clean, plain
from .binding import Binding, fence_time
from .claim import Claim, Settlement, Swept
from .claim_start import ClaimStart
from .lane_store import LaneStore
from .postgres_statements import MOST, PostgresStatements
from .replan import Replan
from .settlements import encoding, fences
from .sweep import sweep


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
        self._texts = {}
        self._boundable = self.statements.bound() is not None
        self._horizon = ClaimStart()
        self._guise = Replan(dear=0.004, per_row=0.00003)
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
        bound = self._horizon.bound(began) if boundable else None
        rows = await self._claim(count, bound)
        now = time.monotonic()
        self._guise.claimed(now - began, count)
        if boundable:
            last = tuple(rows[-1][self._at[column]] for column, _ in self.binding.order) if rows else None
            self._horizon.claimed(
                last, full=len(rows) == count, count=count, began=began, now=now, bounded=bound is not None
            )
            self.look_again = self._horizon.look_again
        return self.make_claims(rows, began)

    def forget_bound(self) -> None:
        self._horizon, self.look_again = ClaimStart(), None

    async def _claim(self, count: int, bound: tuple[Any, ...] | None) -> Sequence[Any]:
        most = MOST if count <= MOST else count
        text = self._text(
            ("claim", most, bound is not None, self._guise.number),
            lambda: self._guise.of(self.statements.claim(most, bounded=bound is not None)),
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
        found: dict[Any, list[Any]] = {unit: [] for unit, _ in asked}
        for row in run(text, (document, *worker)):
            found[tuple(row[len(self.binding.columns) :])].append(row)
        return [found[unit] for unit, _ in asked]

    # -- settle, renew, read

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
            if values is not None:
                row.update(values[i])
            rows.append(row)
        return json.dumps(rows, default=plain, ensure_ascii=True)

    def settling(self, group: Sequence[Settlement]) -> Callable[[Run], set[int]]:
        kind, columns = group[0].kind, tuple(sorted(group[0].columns))
        if kind == "done" and not columns and self._in_arrays and not self.tolerant:
            text = self._text("done", self.statements.settle_done)
            return SingleStatement(text, self._arrays(group), lambda rows: set(rows[0][0] or ()))
        text = self._text(("settle", kind, columns), lambda: self.statements.settle(kind, columns))
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
        return SingleStatement(text, self._parameters(document), lambda rows: {row[0] for row in rows})

    def _arrays(self, group: Sequence[Settlement]) -> tuple[Any, ...]:
        claims = [settlement.claim for settlement in group]
        known, places = fences(claims)
        keys = map(list, zip(*[claim.key for claim in claims], strict=True))
        sent: list[Any] = [*keys, [place + 1 for place in places]]
        if fence_time(self.binding):
            sent.append([at for at, _ in known])
        if "attempts" in self.binding.roles:
            sent.append([count for _, count in known])
        return (*sent, self.worker) if self._asks_for_worker else tuple(sent)

    def _json(self, column: str, value: Any) -> Any:
        if isinstance(value, datetime) and value.tzinfo and "without time zone" in self.binding.sql_types[column]:
            value = value.astimezone(ZoneInfo(self.lane.timezone or "UTC")).replace(tzinfo=None)
        value = self.encode(column, value)
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    def read_claims(self, run: Run, claims: Sequence[Claim]) -> dict[int, tuple[bool, Sequence[Any]]]:
        text = self._text("read", self.statements.read)
        return {row[0]: (row[1], row[2:]) for row in run(text, self._parameters(self._document(claims)))}

    async def mine(self) -> list[Claim]:
        text = self._text("mine", lambda: self.statements.mine("$1::text", "$2"))
        values = (self.worker, self.opened_at) if fence_time(self.binding) else (self.worker,)
        rows = await self.database.read(rows_of(text, values))
        return self.find_claims(rows)

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
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

    async def progress(self, claim: Claim, value: Any) -> bool:
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
