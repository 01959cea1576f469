"""A lane: a table, its states, its policy, its handler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from ..errors import DeclarationError, did_you_mean
from . import chunk, roles, shard, states
from .budget import Budget
from .gates import Gate, Group, Rate, grouped, shared_rate
from .retry import Backoff, Verdict, exponential
from .states import Values

P = ParamSpec("P")
R = TypeVar("R")

RENEWALS = ("heartbeat_at", "claimed_at", "none")
#: So many runs in a row, so long since the first of them ended, or both; None: without end.
Bound = int | timedelta | tuple[int, timedelta] | None
SETTLE_AFTER: Bound = (10, timedelta(minutes=1))
STALE = ("drop", "write")
#: By how much a backfill stands behind the lane that it is of.
BEHIND = 1_000_000
_DURATIONS = (
    "untouched_for", "expires_after", "lease", "startup_lease", "heartbeat", "sweep_every", "poll", "timeout",
    "chunk_wait", "keep_logs",
)  # fmt: skip


@dataclass(eq=False, kw_only=True)
class Lane:
    """A declared lane. Made by ``@mill.lane(...)``; calling it calls the handler, so handlers stay testable."""

    table: Any
    handler: Callable[..., Any]
    name: str
    ready: Values | str
    running: Values
    done: Values
    retry: Values | None = None
    dead: Values | None = None
    canceled: Values | None = None
    #: A row that expired before it was started; without it such a row is canceled. An operator sees it among those.
    expired: Values | None = None
    #: Columns that ``done``, ``dead`` or ``canceled`` write, and by which rows in that state are not recognised.
    only_written: Sequence[str] = ()
    #: States of rows that no lane works on, on purpose: values of the state column, or column values. For ``check``.
    ignore_states: Sequence[Any] = ()
    #: The zone of the times in columns without one, on PostgreSQL; None means UTC.
    timezone: str | None = None
    where: str | Callable[[Any], Any] | None = None
    #: A column and its value, or its values, served in turn: they stand in every statement of the lane.
    shard: Mapping[str, Any] | None = None
    untouched_for: timedelta | None = None
    #: A row that is older is not started any more; a row's own time, in the role ``expires_at``, goes before it.
    expires_after: timedelta | None = None
    #: Columns that the work depends on: where one of them changed during the run, its outcome is not final.
    inputs: Sequence[str] = ()
    #: What becomes of the columns that such a run returned: ``drop`` or ``write``.
    stale: str = "drop"
    #: How often in a row, and for how long, an outcome is not final: then the next one is, whatever changed.
    settle_after: Bound = SETTLE_AFTER
    roles: Mapping[str, str | None] = field(default_factory=dict)
    order_by: Sequence[str] | None = None
    priority: int = 0
    batch: int | None = None
    concurrency: int = 10
    #: One call of the handler is for up to so many rows; each slot holds a chunk.
    chunk: int | None = None
    #: How long a chunk that is not full waits for more rows; None: it starts at once.
    chunk_wait: timedelta | None = None
    max_attempts: int | None = None
    max_reclaims: int = 3
    backoff: Backoff = field(default_factory=exponential)
    lease: timedelta = timedelta(minutes=5)
    startup_lease: timedelta | None = None
    heartbeat: timedelta | None = None
    #: By default a third of the lease, between 1 s and 60 s.
    sweep_every: timedelta = None  # type: ignore[assignment]
    renew: str | None = None
    #: None: never; the lane looks when it is woken, and when a row of its own is due.
    poll: timedelta | None = timedelta(seconds=5)
    timeout: timedelta | None = None
    isolation: str = "auto"
    classify: Callable[[BaseException], Verdict | None] | None = None
    gates: Sequence[Gate] = ()
    pace: tuple[int, timedelta] | None = None
    fills: Mapping[str, tuple[str, Callable[[Any], Any]]] = field(default_factory=dict)
    environments: Sequence[str] | None = None
    unfenced: bool = False
    slot_name: str = "{lane}-{n}"
    #: How long what handlers log through ``job.log`` is kept; None: not at all.
    keep_logs: timedelta | None = timedelta(days=7)
    #: What a row that is done has reached; rows below it are worked on again, behind the live ones: see ``backfill``.
    version: int | None = None
    version_column: str | None = None
    #: At most so many rows of the backfill are begun in such a time, in one worker process.
    backfill_pace: tuple[int, timedelta] | None = None
    settled_hooks: list[Callable[..., Any]] = field(default_factory=list)
    #: The Mill's budgets, by name.
    budgets: dict[str, Budget] = field(init=False, default_factory=dict)
    #: The gates by what they look at; made from ``gates`` and ``pace``.
    groups: tuple[Group, ...] = field(init=False)
    #: The rate over all environments, if there is one; made from ``gates``.
    shared_rate: Rate | None = field(init=False)
    #: The lane whose done rows this one works on again.
    backfills: Lane | None = None

    #: A mistake in the states that a misspelled column may explain: told once the table has been asked for its columns.
    doubt: DeclarationError | None = field(init=False, default=None)

    #: A lane over rowmill's own table: see ``task.Queue``.
    own = False

    def __post_init__(self) -> None:
        where = f"lane {self.name!r}"
        if not callable(self.handler) or inspect.isclass(self.handler):
            raise DeclarationError(f"{where}: the handler must be a function, not {self.handler!r}")
        if not inspect.signature(self.handler).parameters:
            raise DeclarationError(
                f"{where}: the handler takes no parameters, but it needs one for the job",
                hint=f"async def {getattr(self.handler, '__name__', 'handler')}(job): ...",
            )
        if isinstance(self.ready, str):
            if self.retry is None:
                raise DeclarationError(
                    f"{where}: ready is a SQL condition, so rowmill cannot know what a retried row looks like",
                    hint='add retry={"status": ...}: the values that make a row ready again',
                )
        else:
            states.validate("ready", self.ready, where, lists=True)
        for state in states.WRITTEN:
            values = getattr(self, state)
            if values is not None or state in ("running", "done"):
                states.validate(state, values, where)
        if not isinstance(self.ready, str) and states.overlaps(self.ready, self.running_condition):
            apart = not self.ready.keys() & self.running.keys()
            self._refuse(
                f"{where}: a running row would still be ready, so two workers could hold it"
                + (f": running sets {_names(self.running)}, ready looks at {_names(self.ready)}" if apart else ""),
                "give running a value that ready does not have",
                apart=apart,
            )
        if self.expired is not None:
            states.validate(states.EXPIRED, self.expired, where)
        self._validate_ends(where)
        self._validate_expiry(where)
        self._validate_only_written(where)
        self._validate_ignored(where)
        if self.timezone is not None:
            try:
                ZoneInfo(self.timezone)
            except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
                close = did_you_mean(str(self.timezone), available_timezones())
                raise DeclarationError(
                    f"{where}: there is no time zone {self.timezone!r}",
                    hint=close if close.startswith("did") else 'timezone="Asia/Tokyo", timezone="UTC"',
                ) from None
        for column in self.running:
            if isinstance(self.ready, Mapping) and self.ready.get(column) is states.NOW:
                raise DeclarationError(
                    f"{where}: running writes {column!r}, so a row that goes back could not get its old time again",
                    hint=f"leave {column!r} out of running",
                )
        if isinstance(self.ready, Mapping) and self.backfills is None and not self.leads_to_ready(self.retry_values):
            self._refuse(
                f"{where}: a row that waits for its retry would not be ready, so it would never be claimed again",
                'name the retry values in ready too: ready={"status": ["queued", "failed"]}',
                apart=not self.retry_values.keys() & self.ready.keys(),
            )
        roles.validate(self.roles, where)
        self._validate_numbers(where)
        chunk.validate(where, self.chunk, self.chunk_wait, None if self.backfills else self.batch, self.lease)
        if not self.own:
            chunk.validate_handler(where, self.handler, self.chunk)
        self.groups = grouped(self.gates, self.pace, where)
        self.shared_rate = shared_rate(self.gates, where)
        if self.shared_rate is not None and self.chunk is not None:
            raise DeclarationError(
                f"{where}: a rate with shared= counts rows that start one by one, not chunks",
                hint="a budget with shared=, from which the handler takes with job.spend",
            )
        for column, given in self.fills.items():
            if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str) and callable(given[1])):
                raise DeclarationError(
                    f"{where}: fills[{column!r}] is not a column and a function of it",
                    hint='fills={"domain": ("url", rowmill.domain)}',
                )
        self._validate_version(where)
        self._validate_inputs(where)
        self._validate_shard(where)
        if isinstance(self.environments, str):
            self.environments = [self.environments]
        if isinstance(self.order_by, str):
            self.order_by = [part.strip() for part in self.order_by.split(",")]
        if self.startup_lease is None:
            self.startup_lease = self.lease
        if self.sweep_every is None:
            self.sweep_every = min(max(self.lease / 3, timedelta(seconds=1)), timedelta(seconds=60))
        if self.heartbeat is None:
            self.heartbeat = min(self.lease / 5, timedelta(seconds=20))
        if self.heartbeat > self.lease / 2:
            raise DeclarationError(
                f"{where}: a heartbeat every {self.heartbeat} cannot keep a lease of {self.lease}",
                hint=f"heartbeat of at most {self.lease / 2}; by default it is a fifth of the lease",
            )

    def _validate_ends(self, where: str) -> None:
        """Every state that is written must lead out of running, or the row would be swept and run again forever."""
        for state in (*states.FINAL, states.EXPIRED, states.RETRY):
            values = getattr(self, state)
            after = {**self.running_condition, **states.written(values or {})}
            if values and states.overlaps(self.running_condition, after):
                self._refuse(
                    f"{where}: a row that is {state} ({dict(values)!r}) would still look as if it were running",
                    f"give {state} another value for {', '.join(self.running)}",
                    apart=not values.keys() & self.running.keys(),
                )
            if state in ("dead", "canceled", states.EXPIRED) and values and self.leads_to_ready(values):
                self._refuse(
                    f"{where}: a row that is {state} would be ready again, and would run forever",
                    f"give {state} a value that ready does not have",
                    apart=not values.keys() & set(self.ready),
                )

    def _validate_expiry(self, where: str) -> None:
        expires = self.expires_after is not None or bool(self.roles.get("expires_at"))
        if expires and self.canceled is None and self.expired is None:
            what = "expires_after" if self.expires_after is not None else 'roles["expires_at"]'
            raise DeclarationError(
                f"{where}: {what} is given, but no state says what an expired row looks like",
                hint='canceled={"status": "canceled"}, or a state of its own: expired={"status": "expired"}',
            )
        if self.expired is not None and not expires:
            raise DeclarationError(
                f"{where}: expired is given, but nothing says when a row expires",
                hint='expires_after=timedelta(hours=1), or roles={"expires_at": "a column with a time"}',
            )

    def _refuse(self, message: str, hint: str, *, apart: bool) -> None:
        """Refuse the states; where they name different columns, once the table has shown that those exist."""
        error = DeclarationError(message, hint=hint)
        if not apart:
            raise error
        self.doubt = self.doubt or error

    def _validate_ignored(self, where: str) -> None:
        """Every ignored state as column values."""
        given = (
            states.options(self.ignore_states) if not isinstance(self.ignore_states, Mapping) else [self.ignore_states]
        )
        columns = [column for column, value in self.done.items() if _is_word(value) and self._asks_for(column)]
        ignored = []
        for state in given:
            if isinstance(state, Mapping):
                states.validate("ignore_states", state, where, lists=True)
                ignored.append(state)
            elif len(columns) == 1:
                ignored.append({columns[0]: state})
            else:
                raise DeclarationError(
                    f"{where}: ignore_states has {state!r}, and the lane has several state columns",
                    hint=f'ignore_states=[{{"{next(iter([*columns, *self.done]))}": {state!r}}}]',
                )
        self.ignore_states = ignored

    def _asks_for(self, column: str) -> bool:
        """Whether ready or running goes by this column."""
        return column in self.running or (not isinstance(self.ready, str) and column in self.ready)

    def _validate_only_written(self, where: str) -> None:
        if isinstance(self.only_written, str):
            self.only_written = [self.only_written]
        ends = {state: values for state in (*states.FINAL, states.EXPIRED) if (values := getattr(self, state))}
        known = {column for values in ends.values() for column in states.written(values)}
        for column in self.only_written:
            if column not in known:
                raise DeclarationError(
                    f"{where}: only_written names {column!r}, and no final state writes it",
                    hint=did_you_mean(column, known),
                )
        for state, values in ends.items():
            if not values.keys() - set(self.only_written):
                raise DeclarationError(
                    f"{where}: every column of {state} is only written, so no row can be recognised as {state}",
                    hint=f"leave one of {_names(values)} out of only_written",
                )

    def _validate_version(self, where: str) -> None:
        if (self.version is None) != (self.version_column is None):
            raise DeclarationError(
                f"{where}: version and version_column go together",
                hint='version=2, version_column="enriched_version"',
            )
        if self.version is not None and (not isinstance(self.version, int) or isinstance(self.version, bool)):
            raise DeclarationError(f"{where}: version must be a whole number, not {self.version!r}")
        if self.backfill_pace is None:
            return
        most, time = self.backfill_pace if isinstance(self.backfill_pace, tuple) else (None, None)
        if self.version is None or not isinstance(most, int) or most < 1 or not isinstance(time, timedelta):
            raise DeclarationError(
                f"{where}: backfill_pace={self.backfill_pace!r} is not valid",
                hint="with a version: backfill_pace=(10, timedelta(seconds=1)), ten rows a second",
            )

    def _validate_inputs(self, where: str) -> None:
        given = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) and name for name in given):
            raise DeclarationError(
                f"{where}: inputs is a list of column names, not {self.inputs!r}", hint='inputs=["url", "body"]'
            )
        self.inputs = tuple(dict.fromkeys(given))
        if self.stale not in STALE:
            raise DeclarationError(
                f"{where}: stale={self.stale!r} is not valid", hint=did_you_mean(str(self.stale), STALE)
            )
        runs, time = self.settle_bound or (None, None)
        wrong = runs is not None and (not isinstance(runs, int) or isinstance(runs, bool) or runs < 1)
        wrong = wrong or (time is not None and (not isinstance(time, timedelta) or time <= timedelta(0)))
        if wrong or (self.settle_after is not None and runs is None and time is None):
            raise DeclarationError(
                f"{where}: settle_after={self.settle_after!r}: a number of runs, a positive timedelta, or both",
                hint="settle_after=5, settle_after=timedelta(minutes=1), or settle_after=(5, timedelta(minutes=1))",
            )
        for name, default in (("stale", STALE[0]), ("settle_after", SETTLE_AFTER)):
            if not self.inputs and getattr(self, name) != default:
                raise DeclarationError(
                    f"{where}: {name} is given, but no column is an input", hint='inputs=["url", "body"]'
                )

    def _validate_shard(self, where: str) -> None:
        self.shard = shard.validate(self.shard, where)
        named = (states.READY, *states.WRITTEN, states.EXPIRED)
        for column in self.shard:
            for state in named:
                if isinstance(values := getattr(self, state), Mapping) and column in values:
                    raise DeclarationError(
                        f"{where}: shard names {column!r}, which {state} names too: a row stays in its shard",
                        hint=f"leave {column!r} out of {state}; the shard is part of every statement",
                    )

    @property
    def settle_bound(self) -> tuple[Any, Any] | None:
        """``settle_after`` as a number of runs and a time, of which one may be None; None: there is no bound."""
        given = self.settle_after
        if given is None:
            return None
        if isinstance(given, tuple):
            return given if len(given) == 2 else (None, None)
        return (None, given) if isinstance(given, timedelta) else (given, None)

    @property
    def bounded(self) -> bool:
        """It is noted how often a row's outcome was not final, because some number of that makes the next one final."""
        return bool(self.inputs) and self.settle_after is not None

    def leads_to_ready(self, values: Values) -> bool:
        """Whether a running row that gets these values is ready again."""
        if isinstance(self.ready, str):
            return False
        return states.overlaps(self.ready, {**self.running_condition, **states.written(values)})

    def _validate_numbers(self, where: str) -> None:
        for name in ("batch", "concurrency", "max_attempts"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DeclarationError(f"{where}: {name} must be a whole number of at least 1, not {value!r}")
        if not isinstance(self.priority, int):
            raise DeclarationError(
                f"{where}: priority must be a whole number (lower goes first), not {self.priority!r}"
            )
        try:
            self.slot_name.format(lane=self.name, n=1)
        except (KeyError, IndexError, ValueError, AttributeError):
            raise DeclarationError(
                f"{where}: cannot make slot names from {self.slot_name!r}", hint='slot_name="{lane}-{n}"'
            ) from None
        if not isinstance(self.max_reclaims, int) or self.max_reclaims < 0:
            raise DeclarationError(f"{where}: max_reclaims must be 0 or more, not {self.max_reclaims!r}")
        for name in _DURATIONS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, timedelta) or value <= timedelta(0)):
                raise DeclarationError(
                    f"{where}: {name} must be a positive timedelta, not {value!r}",
                    hint=f"{name}=timedelta(seconds=30)",
                )
        if self.renew is not None and self.renew not in RENEWALS:
            raise DeclarationError(
                f"{where}: renew={self.renew!r} is not valid", hint=did_you_mean(self.renew, RENEWALS)
            )
        if self.isolation not in ("auto", "process"):
            raise DeclarationError(
                f"{where}: isolation={self.isolation!r} is not valid",
                hint=did_you_mean(self.isolation, ("auto", "process")),
            )
        if not callable(self.backoff):
            raise DeclarationError(
                f"{where}: backoff must be fixed(...), exponential(...) or a function of the attempt",
                hint="backoff=fixed(timedelta(minutes=5))",
            )

    @property
    def poll_seconds(self) -> float:
        """The longest wait of an idle worker; infinite where it does not poll."""
        return math.inf if self.poll is None else self.poll.total_seconds()

    @property
    def shared_name(self) -> str:
        """The name of its shared rate, which a lane and its backfill have in common."""
        return self.backfills.name if self.backfills is not None else self.name

    @property
    def running_condition(self) -> dict[str, Any]:
        """What a running row of this lane looks like."""
        return states.overlay(self.ready, self.running)

    @property
    def ready_again(self) -> dict[str, Any]:
        """What a row looks like that goes back without a failure: released, snoozed or swept."""
        return states.first(self.ready) if not isinstance(self.ready, str) else dict(self.retry or {})

    @property
    def retry_values(self) -> dict[str, Any]:
        """What a row looks like that failed and waits for another try."""
        return dict(self.retry) if self.retry is not None else self.ready_again

    def on_settled(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Register ``hook(tx, settled)``: it runs inside the transaction that settles a batch of outcomes."""
        self.settled_hooks.append(hook)
        return hook

    def overlaps(self, values: Values, other: Lane, others: Values) -> bool:
        """Whether one row can look like this to this lane and like that to another lane of the table."""
        mine, theirs = ({c: list(v) for c, v in (lane.shard or {}).items()} for lane in (self, other))
        return states.overlaps({**values, **mine}, {**others, **theirs})

    def serves(self, environment: str) -> bool:
        """Whether this lane works in the named environment."""
        return self.environments is None or environment in self.environments

    def policy(self, read: Callable[[str], Any]) -> Any:
        """What says ``backoff`` and ``classify`` for a row, of which ``read`` gives the columns: the lane itself."""
        return self

    @property
    def handlers(self) -> list[Callable[..., Any]]:
        """The functions that its runs call."""
        return [self.handler]

    @property
    def narrowed(self) -> Mapping[str, frozenset[str]]:
        """Of rowmill's own table: by task, the only arguments with which a job is claimed."""
        return {}

    def resources(self) -> list[str]:
        """Names of the resources the handler asks for: its parameters behind the job."""
        return list(inspect.signature(self.handler).parameters)[1:]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.handler(*args, **kwargs)


class TypedLane(Lane, Generic[P, R]):
    """A lane as a type checker sees it: calling it is calling its handler."""

    if TYPE_CHECKING:
        handler: Callable[P, R]

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class LaneDecorator(Protocol):
    """A decorator that makes a lane of a handler, and keeps the handler's type."""

    def __call__(self, handler: Callable[P, R], /) -> TypedLane[P, R]: ...


def _is_word(value: Any) -> bool:
    """A value that names a state, not a flag or a time that is set or not."""
    return value is not None and not isinstance(value, bool) and states.null_test(value) is None


def _names(values: Values) -> str:
    return ", ".join(repr(column) for column in values)


_INTERNAL = ("table", "handler", "settled_hooks", "backfills")
PARAMETERS = tuple(f.name for f in fields(Lane) if f.init and f.name not in _INTERNAL)


def declare(table: Any, handler: Callable[..., Any], options: Mapping[str, Any]) -> Lane:
    """A lane from a decorator's arguments, with a helpful word for a name that is not a parameter."""
    name = options.get("name") or getattr(handler, "__name__", "lane")
    for option in options:
        if option not in PARAMETERS:
            raise DeclarationError(
                f"lane {name!r}: there is no parameter {option!r}", hint=did_you_mean(option, PARAMETERS)
            )
    for needed in (states.READY, states.RUNNING, states.DONE):
        if needed not in options:
            raise DeclarationError(
                f"lane {name!r}: {needed} is missing",
                hint=f'{needed}={{"status": "..."}}: the column values that mean {needed}',
            )
    given = {**options, "name": name}
    column = given.get("version_column")
    if column is not None and isinstance(given["done"], Mapping):
        given["done"] = {**given["done"], column: given.get("version")}
    return Lane(table=table, handler=handler, **given)


def backfill(lane: Lane) -> Lane:
    """The lane that works again on rows that are done, but below the version: behind all live rows, at its own pace.

    A row goes from done to running and back to done, with the version. One that fails is a row of the live lane from
    then on, with its retries and its end; so is one whose worker died.
    """
    assert lane.version_column is not None
    ready = {column: value for column, value in lane.done.items() if column != lane.version_column}
    most = lane.backfill_pace[0] if lane.backfill_pace else lane.batch
    return replace(
        lane, name=f"{lane.name}-backfill", ready=ready, retry=lane.retry_values, backfills=lane, batch=most,
        priority=lane.priority + BEHIND, expires_after=None, expired=None, roles={**lane.roles, "expires_at": None},
    )  # fmt: skip
