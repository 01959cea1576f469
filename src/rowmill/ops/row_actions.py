"""The writes of operators: retry, cancel, release, schedule and insert rows.

Whether a row may be touched is decided in the statement that touches it, and never by what was read before.
Many rows go in steps, each committed: no long transaction, no lock on more rows than a step has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Busy, DeclarationError, RowmillError, did_you_mean
from ..store.database import Run
from ..store.inspect.lane_view import LaneView
from ..store.lane.claim import HookFailed
from ..store.lane.end_hooks import ending
from ..store.lane.lane_store import LaneStore
from ..store.lane.row_keys import Key, Placeholders, among, written
from ..store.lane.statements import INCARNATION

STEP = 1000
#: Why a row was passed over that is not there.
NO_ROW = "no row has this id"
#: Seconds for a count that is only worth a word of warning.
_COUNT = 3.0
#: A row that is asked for by its id and is locked at that moment is tried again: how often.
_TRIES = 10
#: Roles whose columns an inserted row may fill.
_GIVEN = ("run_after", "expires_at", "priority", "max_attempts", "created_at")


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of rows: in one of these states, optionally by key or by worker."""

    states: tuple[str, ...]
    keys: tuple[Key, ...] | None = None
    worker: str | None = None


async def passed_over(view: LaneView, chosen: Selection, keys: list[Key]) -> list[dict[str, str]]:
    """The rows that were asked for by key, less those that were written: each with the reason."""
    written_keys = set(keys)
    left = [key for key in chosen.keys or () if key not in written_keys]
    rows = {written(row.id): row for row in (await view.find(left, whole=False) if left else [])}
    passed = []
    for key in left:
        name = written(key if len(key) > 1 else key[0])
        row = rows.get(name)
        if row is None:
            reason = NO_ROW
        elif row.state in chosen.states:
            reason = "another transaction has locked it"
        else:
            reason = f"it is {row.state}" if row.state else "it matches no state of this lane"
        passed.append({"id": name, "reason": reason})
    return passed


async def ended_by_others(store: LaneStore) -> int:
    """How many dead rows another program ended, as far as their columns tell; counted up to a thousand."""
    test = store.statements.ended_by_others()
    if test is None:
        return 0
    text = f"select count(*) from (select 1 from {store.statements.table} where {test} limit {STEP}) x"
    try:
        return int((await store.database.read_within(lambda run: run(text, ()), _COUNT))[0][0])
    except Busy:
        return 0  # no index finds dead rows: not worth the wait


