"""Any table you already have is the queue."""

from .declare.budget import Budget
from .declare.call import Call, Handle, Status
from .declare.cron import next_tick
from .declare.domain import domain
from .declare.gates import Breaker, BreakerColumns, Concurrency, Rate
from .declare.lane import Lane
from .declare.options import Keep, Key
from .declare.outcome import Cancel, Dead, Done, Outcome, Retry, Snooze, Wait
from .declare.retry import exponential, fixed
from .declare.schedules import Schedules
from .declare.states import IS_NULL, NOT_NULL, NOW
from .declare.task import Queue, Task, injected
from .engine.job import Job, SyncJob
from .engine.job_steps import Joined
from .errors import (
    AppError,
    Busy,
    DatabaseError,
    DeclarationError,
    InputsChanged,
    KeyTaken,
    LostClaim,
    Refused,
    RowmillError,
    TaskCanceled,
    TaskFailed,
    Unreachable,
    UnreadableValue,
    WorkerIdTaken,
    WrongAnswer,
    WrongArguments,
    WrongResult,
)
from .events import Event, configure_logs
from .mill import Mill
from .store import Settled
from .store.environment_list import from_table
from .store.lane.claim import Claim

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
    "InputsChanged",
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
    "Schedules",
    "Settled",
    "Snooze",
    "Status",
    "SyncJob",
    "Task",
    "TaskCanceled",
    "TaskFailed",
    "Unreachable",
    "UnreadableValue",
    "Wait",
    "WorkerIdTaken",
    "WrongAnswer",
    "WrongArguments",
    "WrongResult",
    "configure_logs",
    "domain",
    "exponential",
    "fixed",
    "from_table",
    "injected",
    "next_tick",
]
