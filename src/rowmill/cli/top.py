"""``rowmill top``: the overview in a terminal, live, with keys to pause and to retry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import DatabaseError, RowmillError
from ..ops.row_actions import Operator, Selection
from ..plural import counted
from ..store.gates.pauses import Target, ensure_gates
from ..store.gates.pauses import pause as write_pause
from ..store.gates.pauses import resume as end_pause
from ..store.inspect.gauges import MOST, Gauges
from ..store.inspect.lane_view import LaneView
from . import show
from .app import App, AsJson, Env, UsageError, app, console, load, print_json, print_out, run_async
from .environments import CommandDirectory
from .errors import bars
from .look import SomeLanes
from .overview import STATES, Overview, busiest, look

EVERY = 2.0
_FAMILIES, _WORKERS = 5, 8
_KEYS = {"\x1b[A": "up", "k": "up", "\x1b[B": "down", "j": "down", "\x03": "q", "\x04": "q", "\x1b": "n"}


@app.command()
def top(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    once: Annotated[bool, typer.Option("--once", help="one look, and no keys")] = False,
    as_json: AsJson = False,
) -> None:
    """Lanes, workers and failures at a glance, every 2 seconds. Keys: up and down (or k, j) choose a lane, p pauses or
    resumes it, r makes its dead rows ready again, q ends. Counts stop at 10,000.
    """
    mill = load(reference)
    if not (once or as_json) and not (sys.stdin.isatty() and console.is_terminal):
        raise UsageError("this is no terminal: nobody could press a key", hint="--once, or --json")

    async def main() -> Overview | None:
        async with CommandDirectory(mill, env, lane) as lookout:
            if once or as_json:
                return await look(lookout)
            await Screen(lookout).run()
            return None

    found = run_async(main())
    if found is not None:
        if as_json:
            print_json(found.value())
        else:
            print_out(picture(found, len(mill.environments)))
        if found.failures:
            raise typer.Exit(1)


class Screen:
    """The live view: what is shown, which lane is chosen, and what a key does."""

    def __init__(self, lookout: CommandDirectory) -> None:
        self._lookout, self._mill = lookout, lookout.mill
        self._found: Overview | None = None
        self._chosen = 0
        self._said = Text("")
        #: A retry that waits for a yes.
        self._asked: LaneView | None = None
        self._pressed: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        """Until q."""
        with _keys(self._pressed), Live(console=console, screen=True, auto_refresh=False) as live:
            looking: asyncio.Task[None] | None = None
            last = 0.0
            try:
                while True:
                    now = asyncio.get_running_loop().time()
                    if looking is None and now - last >= EVERY:
                        looking, last = asyncio.create_task(self._look()), now
                    live.update(self._shown(), refresh=True)
                    with contextlib.suppress(TimeoutError):
                        key = await asyncio.wait_for(self._pressed.get(), 0.25)
                        if key == "q":
                            return
                        await self._act(key)
                    if looking is not None and looking.done():
                        looking.result()
                        looking = None
            finally:
                if looking is not None:
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)

    async def _look(self) -> None:
        try:
            self._found = await look(self._lookout, self._found)
        except RowmillError as error:
            self._said = Text(error.message, "red")

    def _view(self) -> LaneView | None:
        lanes = self._found.lanes if self._found else []
        return lanes[min(self._chosen, len(lanes) - 1)][0] if lanes else None

    async def _act(self, key: str) -> None:
        """What a key does. A retry asks first; whatever else is pressed then means no."""
        view, asked, self._asked = self._view(), self._asked, None
        lanes = len(self._found.lanes) if self._found else 0
        self._said = Text("")
        try:
            if asked is not None and key == "y":
                await self._retry(asked)
            elif key in ("up", "down") and lanes:
                self._chosen = (min(self._chosen, lanes - 1) + (1 if key == "down" else -1)) % lanes
            elif key == "p" and view is not None:
                await self._pause(view)
            elif key == "r" and view is not None:
                self._asked = view
                name = show.plain(f"{view.lane.name} in {view.environment}")
                self._said = Text("Make all dead rows of ").append_text(name).append(" ready again? y or n", "bold")
        except RowmillError as error:
            self._said = Text(error.message, "red")

    async def _pause(self, view: LaneView) -> None:
        target, clock = Target(lane=view.lane.name), self._mill.clock
        if await end_pause(view.database, clock, target) is not None:
            self._said = show.plain(f"{view.lane.name} goes on")
            with contextlib.suppress(DatabaseError):  # workers poll as well
                await self._mill.wake(view.environment)
        else:
            made = await ensure_gates(view.database)
            await write_pause(view.database, clock, target, "rowmill top", None)
            self._said = show.plain(f"{view.lane.name} is paused; p again lets it go on")
            if made:
                self._said.append(". Workers that were started before need a restart to see it", "yellow")
        await self._look()

    async def _retry(self, view: LaneView) -> None:
        number = 0
        async for step in Operator(view).retry(Selection(("dead",))):
            number += len(step)
        self._said = Text(f"{counted(number, 'row')} made ready")
        with contextlib.suppress(DatabaseError):
            await self._mill.wake(view.environment)
        await self._look()

    def _shown(self) -> RenderableType:
        keys = Text("↑↓ lane   p pause, resume   r retry the dead   q quit", "dim")
        if self._found is None:
            return Group(Text("Looking…", "dim"), keys)
        return Group(picture(self._found, len(self._mill.environments), self._chosen), self._said, keys)


def picture(found: Overview, environments: int, chosen: int | None = None) -> RenderableType:
    """An overview, for people; ``chosen``: the number of the lane that keys are about."""
    parts: list[RenderableType] = [
        Text(f"rowmill  {datetime.now():%H:%M:%S}", "bold"),
        _lanes(found, environments, chosen),
    ]
    parts += [show.pause_line(pause, name, environments) for name, pause in found.pauses[:3]]
    for name, (well, badly) in found.rates.items():
        where = f"{name}: " if environments > 1 else ""
        parts.append(Text(f"{where}{well:,.1f} done and {badly:,.1f} failed per second"))
    parts.append(_workers(found, environments))
    if found.families:
        parts.append(_families(found, environments))
    return Group(*parts, *(failure.line() for failure in found.failures))


def _lanes(found: Overview, environments: int, chosen: int | None) -> RenderableType:
    states = [s for s in STATES if s != "excluded" or any(gauge.rows.get("excluded") for _, gauge in found.lanes)]
    headings = [state.capitalize() for state in states] + ["Oldest"]
    made = show.table(*(["Env"] if environments > 1 else []), "Lane", *headings, "Held", right=headings)
    for number, (view, gauge) in enumerate(found.lanes):
        name = show.plain(view.lane.name)
        if found.paused(view.environment, view.lane.name):
            name.append(" (paused)", "yellow")
        held = ", ".join(f"{keys} by {by}" for by, keys in gauge.held_keys.items() if keys)
        cells = [_count(view, gauge, state) for state in states]
        made.add_row(
            *([show.plain(view.environment)] if environments > 1 else []), name, *cells,
            Text(show.span(gauge.oldest_ready) if gauge.rows.get("ready") else ""), show.plain(held),
            style="reverse" if number == chosen else "",
        )  # fmt: skip
    return made


def _count(view: LaneView, gauge: Gauges, state: str) -> Text:
    number = gauge.rows.get(state)
    if number is None:
        return Text("?" if view.condition(state) else "", "yellow")
    more = "+" if number >= MOST else ""
    return Text(f"{number:,}{more}", show.COLOURS.get(state, "") if number else "dim")


def _workers(found: Overview, environments: int) -> RenderableType:
    if not found.workers:
        return Text("No worker has signed on.", "yellow")
    made = Table.grid(padding=(0, 2))
    for name, worker in busiest(found.workers, _WORKERS):
        state = worker["state"] if worker["alive"] else "dead"
        jobs = ", ".join(f"{job['lane']} {job['id']} for {show.span(job['seconds'])}" for job in worker["current"][:3])
        made.add_row(
            *([show.plain(name)] if environments > 1 else []), show.plain(worker["id"]),
            Text(state, show.COLOURS.get(state, "dim")), f"{worker['completed']:,} done",
            f"{worker['failed']:,} failed", show.plain(jobs),
        )  # fmt: skip
    number, more = len(found.workers), len(found.workers) - _WORKERS
    title = counted(number, "worker") + (f", {more} of them not shown" if more > 0 else "")
    return Group(Text(f"\n{title}", "bold"), made)


def _families(found: Overview, environments: int) -> RenderableType:
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    for family in found.families[:_FAMILIES]:
        where = f"{family.environment} {family.lane}" if environments > 1 else family.lane
        made.add_row(
            family.fingerprint, show.plain(where), Text(f"{family.count:,}", "red"), Text(bars(family.buckets), "red"),
            show.plain(family.shape),
        )  # fmt: skip
    made.columns[-1].no_wrap, made.columns[-1].overflow = True, "ellipsis"
    return Group(Text("\nErrors of the last 24 hours", "bold"), made)


@contextlib.contextmanager
def _keys(pressed: asyncio.Queue[str]) -> Iterator[None]:
    """Single keys from the terminal, as they are pressed, without showing them."""
    try:
        import termios
        import tty
    except ImportError:
        raise UsageError("keys are read as only POSIX terminals let them be", hint="rowmill top --once") from None
    file, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before: Any = termios.tcgetattr(file)

    def read() -> None:
        text = os.read(file, 64).decode(errors="replace")
        for key in [text] if text in _KEYS else text:
            pressed.put_nowait(_KEYS.get(key, key))

    tty.setcbreak(file)
    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
