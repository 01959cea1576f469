"""``rowmill adopt``: read a live table and propose a lane. Writes nothing but the requested file."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.syntax import Syntax
from rich.text import Text

from ..adopt import vocabulary
from ..adopt.lane_file import secret
from ..adopt.proposal import Choice, Proposal, given
from ..adopt.propose import propose
from ..adopt.survey import survey
from ..adopt.table_facts import TableFacts
from ..adopt.table_facts import rows as rows_words
from ..declare.roles import ROLES
from ..errors import RowmillError, did_you_mean
from ..ops import adopt as adoption
from ..ops.adopt import Adoption, QueryPlan, redact
from . import show
from .app import UsageError, app, console, errors, labelled, plain, print_json, print_out, run_async
from .options import AsJson, pairs

UNSURE = 5  # exit code: something has to be said first
_UNUSED = 20  # columns without a role that are named


Values = Annotated[list[str] | None, typer.Option(help="a value that means ready (repeatable)", metavar="VALUE")]


def _value(option: str, meaning: str = "") -> Any:
    return typer.Option(option, help=f"the value that means {meaning or option[2:]}", metavar="VALUE")


@app.command()
def adopt(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[URL] TABLE", help="the database (default: ROWMILL_DATABASE_URL) and the table"),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask: accept the guesses")] = False,
    write: Annotated[Path | None, typer.Option("--write", "-w", help="write the proposed file here")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
    state: Annotated[
        str | None, typer.Option("--state", help="the column that holds the state", metavar="COLUMN")
    ] = None,
    ready: Values = None,
    running: Annotated[str | None, _value("--running")] = None,
    done: Annotated[str | None, _value("--done")] = None,
    retry: Annotated[str | None, _value("--retry", "waiting for a retry")] = None,
    dead: Annotated[str | None, _value("--dead")] = None,
    canceled: Annotated[str | None, _value("--canceled")] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            help="the column of a role, such as attempts=retry_cnt; attempts= for none (repeatable)."
            f" Roles: {', '.join(ROLES)}",
            metavar="ROLE=COLUMN",
        ),
    ] = None,
    order_by: Annotated[
        str | None,
        typer.Option("--order-by", help="claim rows in the order of this column", metavar="COLUMN"),
    ] = None,
    wake: Annotated[
        bool, typer.Option("--wake", help="propose a trigger that wakes workers when any client makes rows ready")
    ] = False,
    types: Annotated[
        Path | None,
        typer.Option("--types", help="only write the types of the table's rows to this file", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read a live table, and propose a lane for it.

    Prints the lane, the DDL that it needs, and the query plan of its claim. It only reads, takes no lock that a reader
    does not take, and never scans a large table. At a terminal it asks what is not certain. In a script it lists the
    open questions with the option that answers each, writes no file, and exits with code 5. --yes accepts every guess.
    A question without a guess still needs an option. Give values as the column has them, or as the words of its lookup
    table.

    Example: `rowmill adopt postgresql://localhost/shop links --write worker.py`
    """
    url, table = _target(words)
    address = url if len(words) == 2 else None  # from the environment: then the file reads it there, too
    known = f"--role attempts=retry_cnt; the roles are {', '.join(ROLES)}"
    roles = {role: column or None for role, column in pairs(role or (), "--role", "ROLE=COLUMN", known).items()}
    answered = {"state": state, "ready": ready, "running": running, "done": done, "retry": retry, "dead": dead,
             "canceled": canceled, "roles": roles, "order_by": order_by}  # fmt: skip
    answers = {key: value for key, value in answered.items() if value}
    for file in (write, types):
        if file is not None and file.exists() and not force:
            raise UsageError(f"{file} already exists", hint=f"choose another name, or add --force to overwrite {file}")
    if types is not None:
        types.write_text(run_async(adoption.types(url, table)), encoding="utf-8")
        return

    async def main() -> Adoption:
        async with adoption.opened(url) as database:
            facts = await survey(database, table)
            made = propose(facts, typed(facts, answers))
            asking = not yes and not as_json and console.is_terminal and sys.stdin.isatty()
            if asking:
                made = _ask(facts, answers)
            if made.questions:
                return Adoption(made)
            wakes = database.sql.notify is not None and (wake or (asking and _ask_wake()))
            return await adoption.adopt(database, made, address, wake=wakes)

    adopted = run_async(main())
    if as_json:
        print_json(adoption.value(adopted))
    made = adopted.proposal
    kept = write if not made.questions and (yes or not made.open) else None
    if not as_json:
        if not made.questions:
            print_out(_page(adopted, url, kept))
        _open_questions(made, url, table, accepted=yes)
    if made.questions or (made.open and not yes):
        raise typer.Exit(UNSURE)
    if kept is not None:
        kept.write_text(adopted.source, encoding="utf-8")


