"""``rowmill token``: who may use the dashboard and the API. ``rowmill audit``: what was done there."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ..ops import access, questions
from . import show
from .app import UsageError, answer, app, errors, plain, run_async
from .options import App, AsJson, load, not_empty, worded

_VERBS = "create [APP] NAME | list [APP] | revoke [APP] NAME"


@app.command()
def token(
    words: Annotated[list[str], typer.Argument(metavar=_VERBS, show_default=False)],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, operate or enqueue (repeatable; default: read)"),
    ] = None,
    lane: Annotated[
        list[str] | None,
        typer.Option("--lane", help="only for this lane (repeatable; default: all)", callback=not_empty),
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", min=0.001, max=36500, help="expires after this many days")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create, list and revoke tokens for the dashboard and the HTTP API.

    Shows a token once, when it is created. The database of the first environment stores only its hash. Scopes:

    - *read*: see everything

    - *operate*: retry, cancel, release, pause and resume, change gates

    - *enqueue*: create jobs and rows

    Example: `rowmill token create app:mill alice --scope operate`
    """
    verb, *rest = words
    if verb not in ("create", "list", "revoke"):
        raise UsageError(f"there is no token {verb}", hint=f"rowmill token {_VERBS}")
    reference, names = worded(rest, *([] if verb == "list" else ["NAME"]))
    if verb != "list" and not names:
        raise UsageError("no token name given", hint=f"rowmill token {verb} [APP] NAME")
    if verb != "create" and (scope or lane or days):
        raise UsageError("--scope, --lane and --days are for create", hint=f"rowmill token {verb} without them")
    mill = load(reference)
    if verb == "create":
        document = run_async(access.create_token(mill, names[0], scope or ["read"], lane, days, operator()))
    elif verb == "revoke":
        document = run_async(access.revoke_token(mill, names[0]))
    else:
        document = run_async(access.tokens(mill))
    if verb == "create":
        answer(document, document["token"], as_json=as_json)
    elif verb == "revoke":
        ended = f"{names[0]} is no longer valid" if document["token"] else f"There is no valid token {names[0]}."
        answer(document, plain(ended), as_json=as_json, nothing=document["token"] is None)
    else:
        answer(document, _table(document["tokens"]), as_json=as_json)
    if verb == "create" and not as_json:
        errors.print("The token is shown only once. Send it as: Authorization: Bearer ...", highlight=False)


def _table(tokens: list[dict[str, Any]]) -> RenderableType:
    if not tokens:
        return "No tokens."
    made = show.table("Id", "Name", "Scopes", "Lanes", "Made", "Used", "State")
    for one in tokens:
        state = "valid" if one["valid"] else "revoked" if one["revoked_at"] else "ended"
        lanes = "all" if one["lanes"] is None else ", ".join(one["lanes"])
        used = (one["used_at"] or "never")[:16]
        cells = [one["name"], " ".join(one["scopes"]), lanes, one["created_at"][:16], used, state]
        made.add_row(one["id"], *map(plain, cells))
    return made


@app.command()
def audit(
    reference: App = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="number of entries, newest first")] = 50,
    as_json: AsJson = False,
) -> None:
    """List what was done through the dashboard, the HTTP API and MCP: who, what, when, and how it ended.

    Example: `rowmill audit app:mill --limit 20`
    """
    mill = load(reference)

    async def main() -> dict[str, Any]:
        async with access.first_database(mill) as database:
            return await questions.audit(database, limit)

    document = run_async(main())
    made = show.table("When", "Who", "Action", "Lane", "What", "Outcome")
    for entry in document["entries"]:
        where = "/".join(entry[name] for name in ("environment", "lane") if entry[name])
        cells = [entry["at"][:19], entry["who"], entry["action"], where, entry["target"] or "", entry["outcome"]]
        made.add_row(*map(plain, cells))
    nothing = "Nothing was done through the dashboard or the HTTP API."
    answer(document, made if document["entries"] else nothing, as_json=as_json)


def operator() -> str:
    """The name of the person at this terminal, for the audit log."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"somebody@{socket.gethostname()}"
