"""The faults, in the order in which they are tried."""

from __future__ import annotations

from .clock import Skew
from .disk import LiteFull, ServerFull, TablesFull
from .failover import Failover
from .fault import Fault
from .hands import Delete, Edit
from .lite import Reader, Writer
from .locks import LockTable, LongTransaction, VacuumFull
from .network import Cut
from .processes import Kill, KillChild, LiteKill, LiteStop, Stop
from .restarts import Immediate, KillServer, Restart
from .sessions import Exhaust, Terminate
from .short import BlockedLoop, RestartForty, ShortCut, ShortStop, TerminateAll

FAULTS: tuple[type[Fault], ...] = (
    Kill, KillChild, Stop, Terminate, Exhaust, Restart, Immediate, KillServer, Failover, TablesFull, ServerFull, Cut,
    Skew, LongTransaction, LockTable, VacuumFull, Delete, Edit, LiteKill, LiteStop, LiteFull, Reader, Writer,
    ShortStop, BlockedLoop, ShortCut, TerminateAll, RestartForty,
)  # fmt: skip

__all__ = ["FAULTS", "Fault"]