def _target(words: Sequence[str]) -> tuple[str, str]:
    if len(words) == 2:
        return words[0], words[1]
    url = os.environ.get("ROWMILL_DATABASE_URL")
    if len(words) == 1 and url and "://" not in words[0]:
        return url, words[0]
    if len(words) == 1 and "://" not in words[0]:
        raise UsageError(
            f"adopt {words[0]}: no database is given",
            hint=f"export ROWMILL_DATABASE_URL=..., or put the URL first:"
            f" rowmill adopt postgresql://user@host/database {words[0]} (or sqlite:///file.db)",
        )
    raise UsageError(
        "adopt needs a database and a table" if len(words) < 2 else "expected one database and one table, got more",
        hint="rowmill adopt postgresql://user@host/database table",
    )


def typed(facts: TableFacts, answers: dict[str, Any]) -> dict[str, Any]:
    """Answers as the state column has them: numbers for numbers, NULL for null."""
    column = facts.column(answers["state"]) if answers.get("state") else None
    if column is None and answers:
        made = propose(facts)
        name = next((c.value for c in made.choices if c.what == "state"), None)
        column = facts.column(str(name)) if name else None

    def one(value: Any) -> Any:
        if not isinstance(value, str) or column is None:
            return value
        if column.kind == "int" and re.fullmatch(r"-?\d+", value):
            return int(value)
        words = {vocabulary.words(word): key for key, word in column.meanings.items()}
        if (spelled := vocabulary.words(value)) in words and value not in column.seen:
            return words[spelled]
        if value.lower() == "null" and column.nullable:
            return None
        if column.kind == "int":
            hint = did_you_mean(value, [*column.meanings.values()]) if column.meanings else ""
            raise UsageError(f"{column.name} holds whole numbers, not {value!r}", hint=hint)
        return value

    converted: dict[str, Any] = {}
    for key, value in answers.items():
        if key in ("state", "roles", "order_by"):
            converted[key] = value
        elif key in ("dead", "canceled") and str(value).lower() == "none":
            converted[key] = None
        elif isinstance(value, list):
            values = [one(v) for v in value]
            converted[key] = values[0] if len(values) == 1 else values
        else:
            converted[key] = one(value)
    return converted


def _ask(facts: TableFacts, answers: dict[str, Any]) -> Proposal:
    """Ask at a terminal: first what is not known, then what is not certain."""
    confirmed: list[str] = []
    while True:
        made = propose(facts, typed(facts, answers))
        for what in confirmed:
            made.confirm(what)
        if not made.questions and not made.open:
            return made
        if made.questions:
            about, text = made.questions[0].about, made.questions[0].text
            shown = ", ".join(str(option) for option in made.questions[0].options)
            word = "which column is the state" if about == "state" else f"which value means {about}"
            word, default = f"{word} ({shown})" if shown else word, None
        else:
            choice = made.open[0]
            about, text, default = choice.what, f"{choice.what}: {choice.why}", given(choice.value)
            word = f"the value that means {about}" if not choice.role else f"the column of {about} (none: no column)"
        console.print(Text("? ", "bold yellow").append_text(plain(text)))
        answer = typer.prompt(word, default=default)
        if answer == default:
            confirmed.append(about)
            continue
        tried = {**answers, about: [answer] if about == "ready" else answer}
        if about.startswith("role "):
            chosen = None if answer == "none" else answer
            tried = {**answers, "roles": {**answers.get("roles", {}), about.removeprefix("role "): chosen}}
        try:
            propose(facts, typed(facts, tried))
        except RowmillError as error:  # ask again
            console.print(plain(str(error)))
        else:
            answers = tried


def _ask_wake() -> bool:
    """Ask at a terminal whether to propose the wake trigger."""
    text = (
        "Rows that other programs insert start at the next poll, within 6 s. With a trigger on the table they start"
        " at once. You can also add it later: rowmill migrate --wake."
    )
    console.print(Text("? ", "bold yellow").append_text(plain(text)))
    return typer.confirm("Propose the trigger?", default=False)


