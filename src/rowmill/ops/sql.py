"""A lane's SQL: its statements as they run, the same verbs as database functions, and a role for workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..declare.lane import Lane
from ..errors import DeclarationError, did_you_mean
from ..functions.bodies import FunctionStatements
from ..functions.definitions import FunctionOptions as FunctionOptions
from ..functions.definitions import after, check, notes, render
from ..functions.gate_bodies import FunctionGates, resolve_gates
from ..functions.install import drop, install, installed
from ..functions.resolve_names import resolve
from ..migrate.worker_role import grants
from ..store.inspect.gate_view import lane_gates
from ..store.inspect.lane_view import LaneView
from ..store.inspect.sql_listing import commented as commented
from ..store.inspect.sql_listing import one_line as one_line
from ..store.inspect.sql_listing import texts
from ..store.lane.postgres_statements import PostgresStatements
from ..store.own.schema import GATES, ensure, taken
from .directory import LaneDirectory

Document = dict[str, Any]


async def statements(view: LaneView) -> Document:
    """Claim, settle for each outcome, renew and sweep, as they will run."""
    listed = [{"name": name, "sql": text} for name, text in (await texts(view)).items()]
    return {**_about(view), "statements": listed}


def _about(view: LaneView) -> Document:
    return {"environment": view.environment, "lane": view.lane.name, "dialect": view.binding.dialect.name}


async def functions(view: LaneView, options: FunctionOptions, *, apply: bool) -> Document:
    """The verbs as functions of the database; ``apply`` installs them."""
    statements = _postgres(view)
    if apply and view.lane.bounded:
        await ensure(view.database)
    resolved = await resolve(view.binding, view.database, statements)
    check(view.binding, resolved, options)
    gates = await _gates(view, apply) if view.lane.groups else None
    made = render(view.binding, resolved, options, gates)
    if apply:
        await install(view.database, made, options)
    return {
        **_about(view),
        "applied": apply,
        "notes": notes(view.binding, resolved, options, gates),
        "functions": [{"verb": f.verb, "name": f.name, "signature": f.signature, "sql": f.sql} for f in made],
        "after": after(made, options, view.binding.dialect.identifier_preparer.quote),
    }


async def dropped_functions(view: LaneView, *, apply: bool) -> Document:
    """What removes the functions that are installed; ``apply`` removes them."""
    resolved = await resolve(view.binding, view.database, _postgres(view))
    table = FunctionStatements(view.binding, resolved).table
    signatures = await (drop if apply else installed)(view.database, view.lane.name, table)
    return {**_about(view), "applied": apply, "drop": [f"drop function {signature}" for signature in signatures]}


def _postgres(view: LaneView) -> PostgresStatements:
    if not view.database.sql.has_functions:
        raise DeclarationError(
            f"environment {view.environment!r} is SQLite, which has no stored functions",
            hint="--env with a PostgreSQL environment; on SQLite, use the statements of rowmill sql",
        )
    return cast(PostgresStatements, view.statements)


async def _gates(view: LaneView, apply: bool) -> FunctionGates:
    """A lane's gates for its functions, which name the table of gates in full: it has to be there."""
    own = await (ensure if apply else taken)(view.database)
    if not own.has(GATES):
        why = f"cannot be made: {own.refused}" if apply else "is not there yet"
        raise DeclarationError(
            f"lane {view.lane.name!r} has gates, and their table rowmill_gates {why}",
            hint="run rowmill migrate APP --apply with a role that may create tables",
        )
    gates = await lane_gates(view)
    return await resolve_gates(gates.dims, view.database, gates.rows.table)


async def worker_role(directory: LaneDirectory, role: str, hide: Sequence[str], writes: Sequence[str]) -> Document:
    """The statements that make a role with no more rights than a worker of these lanes needs."""
    ((environment, database),) = directory.databases.items()
    if not database.sql.has_roles:
        raise DeclarationError(
            f"environment {environment!r} is SQLite, which has no roles",
            hint="--env with a PostgreSQL environment; on SQLite, set the permissions of the file",
        )
    answers = await directory.views()
    for failure in answers.failures:
        raise failure.error
    bindings = [view.binding for view, _ in answers.lanes]
    known = {binding.lane.name: set(binding.table.c.keys()) for binding in bindings}
    made = await grants(
        database, bindings, role, hidden=_columns("--hide", hide, known, directory.lanes),
        written=_columns("--writes", writes, known, directory.lanes),
        schedules=[source for source in directory.mill.schedule_tables if source.serves(environment)],
    )  # fmt: skip
    return {"environment": environment, "role": role, "statements": made}


class NotAColumn(DeclarationError):
    """An option that should name a lane and a column."""


def _columns(
    option: str, words: Sequence[str], known: dict[str, set[str]], lanes: Sequence[Lane]
) -> dict[str, list[str]]:
    """``fetch.card`` as a lane and a column of its table."""
    columns: dict[str, list[str]] = {}
    for word in words:
        lane, dot, column = word.partition(".")
        if not dot or not column:
            hint = f"{option} {lanes[0].name}.column"
            raise NotAColumn(f"{option} {word} does not name a lane and a column", hint=hint)
        if lane not in known:
            raise DeclarationError(f"there is no lane {lane!r}", hint=did_you_mean(lane, known))
        if column not in known[lane]:
            raise DeclarationError(
                f"lane {lane!r}: its table has no column {column!r}", hint=did_you_mean(column, known[lane])
            )
        columns.setdefault(lane, []).append(column)
    return columns
