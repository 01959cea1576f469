"""Commands that act on rows: retry, cancel, release."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from ..errors import RowmillError
from ..ops import actions, questions
from ..ops.actions import CANCELED, ActionTarget, ChosenRows, Impact
from ..ops.directory import LaneDirectory
from ..plural import counted, plural
from .app import NOTHING_MATCHED, NothingMatched, UsageError, app, ask, consent, console, errors, plain, print_json
from .options import App, AsJson, OneEnvironment, OneLane, load, not_empty, one_environment, one_lane, one_of

#: More rows than this are changed only after a question, or with --yes.
ASK_ABOVE = 100
#: Hours in which a family of failures is looked for.
_MONTH = 24.0 * 30
_PAST = {"retry": "made ready", "cancel": "canceled", "release": "released"}

Retryable = Literal["dead", "canceled", "waiting", "excluded"]
Cancelable = Literal["ready", "waiting", "excluded", "running"]
Ids = Annotated[list[str] | None, typer.Option("--id", help="this row (repeatable); a composite key: a,b")]
Family = Annotated[
    str | None, typer.Option("--error", help="rows of this family (see `rowmill errors`)", callback=not_empty)
]
Yes = Annotated[bool, typer.Option("--yes", help=f"do not ask for confirmation above {ASK_ABOVE} rows")]


@app.command()
def retry(
    reference: App = None,
    env: OneEnvironment = None,
    lane: OneLane = None,
    ids: Ids = None,
    state: Annotated[
        Retryable | None, typer.Option(metavar="STATE", help=f"all rows in this state: {one_of(Retryable)}")
    ] = None,
    error: Family = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Retry rows now, with all their attempts again.

    Running rows are never touched. With --error, retry the dead and waiting rows whose latest failure is in that
    family.

    Example: `rowmill retry app:mill --lane fetch --state dead`
    """
    _only_one(id=ids, state=state, error=error)
    rows = ChosenRows(ids=ids, state=state, error=error)
    _Command("retry", rows, yes, as_json).run(reference, env, lane, lambda target: actions.retry(target, rows))


