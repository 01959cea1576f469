"""The store of one lane in one environment: the verbs, and all that is the same on both databases.

claim, settle, renew, held, sweep, progress: six verbs. Each dialect renders and runs their statements; what a
batch does when one row is refused, locked or lost is decided here.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from ...clock import Clock
from ...declare.states import FINAL, options
from ...errors import Busy, Refused, Unreachable, UnreadableReply, Unserved, WrongResult
from ..bounded_text import ERROR_LENGTH, bounded
from ..database import Database, Run, runner
from ..driver_errors import translate, translated
from ..handler_connections import shielded
from ..transactions import PlainTx, Tx
from ..unreadable_values import inside
from .binding import Binding
from .claim import Changed, Claim, Expired, Holder, HookFailed, Report, Settled, Settlement, Swept, groups
from .column_readers import Reader, Readers, reading
from .expiry import expire
from .refused_rows import RefusedRow, RefusedRows, set_aside
from .result_values import ColumnChecks
from .row_keys import Key
from .shards import Shards
from .statements import INCARNATION, Statements

if TYPE_CHECKING:
    from ..gates.claim_by_key import ClaimByKey
    from ..gates.gate_binding import BoundGates
    from ..gates.gate_learning import GateLearning
    from ..gates.locking_claim import LockingClaim
    from .row_watch import RowWatch
    from .waits import WaitingRows


#: Tries of one claim that is refused again and again; rows that it asks for at most.
_CAREFUL, MOST_AT_ONCE = 12, 1 << 20


class LaneStore:
    """Claims, settles, renews and sweeps the rows of one lane. Made by ``open_lane``."""

    statements: Statements
    _texts: dict[Any, str]
    #: How long it waits, time after time, before a row that somebody has locked is settled again.
    locked_pauses: Sequence[float] = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)

    def __init__(self, binding: Binding, database: Database, clock: Clock, worker: str, incarnation: str) -> None:
        self.binding = binding
        self.lane = binding.lane
        self.database = database
        self.clock = clock
        # Where it is the whole fence, an id is not reused from process to process.
        self.worker = f"{worker}{INCARNATION}{incarnation}" if binding.incarnated else worker
        self._at = {column: i for i, column in enumerate(binding.columns)}
        #: Replies are read so that a value which Python cannot hold costs its own run alone (see ``unreadable``).
        self.tolerant = False
        #: Rows that may not be claimed: passed over by the claim, and told to the worker once.
        self.passed = RefusedRows(binding)
        self.refused_rows: list[RefusedRow] = []
        self._at_once = MOST_AT_ONCE
        #: A row of this lane was claimed: where another is refused, that is the row's own fault, not the declaration's.
        self.claims_work = False
        #: What reads a column from a claimed row, by its name; made when it is first asked for.
        self.readers = Readers(self.reader)
        self.sign(self.worker)
        #: The check of each column that a handler returns, by its name; made when it is first returned.
        self.checks = ColumnChecks(self)
        roles = [binding.roles.get(role) for role in ("attempts", "failures", "max_attempts")]
        #: Where the key, the claim's time and the counters stand in a row: looked up once, read for every claim.
        self._key_at = [self._at[column] for column in binding.key]
        self._places = [self._at[column] if column else None for column in (binding.fence_time, *roles)]
        #: The database's time when this store was opened, in the claimed_at column's own form: nothing older is ours.
        self.opened_at: Any = None
        #: Monotonic time before which a short claim proves nothing (see the PostgreSQL claim); None: it does.
        self.look_again: float | None = None
        #: The claim where gates hold rows back, and what gates learn from runs; None on a lane without gates.
        self.gated: ClaimByKey | LockingClaim | None = None
        self.gate_learning: GateLearning | None = None
        #: What all workers remember about single rows; None where the tables for that are not there.
        self.watched: RowWatch | None = None
        #: Rows that wait for a condition; None where the table for that is not there, or nothing holds a row back.
        self.waits: WaitingRows | None = None
        #: The shards of a lane that has several; None where it has one or none, and in the store of one shard.
        several = binding.bucket is None and any(len(values) > 1 for values in binding.shard.values())
        self.shards: Shards | None = Shards(self) if several else None

    def sign(self, worker: str) -> None:
        """Claim under this name from now on: what the worker column gets."""
        self.worker = worker
        marked = worker if "worker" in self.binding.roles else None
        binding = self.binding
        self._holder = Holder(self.lane.name, binding.environment, marked, self.readers, self._at, binding.bucket)

    def tolerate(self) -> None:
        """From now on read values that Python cannot hold as Unreadable: slower, and sure."""
        self.tolerant, self.readers = True, Readers(self.reader)
        self.sign(self.worker)

    # -- the verbs

    async def claim(self, count: int) -> list[Claim]:
        """Take up to ``count`` ready rows, in the lane's order; with gates, in that order within each key."""
        if self.shards is not None:
            return await self.shards.claim(count)
        try:
            return await self._claim_or_divide(count)
        except UnreadableReply:
            if self.tolerant:
                raise
            self.tolerate()
            if self.claims_in_transaction:  # so nothing was claimed
                return await self._claim_or_divide(count)
            raise  # committed: the rows are this worker's, which ``mine`` finds

    async def _claim_or_divide(self, count: int) -> list[Claim]:
        claim = self.gated.claim if self.gated is not None else self.claim_ungated
        if self.passed.version:
            return await self._claim_carefully(claim, count)
        try:
            return await claim(count)
        except (UnreadableReply, Unserved):
            raise
        except Refused:
            return await self._claim_carefully(claim, count)

    async def _claim_carefully(self, claim: Callable[[int], Awaitable[list[Claim]]], count: int) -> list[Claim]:
        """The claim of a lane in which some row was refused. Fewer rows at a time where none is refused by itself."""
        wanted = count
        for _ in range(_CAREFUL):
            self.passed.expire(time.monotonic())
            count = min(count, self._at_once)
            try:
                claims = await claim(count)
            except (UnreadableReply, Unserved):
                raise
            except Refused:
                rows, refused = await set_aside(self)
                self.refused_rows += rows
                if not refused and count == 1:
                    raise
                self._at_once = count if refused else count // 2
            else:
                self._at_once = min(2 * self._at_once, MOST_AT_ONCE)
                more = time.monotonic() if len(claims) == count < wanted else math.inf
                soonest = min(self.look_again or math.inf, self.passed.next_time(), more)
                self.look_again = soonest if soonest < math.inf else None
                return claims
        self.look_again = time.monotonic()
        return []

    @property
    def claims_in_transaction(self) -> bool:
        """A claim whose reply cannot be read is rolled back."""
        raise NotImplementedError

    async def claim_ungated(self, count: int) -> list[Claim]:
        """The claim of a lane without gates. One statement, committed."""
        raise NotImplementedError

    def take_units(
        self, run: Run, present: Sequence[BoundGates], absent: Sequence[str], asked: Sequence[tuple[Any, int]]
    ) -> list[list[Any]]:
        """Claim up to so many rows of each unit of keys, inside a transaction; the rows of each, in order."""
        raise NotImplementedError

    def forget_bound(self) -> None:
        """Let the next claim look everywhere, whatever it costs."""
        for store in self.shards.opened if self.shards is not None else ():
            store.forget_bound()

    def forget_texts(self) -> None:
        """Render every statement again: what makes a row ready has changed."""
        self._texts.clear()
        for store in self.shards.opened if self.shards is not None else ():
            store.forget_texts()

    # -- a lane of several shards

    def for_bucket(self, bucket: Any) -> LaneStore:
        """The same store for one of the lane's shards."""
        binding, say = replace(self.binding, bucket=bucket), self.statements
        kind: Any = type(self)  # a dialect's own class knows whether there are gates
        store: LaneStore = kind(binding, self.database, self.clock, "", "", say.gates is not None)
        store.passed = store.statements.passed = self.passed
        store.statements.stale_runs, store.opened_at = say.stale_runs, self.opened_at
        store.watched, store.waits, store.gate_learning = self.watched, self.waits, self.gate_learning
        store.gated = self.gated.of(store) if self.gated is not None else None  # type: ignore[arg-type]
        if self.tolerant:
            store.tolerate()
        store.sign(self.worker)
        return store

    def store_of(self, claim: Claim) -> LaneStore:
        """The store of the shard that a row was claimed in."""
        return self if self.shards is None or claim.holder.bucket is None else self.shards.of(claim.holder.bucket)

    def apart(self, claims: Sequence[Claim]) -> list[tuple[LaneStore, list[int]]]:
        """Claims by their shards: the store of each, and the positions of its claims."""
        if self.shards is None:
            return [(self, list(range(len(claims))))]
        parts: dict[Any, list[int]] = {}
        for position, claim in enumerate(claims):
            parts.setdefault(claim.holder.bucket, []).append(position)
        return [(self.store_of(claims[positions[0]]), positions) for positions in parts.values()]

    def groups(self, batch: Sequence[Settlement]) -> list[list[Settlement]]:
        """Settlements that one statement can write: of one shard, too."""
        if self.shards is None:
            return groups(batch)
        parts = self.apart([settlement.claim for settlement in batch])
        return [group for _, positions in parts for group in groups([batch[i] for i in positions])]

    def settling(self, group: Sequence[Settlement], *, compare: bool = True) -> Callable[[Run], set[int]]:
        """What writes settlements of one kind and one set of columns, and says which (by position) were written.

        ``compare``: an end is written only where the row's inputs are as they were claimed.
        """
        raise NotImplementedError

    def inputs_of(self, row: Sequence[Any]) -> Any:
        """The inputs of a row as a claim returned it, in the form in which they are compared."""
        raise NotImplementedError

    def read_claims(self, run: Run, claims: Sequence[Claim]) -> dict[int, tuple[bool, Sequence[Any]]]:
        """The rows behind claims as they are now, by position: whether the claim holds, and the row."""
        rows: dict[int, tuple[bool, Sequence[Any]]] = {}
        for store, positions in self.apart(claims):
            read = store._read_claims(run, [claims[i] for i in positions])
            rows |= {positions[i]: row for i, row in read.items()}
        return rows

    def _read_claims(self, run: Run, claims: Sequence[Claim]) -> dict[int, tuple[bool, Sequence[Any]]]:
        raise NotImplementedError

    async def mine(self) -> list[Claim]:
        """Running rows that carry this process's own mark: claims whose reply was lost. Only where the mark is sure."""
        raise NotImplementedError

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Extend the leases of all these in one statement for each shard; which of them were renewed."""
        renewed = []
        for store, positions in self.apart(claims):
            renewed += await store._renew([claims[i] for i in positions])
        return renewed

    async def _renew(self, claims: Sequence[Claim]) -> list[Claim]:
        raise NotImplementedError

    async def sweep(self, lease: timedelta, most: int = 1000) -> list[Swept]:
        """Take back rows whose lease ran out; state and lease are checked in the statement that writes."""
        raise NotImplementedError

    async def expire(self, most: int = 1000) -> list[Expired]:
        """End up to ``most`` rows that expired before they were started; none on a lane whose rows do not."""
        if not self.binding.expires:
            return []
        return await expire(self, self._text(("expire", most), lambda: self.statements.expire(most)), most)

    async def forget_stale_runs(self) -> None:
        """Forget notes of rows whose inputs changed long ago."""
        if self.statements.bounded:
            await self.database.write(lambda run: run(self.statements.forget_old(), ()))

    def _text(self, key: Any, render: Any) -> str:
        """A statement, rendered once."""
        raise NotImplementedError

    async def progress(self, claim: Claim, value: Any) -> bool:
        """Write the progress column; False if the claim was lost."""
        return await self.store_of(claim)._progress(claim, value)

    async def _progress(self, claim: Claim, value: Any) -> bool:
        raise NotImplementedError

    def ready_probe(self) -> str:
        """SQL that is true when some row is ready."""
        raise NotImplementedError

    def running_probe(self) -> str:
        """SQL that is true when some row is running, held by any worker."""
        raise NotImplementedError

    # -- what both databases share

    @property
    def marked(self) -> bool:
        """A row shows beyond doubt that this very process claimed it: by an id of its own, or by id and time."""
        return "worker" in self.binding.roles and (self.binding.incarnated or self.opened_at is not None)

    @property
    def needs_workers_table(self) -> bool:
        """Only the workers table can tell that a holder is gone."""
        roles = self.binding.roles.keys()
        return "worker" in roles and not {"heartbeat_at", "claimed_at", "updated_at"} & roles

    @property
    def sweeps(self) -> bool:
        """A row shows who holds it, or since when: what a dead worker held comes back."""
        return bool({"worker", "heartbeat_at", "claimed_at", "updated_at"} & self.binding.roles.keys())

    async def unfinished(self) -> bool:
        """Whether some row is ready, or running and sure to come back."""
        probes = [self.ready_probe(), *([self.running_probe()] if self.sweeps else [])]
        text = f"select 1 where {' or '.join(probes)}"
        return bool(await self.database.read(lambda run: run(text, ())))

    async def left_running(self) -> bool:
        """Whether a row is running that may never come back: nothing shows whether its worker is alive."""
        text = f"select 1 where {self.running_probe()}"
        return not self.sweeps and bool(await self.database.read(lambda run: run(text, ())))

    def find_claims(self, rows: Sequence[Any]) -> list[Claim]:
        """Claims from rows that were read again, which may hold values that Python cannot."""
        if not self.tolerant and any(inside(value) is not None for row in rows for value in row):
            self.tolerate()
        return self.make_claims(rows)

    def make_claims(self, rows: Sequence[Any], now: float | None = None) -> list[Claim]:
        """Claims from the rows a claim returned, each with the values its fence will ask for.

        The lease is counted from ``now``, when the claim was sent: it began no earlier.
        """
        holder, now = self._holder, time.monotonic() if now is None else now
        time_at, attempts_at, failures_at, _ = self._places
        first, *more = self._key_at
        claims = []
        self.claims_work = self.claims_work or bool(rows)
        for row in rows:
            key = (row[first], *[row[at] for at in more]) if more else (row[first],)
            claimed_at = row[time_at] if time_at is not None else None
            attempts = row[attempts_at] if attempts_at is not None else None
            attempt = (row[failures_at] or 0) + 1 if failures_at is not None else attempts or 1
            claims.append(Claim(holder, key, row, claimed_at, attempts, attempt, now))
        if self.lane.inputs:
            for claim in claims:
                claim.inputs = self.inputs_of(claim.row)
        return claims

    @property
    def returned(self) -> set[str]:
        """Columns that handlers have returned so far."""
        texts = [self._texts, *(store._texts for store in (self.shards.opened if self.shards is not None else ()))]
        settles = [key[0] for each in texts for key in each if isinstance(key[0], tuple) and key[0][0] == "settle"]
        return {column for _, _, columns, _ in settles for column in columns}

    def value(self, row: Sequence[Any], column: str) -> Any:
        """One column of a claimed row, decoded when it is read."""
        return self.readers[column](row)

    def reader(self, column: str) -> Reader:
        """What reads this column from a row as the driver gives it."""
        kind = self.binding.table.c[column].type
        return reading(
            self._at[column],
            column,
            self._decoder(kind),
            checked=self.tolerant or not self.marked or isinstance(kind, sa.JSON),
        )

    async def keep_step(self, claim: Claim, table: str, name: str, result: Any) -> bool:
        """Write what a job's step returned, only while the claim holds; False where the row was locked."""
        raise NotImplementedError

    def _decoder(self, kind: sa.types.TypeEngine[Any]) -> Any:
        """What makes a Python value of what the driver gives for a column of this type; None: it is one already."""
        return kind.dialect_impl(self.database.dialect).result_processor(self.database.dialect, None)

    def policy(self, claim: Claim) -> Any:
        """What says ``backoff`` and ``classify`` for a claimed row."""
        return self.lane.policy(lambda column: claim.row[claim.holder.at[column]])

    def limit(self, claim: Claim) -> int:
        """How many attempts a claimed row may have: as it says itself, or its task, or its lane."""
        column = self.binding.roles.get("max_attempts")
        own = claim.row[claim.holder.at[column]] if column else None
        return int(self.policy(claim).max_attempts or self.binding.max_attempts if own is None else own)

    def error_text(self, text: str) -> str:
        """Error text as the lane's error column can hold it."""
        column = self.binding.roles.get("error")
        length = getattr(self.binding.table.c[column].type, "length", None) if column else None
        return bounded(text, min(length or ERROR_LENGTH, ERROR_LENGTH), self.database.encoding)

    def encode(self, column: str, value: Any) -> Any:
        """A handler's value for a column whose type knows more than the driver (Python enums, decorated types)."""
        encode = self.encoder(column)
        return value if encode is None else encode(value)

    def encoder(self, column: str) -> Callable[[Any], Any] | None:
        """What turns a value into what the database gets, where the user gave the column's type and it does that."""
        kind = self.binding.table.c[column].type
        if column not in self.binding.given or isinstance(kind, sa.JSON):
            return None
        encode: Callable[[Any], Any] | None
        encode = kind.dialect_impl(self.database.dialect).bind_processor(self.database.dialect)
        return encode

    def checked(self, columns: Any) -> dict[str, Any]:
        """The columns that a handler returned, as they are to be written; raises WrongResult."""
        if not isinstance(columns, Mapping):
            raise WrongResult(f"Done takes a dict of columns, not {type(columns).__name__}")
        checks = self.checks
        try:
            return {column: checks[column](value) for column, value in columns.items()}
        except WrongResult:
            raise
        except BaseException as error:  # whatever an object of the user's own does when it is read
            raise WrongResult(
                f"cannot read the columns that the handler returned: {type(error).__name__}: {error}"
            ) from error

    async def settle(self, batch: Sequence[Settlement]) -> Report:
        """Write a batch of outcomes, each only where its claim still holds. One bad row does not fail the others.

        A row that somebody has locked is passed over and tried again at once, a few times: another worker's claim
        locks for its own short length what was ready when it began to look.
        """
        try:
            if self.gate_learning is not None:
                await self.gate_learning.hear(batch)
            report = await self._settle_batch(batch)
            for pause in self.locked_pauses:
                if not report.locked:
                    break
                await asyncio.sleep(pause)
                again, report.locked = report.locked, []
                report.add(await self._settle_batch(again))
        except (Unreachable, Busy):
            for settlement in batch:
                settlement.reply_lost = True  # a lost reply to a commit says nothing about the commit
            raise
        return report

    async def _settle_batch(self, batch: Sequence[Settlement]) -> Report:
        report = Report()
        if any(settlement.wait is not None for settlement in batch):
            batch = [await self.usable(settlement) for settlement in batch]
        if self.lane.settled_hooks:
            if hooked := [s for s in batch if s.hooked]:
                await self._settle_hooked(hooked, report)
            batch = [s for s in batch if not s.hooked]
        for group in self.groups(batch):
            await self._settle(group, report)
        return report

    async def usable(self, settlement: Settlement) -> Settlement:
        """The settlement, or, where the database does not take the condition that its row is to wait for, its end."""
        if settlement.wait is None or self.waits is None:
            return settlement
        error = await self.waits.unusable(settlement.wait.until)
        return settlement if error is None else self.refused(settlement, error)

    async def _settle(self, group: list[Settlement], report: Report, *, compare: bool = True) -> None:
        try:
            written = await self.database.write(self.store_of(group[0].claim).settling(group, compare=compare))
        except Unserved:
            raise  # no row's fault: the outcomes wait
        except Refused as error:
            await self._divide(group, error, report, compare)
            return
        if len(written) == len(group):
            report.written += group
            return
        report.written += [s for i, s in enumerate(group) if i in written]
        changed = await self._explain([s for i, s in enumerate(group) if i not in written], report)
        for again in self.groups(changed.back):
            await self._settle(again, report)
        for again in self.groups(changed.final):
            await self._settle(again, report, compare=False)

    async def _divide(self, group: list[Settlement], error: Refused, report: Report, compare: bool) -> None:
        """Halve a refused batch until the row that was refused stands alone; it fails, with the reason."""
        if len(group) > 1:
            half = len(group) // 2
            await self._settle(group[:half], report, compare=compare)
            await self._settle(group[half:], report, compare=compare)
        elif group[0].columns or group[0].kind != "dead":
            inner = Report()
            compare = compare and group[0].kind != "stale"  # one that may not even go back ends
            await self._settle([self.refused(group[0], error)], inner, compare=compare)
            self._add_refused(report, inner)
        else:
            report.stuck.append((group[0], error.message))

    def refused(self, settlement: Settlement, error: Refused) -> Settlement:
        """The same run as a permanent failure, without the values that the database would not take."""
        if settlement.kind == "stale" and settlement.columns:
            bare = Settlement(settlement.claim, "stale", delay=settlement.delay)
            bare.duration, bare.cause = settlement.duration, settlement.cause
            return bare
        columns = ", ".join(sorted(settlement.columns))
        what = f"what the handler returned ({columns})" if columns else f"the outcome {settlement.kind}"
        what = f"Wait({settlement.wait.until!r})" if settlement.wait is not None else what
        reason = f"the database refused {what}: {error.message}"
        refused = Settlement(settlement.claim, "dead", error=self.error_text(reason))
        refused.duration = settlement.duration
        return refused

    @staticmethod
    def _add_refused(report: Report, inner: Report) -> None:
        report.refused += inner.written
        inner.written = []
        report.add(inner)

    async def _explain(self, missing: list[Settlement], report: Report) -> Changed:
        """A row that was not written is read before it is called lost: it may be locked, or written long ago, or its
        inputs have changed. Returns those of which that is so, to be settled again.
        """
        rows = await self.database.read(lambda run: self.read_claims(run, [s.claim for s in missing]))
        changed = Changed([], [])
        for i, settlement in enumerate(missing):
            held, row = rows.get(i, (False, ()))
            if held and (wait := self._changed(settlement.kind, row)) is not None:
                changed.add(settlement, final=wait, write=self.lane.stale == "write")
            elif held:
                report.locked.append(settlement)
            elif settlement.reply_lost and row and self._shows(row, settlement):
                report.written.append(settlement)
            else:
                settlement.claim.lost = True
                report.lost.append(settlement)
        return changed

    def _changed(self, kind: str, row: Sequence[Any]) -> bool | None:
        """Of a row that was read again: None where its inputs are as they were claimed, or an outcome of this kind does
        not depend on them. Otherwise whether they have kept changing for as long as the lane allows.
        """
        if not self.statements.compares(kind):
            return None
        same, kept_changing = row[len(self._at) : len(self._at) + 2]
        return None if same else bool(kept_changing)

    def _shows(self, row: Sequence[Any], settlement: Settlement) -> bool:
        """Whether a row looks as this settlement would have left it."""
        lane, claim = self.lane, settlement.claim
        target = {
            "done": lane.done,
            "dead": lane.dead,
            "canceled": lane.canceled or lane.dead,
            "retry": self.binding.retry_values,
        }
        values = target.get(settlement.kind, self.binding.ready_again) or self.binding.retry_values
        if not all(self.statements.shows(c, self.value(row, c), value) for c, value in values.items()):
            return False
        worker = self.binding.roles.get("worker")
        if settlement.kind in FINAL and worker:
            return bool(row[self._at[worker]] == claim.worker)
        return True

    # -- rows that were taken back from a dead worker

    async def suspects(self, claims: Sequence[Claim]) -> dict[Key, int]:
        """Claims on rows that were taken back from a dead worker and have not run to an end since: how often."""
        roles = self.binding.roles
        if column := roles.get("reclaims"):
            at = self._at[column]
            likely = [claim for claim in claims if claim.row[at]]
        elif "attempts" in roles:
            likely = [claim for claim in claims if claim.attempts != 1]
        else:
            likely = list(claims)
        if not likely:
            return {}
        counted = column is not None and column != roles.get("failures")
        if self.watched is not None:
            known = await self.watched.suspects([claim.key for claim in likely])
        else:
            known = {claim.key: 1 for claim in likely} if counted else {}
        if counted and known:
            return {claim.key: claim.row[at] for claim in likely if claim.key in known}
        return known

    def is_poison(self, claim: Claim, reclaims: int) -> bool:
        """Taken back too often. Only for a lane without a counter: elsewhere the sweep itself sees it in the row."""
        counts = {"attempts", "failures", "reclaims"} & self.binding.roles.keys()
        return not counts and reclaims > self.limit(claim) + self.lane.max_reclaims

    async def clear_suspects(self, claims: Sequence[Claim]) -> None:
        """These have run to an end, whatever it was: they kill no process."""
        if self.watched is not None:
            await self.watched.clear([claim.key for claim in claims])

    async def backs_off(self) -> bool:
        """A row that was taken back from several dead workers waits before it is ready again."""
        return self.watched is not None and await self.watched.backs_off()

    def survives_deaths(self, count: int) -> bool:
        """A row may be taken back from that many dead workers, and does not end by it."""
        shared = self.binding.roles.get("reclaims", "") == self.binding.roles.get("failures")
        return self.lane.max_reclaims >= count and not shared

    # -- on_settled: the lane's own writes in the settling transaction

    async def _settle_hooked(self, batch: list[Settlement], report: Report, *, compare: bool = True) -> None:
        try:
            inner, changed = await self._hooked_transaction(batch, compare)
        except Exception as error:
            if not isinstance(error, (Refused, HookFailed)) or isinstance(error, Unserved):
                raise
            if len(batch) > 1:
                for settlement in batch:
                    await self._settle_hooked([settlement], report, compare=compare)
            elif isinstance(error, HookFailed):
                report.unhooked.append((batch[0], error.error))
            elif batch[0].columns or batch[0].kind != "dead":
                inner = Report()
                compare = compare and batch[0].kind != "stale"
                await self._settle_hooked([self.refused(batch[0], error)], inner, compare=compare)
                self._add_refused(report, inner)
            else:
                report.stuck.append((batch[0], str(error)))
        else:
            report.add(inner)
            if changed.back:
                await self._settle_hooked(changed.back, report)
            if changed.final:
                await self._settle_hooked(changed.final, report, compare=False)

    async def _hooked_transaction(self, batch: list[Settlement], compare: bool) -> tuple[Report, Changed]:
        report, missing = Report(), []
        async with self.database.begin() as connection:
            for group in self.groups(batch):
                written = await self.settle_in(connection, group, compare=compare)
                report.written += [s for i, s in enumerate(group) if i in written]
                missing += [s for i, s in enumerate(group) if i not in written]
            await self.run_hooks(connection, report.written)
        return report, await self._explain(missing, report) if missing else Changed([], [])

    async def settle_in(
        self, connection: AsyncConnection, group: list[Settlement], *, compare: bool = True
    ) -> set[int]:
        """Settle inside a transaction that is under way."""
        store = self.store_of(group[0].claim)
        with translated(self.database):
            return await shielded(connection.run_sync(lambda c: store.settling(group, compare=compare)(runner(c))))

    async def run_hooks(self, connection: AsyncConnection, written: list[Settlement]) -> None:
        """Call the lane's ``on_settled`` hooks with what was written, in the same transaction."""
        if not written:
            return
        for hook in self.lane.settled_hooks:
            settled = [Settled(settlement) for settlement in written]
            try:
                if inspect.iscoroutinefunction(hook):
                    await hook(Tx(connection), settled)
                else:
                    await connection.run_sync(_call_plainly, hook, settled)
            except (Exception, asyncio.CancelledError) as error:
                known = translate(error, self.database)
                if isinstance(known, (Unreachable, Busy)):
                    raise known from error  # the database's doing, not the hook's: all of it is tried again
                raise HookFailed(error) from error

    async def deleted_in(self, connection: AsyncConnection, claim: Claim) -> bool:
        """Whether the transaction that is under way has itself deleted the claim's row."""
        with translated(self.database):
            return not await connection.run_sync(lambda c: self.read_claims(runner(c), [claim]))

    async def changed_in(self, connection: AsyncConnection | None, claim: Claim) -> bool | None:
        """Whether a claimed row's inputs have changed, as a transaction that is under way sees it, or as anybody does.
        None: they have not, or the claim is lost; True: they have, and have kept changing for too long.
        """
        if connection is None:
            rows = await self.database.read(lambda run: self.read_claims(run, [claim]))
        else:
            with translated(self.database):
                rows = await shielded(connection.run_sync(lambda c: self.read_claims(runner(c), [claim])))
        held, row = rows.get(0, (False, ()))
        return self._changed("done", row) if held else None

    async def landed(self, settlement: Settlement) -> bool:
        """Whether the row shows what this settlement would have written."""
        rows = await self.database.read(lambda run: self.read_claims(run, [settlement.claim]))
        held, row = rows.get(0, (False, ()))
        return not held and bool(row) and self._shows(row, settlement)

    async def adopt(self, claims: Sequence[Claim]) -> None:
        """After the reply to a moving renewal was lost: take the time from a row that is still ours."""
        roles, time_at = self.binding.roles, self._places[0]
        if "worker" not in roles or time_at is None:
            return
        shows = self.statements.shows
        rows = await self.database.read(lambda run: self.read_claims(run, claims))
        for i, claim in enumerate(claims):
            _, row = rows.get(i, (False, ()))
            if not row or row[self._at[roles["worker"]]] != claim.worker:
                continue
            state = self.binding.running.items()
            same = all(any(shows(c, self.value(row, c), o) for o in options(v)) for c, v in state)
            if same and ("attempts" not in roles or row[self._at[roles["attempts"]]] == claim.attempts):
                claim.claimed_at = row[time_at]

    async def still_held(self, claims: Sequence[Claim]) -> list[bool]:
        """Which of these claims still hold, by reading the rows."""
        rows = await self.database.read(lambda run: self.read_claims(run, claims))
        return [rows.get(i, (False, ()))[0] for i in range(len(claims))]


def _call_plainly(connection: sa.Connection, hook: Callable[..., Any], settled: list[Settled]) -> None:
    hook(PlainTx(connection), settled)
