"""A lane's functions in the database: list, install and remove them, each in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from ..errors import DeclarationError
from ..store.database import Database, Run
from .definitions import VERBS, Function, FunctionOptions, after, mark_of

T = TypeVar("T")

_COMMENT = "left join pg_description d on d.objoid = p.oid and d.classoid = 'pg_proc'::regclass and d.objsubid = 0"
_INSTALLED = f"""
select p.oid::regprocedure::text from pg_proc p {_COMMENT} where d.description = any ($1::text[]) order by 1"""
_SAME_NAME = f"""
select p.oid::regprocedure::text, coalesce(d.description, ''), p.oid = to_regprocedure($3::text) is true
from pg_proc p {_COMMENT} join pg_namespace n on n.oid = p.pronamespace
where n.nspname = $1::text and p.proname = $2::text"""


async def installed(database: Database, lane: str, table: str) -> list[str]:
    """The signatures of a lane's functions, as ``drop function`` takes them."""
    return await _transaction(database, lambda run: _installed(run, lane, table))


async def drop(database: Database, lane: str, table: str) -> list[str]:
    """Remove a lane's functions; their signatures."""

    def work(run: Run) -> list[str]:
        signatures = _installed(run, lane, table)
        for signature in signatures:
            run(f"drop function {signature}", ())
        return signatures

    return await _transaction(database, work)


async def install(database: Database, functions: Sequence[Function], options: FunctionOptions) -> None:
    """Create or replace the functions. Refuses to replace a function that is not rowmill's."""

    def work(run: Run) -> None:
        for function in functions:
            _create(run, function)
        for statement in after(functions, options, database.dialect.identifier_preparer.quote):
            run(statement, ())

    await _transaction(database, work)


def _create(run: Run, function: Function) -> None:
    for signature, comment, same in run(_SAME_NAME, (function.schema, function.name, function.signature)):
        if comment == function.mark:
            if not same:  # what the lane's verb took before; a caller could not tell the two apart
                run(f"drop function {signature}", ())
        elif same:
            raise DeclarationError(
                f"there is a function {signature} already, and it is not rowmill's",
                hint=f"another name: --name {function.verb}=..., or drop function {signature}",
            )
    run("savepoint rowmill_function", ())
    try:
        run(function.sql, ())
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != "42P13":  # another result, or other names of parameters
            raise
        run("rollback to savepoint rowmill_function", ())
        run(f"drop function {function.signature}", ())
        run(function.sql, ())


def _installed(run: Run, lane: str, table: str) -> list[str]:
    return [row[0] for row in run(_INSTALLED, ([mark_of(lane, table, verb) for verb in VERBS],))]


async def _transaction(database: Database, work: Callable[[Run], T]) -> T:
    def inside(run: Run) -> T:
        run("set local search_path = pg_catalog", ())  # so that names are printed in full
        return work(run)

    return await database.long_transaction(inside)
