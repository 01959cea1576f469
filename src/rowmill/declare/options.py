"""How a job is enqueued and how long it is kept: the options besides the handler's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from ..errors import DeclarationError, WrongArguments, did_you_mean
from .states import FINAL, READY, UNFINISHED

#: States of an unfinished job; ``joining`` means that it waits for its children.
STATES = (*UNFINISHED, *FINAL)
CONFLICTS = ("ignore", "replace", "raise")
_ZERO = timedelta(0)
#: The longest time from now: the databases' own times cannot hold more.
FARTHEST = timedelta(days=365 * 1000)
LONGEST_KEY = 500  # an index entry holds 2,700 bytes


@dataclass(frozen=True, slots=True)
class Key:
    """A job's key, which prevents duplicates.

    No second job of the task with this key is added while there is one in ``states`` (and made less than ``within``
    ago, if given). By default ``states`` are the unfinished ones; with ``within``, done too.

    ``conflict`` is what a second call does: ``ignore`` (it gets the handle of the first), ``replace`` (the first gets
    its arguments, time and priority, unless it is running; a job that waits for its retry begins again with all its
    attempts and without the results of its steps) or ``raise``.

    ``debounce``: the job waits this long after the last call, and runs once with that call's arguments, but at most
    ``at_most`` after the first call. A call while it runs makes the next job.
    """

    value: str
    within: timedelta | None = None
    states: Sequence[str] = ()
    conflict: str = "ignore"
    debounce: timedelta | None = None
    at_most: timedelta | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or not self.value:
            raise WrongArguments(f"a key must be text, not {self.value!r}")
        if len(self.value) > LONGEST_KEY or any(
            letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in self.value
        ):
            raise WrongArguments(
                f"the key {self.value[:60]!r} cannot be stored: at most {LONGEST_KEY} characters, no NUL or surrogate",
                hint="use a hash of it",
            )
        if self.debounce is not None or self.at_most is not None:
            self._check_debounce()
        if not self.states:
            object.__setattr__(self, "states", UNFINISHED if self.within is None else (*UNFINISHED, "done"))
        for state in self.states:
            if state not in STATES:
                raise WrongArguments(
                    f"key {self.value!r}: there is no state {state!r}", hint=did_you_mean(state, STATES)
                )
        if self.conflict not in CONFLICTS:
            raise WrongArguments(
                f"key {self.value!r}: conflict={self.conflict!r} is not valid",
                hint=did_you_mean(str(self.conflict), CONFLICTS),
            )
        if self.within is not None and not (isinstance(self.within, timedelta) and _ZERO < self.within <= FARTHEST):
            raise WrongArguments(f"key {self.value!r}: within must be a positive timedelta, not {self.within!r}")

    def _check_debounce(self) -> None:
        for name in ("debounce", "at_most"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, timedelta) and _ZERO < given <= FARTHEST):
                raise WrongArguments(f"key {self.value!r}: {name} must be a positive timedelta, not {given!r}")
        if self.debounce is None:
            raise WrongArguments(
                f"key {self.value!r}: at_most limits a debounce", hint="Key(value, debounce=..., at_most=...)"
            )
        if self.at_most is not None and self.at_most < self.debounce:
            raise WrongArguments(
                f"key {self.value!r}: at_most={self.at_most} is shorter than debounce={self.debounce}",
                hint="at_most is the longest wait after the first call",
            )
        if self.within is not None or self.states or self.conflict != "ignore":
            raise WrongArguments(
                f"key {self.value!r}: debounce cannot be combined with within, states or conflict",
                hint="leave them out, or debounce",
            )
        object.__setattr__(self, "states", (READY,))
        object.__setattr__(self, "conflict", "replace")

    @property
    def strict(self) -> bool:
        """Whether the database enforces the key, also for other programs: all unfinished states count."""
        return self.within is None and set(UNFINISHED) <= set(self.states)

    @property
    def looks_back(self) -> bool:
        """Whether the check needs more than the unique index."""
        return self.within is not None or set(self.states) != set(UNFINISHED)


@dataclass(frozen=True, slots=True)
class Keep:
    """How long ended jobs are kept.

    Done and canceled jobs are kept for ``age``, and only the newest ``count`` of them; dead jobs for ``dead``. None: no
    limit.
    """

    age: timedelta | None = timedelta(days=7)
    count: int | None = None
    dead: timedelta | None = timedelta(days=30)

    def __post_init__(self) -> None:
        for name in ("age", "dead"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, timedelta) and _ZERO <= given <= FARTHEST):
                raise DeclarationError(f"Keep: {name} must be a timedelta or None, not {given!r}")
        if self.count is not None and not (type(self.count) is int and 0 <= self.count < 2**31):
            raise DeclarationError(f"Keep: count must be a whole number or None, not {self.count!r}")

    @classmethod
    def of(cls, given: Any, where: str) -> Keep:
        """``keep=timedelta(days=1)``, ``keep=1000``, ``keep=Keep(...)``."""
        if isinstance(given, cls):
            return given
        if isinstance(given, timedelta) and given >= timedelta(0):
            return cls(age=given, dead=max(given, timedelta(days=30)))
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return cls(count=given)
        raise DeclarationError(
            f"{where}: keep={given!r} is not valid", hint="keep=timedelta(days=7), keep=1000 or keep=Keep(...)"
        )


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is enqueued, besides its handler's arguments."""

    #: The caller's own transaction: the job exists only if it commits.
    tx: Any = None
    run_after: datetime | timedelta | None = None
    #: Lower runs first.
    priority: int | None = None
    key: str | Key | None = None
    env: str | None = None

    def __post_init__(self) -> None:
        after = self.run_after
        if after is not None and not isinstance(after, (datetime, timedelta)):
            raise WrongArguments(f"run_after must be a datetime or a timedelta, not {after!r}")
        if isinstance(after, timedelta) and abs(after) > FARTHEST:
            raise WrongArguments(f"run_after={after!r} is too far away", hint=f"at most {FARTHEST.days} days")
        if isinstance(after, datetime) and not 1000 < after.year < 9999:
            # A time that the database can store but the drivers cannot read would stop the whole queue.
            raise WrongArguments(f"run_after={after!r} is too far away")
        if isinstance(after, datetime) and after.tzinfo is None:
            raise WrongArguments(
                f"run_after={after!r} has no time zone", hint="datetime.now(UTC) + ..., or a timedelta"
            )
        whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if self.priority is not None and not (whole and -32768 <= self.priority <= 32767):
            raise WrongArguments(f"priority must be a whole number (lower goes first), not {self.priority!r}")
        if self.key is not None and not isinstance(self.key, (str, Key)):
            raise WrongArguments(f"key must be text or a Key, not {self.key!r}")
        if isinstance(self.key, str):
            Key(self.key)
        if isinstance(self.key, Key) and self.key.debounce is not None and after is not None:
            raise WrongArguments(
                f"key {self.key.value!r}: debounce and run_after cannot be combined", hint="leave out one of them"
            )

    def under(self, common: Options) -> Options:
        """These options, with ``common`` as the default for those that are not set."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(common, **given) if given else common

    @property
    def unique(self) -> Key | None:
        """The key with its options."""
        return Key(self.key) if isinstance(self.key, str) else self.key


OPTIONS = tuple(f.name for f in fields(Options))
