"""How the demo looks: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..plural import counted

#: state -> the mark and the colour it has in a bar, in the order in which a bar shows them
STATES = {
    "done": ("█", "green"),
    "running": ("▓", "cyan"),
    "waiting for retry": ("▒", "yellow"),
    "dead": ("x", "red"),
    "ready": ("░", "bright_black"),
}
_PLAIN_EVERY = 3.0


@dataclass
class DemoWorker:
    """One worker as the view shows it."""

    pid: int | None = None
    state: str = ""
    rows: int = 0
    #: Rows that a killed predecessor left behind, until they are taken back.
    left: int = 0


@dataclass
class DemoScene:
    """All that there is to see at one moment."""

    tables: dict[str, Counter[str]] = field(default_factory=dict)
    workers: dict[str, DemoWorker] = field(default_factory=dict)
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, words: str, style: str = "") -> None:
        """Add to the running commentary."""
        self.lines.append((self.seconds, words, style))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class DemoView:
    """Shows scenes; nothing at all where ``quiet``."""

    def __init__(self, console: Console, scene: DemoScene, *, quiet: bool) -> None:
        self._console, self._scene, self._quiet = console, scene, quiet
        # The other screen: it is redrawn whole after a resize, and leaves no half-drawn frames behind.
        self._live = (
            Live(console=console, screen=True, auto_refresh=False) if console.is_terminal and not quiet else None
        )
        self._told = 0
        self._next = 0.0

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._console.print(_top(self._scene, self._console.width))
            self._console.print(_commentary(self._scene, len(self._scene.lines)))
        elif not self._quiet:
            self._plain(last=True)

    def show(self) -> None:
        """Show the scene as it is now."""
        if self._live is not None:
            top = _top(self._scene, self._console.width)
            room = max(self._console.height - len(self._console.render_lines(top)), 1)
            self._live.update(Group(top, _commentary(self._scene, room)), refresh=True)
        elif not self._quiet:
            self._plain()

    def _plain(self, last: bool = False) -> None:
        for at, words, _ in self._scene.lines[self._told :]:
            print(f"{_clock(at)}  {words}", flush=True)
        self._told = len(self._scene.lines)
        if (self._scene.seconds >= self._next or last) and self._scene.tables:
            self._next = self._scene.seconds + _PLAIN_EVERY
            for name, counts in self._scene.tables.items():
                print(f"{_clock(self._scene.seconds)}  {name}: {_counts(counts)}", flush=True)


def _top(scene: DemoScene, width: int) -> RenderableType:
    """The tables and the workers: as high as it must be, whatever the width."""
    words = "two worker processes, two tables, one SQLite file"
    parts: list[RenderableType] = [
        Text.assemble(("rowmill demo", "bold"), f"  {words}  ", (_clock(scene.seconds), "bold")),
        "",
    ]
    for name, counts in scene.tables.items():
        title = Text.assemble((name, "bold"), f"  {counted(counts.total(), 'row')}")
        parts += [title, _bar(counts, min(width, 100)), _legend(counts), ""]
    return Group(*parts, _workers(scene), "")


def _commentary(scene: DemoScene, room: int) -> RenderableType:
    """The latest of it, one line each."""
    return Group(
        *(
            Text.assemble((f"{_clock(at)}  ", "bright_black"), (words, style), no_wrap=True, overflow="ellipsis")
            for at, words, style in scene.lines[-room:]
        )
    )


def _bar(counts: Counter[str], width: int) -> Text:
    """One character per share; a state that has rows at all has at least one."""
    total = counts.total() or 1
    cells = {state: max(round(counts[state] * width / total), 1) if counts[state] else 0 for state in STATES}
    largest = max(cells, key=lambda state: cells[state])
    cells[largest] += width - sum(cells.values())
    return Text.assemble(*((STATES[state][0] * cells[state], STATES[state][1]) for state in STATES), no_wrap=True)


def _legend(counts: Counter[str]) -> Text:
    parts: list[tuple[str, str] | str] = []
    for state, (mark, colour) in STATES.items():
        parts += [(f"{mark} ", colour), f"{counts[state]} {state}   "]
    return Text.assemble(*parts)


def _workers(scene: DemoScene) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(5):
        table.add_column(no_wrap=True)
    for name, seat in scene.workers.items():
        state = Text(seat.state, {"alive": "green", "killed": "bold red"}.get(seat.state, "yellow"))
        held = f"{counted(seat.rows, 'row')} in hand" if seat.state == "alive" else ""
        left = f"{counted(seat.left, 'row')} left behind by the killed" if seat.left else ""
        table.add_row(Text(name, "bold"), f"pid {seat.pid or ''}", state, held, Text(left, "yellow"))
    return table


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