def _open_questions(made: Proposal, url: str, table: str, *, accepted: bool) -> None:
    """Print the open questions, and which option answers each."""
    for question in made.questions:
        errors.print(Text("Cannot tell: ", "bold yellow").append_text(plain(question.text)), soft_wrap=True)
    for choice in () if made.questions else made.open:
        value = plain(f"{choice.what} is {given(choice.value)}? {choice.why}: {choice.answer}")
        errors.print(Text("Not certain: ", "bold yellow").append_text(value), soft_wrap=True)
    if made.questions:
        asked = made.questions[0]
        options = " ".join(f"--{q.about} {_shell(q.options[0]) if q.options else '...'}" for q in made.questions)
        others = f" (one of: {', '.join(map(str, asked.options))})" if len(asked.options) > 1 else ""
        hint = f"{options}{others}"
    elif made.open and not accepted:
        hint = " ".join(choice.answer.partition(" or ")[0] for choice in made.open)
        hint += ", or your own values; --yes accepts the proposal"
    else:
        return
    line = plain(f"rowmill adopt {_shell(redact(url))} {_shell(table)} {hint}")
    errors.print(Text("Try: ", "bold").append_text(line), soft_wrap=True)


def _shell(value: Any) -> str:
    return shlex.quote(str(value))


# -- what is shown


def _page(adopted: Adoption, url: str, write: Path | None) -> Group:
    made, facts = adopted.proposal, adopted.proposal.facts
    rows = rows_words(facts.rows, facts.counted)
    if not facts.exact:
        rows += f"; sampled {facts.looked_at:,}: {facts.how}"
    parts: list[Any] = [Text().append_text(plain(facts.fullname)).append(f"  {rows}", "dim"), Text()]
    table_ = show.table("What", "Is", "How sure", "Why")
    for choice in made.choices:
        colour = {"sure": "green", "likely": "cyan", "a guess": "yellow"}[choice.word]
        table_.add_row(choice.what, plain(_shown(made, choice)), Text(choice.word, colour), plain(choice.why))
    table_.columns[-1].no_wrap = False
    parts.append(table_)
    if made.unused:
        rest = f", and {len(made.unused) - _UNUSED} more" if len(made.unused) > _UNUSED else ""
        parts.append(plain(f"No role: {', '.join(made.unused[:_UNUSED])}{rest} (--role ROLE=COLUMN gives one)"))
    parts.append(Text())
    parts += [Text("Note: ", "yellow").append_text(plain(note)) for note in made.notes]
    if made.notes:
        parts.append(Text())
    parts += [_heading(f"The file{f', written to {write}' if write else ''}"), _code(adopted.source, "python"), Text()]
    if adopted.changes:
        parts.append(_heading("The DDL that `rowmill migrate` would run"))
        for change in adopted.changes:
            if change.kind != "own":
                parts.append(_code(f"-- {change.reasons}\n{change.statement};", "sql"))
        parts.append(Text())
    parts += _plan("Query plan of the claim, as the table is today", adopted.now)
    parts += _plan("Query plan of the claim with the proposed index, on a temporary copy", adopted.later)
    parts += _next(adopted, url, write)
    return Group(*parts)


def _shown(made: Proposal, choice: Choice) -> str:
    """A choice's value, with its meaning."""
    if choice.value is None:
        return "(none)" if choice.what in ("dead", "canceled") else "NULL"
    labels = made.labels(choice)
    return f"{choice.value} ({', '.join(labels)})" if labels else str(choice.value)


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _code(text: str, language: str) -> Any:
    if console.is_terminal:
        return Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True)
    return Text(text.rstrip("\n"))


def _plan(title: str, plan: QueryPlan | None) -> list[Any]:
    if plan is None:
        return []
    return [_heading(title), *(plain(f"  {line}") for line in plan.lines), Text()]


def _next(adopted: Adoption, url: str, write: Path | None) -> list[Any]:
    file = write or Path("worker.py")
    module = f"{file.stem}:mill"
    steps = []
    if write is None:
        steps.append((f"rowmill adopt ... --write {file}", "the same command again: it writes the file"))
    if secret(url) and url != os.environ.get("ROWMILL_DATABASE_URL"):
        steps.append(("export ROWMILL_DATABASE_URL=...", "the file contains no password"))
    steps.append((f"edit {file.name}", "fill in the handler: it only logs rows, and they are then done"))
    if adopted.first is None:
        steps.append((f"rowmill check {module}", "shows what the table lacks, and what that costs"))
    if adopted.changes:
        why = f"required first: {adopted.first}" if adopted.first else "adds what the table lacks (optional)"
        migrate = f"rowmill migrate {module}{' --wake' if adopted.wake else ''}"
        steps.append((migrate, "shows the DDL"))
        steps.append((f"{migrate} --apply", why))
        steps.append((f"rowmill check {module}", "shows what is left"))
    steps.append((f"rowmill run {module}", "starts a worker"))
    width = max(len(step) for step, _ in steps) + 4
    return [_heading("Next"), *(labelled(Text(f"  {step}".ljust(width)), plain(why)) for step, why in steps)]
