"""Commands that hold rows back and let them go: pause, resume. What runs goes on."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer
from rich.text import Text

from ..errors import DatabaseError, RowmillError
from ..mill import Mill
from ..store import Database
from ..store.gates.pauses import Pause, Target, ensure_gates, standing
from ..store.gates.pauses import pause as write_pause
from ..store.gates.pauses import resume as end_pause
from ..store.inspect import json_values
from ..store.inspect.gate_view import lane_gates
from ..store.inspect.lane_view import check_file, view_lane
from . import show
from .app import (
    NOTHING_MATCHED,
    App,
    AsJson,
    UsageError,
    app,
    errors,
    lane_names,
    load,
    print_json,
    print_out,
    run_async,
    said,
)
from .durations import duration, moment
from .environments import one_environment

Lane = Annotated[
    str | None,
    typer.Option("--lane", help="this lane; default: the whole environment", autocompletion=lane_names, callback=said),
]
Key = Annotated[str | None, typer.Option("--key", help="only rows of this key, of a lane with a gate by key")]
By = Annotated[str | None, typer.Option("--by", help="what the key is of, where gates have several", callback=said)]
Environment = Annotated[
    str | None, typer.Option("--env", help="the environment; needed where there are several", callback=said)
]


class PauseEnvironment:
    """One environment, opened to pause something in it."""

    def __init__(self, mill: Mill, environment: str, lane: str | None, key: str | None, by: str | None) -> None:
        self.mill, self.environment, self.lane, self.key, self.by = mill, environment, lane, key, by
        #: Whether no row has the key at present.
        self.unknown = False

    async def target(self, database: Database) -> Target:
        """What is meant, checked against the lane and its table."""
        check_file(database)
        if self.lane is None:
            return Target()
        (lane,) = self.mill.select([self.lane])
        if not lane.serves(self.environment):
            raise RowmillError(
                f"lane {lane.name!r} does not work in environment {self.environment!r}",
                hint=" or ".join(f"--env {name}" for name in lane.environments or ()),
            )
        if self.key is None:
            return Target(lane.name)
        gates = await lane_gates(await view_lane(lane, self.environment, database, self.mill.clock))
        dim = gates.choose(self.by, keyed=True)
        key, known = await gates.known(dim, self.key)
        self.unknown = not known
        return Target(lane.name, dim.label, key)


@app.command()
def pause(
    reference: App = None,
    lane: Lane = None,
    key: Key = None,
    by: By = None,
    env: Environment = None,
    reason: Annotated[str | None, typer.Option(help="what others read when they look", callback=said)] = None,
    span: Annotated[
        str | None, typer.Option("--for", help="ends after this: 90s, 10m, 1h30m, 2d", callback=said)
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="ends then: 18:30 or 2027-01-31T08:00 (UTC)", callback=said)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Claim nothing more: of an environment, of one lane, or of one key of its gates. What runs goes on.

    Holds at once, for all workers, until its end or until *resume*. Costs the rows nothing.
    """
    if span and until:
        raise typer.BadParameter("--for or --until, one of them")
    end = duration(span, "--for") if span else moment(until, "--until") if until else None
    desk = _desk(reference, lane, key, by, env)

    async def main(database: Database) -> tuple[Pause, bool]:
        target = await desk.target(database)
        made = await ensure_gates(database)
        return await write_pause(database, desk.mill.clock, target, reason, end), made

    found, made = _with_database(desk, main)
    if as_json:
        print_json({"action": "pause", **json_values.pause_value(found, desk.environment)})
        return
    print_out(show.pause_line(found, desk.environment, len(desk.mill.environments)))
    if desk.unknown:
        errors.print(show.plain(f"No row has the key {found.target.key} at present."), soft_wrap=True)
    if made:
        errors.print("Made rowmill_gates, where pauses stand: workers started before it was there need a restart.")


@app.command()
def resume(
    reference: App = None,
    lane: Lane = None,
    key: Key = None,
    by: By = None,
    env: Environment = None,
    as_json: AsJson = False,
) -> None:
    """End a pause, and wake idle workers. Exit code 4: it was not paused."""
    desk = _desk(reference, lane, key, by, env)

    async def main(database: Database) -> tuple[Target, Pause | None, list[Pause]]:
        target = await desk.target(database)
        stood = await end_pause(database, desk.mill.clock, target)
        if stood is not None:
            with contextlib.suppress(DatabaseError):  # workers poll as well
                await desk.mill.wake(desk.environment)
        return (
            target,
            stood,
            await standing(database, desk.mill.clock, [target.lane] if target.lane else desk.mill.lanes),
        )

    target, stood, left = _with_database(desk, main)
    several = len(desk.mill.environments)
    if as_json:
        still = [json_values.pause_value(pause, desk.environment) for pause in left]
        was = json_values.pause_value(stood, desk.environment) if stood else None
        print_json({"action": "resume", "environment": desk.environment, "resumed": was, "still_paused": still})
    else:
        name = show.pause_name(target, desk.environment)
        print_out(show.plain(f"{name} {'is no longer paused' if stood else 'was not paused'}"))
        for pause in left[:10]:
            print_out(Text("still: ").append_text(show.pause_line(pause, desk.environment, several)))
    if stood is None:
        raise typer.Exit(NOTHING_MATCHED)


def _desk(
    reference: str | None, lane: str | None, key: str | None, by: str | None, env: str | None
) -> PauseEnvironment:
    if lane is None and (key is not None or by is not None):
        raise UsageError("a key of which lane?", hint="--lane NAME")
    if key is None and by is not None:
        raise UsageError("--by says what a key is of, and there is no key", hint="--key KEY")
    mill = load(reference)
    return PauseEnvironment(mill, one_environment(mill, env, lane), lane, key, by)


def _with_database(desk: PauseEnvironment, work: Any) -> Any:
    async def main() -> Any:
        ((_, database),) = desk.mill.databases([desk.environment])
        try:
            return await work(database)
        finally:
            await database.close()

    return run_async(main())
