"""``rowmill top``: the overview in a terminal, live, with keys to pause and to retry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import RowmillError
from ..ops import actions
from ..ops.actions import ActionTarget, ChosenRows
from ..ops.directory import LaneDirectory
from ..ops.top import STATES, busiest, rates
from ..ops.top import top as look
from ..plural import counted
from . import show
from .app import UsageError, app, console, failure_line, plain, print_json, print_out, run_async
from .errors import bars
from .options import App, AsJson, Env, SomeLanes, load

EVERY = 2.0
_FAMILIES, _WORKERS = 5, 8
_KEYS = {"\x1b[A": "up", "k": "up", "\x1b[B": "down", "j": "down", "\x03": "q", "\x04": "q", "\x1b": "n"}


@app.command()
def top(
    reference: App = None,
    env: Env = None,
    lane: SomeLanes = None,
    once: Annotated[bool, typer.Option("--once", help="print once and exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Show lanes, workers and failures live in the terminal, every 2 seconds.

    Keys: up and down (or k, j) choose a lane, p pauses or resumes it, r retries its dead rows, q quits. Counts stop
    at 10,000.

    Example: `rowmill top app:mill --lane fetch`
    """
    mill = load(reference)
    if not (once or as_json) and not (sys.stdin.isatty() and console.is_terminal):
        raise UsageError("standard output is not a terminal", hint="--once, or --json")

    async def main() -> dict[str, Any] | None:
        async with LaneDirectory(mill, env, lane) as directory:
            if once or as_json:
                return await look(directory)
            await Screen(directory).run()
            return None

    document = run_async(main())
    if document is not None:
        if as_json:
            print_json(document)
        else:
            print_out(picture(document, len(mill.environments)))
        if document["failures"]:
            raise typer.Exit(1)


class Screen:
    """The live view: its tables, the chosen lane, and the keys."""

    def __init__(self, directory: LaneDirectory) -> None:
        self._directory = directory
        self._several = len(directory.mill.environments)
        self._document: dict[str, Any] | None = None
        self._rates: dict[str, dict[str, float]] = {}
        self._looked = 0.0
        self._chosen = 0
        self._said = Text("")
        #: A retry that waits for a yes.
        self._asked: dict[str, Any] | None = None
        self._pressed: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        """Show the view until q is pressed."""
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
            before, self._document = self._document, await look(self._directory)
        except RowmillError as error:
            self._said = Text(error.message, "red")
            return
        now = asyncio.get_running_loop().time()
        self._rates = rates(self._document, before, now - self._looked) if before else {}
        self._looked = now

    def _lane(self) -> dict[str, Any] | None:
        lanes = self._document["lanes"] if self._document else []
        return lanes[min(self._chosen, len(lanes) - 1)] if lanes else None

    async def _act(self, key: str) -> None:
        """Handle a key. A retry asks for y first; any other key means no."""
        lane, asked, self._asked = self._lane(), self._asked, None
        lanes = len(self._document["lanes"]) if self._document else 0
        self._said = Text("")
        try:
            if asked is not None and key == "y":
                await self._retry(asked)
            elif key in ("up", "down") and lanes:
                self._chosen = (min(self._chosen, lanes - 1) + (1 if key == "down" else -1)) % lanes
            elif key == "p" and lane is not None:
                await self._pause(lane)
            elif key == "r" and lane is not None:
                self._asked = lane
                name = plain(f"{lane['lane']} in {lane['environment']}")
                self._said = Text("Make all dead rows of ").append_text(name).append(" ready again? y/n", "bold")
        except RowmillError as error:
            self._said = Text(error.message, "red")

    def _target(self, lane: dict[str, Any]) -> ActionTarget:
        return ActionTarget(self._directory, lane["environment"], lane["lane"])

    async def _pause(self, lane: dict[str, Any]) -> None:
        if (await actions.resume(self._target(lane)))["resumed"] is not None:
            self._said = plain(f"{lane['lane']} resumed")
        else:
            paused = await actions.pause(self._target(lane), reason="rowmill top")
            self._said = plain(f"{lane['lane']} is paused; press p again to resume it")
            self._said.append("".join(f". {note}" for note in paused["notes"]), "yellow")
        await self._look()

    async def _retry(self, lane: dict[str, Any]) -> None:
        written = await actions.retry(self._target(lane), ChosenRows(state="dead"))
        self._said = Text(f"{counted(written['count'], 'row')} made ready")
        await self._look()

    def _shown(self) -> RenderableType:
        keys = Text("↑↓ lane   p pause/resume   r retry dead rows   q quit", "dim")
        if self._document is None:
            return Group(Text("Looking…", "dim"), keys)
        return Group(picture(self._document, self._several, self._chosen, self._rates), self._said, keys)


