"""The sql command: a lane's statements, and the same verbs as functions of the database."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer

from ..errors import DeclarationError
from ..functions.bodies import FunctionStatements
from ..functions.definitions import FunctionOptions, after, check, notes, render
from ..functions.gate_bodies import FunctionGates, resolve_gates
from ..functions.install import drop, install, installed
from ..functions.resolve_names import resolve
from ..store.inspect.gate_view import lane_gates
from ..store.inspect.lane_view import LaneView
from ..store.inspect.sql_listing import commented, one_line, texts
from ..store.lane.postgres_statements import PostgresStatements
from ..store.own.schema import GATES, ensure, taken
from .app import AsJson, UsageError, app, errors, load, print_json, run_async, said
from .environments import CommandDirectory, one_lane
from .role import worker_role

Words = Annotated[list[str] | None, typer.Argument(metavar="[APP] LANE", help="the application, and the lane")]
_FUNCTIONS, _ROLE = "Functions", "Role"


@app.command()
def sql(
    words: Words = None,
    env: Annotated[
        str | None, typer.Option("--env", help="for this environment's database; default: the first", callback=said)
    ] = None,
    functions: Annotated[
        bool, typer.Option("--functions", help="the verbs as PostgreSQL functions, for workers in other languages")
    ] = False,
    prefix: Annotated[
        str | None, typer.Option(help="of their names; default: the lane's name and _", rich_help_panel=_FUNCTIONS)
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="what one is called: claim=claim_next_pending_job (may be given again)",
            callback=said,
            rich_help_panel=_FUNCTIONS,
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(help="where they are made; default: beside the table", callback=said, rich_help_panel=_FUNCTIONS),
    ] = None,
    security: Annotated[
        Literal["invoker", "definer"],
        typer.Option(help="with whose rights they run: the caller's or their owner's", rich_help_panel=_FUNCTIONS),
    ] = "invoker",
    grant: Annotated[
        list[str] | None,
        typer.Option(
            help="a role that may call them; default: nobody (may be given again)",
            callback=said,
            rich_help_panel=_FUNCTIONS,
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="install them, or with --drop remove them", rich_help_panel=_FUNCTIONS)
    ] = False,
    remove: Annotated[
        bool, typer.Option("--drop", help="what removes those that are installed", rich_help_panel=_FUNCTIONS)
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            help="what makes this role one that may work on the lanes and do nothing else",
            callback=said,
            rich_help_panel=_ROLE,
        ),
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option(help="a column it must not read: LANE.COLUMN (may be given again)", rich_help_panel=_ROLE),
    ] = None,
    writes: Annotated[
        list[str] | None,
        typer.Option(help="a column that the handler returns: LANE.COLUMN (may be given again)", rich_help_panel=_ROLE),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The statements as they will run: claim, settle for each outcome, renew, sweep.

    With --functions the same verbs as functions of the database: a worker in any language can work beside the Python
    ones, also through PostgREST. With --role, and the lane left out for all: what a database role for workers needs.
    """
    words = list(words or ())
    if role is None and (hide or writes):
        raise UsageError("--hide and --writes are about a role", hint="--role NAME")
    if role is not None:
        if functions:
            raise UsageError("--role or --functions, one of them")
        worker_role(words, env, role, hide or [], writes or [], as_json)
        return
    if not words and "ROWMILL_APP" not in os.environ:
        raise UsageError("which lane?", hint="sql [APP] LANE")
    if len(words) > 2:
        raise typer.BadParameter(f"one application and one lane, not {len(words)} words")
    if not functions and (prefix is not None or name or schema or grant or apply or remove or security != "invoker"):
        raise UsageError("that option is about functions", hint="add --functions")
    options = FunctionOptions(prefix, _pairs(name or []), schema, security == "definer", grant or ())
    named = len(words) == 2 or (bool(words) and ":" in words[0])
    mill = load(words[0] if named else None)
    lane = one_lane(mill, words[-1] if len(words) == 2 or (words and not named) else None)
    (chosen,) = mill.select([lane])
    environment = env or next((e for e in mill.environments if chosen.serves(e)), next(iter(mill.environments)))

    async def question(view: LaneView) -> dict[str, Any]:
        if not functions:
            return {"statements": [{"name": n, "sql": text} for n, text in (await texts(view)).items()]}
        if not isinstance(view.statements, PostgresStatements):
            raise DeclarationError(
                f"environment {environment!r} is SQLite, which has no functions of its own",
                hint="--env with a PostgreSQL environment; on SQLite, use the statements of rowmill sql",
            )
        return await (_dropped if remove else _functions)(view, view.statements, options, apply)

    async def main() -> Any:
        async with CommandDirectory(mill, [environment], [lane]) as lookout:
            return await lookout.ask(question)

    answers = run_async(main())
    for view, found in answers.found:
        if as_json:
            where = {"environment": environment, "lane": lane, "dialect": view.binding.dialect.name}
            print_json({**where, **found})
        elif not functions:
            texts_of = [(s["name"], commented(s["name"], s["sql"])) for s in found["statements"]]
            typer.echo("\n\n".join(f"-- {one_line(lane)}: {n}\n{text};" for n, text in texts_of))
        elif remove:
            _print_dropped(lane, found)
        else:
            _print_functions(lane, found)
    answers.end()


