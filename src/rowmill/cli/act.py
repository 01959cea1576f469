"""Commands that act on rows: retry, cancel, release."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import typer

from ..declare import states as states_words
from ..errors import Busy, DatabaseError, DeclarationError, RowmillError
from ..mill import Mill
from ..ops.row_actions import Operator, Selection, ended_by_others, passed_over
from ..plural import counted, plural
from ..store.inspect.failure_families import members
from ..store.inspect.lane_view import OPEN, LaneView
from ..store.lane.row_keys import Key, parse
from . import show
from .app import NOTHING_MATCHED, App, AsJson, app, console, errors, lane_names, load, print_json, run_async, said
from .environments import CommandDirectory, one_environment, one_lane

#: More rows than this are changed only after a question, or with --yes.
ASK_ABOVE = 100

Lane = Annotated[
    str | None,
    typer.Option("--lane", help="the lane; may be left out where there is only one", autocompletion=lane_names),
]
Environment = Annotated[
    str | None, typer.Option("--env", help="the environment; needed where there are several", callback=said)
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="this row (may be given again); a composite key: a,b")]
Family = Annotated[
    str | None, typer.Option("--error", help="the rows of this family of `rowmill errors`", callback=said)
]
Yes = Annotated[bool, typer.Option("--yes", help=f"do not ask, also for more than {ASK_ABOVE} rows")]


@dataclass
class Action:
    """One command on one lane of one environment: what it is called, the rows it means, and what it does to them."""

    verb: str
    past: str
    chosen: Selection
    ids: list[str]
    work: Callable[[Operator, Selection], AsyncIterator[list[Key]]]
    yes: bool
    as_json: bool
    #: Only the rows of this family of failures.
    family: str | None = None

    async def run(self, mill: Mill, environment: str, lane: str) -> None:
        """Check, ask where needed, write step by step, say what became of it."""
        async with CommandDirectory(mill, [environment], [lane]) as lookout:
            view = await lookout.view(environment, lookout.databases[0][1], lookout.lanes[0])
            chosen = self.chosen
            if chosen.worker is not None and "worker" not in view.binding.roles:
                raise DeclarationError(f"lane {lane!r} has no worker column", hint="--id or --stuck")
            if self.family is not None:
                chosen = replace(chosen, keys=await self._relatives(view))
                self._few(mill, view, chosen.states, await Operator(view).count_keys(chosen, ASK_ABOVE + 1))
            elif self.ids:
                chosen = replace(chosen, keys=tuple(dict.fromkeys(parse(view.binding, text) for text in self.ids)))
            else:
                await self._consent(mill, view, chosen)
            keys: list[Key] = []
            try:
                async for step in self.work(Operator(view), chosen):
                    keys += step
            except RowmillError as error:
                if keys:
                    error.message += f" ({_rows(len(keys))} had been {self.past} before that)"
                raise
            finally:
                if keys and self.verb != "cancel":
                    with contextlib.suppress(DatabaseError):  # workers poll as well
                        await mill.wake(environment)
            passed = await self._passed(view, chosen, keys)
        self._tell(view, keys, passed)

    async def _relatives(self, view: LaneView) -> tuple[Key, ...]:
        """The rows of the family."""
        assert self.family is not None
        found: dict[Key, None] = {}
        async for step in members(view, self.family, self.chosen.states):
            found |= dict.fromkeys(step)
        return tuple(found)

    async def _consent(self, mill: Mill, view: LaneView, chosen: Selection) -> None:
        """Many rows, or rows that may be another lane's, are not changed by a slip of the hand."""
        try:
            number = await Operator(view).count(chosen, ASK_ABOVE + 1)
        except Busy:
            number = ASK_ABOVE + 1
        foreign = await ended_by_others(view.store) if "dead" in chosen.states and number else 0
        self._few(mill, view, chosen.states, number, foreign)

    def _few(self, mill: Mill, view: LaneView, states: tuple[str, ...], number: int, foreign: int = 0) -> None:
        """``foreign``: how many of the rows another program ended."""
        others = _sharing(mill, view, states)
        if self.yes or not number or (number <= ASK_ABOVE and not others and not foreign):
            return
        many = f"more than {ASK_ABOVE} rows" if number > ASK_ABOVE else _rows(number)
        what = f"{self.verb} {many} of lane {view.lane.name!r} in {view.environment!r}"
        if others:
            what += f", among them those of {' and '.join(map(repr, others))}, which {_has(others)} the same state"
        if foreign:
            own = view.binding.roles["error"]
            what += f", among them {_rows(foreign)} that another program ended: {own} is null, another error is not"
        if not sys.stdin.isatty():
            hint = "--yes, or the rows one by one with --id"
            if foreign:
                hint = f"say in dead what tells this lane's rows apart: {own!r}: NOT_NULL; or {hint}"
            raise RowmillError(f"this would {what}", hint=hint)
        if not typer.confirm(f"This will {what}. Go on?", err=True):
            raise typer.Exit(1)

    async def _passed(self, view: LaneView, chosen: Selection, keys: list[Key]) -> list[tuple[str, str]]:
        """The rows that were asked for by id and not written, each with the reason and what else would take it."""
        hint = " (--running takes it from its holder)"
        left = await passed_over(view, chosen, keys) if self.ids else []
        held = {row.id for row in left if (self.verb, row.state) == _RUNNING and row.state not in chosen.states}
        return [(row.id, row.reason + hint * (row.id in held)) for row in left]

    def _tell(self, view: LaneView, keys: list[Key], passed: list[tuple[str, str]]) -> None:
        if self.as_json:
            ids: list[Any] = [list(key) if len(key) > 1 else key[0] for key in keys]
            document: dict[str, Any] = {"environment": view.environment, "lane": view.lane.name, "action": self.verb}
            document |= {"count": len(keys), "passed_over": [{"id": i, "reason": r} for i, r in passed]}
            print_json(document | ({"ids": ids} if self.ids else {}))
        else:
            for name, reason in passed:
                errors.print(show.plain(f"{name}: not {self.past}: {reason}"), soft_wrap=True)
            if keys or not passed:
                console.print(f"{_rows(len(keys))} {self.past}" if keys else "No row matched.", highlight=False)
        if not keys:
            raise typer.Exit(NOTHING_MATCHED)