def picture(
    document: dict[str, Any],
    environments: int,
    chosen: int | None = None,
    per_second: dict[str, dict[str, float]] | None = None,
) -> RenderableType:
    """One look; ``chosen``: the number of the lane that keys are about."""
    parts: list[RenderableType] = [
        Text(f"rowmill  {datetime.now():%H:%M:%S}", "bold"),
        _lanes(document["lanes"], environments, chosen),
    ]
    parts += [show.pause_line(pause, environments) for pause in document["paused"][:3]]
    for name, rate in (per_second or {}).items():
        where = f"{name}: " if environments > 1 else ""
        parts.append(Text(f"{where}{rate['completed']:,.1f} done and {rate['failed']:,.1f} failed per second"))
    parts.append(_workers(document["workers"], environments))
    if document["errors"]:
        parts.append(_families(document["errors"], environments))
    return Group(*parts, *(failure_line(failure) for failure in document["failures"]))


def _lanes(lanes: Sequence[dict[str, Any]], environments: int, chosen: int | None) -> RenderableType:
    states = [s for s in STATES if s != "excluded" or any(lane["counts"]["excluded"] for lane in lanes)]
    headings = [state.capitalize() for state in states] + ["Oldest"]
    made = show.table(*(["Env"] if environments > 1 else []), "Lane", *headings, "Held", right=headings)
    for number, lane in enumerate(lanes):
        name = plain(lane["lane"]).append(" (paused)" if lane["paused"] else "", "yellow")
        held = ", ".join(f"{keys} by {by}" for by, keys in lane["held_keys"].items() if keys)
        made.add_row(
            *([plain(lane["environment"])] if environments > 1 else []), name,
            *(show.count(lane, state) for state in states),
            Text(show.span(lane["oldest_ready"]) if lane["counts"]["ready"] else ""), plain(held),
            style="reverse" if number == chosen else "",
        )  # fmt: skip
    return made


def _workers(workers: list[dict[str, Any]], environments: int) -> RenderableType:
    if not workers:
        return Text("No workers.", "yellow")
    made = Table.grid(padding=(0, 2))
    for worker in busiest(workers, _WORKERS):
        state = worker["state"] if worker["alive"] else "dead"
        jobs = ", ".join(
            f"{job['lane']} {show.run_name(job)} for {show.span(job['seconds'])}" for job in worker["current"][:3]
        )
        made.add_row(
            *([plain(worker["environment"])] if environments > 1 else []), plain(worker["id"]),
            Text(state, show.COLOURS.get(state, "dim")), f"{worker['completed']:,} done",
            f"{worker['failed']:,} failed", plain(jobs),
        )  # fmt: skip
    number, more = len(workers), len(workers) - _WORKERS
    title = counted(number, "worker") + (f", {more} of them not shown" if more > 0 else "")
    return Group(Text(f"\n{title}", "bold"), made)


def _families(families: Sequence[dict[str, Any]], environments: int) -> RenderableType:
    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    for family in families[:_FAMILIES]:
        where = f"{family['environment']} {family['lane']}" if environments > 1 else family["lane"]
        made.add_row(
            family["fingerprint"], plain(where), Text(f"{family['count']:,}", "red"),
            Text(bars(family["buckets"]), "red"), plain(family["shape"]),
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
        raise UsageError("rowmill top needs a POSIX terminal to read keys", hint="rowmill top --once") from None
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
