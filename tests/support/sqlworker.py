"""A lane's functions inside a test: installed, and called as another language would call them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from databases import Db, Row
from rowmill import Mill
from rowmill.functions.definitions import Function, FunctionOptions, check, render
from rowmill.functions.gate_bodies import resolve_gates
from rowmill.functions.install import install
from rowmill.functions.resolve_names import resolve
from rowmill.testing import Kit


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class Functions:
    """The installed functions of one lane, by verb."""

    def __init__(self, db: Db, functions: list[Function], fence: Mapping[str, str], key: Mapping[str, str]) -> None:
        self.db, self.functions = db, {f.verb: f for f in functions}
        self._fence, self._key = fence, key

    def full(self, verb: str) -> str:
        return self.functions[verb].signature.partition("(")[0]

    def call(self, verb: str, **given: Any) -> list[Row]:
        """Call with named parameters, as PostgREST does."""
        listed = ", ".join(f"{quoted(name)} => ?" for name in given)
        return self.db.query(f"select * from {self.full(verb)}({listed})", *given.values())

    def claim(self, worker: str = "w") -> Row | None:
        rows = self.call("claim", **({"worker": worker} if "worker" in self._fence else {}))
        assert len(rows) <= 1
        return rows[0] if rows else None

    def settle(self, verb: str, row: Row, **given: Any) -> Any:
        """A verb about the claim that returned this row; what the function answered."""
        (answer,) = self.call(verb, **self.held(row), **given)
        return next(iter(answer.values()))

    def held(self, row: Row) -> Row:
        return {name: row[column] for name, column in {**self._key, **self._fence}.items()}


async def installed(db: Db, mill: Mill, lane: str | None = None, **options: Any) -> Functions:
    """Install a lane's functions."""
    async with Kit(mill) as kit:
        store = await kit.store(lane)
        binding, chosen = store.binding, FunctionOptions(**options)
        resolved = await resolve(binding, store.database, store.statements)  # type: ignore[arg-type]
        gates = None
        if binding.lane.groups:
            check(binding, resolved, chosen)
            gates = await resolve_gates(
                tuple(store.gate_learning.dims.values()), store.database, store.gate_learning.rows.table
            )
        made = render(binding, resolved, chosen, gates)
        await install(store.database, made, chosen)
    roles = {"worker": binding.roles.get("worker"), "claimed_at": binding.fence_time,
             "attempts": binding.roles.get("attempts")}  # fmt: skip
    fence = {role: column for role, column in roles.items() if column}
    taken = {"worker", "claimed_at", "attempts"}
    return Functions(db, made, fence, {f"key_{c}" if c in taken else c: c for c in binding.key})


def install_now(db: Db, mill: Mill, lane: str | None = None, **options: Any) -> Functions:
    """The same from a plain test."""
    return asyncio.run(installed(db, mill, lane, **options))
