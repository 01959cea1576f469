"""Any table you already have is the queue."""

from .budget import Budget
from .claim import Claim
from .domain import domain
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
from .gates import Breaker, BreakerColumns, Concurrency, Rate
from .lane import Lane
from .mill import Mill
from .outcome import Cancel, Dead, Done, Outcome, Retry, Snooze
from .retry import exponential, fixed
from .states import NOW
from .store import Settled

__all__ = [
    "NOW",
    "AppError",
    "Breaker",
    "BreakerColumns",
    "Budget",
    "Busy",
    "Cancel",
    "Claim",
    "Concurrency",
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
    "Rate",
    "Refused",
    "Retry",
    "RowmillError",
    "Settled",
    "Snooze",
    "SyncJob",
    "Unreachable",
    "WorkerIdTaken",
    "configure_logs",
    "domain",
    "exponential",
    "fixed",
]
