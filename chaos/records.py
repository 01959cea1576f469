"""What the handlers wrote down: one file per process, a line per start and per end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Run:
    """One call of the handler. ``end`` is when it ended, by itself or with its process."""

    name: str
    row: int
    worker: str
    #: When its claim was made, by the database's clock.
    since: float
    start: float
    end: float = 0.0
    #: done, retry, failed; cut: it was ended with its process.
    how: str = "cut"
    #: It came to its end, whatever became of that: a commit may fail, or stand although the reply was lost.
    came_to_end: bool = False
    #: What the worker took for the time of day at the start.
    wall: float = 0.0


def read(folder: Path, deaths: Mapping[int, float]) -> Iterator[Run]:
    """All runs of all processes. ``deaths``: when a process was killed, by its number; a run that has no end of its own
    ended then, or, where that is not known, with the last thing its process wrote.
    """
    for path in sorted(folder.iterdir()):
        runs: dict[str, Run] = {}
        last = 0.0
        for line in path.read_text().splitlines():
            kind, number, *words = line.split(" ")
            last = float(words[-1])
            if kind == "start":
                row, since, worker, wall = words[:4]
                runs[number] = Run(f"{path.name}.{number}", int(row), worker, float(since), last, wall=float(wall))
            else:
                runs[number].how, runs[number].end = words[0], last
                runs[number].came_to_end |= words[0] == "done"
        died = deaths.get(int(path.name.split("-")[0]), last)
        for run in runs.values():
            run.end = run.end or max(died, run.start)
            yield run
