"""``rowmill sql APP --role NAME``: the statements that make a role with no more rights than a worker needs."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ..declare.lane import Lane
from ..errors import DeclarationError, did_you_mean
from ..migrate.worker_role import grants
from ..store.inspect.lane_view import LaneView
from .app import UsageError, load, print_json, run_async
from .environments import CommandDirectory, worded


def worker_role(
    words: Sequence[str], env: str | None, role: str, hide: Sequence[str], writes: Sequence[str], as_json: bool
) -> None:
    """Print them: for the first environment, or the named one; for all its lanes, or the named one."""
    reference, rest = worded(words, "LANE")
    mill = load(reference)
    lanes = mill.select(rest or None)
    environment = env or next(iter(mill.environments))

    async def main() -> list[str]:
        async with CommandDirectory(mill, [environment], [lane.name for lane in lanes]) as lookout:
            database = lookout.databases[0][1]
            if database.dialect.name != "postgresql":
                raise DeclarationError(
                    f"environment {environment!r} is SQLite, which has no roles",
                    hint="--env with a PostgreSQL environment; a file's rights are its own",
                )

            async def there(view: LaneView) -> None: ...

            answers = await lookout.ask(there)
            for failure in answers.failures:
                raise failure.error
            bindings = [view.binding for view, _ in answers.found]
            known = {b.lane.name: set(b.table.c.keys()) for b in bindings}
            return await grants(
                database, bindings, role, hidden=_columns("--hide", hide, known, lanes),
                written=_columns("--writes", writes, known, lanes),
            )  # fmt: skip

    found = run_async(main())
    if as_json:
        print_json({"environment": environment, "role": role, "statements": found})
        return
    typer.echo(
        "-- A role for workers: it works on these lanes, and can do nothing else. Run it as the tables' owner, after"
    )
    typer.echo(
        "-- rowmill migrate APP --apply; then give the role a password. What a finish block or on_settled writes"
    )
    typer.echo("-- elsewhere, and tables of your own that gates read, are yours to grant.")
    typer.echo("begin;\n" + "".join(f"{statement};\n" for statement in found) + "commit;")


def _columns(
    option: str, words: Sequence[str], known: dict[str, set[str]], lanes: Sequence[Lane]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in words:
        lane, dot, column = word.partition(".")
        if not dot or not column:
            raise UsageError(
                f"{option} {word} does not name a lane and a column", hint=f"{option} {lanes[0].name}.column"
            )
        if lane not in known:
            raise DeclarationError(f"there is no lane {lane!r}", hint=did_you_mean(lane, known))
        if column not in known[lane]:
            raise DeclarationError(
                f"lane {lane!r}: its table has no column {column!r}", hint=did_you_mean(column, known[lane])
            )
        found.setdefault(lane, []).append(column)
    return found