_RUNNING = ("cancel", "running")


def _rows(number: int) -> str:
    return counted(number, "row")


def _has(others: list[str]) -> str:
    return plural(len(others), "has", "have")


def _sharing(mill: Mill, view: LaneView, states: tuple[str, ...]) -> list[str]:
    """Other lanes whose rows cannot be told from this lane's: the same table, the same final state."""
    found = []
    for other in mill.lanes.values():
        if other is view.lane or not other.serves(view.environment) or not view.same_table(other):
            continue
        for state in {"dead", "canceled"} & set(states):
            mine, theirs = getattr(view.lane, state), getattr(other, state)
            if mine and theirs and states_words.overlaps(mine, theirs):
                found.append(other.name)
    return found


def _start(action: Action, reference: str | None, env: str | None, lane: str | None) -> None:
    mill = load(reference)
    name = one_lane(mill, lane)
    run_async(action.run(mill, one_environment(mill, env, name), name))


def _only_one(**given: Any) -> None:
    names = [f"--{name}" for name, value in given.items()]
    if sum(bool(value) for value in given.values()) != 1:
        raise typer.BadParameter(f"say which rows: {' or '.join(names)}, one of them")


@app.command()
def retry(
    reference: App = None,
    env: Environment = None,
    lane: Lane = None,
    ids: Ids = None,
    state: Annotated[
        Literal["dead", "canceled", "waiting", "excluded"] | None, typer.Option(help="all rows in this state")
    ] = None,
    error: Family = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make rows ready at once, with all their attempts before them. A running row is never touched.

    With --error: the rows that are dead, or wait to be tried again, and whose latest failure is of that family.
    """
    _only_one(id=ids, state=state, error=error)
    states = (state,) if state else ("waiting", "excluded", "dead") if error else (*OPEN, "dead", "canceled")
    action = Action("retry", "made ready", Selection(states), ids or [], Operator.retry, yes, as_json, error)
    _start(action, reference, env, lane)


@app.command()
def cancel(
    reference: App = None,
    env: Environment = None,
    lane: Lane = None,
    ids: Ids = None,
    state: Annotated[
        Literal["ready", "waiting", "excluded", "running"] | None, typer.Option(help="all rows in this state")
    ] = None,
    error: Family = None,
    running: Annotated[bool, typer.Option("--running", help="running rows too: their outcome is dropped")] = False,
    reason: Annotated[str, typer.Option(help="what the error column says")] = "canceled by an operator",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel rows that are ready, waiting or excluded. They move to canceled, or to dead if the lane has no such state.

    With --error: of these, the ones whose latest failure is of that family.
    """
    _only_one(id=ids, state=state, error=error)
    if state == "running" and not running:
        raise typer.BadParameter("running rows are taken from their holders only with --running")
    states = (state,) if state else (*OPEN, *(["running"] if running else []))
    action = Action(
        "cancel",
        "canceled",
        Selection(states),
        ids or [],
        lambda o, chosen: o.cancel(chosen, reason),
        yes,
        as_json,
        error,
    )
    _start(action, reference, env, lane)


@app.command()
def release(
    reference: App = None,
    env: Environment = None,
    lane: Lane = None,
    ids: Ids = None,
    worker: Annotated[str | None, typer.Option(help="all rows this worker holds")] = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="all rows without a sign of life")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take running rows back from their holder: ready again, no attempt lost; what the holder still does is dropped."""
    _only_one(id=ids, worker=worker, stuck=stuck)
    chosen = Selection(("stuck",) if stuck else ("running",), worker=worker)
    action = Action("release", "released", chosen, ids or [], Operator.release, yes, as_json)
    _start(action, reference, env, lane)
