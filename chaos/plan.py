"""What is tried, how often, and under how many rows: in the long form, the quick one, and the one of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .faults import FAULTS, Fault
from .faults.clock import Skew
from .faults.disk import LiteFull, ServerFull, TablesFull
from .faults.failover import Failover
from .faults.hands import Delete, Edit
from .faults.lite import Reader, Writer
from .faults.locks import LockTable, LongTransaction, VacuumFull
from .faults.network import Cut
from .faults.processes import Kill, KillChild, LiteKill, LiteStop, Stop
from .faults.restarts import Immediate, KillServer, Restart
from .faults.sessions import Exhaust, Terminate
from .faults.short import BlockedLoop, RestartForty, ShortCut, ShortStop, TerminateAll

_TIMES: Mapping[type[Fault], int] = {
    Kill: 120, KillChild: 8, Stop: 12, Terminate: 90, Exhaust: 6, Restart: 6, Immediate: 6, KillServer: 6, Failover: 2,
    TablesFull: 3, ServerFull: 2, Cut: 4, Skew: 25, LongTransaction: 3, LockTable: 5, VacuumFull: 30, Delete: 70,
    Edit: 70, LiteKill: 50, LiteStop: 4, LiteFull: 4, Reader: 3, Writer: 3,
    ShortStop: 5, BlockedLoop: 3, ShortCut: 5, TerminateAll: 5, RestartForty: 3,
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How often each fault, how many rows each, and how large the fleet is."""

    times: Mapping[type[Fault], int]
    rows: int
    hosts: int
    each: int
    idle: tuple[int, ...]
    idle_seconds: float
    fleet_rows: int

    def wanted(self, names: str | None) -> list[type[Fault]]:
        """All, or those whose name has one of these words in it."""
        words = [word.strip().lower() for word in names.split(",")] if names else [""]
        return [fault for fault in FAULTS if fault in self.times and any(word in fault.name.lower() for word in words)]


LONG = Plan(_TIMES, 23_000, 5, 10, (1, 10, 50), 30.0, 30_000)
QUICK = Plan({fault: 2 if times > 20 else 1 for fault, times in _TIMES.items()}, 1_500, 2, 2, (1, 4), 10.0, 3_000)
