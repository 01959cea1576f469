"""``rowmill adopt``: read a live table and propose the lane over it. Nothing is written but the file asked for."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.syntax import Syntax
from rich.text import Text

from ..adopt.lane_file import quoted_table, secret, sketch
from ..adopt.proposal import Proposal
from ..adopt.propose import propose
from ..adopt.survey import read_only, survey
from ..adopt.table_facts import TableFacts
from ..clock import Clock
from ..declare import lane as lanes_words
from ..errors import DeclarationError, RowmillError
from ..migrate import ddl
from ..ops.findings import zones
from ..plural import counted
from ..store import Database, bind, redact, store_for
from ..store.database import runner
from ..store.inspect import plans
from ..store.inspect.indexes import needed
from ..store.inspect.lane_view import check_file
from ..store.lane.refused_states import check_states
from . import show
from .app import AsJson, UsageError, app, console, errors, print_json, print_out, run_async

UNSURE = 5  # exit code: something has to be said first


@dataclass
class Adoption:
    """All that adopt found out."""

    proposal: Proposal
    source: str = ""
    changes: Sequence[ddl.SchemaChange] = ()
    #: The claim's plan as the table is, and with the proposed index.
    now: plans.QueryPlan | None = None
    later: plans.QueryPlan | None = None
    #: Why the lane cannot run before migrate; None: it can.
    first: str | None = None


Values = Annotated[list[str] | None, typer.Option(help="a value that means so; may be given again", metavar="VALUE")]
Value = Annotated[str | None, typer.Option(help="the value that means so", metavar="VALUE")]


@app.command()
def adopt(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[URL] TABLE", help="the database, and the table; ROWMILL_DATABASE_URL stands in"),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="ask nothing: take the guesses")] = False,
    write: Annotated[Path | None, typer.Option("--write", "-w", help="write the proposed file here")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite that file")] = False,
    state: Annotated[
        str | None, typer.Option("--state", help="the column that holds the state", metavar="COLUMN")
    ] = None,
    ready: Values = None,
    running: Value = None,
    done: Value = None,
    retry: Value = None,
    dead: Value = None,
    as_json: AsJson = False,
) -> None:
    """Read a live table; propose the lane, the DDL, and show the claim's plan at today's size.

    Only reads, takes no lock that a reader does not, and never scans a large table. What the table does not tell is
    asked at a terminal; with --yes or in a script the command then ends with code 5 and says which option answers it.
    """
    url, table = _target(words)
    place = url if len(words) == 2 else None  # from the environment: then the file reads it there, too
    given = {"state": state, "ready": ready, "running": running, "done": done, "retry": retry, "dead": dead}
    answers = {key: value for key, value in given.items() if value}
    if write is not None and write.exists() and not force:
        raise UsageError(f"{write} is there already", hint=f"another name, or --force to overwrite {write}")

    async def main() -> Adoption:
        database = Database.open(url)
        try:
            check_file(database)
            facts = await survey(database, table)
            made = propose(facts, typed(facts, answers))
            asking = not yes and not as_json and console.is_terminal and sys.stdin.isatty()
            if asking:
                made = _ask(facts, made, answers)
            if made.questions:
                return Adoption(made)
            return await _whole(database, made, place)
        finally:
            await database.close()

    found = run_async(main())
    if as_json:
        print_json(_value(found))
    if found.proposal.questions:
        _unsure(found.proposal, url, table, quiet=as_json)
    if not as_json:
        print_out(_page(found, url, table, write))
    if write is not None:
        write.write_text(found.source, encoding="utf-8")


def _target(words: Sequence[str]) -> tuple[str, str]:
    if len(words) == 2:
        return words[0], words[1]
    url = os.environ.get("ROWMILL_DATABASE_URL")
    if len(words) == 1 and url and "://" not in words[0]:
        return url, words[0]
    raise UsageError(
        "adopt needs a database and a table" if len(words) < 2 else "one database and one table, not more",
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
        if not isinstance(value, str):
            return value
        if column is not None and column.kind == "int":
            try:
                return int(value)
            except ValueError:
                raise UsageError(f"{column.name} holds whole numbers, not {value!r}") from None
        return None if value.lower() == "null" and column is not None and column.nullable else value

    found: dict[str, Any] = {}
    for key, value in answers.items():
        if key == "state":
            found[key] = value
        elif isinstance(value, list):
            values = [one(v) for v in value]
            found[key] = values[0] if len(values) == 1 else values
        else:
            found[key] = one(value)
    return found


def _ask(facts: TableFacts, made: Proposal, answers: dict[str, Any]) -> Proposal:
    """At a terminal: each thing that is not known, and once more what is only a guess."""
    for _ in range(12):
        if made.questions:
            question = made.questions[0]
            console.print(Text("? ", "bold yellow").append_text(show.plain(question.text)))
            shown = ", ".join(str(option) for option in question.options)
            word = (
                f"which column is the state ({shown})"
                if question.about == "state"
                else (f"which value means {question.about}" + (f" ({shown})" if shown else ""))
            )
            said = typer.prompt(word)
            answers[question.about] = [said] if question.about == "ready" else said
        else:
            unsure = [c for c in made.choices if c.what in ("ready", "running", "done", "dead")
                      and c.sure < 0.7 and c.what not in answers and isinstance(c.value, str)]  # fmt: skip
            if not unsure:
                return made
            choice = unsure[0]
            console.print(Text("? ", "bold yellow").append_text(show.plain(f"{choice.what}: {choice.why}")))
            said = typer.prompt(f"the value that means {choice.what}", default=str(choice.value))
            answers[choice.what] = [said] if choice.what == "ready" else said
        made = propose(facts, typed(facts, answers))
    return made


async def _whole(database: Database, made: Proposal, url: str | None) -> Adoption:
    """The proposal as a lane: bound, with its DDL and its plans."""

    async def handler(job: Any) -> None: ...

    options = {**made.options, "name": made.name}
    lane = lanes_words.declare(quoted_table(made.facts.schema, made.facts.name), handler, options)
    found = Adoption(made, sketch(made, url))
    outline = await ddl.outline(lane, "default", database)
    found.changes = await ddl.changes(database, [outline])
    try:
        binding = await bind(lane, "default", database)
    except DeclarationError as error:
        found.first = error.message
        binding = outline.binding
    else:
        await check_states(store_for(binding, database, Clock(), "", ""), trial=False)
        say = plans.statements(binding)
        found.now = await read_only(database, lambda c: plans.explain(runner(c), say))
    if database.dialect.name == "postgresql":
        relation = plans.statements(binding).table
        doubts = await read_only(database, lambda c: zones(runner(c), binding, relation))
        made.notes += [f"{doubt.text}. Try: {doubt.hint}" for doubt in doubts]
    need = needed(outline.binding, plans.statements(outline.binding))[0]
    if any(change.kind == "index" for change in found.changes):
        lacks = {lack.column: lack.sql_type for lack in outline.lacking}
        try:
            found.later = await plans.with_index(database, outline.binding, need, lacks)
        except RowmillError:  # what could not be tried is not shown
            found.later = None
    return found


def _unsure(made: Proposal, url: str, table: str, *, quiet: bool) -> None:
    """Say what is not known, and which option answers it; end the command."""
    if not quiet:
        for question in made.questions:
            line = Text("Cannot tell: ", "bold yellow").append_text(show.plain(question.text))
            errors.print(line, soft_wrap=True)
        asked = made.questions[0]
        options = " ".join(f"--{q.about} {_shell(q.options[0]) if q.options else '...'}" for q in made.questions)
        others = f" (one of: {', '.join(map(str, asked.options))})" if len(asked.options) > 1 else ""
        hint = f"rowmill adopt {_shell(redact(url))} {_shell(table)} {options}{others}"
        errors.print(Text("Try: ", "bold").append_text(show.plain(hint)), soft_wrap=True)
    raise typer.Exit(UNSURE)


def _shell(value: Any) -> str:
    return shlex.quote(str(value))


# -- what is shown


def _page(found: Adoption, url: str, table: str, write: Path | None) -> Group:
    made, facts = found.proposal, found.proposal.facts
    rows = (
        counted(facts.rows, "row")
        if facts.exact
        else f"about {counted(facts.rows, 'row')}; looked at {facts.looked_at:,}: {facts.how}"
    )
    parts: list[Any] = [Text().append_text(show.plain(facts.fullname)).append(f"  {rows}", "dim"), Text()]
    table_ = show.table("What", "Is", "How sure", "Why")
    for choice in made.choices:
        colour = {"sure": "green", "likely": "cyan", "a guess": "yellow"}[choice.word]
        value = (
            "(none)"
            if choice.value is None and choice.what == "dead"
            else "NULL"
            if choice.value is None
            else choice.value
        )
        table_.add_row(choice.what, show.plain(value), Text(choice.word, colour), show.plain(choice.why))
    table_.columns[-1].no_wrap = False
    parts += [table_, Text()]
    parts += [Text("Note: ", "yellow").append_text(show.plain(note)) for note in made.notes]
    if made.notes:
        parts.append(Text())
    parts += [_heading(f"The file{f', written to {write}' if write else ''}"), _code(found.source, "python"), Text()]
    if found.changes:
        parts.append(_heading("The DDL that `rowmill migrate` would run"))
        for change in found.changes:
            if change.kind != "own":
                parts.append(_code(f"-- {change.reasons}\n{change.statement};", "sql"))
        parts.append(Text())
    parts += _plan("The claim's plan, as the table is today", found.now)
    parts += _plan("The claim's plan with the proposed index, tried on a temporary copy", found.later)
    parts += _next(found, url, write)
    return Group(*parts)


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _code(text: str, language: str) -> Any:
    if console.is_terminal:
        return Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True)
    return Text(text.rstrip("\n"))


def _plan(title: str, plan: plans.QueryPlan | None) -> list[Any]:
    if plan is None:
        return []
    return [_heading(title), *(show.plain(f"  {line}") for line in plan.lines), Text()]


def _next(found: Adoption, url: str, write: Path | None) -> list[Any]:
    module = f"{write.stem}:mill" if write else "FILE:mill"
    steps = []
    if write is None:
        steps.append("rowmill adopt ... --write FILE.py      writes the file")
    if secret(url) and url != os.environ.get("ROWMILL_DATABASE_URL"):
        steps.append("export ROWMILL_DATABASE_URL=...        the file has no password in it")
    if found.first is not None:
        steps.append(f"rowmill migrate {module} --apply       needed first: {found.first}")
    elif found.changes:
        steps.append(f"rowmill migrate {module} --apply       adds what it lacks; it works without, too")
    steps.append(f"rowmill check {module}")
    steps.append(f"rowmill run {module}")
    return [_heading("Next"), *(show.plain(f"  {step}") for step in steps)]


def _value(found: Adoption) -> dict[str, Any]:
    made, facts = found.proposal, found.proposal.facts
    return {
        "table": facts.fullname,
        "rows": facts.rows,
        "exact": facts.exact,
        "lane": made.name,
        "sure": made.sure,
        "options": {k: _jsonable(v) for k, v in made.options.items()},
        "choices": [
            {"what": c.what, "value": c.value, "sure": c.sure, "word": c.word, "why": c.why} for c in made.choices
        ],
        "questions": [{"about": q.about, "text": q.text, "options": list(q.options)} for q in made.questions],
        "notes": made.notes,
        "needs_migrate": found.first,
        "file": found.source or None,
        "ddl": [{"kind": c.kind, "statement": c.statement, "why": c.why} for c in found.changes],
        "plan": _plan_value(found.now),
        "plan_with_index": _plan_value(found.later),
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_jsonable(v) for v in value]
    return value if value is None or isinstance(value, (str, int, bool)) else repr(value)


def _plan_value(plan: plans.QueryPlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {"lines": list(plan.lines), "index": plan.index, "uses_index": plan.direct, "cost": plan.cost}
