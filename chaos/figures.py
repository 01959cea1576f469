"""The figures of a run, kept for the next: what that leaves out keeps what it had."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bout import Result
from .check import Verdict
from .faults import FAULTS
from .fleet import Fleet, Idle


@dataclass
class Figures:
    """What is known: a result for each fault, and the fleet."""

    results: dict[str, Result] = field(default_factory=dict)
    fleet: Fleet | None = None

    @classmethod
    def read(cls, path: Path) -> Figures:
        """Those of the last run; none where there was none."""
        if not path.exists():
            return cls()
        known = json.loads(path.read_text())
        fleet = known["fleet"]
        return cls({each["fault"]: _result(each) for each in known["bouts"]}, None if fleet is None else _fleet(fleet))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = {
            "bouts": [asdict(result) for result in self.bouts],
            "fleet": None if self.fleet is None else asdict(self.fleet),
        }
        path.write_text(json.dumps(known, indent=1))

    @property
    def bouts(self) -> list[Result]:
        """In the order in which the faults are tried."""
        order = [fault.name for fault in FAULTS]
        return sorted(self.results.values(), key=lambda r: order.index(r.fault) if r.fault in order else len(order))

    def all(self) -> Iterable[Result]:
        """The fleet's drain, too."""
        return [*self.bouts, *([] if self.fleet is None else [self.fleet.drained])]


def _result(known: dict[str, Any]) -> Result:
    return Result(**{**known, "verdict": Verdict(**known["verdict"])})


def _fleet(known: dict[str, Any]) -> Fleet:
    idle = [Idle(**each) for each in known["idle"]]
    return Fleet(**{**known, "drained": _result(known["drained"]), "idle": idle})
