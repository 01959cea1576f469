"""Conditions with every table, function and operator under its full name, to be run under any search_path."""

from __future__ import annotations

from collections.abc import Mapping

from ..database import Run


def resolve_conditions(run: Run, table: str, conditions: Mapping[str, str]) -> dict[str, str]:
    """Conditions on a table with every name in full. To be run in a transaction that is rolled back.

    They are resolved by the server, not read here: it parses them as a view and prints them back. From here on the
    transaction has the search_path pg_catalog.
    """
    views = {name: f"rowmill_condition_{i}" for i, name in enumerate(conditions)}
    view_of = "create temporary view {} as select 1 as one from {}"
    if views:
        run(view_of.format("rowmill_bare", table), ())
    for name, view in views.items():
        run(f"{view_of.format(view, table)} where ({conditions[name]})", ())
    # Whatever is not the server's own is now printed with its schema.
    run("set local search_path = pg_catalog", ())
    return {name: _printed(run, view) for name, view in views.items()}


def _printed(run: Run, view: str) -> str:
    """The view's condition: what stands behind what the view without one says."""
    ((bare, whole),) = run(
        f"select pg_get_viewdef('pg_temp.rowmill_bare'::regclass), pg_get_viewdef('pg_temp.{view}'::regclass)", ()
    )
    return str(whole).removeprefix(bare.removesuffix(";") + "\n  WHERE ").removesuffix(";")
