"""States: what "ready", "running", "done" and "dead" look like in the user's own columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import DeclarationError

READY, RUNNING, DONE, RETRY, DEAD, CANCELED = "ready", "running", "done", "retry", "dead", "canceled"
#: The states of a declaration: all of them, those that the engine writes, those in which a row has ended.
DECLARED = (READY, RUNNING, DONE, RETRY, DEAD, CANCELED)
WRITTEN = DECLARED[1:]
FINAL = (DONE, DEAD, CANCELED)
#: The states that an operator sees. A row is waiting for its time, or excluded by the lane's ``where``; a stuck one is
#: among the running. Open rows are held by nobody and have not ended.
WAITING, EXCLUDED, STUCK = "waiting", "excluded", "stuck"
OPEN = (READY, WAITING, EXCLUDED)
SEEN = (*OPEN, RUNNING, *FINAL)
#: A job of rowmill's own table that waits for its children.
JOINING = "joining"
UNFINISHED = (READY, RUNNING, JOINING)

#: column -> value; in ``ready`` a list means any of, None means NULL
Values = Mapping[str, Any]


class _Now:
    """The database's time where a state is written; any time at all where rows are asked for.

    For tables whose state is a time that is set or not: ``done={"processed_at": NOW}``.
    """

    def __repr__(self) -> str:
        return "NOW"


NOW: Final = _Now()


class _Null:
    """Recognises rows by whether a column is NULL, and writes nothing to it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: In ``done``, ``dead`` and ``canceled``: rows in the state have a value in this column (IS_NULL: have none), and the
#: state does not write it. So two lanes over one table tell their dead rows apart:
#: ``dead={"status": 4, "ocr_error": NOT_NULL}``.
NOT_NULL: Final = _Null("NOT_NULL")
IS_NULL: Final = _Null("IS_NULL")


def written(values: Values) -> dict[str, Any]:
    """What a state writes: its values, without those that only recognise a row."""
    return {column: value for column, value in values.items() if not isinstance(value, _Null)}


def null_test(value: Any) -> str | None:
    """The SQL test for a marker that says whether a column is NULL; None for a plain value."""
    return "is not null" if value is NOW or value is NOT_NULL else "is null" if value is IS_NULL else None


def options(value: Any) -> list[Any]:
    """The values a column may have: one, or any of a list."""
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def first(values: Values) -> dict[str, Any]:
    """The first of each list: where a row goes when it goes back to ready. A time that was set stays as it is."""
    return {column: options(value)[0] for column, value in values.items() if value is not NOW}


def overlay(ready: Values | str, running: Values) -> dict[str, Any]:
    """The running condition: the ready values overlaid with the running ones.

    So phases that share a table and one flag column stay apart: what the flag does not say, the untouched
    columns still do.
    """
    return {**({} if isinstance(ready, str) else ready), **running}


def overlaps(one: Values, other: Values) -> bool:
    """Whether some row could satisfy both conditions."""
    return all(
        any(_alike(x, y) for x in options(one[column]) for y in options(other[column]))
        for column in one.keys() & other.keys()
    )


def _alike(x: Any, y: Any) -> bool:
    if any(isinstance(value, (_Now, _Null)) for value in (x, y)):
        return (x is None or x is IS_NULL) == (y is None or y is IS_NULL)
    return bool(x == y and type(x) is type(y))


def validate(name: str, values: object, where: str, *, lists: bool = False) -> None:
    """Refuse what cannot be a state."""
    if not isinstance(values, Mapping) or not values:
        example = f'{name}={{"status": "{name}"}}'
        raise DeclarationError(f"{where}: {name} must be column values, not {values!r}", hint=example)
    for column, value in values.items():
        if not isinstance(column, str):
            raise DeclarationError(f"{where}: {name} has a column name that is not text: {column!r}")
        several = isinstance(value, (list, tuple, set, frozenset))
        if name not in FINAL and any(isinstance(part, _Null) for part in options(value)):
            raise DeclarationError(
                f"{where}: {name}[{column!r}]: {value!r} only recognises rows, so it stands in done, dead or canceled",
                hint="where=... for a further condition on ready rows" if name == "ready" else "a value to be written",
            )
        if several and (not lists or not value):
            wanted = "one value" if not lists else "at least one value"
            raise DeclarationError(
                f"{where}: {name}[{column!r}] needs {wanted}, not {value!r}",
                hint="a list of values is for ready only; a state that is written has one value per column",
            )
        if several and NOW in list(value):
            raise DeclarationError(
                f"{where}: {name}[{column!r}]: NOW does not go into a list", hint=f'{name}={{"{column}": NOW}}'
            )
    if not written(values):
        raise DeclarationError(
            f"{where}: {name} writes no column", hint=f'a value beside {values!r}: {name}={{"status": "{name}", ...}}'
        )