@app.command()
def cancel(
    reference: App = None,
    env: OneEnvironment = None,
    lane: OneLane = None,
    ids: Ids = None,
    state: Annotated[
        Cancelable | None, typer.Option(metavar="STATE", help=f"all rows in this state: {one_of(Cancelable)}")
    ] = None,
    error: Family = None,
    running: Annotated[bool, typer.Option("--running", help="also running rows; their outcome is dropped")] = False,
    reason: Annotated[str, typer.Option(help="text for the error column")] = CANCELED,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel rows before they run, or also running rows with --running.

    Canceled rows move to canceled, or to dead if the lane has no such state. With --error, cancel the rows whose
    latest failure is in that family.

    Example: `rowmill cancel app:mill --lane fetch --id 7`
    """
    _only_one(id=ids, state=state, error=error)
    if state == "running" and not running:
        raise UsageError("--state running takes rows from their workers", hint="add --running")
    rows = ChosenRows(ids=ids, state=state, error=error)
    _Command("cancel", rows, yes, as_json, running).run(
        reference, env, lane, lambda target: actions.cancel(target, rows, running=running, reason=reason)
    )


@app.command()
def release(
    reference: App = None,
    env: OneEnvironment = None,
    lane: OneLane = None,
    ids: Ids = None,
    worker: Annotated[str | None, typer.Option(help="all rows that this worker is running")] = None,
    stuck: Annotated[
        bool, typer.Option("--stuck", help="all stuck rows: no heartbeat for longer than the lease")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take running rows back from their worker, and make them ready again.

    No attempt is lost. If the worker still finishes one of them, its outcome is dropped.

    Example: `rowmill release app:mill --worker host-4711-k7xq`
    """
    _only_one(id=ids, worker=worker, stuck=stuck)
    rows = ChosenRows(ids=ids, worker=worker, stuck=stuck)
    _Command("release", rows, yes, as_json).run(reference, env, lane, lambda target: actions.release(target, rows))


def _only_one(**given: Any) -> None:
    names = ", ".join(f"--{name}" for name in given)
    chosen = sum(bool(value) for value in given.values())
    if chosen != 1:
        raise UsageError(
            "no rows are chosen" if not chosen else "rows are chosen in more than one way", hint=f"one of {names}"
        )


@dataclass
class _Command:
    """One action on one lane of one environment: ask for confirmation, do it, report the result."""

    verb: str
    rows: ChosenRows
    yes: bool
    as_json: bool
    running: bool = False

    def run(
        self,
        reference: str | None,
        env: str | None,
        lane: str | None,
        work: Callable[[ActionTarget], Awaitable[dict[str, Any]]],
    ) -> None:
        mill = load(reference)
        name = one_lane(mill, lane)
        environment = one_environment(mill, env, name)

        async def act(directory: LaneDirectory) -> dict[str, Any]:
            target = ActionTarget(directory, environment, name)
            if not self.rows.ids and not self.yes:
                most = ASK_ABOVE + 1
                self._consent(await actions.impact(target, self.verb, self.rows, most, running=self.running))
            try:
                document = await work(target)
                if self.rows.error is not None and not document["count"] and not self.as_json:
                    await self._refuse_family(directory, self.rows.error)
                return document
            except RowmillError as error:
                if written := target.progress.rows:
                    error.message += f" ({counted(written, 'row')} had been {_PAST[self.verb]} before that)"
                raise

        self._tell(ask(mill, act, [environment], [name]))

    async def _refuse_family(self, directory: LaneDirectory, family: str) -> None:
        """Raise the reason why no row of a family was written: no such family, or none of its rows is left."""
        document = await questions.errors(directory, _MONTH, family)
        if not any(part["families"] for part in document["environments"]):
            hint = "rowmill errors APP lists them; use the name in its column Family"
            raise NothingMatched(f"there is no family {family!r}", hint=hint)
        what = {"retry": "dead or waiting", "cancel": "ready or waiting"}[self.verb]
        raise NothingMatched(
            f"no row is {what} with its latest failure in the family {family!r}",
            hint="rowmill jobs --state dead lists dead rows; rows that have succeeded since need no retry",
        )

    def _consent(self, impact: Impact) -> None:
        """Ask before changing many rows, or rows that may belong to another lane."""
        others, foreign = impact.others, impact.foreign
        if not impact.rows or (impact.rows <= ASK_ABOVE and not others and not foreign):
            return
        many = f"more than {ASK_ABOVE} rows" if impact.rows > ASK_ABOVE else counted(impact.rows, "row")
        what = f"{self.verb} {many} of lane {impact.view.lane.name!r} in {impact.view.environment!r}"
        if others:
            have = plural(len(others), "has", "have")
            what += f", including those of {' and '.join(map(repr, others))}, which {have} the same state"
        if foreign:
            many = counted(foreign, "row")
            own = impact.view.binding.roles["error"]
            what += f", including {many} that another program ended ({own} is null, another error column is not)"
        hint = "--yes, or name the rows with --id"
        if foreign:
            hint = f"make dead match only this lane's rows, with {own!r}: NOT_NULL; or {hint}"
        consent(what, hint)

    def _tell(self, document: dict[str, Any]) -> None:
        count, passed, past = document["count"], document["passed_over"], _PAST[self.verb]
        if self.as_json:
            print_json(document)
        else:
            for row in passed:
                running = self.verb == "cancel" and row["reason"] == "it is running"
                hint = " (add --running to take it from its worker)" if running else ""
                errors.print(plain(f"{row['id']}: not {past}: {row['reason']}{hint}"), soft_wrap=True)
            if count or not passed:
                console.print(f"{counted(count, 'row')} {past}" if count else "No row matched.", highlight=False)
        if not count:
            raise typer.Exit(NOTHING_MATCHED)
