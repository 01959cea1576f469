"""``rowmill token``: who may use the dashboard and the API. ``rowmill audit``: what was done there."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from ..errors import DeclarationError
from ..mill import Mill
from ..store import Database
from ..store.inspect.lane_view import check_file
from ..store.own.access import SCOPES, Audit, Token, Tokens, check_scopes
from . import show
from .app import NOTHING_MATCHED, App, AsJson, UsageError, app, errors, load, print_json, print_out, run_async, said
from .environments import worded

T = TypeVar("T")
_VERBS = "create [APP] NAME | list [APP] | revoke [APP] NAME"


@app.command()
def token(
    words: Annotated[list[str], typer.Argument(metavar=_VERBS, show_default=False)],
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", help="read, operate, enqueue: what it may do (may be given again); default: read"),
    ] = None,
    lane: Annotated[
        list[str] | None,
        typer.Option("--lane", help="only for this lane (may be given again); default: all", callback=said),
    ] = None,
    days: Annotated[float | None, typer.Option("--days", min=0.001, max=36500, help="ends after so many days")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens for the dashboard and the HTTP API: make one (it is shown this once), list them, end one.

    *read*: see everything; *operate*: retry, cancel, release, pause, gates; *enqueue*: create jobs and rows. They stand
    in the first environment's database, as hashes.
    """
    verb, *rest = words
    if verb not in ("create", "list", "revoke"):
        raise UsageError(f"there is no token {verb}", hint=f"rowmill token {_VERBS}")
    reference, names = worded(rest, *([] if verb == "list" else ["NAME"]))
    if verb != "list" and not names:
        raise UsageError("which token?", hint=f"rowmill token {verb} [APP] NAME")
    if verb != "create" and (scope or lane or days):
        raise UsageError("--scope, --lane and --days are for create", hint=f"rowmill token {verb} without them")
    mill = load(reference)
    if verb == "create":
        _create(mill, names[0], scope or ["read"], lane, days, as_json)
    elif verb == "revoke":
        _revoke(mill, names[0], as_json)
    else:
        _list(run_async(_first(mill, lambda database: Tokens(database).all())), as_json)


def _create(
    mill: Mill, name: str, scopes: list[str], lanes: list[str] | None, days: float | None, as_json: bool
) -> None:
    check_scopes(scopes)
    if lanes:
        mill.select(lanes)
    if len(name) > 100:
        raise DeclarationError("a token's name has at most 100 letters")
    made, secret = run_async(
        _first(mill, lambda database: Tokens(database).create(name, scopes, lanes, days, operator()))
    )
    if as_json:
        print_json({"action": "create", **made.value(), "token": secret})
        return
    print_out(secret)
    errors.print("This is shown once. Send it as: Authorization: Bearer ...", highlight=False)


def _revoke(mill: Mill, name: str, as_json: bool) -> None:
    found = run_async(_first(mill, lambda database: Tokens(database).revoke(name)))
    if as_json:
        print_json({"action": "revoke", "token": found.value() if found else None})
    else:
        print_out(show.plain(f"{name} is no longer valid" if found else f"There is no valid token {name}."))
    if found is None:
        raise typer.Exit(NOTHING_MATCHED)


def _list(found: list[Token], as_json: bool) -> None:
    if as_json:
        print_json({"tokens": [token.value() for token in found]})
        return
    if not found:
        print_out("No tokens.")
        return
    made = show.table("Id", "Name", "Scopes", "Lanes", "Made", "Used", "State")
    for one in found:
        scopes = " ".join(s for s in SCOPES if s in one.scopes)
        state = "valid" if one.valid else "revoked" if one.revoked_at else "ended"
        lanes = "all" if one.lanes is None else ", ".join(sorted(one.lanes))
        cells = [one.name, scopes, lanes, one.created_at[:16], (one.used_at or "never")[:16], state]
        made.add_row(one.id, *map(show.plain, cells))
    print_out(made)


@app.command()
def audit(
    reference: App = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="the newest so many")] = 50,
    as_json: AsJson = False,
) -> None:
    """What was done through the dashboard and the HTTP API: who, what, when, how it ended."""
    found = run_async(_first(load(reference), lambda database: Audit(database).entries(limit)))
    if as_json:
        print_json({"entries": found})
        return
    if not found:
        print_out("Nothing was done yet.")
        return
    made = show.table("When", "Who", "Action", "Lane", "What", "Outcome")
    for entry in found:
        where = "/".join(entry[name] for name in ("environment", "lane") if entry[name])
        cells = [entry["at"][:19], entry["who"], entry["action"], where, entry["target"] or "", entry["outcome"]]
        made.add_row(*map(show.plain, cells))
    print_out(made)


def operator() -> str:
    """Who is at this terminal."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"somebody@{socket.gethostname()}"


async def _first(mill: Mill, work: Callable[[Database], Awaitable[T]]) -> T:
    """Something with the first environment's database, where tokens stand."""
    ((_, database),) = mill.databases([next(iter(mill.environments))])
    try:
        check_file(database)
        return await work(database)
    finally:
        await database.close()
