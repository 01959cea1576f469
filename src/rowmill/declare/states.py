"""States: what "ready", "running", "done" and "dead" look like in the user's own columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import DeclarationError

READY, RUNNING, DONE, RETRY, DEAD, CANCELED = "ready", "running", "done", "retry", "dead", "canceled"
#: The state of a row that expired before it was started. Without it, the row is canceled.
EXPIRED = "expired"
#: The states of a declaration: all of them, those that the engine writes, and the end states.
DECLARED = (READY, RUNNING, DONE, RETRY, DEAD, CANCELED)
WRITTEN = DECLARED[1:]
FINAL = (DONE, DEAD, CANCELED)
#: The states that an operator sees. A waiting row is not due yet, or the lane's ``where`` excludes it. A stuck row
#: counts as running. Open rows are neither running nor ended.
WAITING, EXCLUDED, STUCK = "waiting", "excluded", "stuck"
OPEN = (READY, WAITING, EXCLUDED)
SEEN = (*OPEN, RUNNING, *FINAL)
#: A job of rowmill's own table that waits for its children.
JOINING = "joining"
UNFINISHED = (READY, RUNNING, JOINING)

#: column -> value; in ``ready`` a list means any of its values, None means NULL
Values = Mapping[str, Any]


class _Now:
    """The database's time when a state is written; any time when rows are selected.

    For tables where a timestamp is the state: ``done={"processed_at": NOW}``.
    """

    def __repr__(self) -> str:
        return "NOW"


NOW: Final = _Now()


class _Null:
    """Matches rows by whether a column is NULL, and writes nothing to it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: In ``done``, ``dead`` and ``canceled``: rows in the state have a value in this column (IS_NULL: have none), but the
#: state does not write it. So two lanes on one table can tell their dead rows apart: ``dead={"status": 4, "ocr_error":
#: NOT_NULL}``.
NOT_NULL: Final = _Null("NOT_NULL")
IS_NULL: Final = _Null("IS_NULL")


def written(values: Values) -> dict[str, Any]:
    """The values that a state writes, without the markers that only match rows."""
    return {column: value for column, value in values.items() if not isinstance(value, _Null)}


def null_test(value: Any) -> str | None:
    """The SQL test for a NULL marker; None for a plain value."""
    return "is not null" if value is NOW or value is NOT_NULL else "is null" if value is IS_NULL else None


def options(value: Any) -> list[Any]:
    """The allowed values of a column: one, or all of a list."""
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def first(values: Values) -> dict[str, Any]:
    """The values for a row that goes back to ready: the first of each list. A timestamp stays as it is."""
    return {column: options(value)[0] for column, value in values.items() if value is not NOW}


def overlay(ready: Values | str, running: Values) -> dict[str, Any]:
    """The running condition: the ready values, overlaid with the running ones.

    This keeps phases apart that share a table and one flag column. Where the flag is the same, the unchanged columns
    differ.
    """
    return {**({} if isinstance(ready, str) else ready), **running}


def overlaps(one: Values, other: Values) -> bool:
    """Whether a row can satisfy both conditions."""
    return all(
        any(_alike(x, y) for x in options(one[column]) for y in options(other[column]))
        for column in one.keys() & other.keys()
    )


def _alike(x: Any, y: Any) -> bool:
    if any(isinstance(value, (_Now, _Null)) for value in (x, y)):
        return (x is None or x is IS_NULL) == (y is None or y is IS_NULL)
    return bool(x == y and type(x) is type(y))


def validate(name: str, values: object, where: str, *, lists: bool = False) -> None:
    """Refuse an invalid state."""
    if not isinstance(values, Mapping) or not values:
        example = f'{name}={{"status": "{name}"}}'
        raise DeclarationError(f"{where}: {name} must be column values, not {values!r}", hint=example)
    for column, value in values.items():
        if not isinstance(column, str):
            raise DeclarationError(f"{where}: {name} has a column name that is not text: {column!r}")
        several = isinstance(value, (list, tuple, set, frozenset))
        if name not in FINAL and any(isinstance(part, _Null) for part in options(value)):
            raise DeclarationError(
                f"{where}: {name}[{column!r}]: {value!r} only recognises rows: use it in done, dead or canceled",
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
                f"{where}: {name}[{column!r}]: NOW cannot be in a list", hint=f'{name}={{"{column}": NOW}}'
            )
    if not written(values):
        raise DeclarationError(
            f"{where}: {name} writes no column", hint=f'a value beside {values!r}: {name}={{"status": "{name}", ...}}'
        )