def _pairs(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        verb, equals, name = word.partition("=")
        if not (equals and name):
            raise UsageError(f"--name {word} does not say what is called what", hint="--name claim=claim_next_job")
        found[verb] = name
    return found


async def _functions(view: LaneView, say: PostgresStatements, options: FunctionOptions, apply: bool) -> dict[str, Any]:
    resolved = await resolve(view.binding, view.database, say)
    check(view.binding, resolved, options)
    gates = await _gates(view, apply) if view.lane.groups else None
    made = render(view.binding, resolved, options, gates)
    if apply:
        await install(view.database, made, options)
    return {
        "applied": apply,
        "notes": notes(view.binding, resolved, options, gates),
        "functions": [{"verb": f.verb, "name": f.name, "signature": f.signature, "sql": f.sql} for f in made],
        "after": after(made, options, view.binding.dialect.identifier_preparer.quote),
    }


async def _gates(view: LaneView, apply: bool) -> FunctionGates:
    """A lane's gates for its functions, which name the table of gates in full: it has to be there."""
    own = await (ensure if apply else taken)(view.database)
    if not own.has(GATES):
        why = f"cannot be made: {own.refused}" if apply else "is not there yet"
        raise DeclarationError(
            f"lane {view.lane.name!r} has gates, and their table rowmill_gates {why}",
            hint="rowmill migrate APP --apply, by somebody who may create tables",
        )
    gates = await lane_gates(view)
    return await resolve_gates(gates.dims, view.database, gates.rows.table)


async def _dropped(view: LaneView, say: PostgresStatements, _: FunctionOptions, apply: bool) -> dict[str, Any]:
    table = FunctionStatements(view.binding, await resolve(view.binding, view.database, say)).table
    found = await (drop if apply else installed)(view.database, view.lane.name, table)
    return {"applied": apply, "drop": [f"drop function {signature}" for signature in found]}


def _print_functions(lane: str, found: dict[str, Any]) -> None:
    if found["applied"]:
        typer.echo("\n".join(f"installed {f['signature']}" for f in found["functions"]))
        for note in found["notes"]:
            errors.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
        return
    head = [
        f"The verbs of lane {lane} as functions. rowmill sql ... --functions --apply installs them.",
        *found["notes"],
    ]
    typer.echo("\n".join(f"-- {one_line(line)}" for line in head))
    typer.echo("begin;\n")
    for function in found["functions"]:
        typer.echo(f"-- {one_line(lane)}: {function['verb']}\n{function['sql']};\n")
    typer.echo("-- Known as rowmill's own by their comments; granted to nobody but those named.")
    typer.echo("".join(f"{statement};\n" for statement in found["after"]) + "commit;")


def _print_dropped(lane: str, found: dict[str, Any]) -> None:
    if not found["drop"]:
        typer.echo(f"-- No functions of lane {one_line(lane)} are installed.")
    elif found["applied"]:
        typer.echo("\n".join(line.replace("drop function", "dropped", 1) for line in found["drop"]))
    else:
        typer.echo("\n".join(f"{line};" for line in found["drop"]))
