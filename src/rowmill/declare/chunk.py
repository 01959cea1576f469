"""A chunk: rows that one call of a handler works on together, and what the handler's answer means for each of them."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..errors import DeclarationError, WrongAnswer, WrongResult
from ..plural import counted
from .outcome import Outcome

_SHOWN = 5  # ids that a message names
_LONG = 80


class Misfits(Exception):
    """Jobs of a chunk whose arguments do not fit the handler, by their place: each ends by itself, and the others are
    called without them.
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        super().__init__(f"{len(outcomes)} jobs do not fit the handler")
        self.outcomes = dict(outcomes)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcomes,)


def validate(where: str, chunk: Any, wait: Any, batch: int | None, lease: timedelta) -> None:
    """Refuse a size, or a wait for more rows, that cannot work."""
    if chunk is None:
        if wait is not None:
            raise DeclarationError(
                f"{where}: chunk_wait is given without chunk: it says how long a chunk waits for more rows",
                hint="chunk=64, chunk_wait=timedelta(milliseconds=200)",
            )
        return
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise DeclarationError(
            f"{where}: chunk must be a whole number of at least 1, not {chunk!r}",
            hint="chunk=64: the handler gets a list of up to 64 jobs",
        )
    if batch is not None and batch < chunk:
        raise DeclarationError(
            f"{where}: a claim of batch={batch} rows cannot fill a chunk of {chunk}",
            hint=f"batch={chunk} or more; without batch= a claim takes as much as the chunks need",
        )
    if wait is not None and wait > lease / 2:
        raise DeclarationError(
            f"{where}: a chunk that waits {wait} for more rows uses up a lease of {lease}",
            hint=f"chunk_wait of at most {lease / 2}",
        )


def validate_handler(where: str, handler: Callable[..., Any], chunk: Any) -> None:
    """Refuse a handler that takes one job where it gets many, or many where it gets one."""
    first = next(iter(inspect.signature(handler).parameters.values()))
    hint = _text(first.annotation)
    if chunk is None:
        if re.search(r"\[.*\b(Sync)?Job\b", hint):
            raise DeclarationError(
                f"{where}: {first.name!r} is a list of jobs, but the lane gives its handler one job at a time",
                hint="chunk=64: the handler gets a list of up to 64 jobs",
            )
        return
    if first.name == "job" or re.fullmatch(r"(.*\.)?(Sync)?Job", hint):
        raise DeclarationError(
            f"{where}: with chunk={chunk!r} the handler gets a list of jobs, but its first parameter is one job",
            hint=f"async def {getattr(handler, '__name__', 'handler')}(jobs: list[Job]): ...",
        )
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise DeclarationError(
            f"{where}: the handler yields, but a chunk needs one answer for all of its jobs",
            hint="return a list of outcomes, in the order of the jobs, or a mapping by job.id",
        )


def takes_jobs(first: inspect.Parameter) -> bool:
    """The first parameter of a task's handler is the list of jobs, not of an argument."""
    return first.name == "jobs" or bool(re.search(r"\b(Sync)?Job\b", _text(first.annotation)))


def _text(annotation: Any) -> str:
    if inspect.isclass(annotation) and not getattr(annotation, "__args__", ()):
        return annotation.__name__
    return str(annotation)


def in_order(returned: Any, handed: Sequence[Any], given: Sequence[Any]) -> Any:
    """What a handler returned. A list says which outcome is whose by its order alone, so the list that was handed to
    the handler must be as it was given.
    """
    same = len(handed) == len(given) and all(a is b for a, b in zip(handed, given, strict=True))
    if same or not isinstance(returned, (list, tuple)):
        return returned
    wrong = WrongResult(
        "the handler changed the list that it was given, so outcomes cannot be matched to jobs; change a copy, or"
        " return a mapping by job.id"
    )
    return [wrong] * len(given)


def answers(jobs: Sequence[Any], returned: Any) -> list[Any]:
    """How the run of each job ended, by what the handler returned for all of them: a list in the same order, a mapping
    by id, or one end for all (None, an outcome). Raises WrongAnswer where outcomes cannot be matched to jobs.
    """
    if returned is None or isinstance(returned, BaseException):
        return [returned] * len(jobs)
    if isinstance(returned, type) and issubclass(returned, Outcome):
        return [returned] * len(jobs)
    if isinstance(returned, (list, tuple)):
        if len(returned) != len(jobs):
            raise WrongAnswer(
                f"the handler returned {counted(len(returned), 'outcome')} for {counted(len(jobs), 'job')}, so"
                " outcomes cannot be matched to jobs"
            )
        return list(returned)
    if isinstance(returned, Mapping):
        return _by_id(jobs, returned)
    kind = type(returned).__name__
    if inspect.iscoroutine(returned):
        returned.close()
        kind = f"a coroutine ({returned.__qualname__}): an await is missing"
    wrong = WrongResult(
        f"the handler returned {kind}; a chunk ends with a list of outcomes in the order of its jobs, a mapping by"
        " job.id, one outcome for all, or None"
    )
    return [wrong] * len(jobs)


def _by_id(jobs: Sequence[Any], returned: Mapping[Any, Any]) -> list[Any]:
    given = list(returned.items())  # a mapping of several values by key has a key twice
    times = Counter([_name(id) for id, _ in given])
    by_id = {_name(id): ended for id, ended in given}
    ids = [job.id for job in jobs]
    names = [_name(id) for id in ids]
    known = set(names)
    unknown = [id for id, _ in given if _name(id) not in known]
    return [
        by_id[name] if times[name] == 1 else _unanswered(id, times[name], unknown)
        for name, id in zip(names, ids, strict=True)
    ]


def _name(id: Any) -> Any:
    """An id as it is compared: True is not 1. What cannot be looked up is nobody's id."""
    try:
        hash(id)
    except TypeError:
        return (list, repr(id))
    return (bool, id) if isinstance(id, bool) else id


def _unanswered(id: Any, times: int, unknown: Sequence[Any]) -> WrongAnswer:
    if times:
        return WrongAnswer(f"the handler returned {times} outcomes for this job: {_shown(id)}")
    text = f"the handler returned no outcome for this job: there is none for {_shown(id)}"
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        text += (
            f"; it returned some for ids that are not in the chunk: {', '.join(map(_shown, unknown[:_SHOWN]))}{more}"
        )
    return WrongAnswer(text)


def _shown(id: Any) -> str:
    """An id with its type: '7' is not 7."""
    try:
        text = repr(id)
    except Exception:
        text = "an id"
    return f"{text if len(text) <= _LONG else text[: _LONG - 1] + '…'} ({type(id).__name__})"