class Operator:
    """Writes to the rows of one lane in one environment. Each verb yields the keys it wrote, step by step."""

    #: Seconds before a row that is locked is tried again.
    pause = 0.1

    def __init__(self, view: LaneView) -> None:
        self.view, self.binding, self.statements = view, view.binding, view.statements

    def retry(self, chosen: Selection) -> AsyncIterator[list[Key]]:
        """Make rows ready at once, with all their attempts; the old error stays."""
        lane, roles, statements = self.view.lane, self.binding.roles, self.statements
        written: dict[str, str] = {}
        finished = roles.get("finished_at")
        if finished and self.binding.nullable(finished):
            written[finished] = "null"
        written |= statements._cleared()
        touched = roles.get("updated_at")
        if touched and not lane.untouched_for:  # there a touch would hold the row back
            written[touched] = statements.now(touched)
        if due := roles.get("run_after"):
            written[due] = statements.now(due)
        if (expiry := roles.get("expires_at")) and self.binding.nullable(expiry):
            written[expiry] = "null"  # it would only expire again
        for role in ("attempts", "failures", "reclaims"):
            if counter := roles.get(role):
                written[counter] = "0"
        written |= {column: statements.literal(column, value) for column, value in self.binding.ready_again.items()}
        return self._write(chosen, written, Placeholders(self.binding))

    def cancel(self, chosen: Selection, reason: str) -> AsyncIterator[list[Key]]:
        """Rows to canceled, or to dead where the lane has no such state; a holder's outcome is then dropped."""
        marks = Placeholders(self.binding)
        error = marks.add(self.view.store.error_text(reason)) if "error" in self.binding.roles else "null"
        return self._write(chosen, self.statements.settle_set("canceled", error, "0"), marks, canceled=reason)

    def release(self, chosen: Selection) -> AsyncIterator[list[Key]]:
        """Running rows back to ready as if they had not been claimed; a holder's outcome is then dropped."""
        return self._write(chosen, self.statements.settle_set("release", "null", "0"), Placeholders(self.binding))

    def schedule(self, chosen: Selection, seconds: float) -> AsyncIterator[list[Key]]:
        """Schedule ready or waiting rows for so many seconds from now."""
        due = self.binding.roles.get("run_after")
        if due is None:
            raise DeclarationError(
                f"lane {self.view.lane.name!r} has no run_after column, so its rows cannot be scheduled",
                hint="rowmill migrate APP --apply adds one",
            )
        return self._write(chosen, {due: self.statements.later(due, str(float(seconds)))}, Placeholders(self.binding))

    async def insert(self, columns: Mapping[str, Any]) -> Key:
        """Add a row in the lane's ready state, with these columns; its key."""
        table, own = self.binding.table.fullname, set(self.binding.state_columns())
        own |= {column for role, column in self.binding.roles.items() if role not in _GIVEN}
        for column in columns:
            if column not in self.binding.columns:
                raise DeclarationError(
                    f"table {table!r} has no column {column!r}", hint=did_you_mean(column, self.binding.columns)
                )
            if column in own:
                raise DeclarationError(f"column {column!r} of table {table!r} is written by rowmill: leave it out")
        if isinstance(self.view.lane.ready, str):
            raise DeclarationError(
                f"lane {self.view.lane.name!r}: ready is a SQL condition, so rowmill cannot create a row that meets it"
            )
        marks = Placeholders(self.binding)
        columns = {**self._shard(columns), **columns}
        written = {c: self.statements.literal(c, value) for c, value in self.binding.ready_again.items()}
        written |= {c: "null" if v is None else marks.add(self._plain(v), c) for c, v in columns.items()}
        text = f"""insert into {self.statements.table} ({self.statements.names(list(written))})
values ({", ".join(written.values())}) returning {self._keys}"""
        rows = await self.view.database.write(lambda run: run(text, marks.given()))
        return tuple(rows[0])

    def _shard(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The lane's shard, for a row that names none; raises where the row would not be in any of the lane's."""
        for column, values in self.binding.shard.items():
            if column not in columns and len(values) == 1:
                return {column: values[0]}
            if columns.get(column) not in values:
                raise DeclarationError(
                    f"lane {self.view.lane.name!r} has shard={self.view.lane.shard!r}, and a row with"
                    f" {column} = {columns.get(column)!r} would not be in it",
                    hint=f"--set {column}={values[0]}",
                )
        return {}

    def _plain(self, value: Any) -> Any:
        """A value as JSON has it, as the driver takes it."""
        return json.dumps(value) if isinstance(value, (dict, list)) else self.view.sql.plain(value)

    async def count(self, chosen: Selection, most: int) -> int:
        """The number of selected rows, counted up to ``most``."""
        marks = Placeholders(self.binding)
        test = self._test(chosen, marks)
        text = f"select count(*) from (select 1 from {self.statements.table} where {test} limit {most}) x"
        return int((await self.view.ask(text, marks))[0][0])

    async def count_keys(self, chosen: Selection, most: int) -> int:
        """The same for a selection by keys, of which there may be more than one statement takes."""
        keys, number = chosen.keys or (), 0
        for start in range(0, len(keys), STEP):
            number += await self.count(replace(chosen, keys=keys[start : start + STEP]), most)
            if number >= most:
                break
        return number

    # -- one statement per step

    def _test(self, chosen: Selection, marks: Placeholders) -> str:
        """The condition that a row must meet in the statement that writes it."""
        known = [test for state in chosen.states if (test := self.view.condition(state))]
        tests = [f"({' or '.join(f'({test})' for test in known or [self.view.need(chosen.states[0])])})"]
        tests[0] += self.statements.shard()
        if not {"running", "stuck"} & set(chosen.states):
            tests.append(f"({self.statements.running()}) is not true")
        if chosen.keys is not None:
            tests.append(among(self.statements, chosen.keys, marks))
        if chosen.worker is not None:
            name = self.statements.name(self.binding.roles["worker"])
            mine = [f"{name} = {marks.add(chosen.worker)}"]
            if self.binding.incarnated:
                given = marks.add(f"{chosen.worker}{INCARNATION}")
                mine.append(f"substr({name}, 1, {len(chosen.worker) + 1}) = {given}")
            tests.append(f"({' or '.join(mine)})")
        return " and ".join(tests)

    @property
    def _keys(self) -> str:
        return self.statements.names(self.binding.key)

    async def _write(
        self, chosen: Selection, written: dict[str, str], marks: Placeholders, canceled: str | None = None
    ) -> AsyncIterator[list[Key]]:
        """``canceled``: the rows end, for this reason."""
        if chosen.keys is None:
            async for step in self._pages(chosen, written, marks, canceled):
                yield step
            return
        for start in range(0, len(chosen.keys), STEP):
            left = set(chosen.keys[start : start + STEP])
            for _ in range(_TRIES):
                part = Selection(chosen.states, tuple(left), chosen.worker)
                async for step in self._pages(part, written, marks, canceled):
                    left -= set(step)
                    yield step
                # A row in the right state that was not written is locked: by a renewal, or by its own handler.
                if not left or not await self.count(Selection(chosen.states, tuple(left), chosen.worker), 1):
                    break
                await asyncio.sleep(self.pause)

    async def _pages(
        self, chosen: Selection, written: dict[str, str], marks: Placeholders, canceled: str | None
    ) -> AsyncIterator[list[Key]]:
        """Step through the rows by key, so that a row that still matches after its write is not written twice."""
        last: Key | None = None
        while True:
            mine = marks.copy()
            test = self._test(chosen, mine)
            if last is not None:
                test += f" and ({self._keys}) > {mine.key(last)}"
            keys = await self._step(test, written, mine, canceled)
            if keys:
                yield keys
                last = keys[-1]
            if len(keys) < STEP:
                return

    async def _step(self, test: str, written: dict[str, str], marks: Placeholders, canceled: str | None) -> list[Key]:
        """One step, committed; rows that it ends are told to the lane's ``on_settled`` in the same transaction."""
        values, texts = marks.given(), self.statements.write_step(written, test, STEP)

        def verb(run: Run) -> list[Key]:
            keys, *_ = [run(text, values) for text in texts]
            return [tuple(row) for row in keys]

        try:
            # Not one of the engine's own connections: without an index on the state this may take its time.
            return await ending(
                self.view.store, verb, lambda keys: keys if canceled is not None else (), "canceled", canceled or ""
            )
        except HookFailed as failed:
            raise RowmillError(
                f"on_settled of lane {self.view.lane.name!r} failed: {type(failed.error).__name__}: {failed.error}."
                " None of these rows was written",
                hint="fix the hook, or cancel rows one at a time with --id",
            ) from failed.error
