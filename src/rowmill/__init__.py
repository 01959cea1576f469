"""Any table you already have is the queue."""

from .budget import Budget
from .call import Call, Handle, Status
from .claim import Claim
from .domain import domain
from .engine.flow import Joined
from .engine.job import Job, SyncJob
from .errors import (
    AppError,
    Busy,
    DatabaseError,
    DeclarationError,
    KeyTaken,
    LostClaim,
    Refused,
    RowmillError,
    TaskCanceled,
    TaskFailed,
    Unreachable,
    UnreadableValue,
    WorkerIdTaken,
    WrongArguments,
    WrongResult,
)
from .events import Event, configure_logs
from .gates import Breaker, BreakerColumns, Concurrency, Rate
from .lane import Lane
from .mill import Mill
from .options import Keep, Key
from .outcome import Cancel, Dead, Done, Outcome, Retry, Snooze
from .retry import exponential, fixed
from .states import IS_NULL, NOT_NULL, NOW
from .store import Settled
from .task import Queue, Task, injected

__all__ = [
    "IS_NULL",
    "NOT_NULL",
    "NOW",
    "AppError",
    "Breaker",
    "BreakerColumns",
    "Budget",
    "Busy",
    "Call",
    "Cancel",
    "Claim",
    "Concurrency",
    "DatabaseError",
    "Dead",
    "DeclarationError",
    "Done",
    "Event",
    "Handle",
    "Job",
    "Joined",
    "Keep",
    "Key",
    "KeyTaken",
    "Lane",
    "LostClaim",
    "Mill",
    "Outcome",
    "Queue",
    "Rate",
    "Refused",
    "Retry",
    "RowmillError",
    "Settled",
    "Snooze",
    "Status",
    "SyncJob",
    "Task",
    "TaskCanceled",
    "TaskFailed",
    "Unreachable",
    "UnreadableValue",
    "WorkerIdTaken",
    "WrongArguments",
    "WrongResult",
    "configure_logs",
    "domain",
    "exponential",
    "fixed",
    "injected",
]
