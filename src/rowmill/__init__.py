"""Any table you already have is the queue."""

from .claim import Claim
from .engine.job import Job, SyncJob
from .errors import (
    AppError,
    Busy,
    DatabaseError,
    DeclarationError,
    LostClaim,
    Refused,
    RowmillError,
    Unreachable,
    WorkerIdTaken,
)
from .events import Event, configure_logs
from .lane import Lane
from .mill import Mill
from .outcome import Cancel, Dead, Done, Outcome, Retry, Snooze
from .retry import exponential, fixed
from .states import NOW
from .store import Settled

__all__ = [
    "NOW",
    "AppError",
    "Busy",
    "Cancel",
    "Claim",
    "DatabaseError",
    "Dead",
    "DeclarationError",
    "Done",
    "Event",
    "Job",
    "Lane",
    "LostClaim",
    "Mill",
    "Outcome",
    "Refused",
    "Retry",
    "RowmillError",
    "Settled",
    "Snooze",
    "SyncJob",
    "Unreachable",
    "WorkerIdTaken",
    "configure_logs",
    "exponential",
    "fixed",
]
