"""The sql command: a lane's statements, and the same verbs as functions of the database."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import typer

from ..mill import Mill
from ..ops import sql as lane_sql
from ..ops.directory import LaneDirectory
from ..ops.sql import FunctionOptions, commented, one_line
from .app import UsageError, app, ask, errors, print_json
from .options import AsJson, load, not_empty, one_lane, pairs, worded

Words = Annotated[list[str] | None, typer.Argument(metavar="[APP] LANE", help="the application and the lane")]
_FUNCTIONS, _ROLE = "Functions", "Role"


@app.command()
def sql(
    words: Words = None,
    env: Annotated[
        str | None, typer.Option("--env", help="the environment (default: the first)", callback=not_empty)
    ] = None,
    functions: Annotated[
        bool,
        typer.Option("--functions", help="print the verbs as PostgreSQL functions, for workers in other languages"),
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(help="prefix of the function names (default: the lane's name and _)", rich_help_panel=_FUNCTIONS),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="name of one function: claim=claim_next_pending_job (repeatable)",
            callback=not_empty,
            rich_help_panel=_FUNCTIONS,
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            help="schema of the functions (default: that of the table)", callback=not_empty, rich_help_panel=_FUNCTIONS
        ),
    ] = None,
    security: Annotated[
        Literal["invoker", "definer"],
        typer.Option(help="run with the rights of the caller (invoker) or owner (definer)", rich_help_panel=_FUNCTIONS),
    ] = "invoker",
    grant: Annotated[
        list[str] | None,
        typer.Option(
            help="a role that may call them (default: none; repeatable)",
            callback=not_empty,
            rich_help_panel=_FUNCTIONS,
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="install the functions, or remove them with --drop", rich_help_panel=_FUNCTIONS),
    ] = False,
    remove: Annotated[
        bool, typer.Option("--drop", help="print what removes the installed functions", rich_help_panel=_FUNCTIONS)
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            help="print the grants that let this role work on the lanes, and nothing else",
            callback=not_empty,
            rich_help_panel=_ROLE,
        ),
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option(help="a column the role must not read: LANE.COLUMN (repeatable)", rich_help_panel=_ROLE),
    ] = None,
    writes: Annotated[
        list[str] | None,
        typer.Option(help="a column that the handler writes: LANE.COLUMN (repeatable)", rich_help_panel=_ROLE),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the statements as they will run: claim, settle for each outcome, renew, sweep.

    With --functions, prints the same operations as database functions. A worker in any language can call them, also
    through PostgREST. With --role, prints the grants that a database role for workers needs, for LANE or for all lanes.

    Example: `rowmill sql app:mill fetch --functions`
    """
    words = list(words or ())
    if role is None and (hide or writes):
        raise UsageError("--hide and --writes need --role", hint="--role NAME")
    if role is not None and functions:
        raise UsageError("--role and --functions cannot be used together", hint="use one of them")
    if not functions and (prefix is not None or name or schema or grant or apply or remove or security != "invoker"):
        raise UsageError("that option needs --functions", hint="add --functions")
    if role is not None:
        _role(words, env, role, hide or [], writes or [], as_json)
        return
    names = pairs(name or (), "--name", "VERB=NAME", "--name claim=claim_next_job")
    options = FunctionOptions(prefix, names, schema, security == "definer", grant or ())
    mill, lane, environment = _lane(words, env)
    if not functions:
        document = _of_lane(mill, lane, environment, lane_sql.statements)
        shown = _statements
    elif remove:
        document = _of_lane(mill, lane, environment, lambda view: lane_sql.dropped_functions(view, apply=apply))
        shown = _dropped
    else:
        document = _of_lane(mill, lane, environment, lambda view: lane_sql.functions(view, options, apply=apply))
        shown = _functions
    if as_json:
        print_json(document)
    else:
        shown(document)


def _lane(words: list[str], env: str | None) -> tuple[Mill, str, str]:
    """``[APP] LANE``: the application, the lane, and the environment, by default the first that the lane works in."""
    if not words and "ROWMILL_APP" not in os.environ:
        raise UsageError("no lane given", hint="rowmill sql [APP] LANE")
    named = len(words) == 2 and ":" not in words[0]
    reference, rest = (words[0], words[1:]) if named else worded(words, "LANE")
    mill = load(reference)
    lane = one_lane(mill, rest[0] if rest else None)
    served = (name for name in mill.environments if mill.lanes[lane].serves(name))
    return mill, lane, env or next(served, next(iter(mill.environments)))


def _of_lane(
    mill: Mill, lane: str, environment: str, question: Callable[[Any], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    async def of_lane(directory: LaneDirectory) -> dict[str, Any]:
        return await question(await directory.view(environment, lane))

    return ask(mill, of_lane, [environment], [lane])


def _statements(document: dict[str, Any]) -> None:
    lane = one_line(document["lane"])
    listed = [(each["name"], commented(each["name"], each["sql"])) for each in document["statements"]]
    typer.echo("\n\n".join(f"-- {lane}: {name}\n{text};" for name, text in listed))


def _functions(document: dict[str, Any]) -> None:
    lane = document["lane"]
    if document["applied"]:
        typer.echo("\n".join(f"installed {f['signature']}" for f in document["functions"]))
        for note in document["notes"]:
            errors.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
        return
    head = [
        f"The verbs of lane {lane} as functions. rowmill sql ... --functions --apply installs them.",
        *document["notes"],
    ]
    typer.echo("\n".join(f"-- {one_line(line)}" for line in head))
    typer.echo("begin;\n")
    for function in document["functions"]:
        typer.echo(f"-- {one_line(lane)}: {function['verb']}\n{function['sql']};\n")
    typer.echo("-- rowmill recognises its functions by their comments. Only the roles named here may call them.")
    typer.echo("".join(f"{statement};\n" for statement in document["after"]) + "commit;")


def _dropped(document: dict[str, Any]) -> None:
    if not document["drop"]:
        typer.echo(f"-- No functions of lane {one_line(document['lane'])} are installed.")
    elif document["applied"]:
        typer.echo("\n".join(line.replace("drop function", "dropped", 1) for line in document["drop"]))
    else:
        typer.echo("\n".join(f"{line};" for line in document["drop"]))


def _role(words: list[str], env: str | None, role: str, hide: list[str], writes: list[str], as_json: bool) -> None:
    """Print the statements for a worker role, in the first environment or the named one, for all lanes or one."""
    reference, rest = worded(words, "LANE")
    mill = load(reference)
    environment = env or next(iter(mill.environments))
    try:
        document = ask(
            mill, lambda directory: lane_sql.worker_role(directory, role, hide, writes), [environment], rest or None
        )
    except lane_sql.NotAColumn as error:
        raise UsageError(error.message, hint=error.hint) from None
    if as_json:
        print_json(document)
        return
    typer.echo(
        "-- A role for workers: it can work on these lanes and do nothing else. Run this as the tables' owner, after\n"
        "-- rowmill migrate APP --apply; then give the role a password. What a finish block or on_settled writes\n"
        "-- elsewhere, and tables of your own that gates read, are yours to grant."
    )
    typer.echo("begin;\n" + "".join(f"{statement};\n" for statement in document["statements"]) + "commit;")
