"""How ``make registre`` looks: a table that fills on a terminal, plain lines elsewhere, and a summary."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

Counts = Counter[str]
Tables = dict[str, dict[str, Counts]]

#: Column -> the states that it counts, whatever the kind.
_COLUMNS = {
    "waiting": ("1", "pending_company_selection", "pending"),
    "at work": ("2", "scraping_company_data", "in_progress"),
    "stored": ("3",),
    "in OCR": ("6",),
    "done": ("5", "pending_name_selection", "completed"),
    "failed": ("4", "failed"),
}
_STYLES = {
    "waiting": "bright_black",
    "at work": "cyan",
    "stored": "blue",
    "in OCR": "magenta",
    "done": "green",
    "failed": "red",
}
_PLAIN_EVERY = 3.0


class View:
    """Shows the tables as they are; knows how they are to end."""

    def __init__(self, address: str, commands: list[str], expected: Tables) -> None:
        self.expected = expected
        self.found: Tables = {}
        #: The objects in the storage.
        self.stored: list[str] = []
        self._console = Console(highlight=False)
        self._title = f"{' and '.join(commands)} against the stand-in at {address}"
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._began, self._next = time.monotonic(), 0.0
        self._told: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            print(self._title, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def ended(self) -> bool:
        """Every row has come to an end, as it should or not."""
        final = {
            "4",
            "failed",
            *(state for kinds in self.expected.values() for ends in kinds.values() for state in ends),
        }
        return all(set(counts) <= final for kinds in self.found.values() for counts in kinds.values())

    def show(self, found: Tables) -> None:
        """Show the tables as they are now."""
        self.found = found
        seconds = time.monotonic() - self._began
        if self._live is not None:
            head = Text.assemble((self._title, "bold"), f"  {seconds:.0f} s")
            self._live.update(Group(head, self._table(), f"{len(self.stored)} PDFs in the storage"), refresh=True)
        elif seconds >= self._next:
            self._next = seconds + _PLAIN_EVERY
            for environment, kinds in found.items():
                words = "; ".join(f"{kind} {_words(counts)}" for kind, counts in kinds.items())
                if words != self._told.get(environment):
                    print(f"{seconds:4.0f} s  {environment:8}{words}", flush=True)
                self._told[environment] = words

    def _table(self) -> Table:
        table = Table("environment", "kind", *_COLUMNS, pad_edge=False)
        for environment, kinds in self.found.items():
            for kind, counts in kinds.items():
                shown = {name: sum(counts[state] for state in states) for name, states in _COLUMNS.items()}
                cells = (
                    Text(str(n) if n else "·", _STYLES[name] if n else "bright_black") for name, n in shown.items()
                )
                table.add_row(environment if kind == "documents" else "", kind, *cells)
        return table

    def summary(self, ended: bool, figures: dict[str, int]) -> int:
        """The closing words, and the exit code."""
        seconds = time.monotonic() - self._began
        good = ended and self.found == self.expected
        if self._live is None:
            self._console.print(self._table())
        told = ", ".join(f"{count} {what}" for what, count in figures.items())
        if good:
            self._console.print(f"Every job ended as it should, in {seconds:.0f} s: {told}.", style="bold green")
            if any(counts["4"] for kinds in self.found.values() for counts in kinds.values()):
                self._console.print("The failed ones have numbers that begin with 9: the stand-in refuses those.")
            return 0
        why = "not as it should" if ended else "not all jobs have ended"
        self._console.print(f"After {seconds:.0f} s {why}: {told}.", style="bold red")
        return 1


def _words(counts: Counts) -> str:
    shown = {name: sum(counts[state] for state in states) for name, states in _COLUMNS.items()}
    return ", ".join(f"{n} {name}" for name, n in shown.items() if n) or "none"
