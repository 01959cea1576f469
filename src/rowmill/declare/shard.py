"""``shard=``: the column, and its value or values, to which a lane keeps in every statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import DeclarationError

_HINT = 'shard={"tenant_id": 7}, or several values that are served in turn: shard={"bucket": range(32)}'
#: The most values of a shard. Statements about all shards contain the whole list.
MOST = 10_000


def validate(given: Any, where: str) -> dict[str, tuple[Any, ...]]:
    """The column with its values; empty where the lane has no shard."""
    if given is None or given == {}:
        return {}
    if not isinstance(given, Mapping):
        raise DeclarationError(f"{where}: shard is a column and its value, not {given!r}", hint=_HINT)
    if len(given) != 1:
        raise DeclarationError(
            f"{where}: shard names {len(given)} columns ({', '.join(map(str, given))}), and takes one",
            hint="the column that the table is divided by, and where= for the others: where=\"region = 'eu'\"",
        )
    ((column, values),) = given.items()
    if not isinstance(column, str) or not column:
        raise DeclarationError(f"{where}: shard names a column by its name, not {column!r}", hint=_HINT)
    if isinstance(values, (Mapping, set, frozenset)) or callable(getattr(values, "__next__", None)):
        raise DeclarationError(
            f"{where}: shard[{column!r}] is {type(values).__name__}, which is neither a value nor a list of values",
            hint=_HINT,
        )
    listed = tuple(values) if isinstance(values, (list, tuple, range)) else (values,)
    if not 1 <= len(listed) <= MOST:
        raise DeclarationError(
            f"{where}: shard[{column!r}] has {len(listed):,} values, so"
            + (" no row could be claimed" if not listed else f" more than {MOST:,}"),
            hint=_HINT,
        )
    for value in listed:
        if value is None:
            raise DeclarationError(
                f"{where}: shard[{column!r}] has NULL, and a row without a value is in no shard",
                hint="give these rows a value, and the column NOT NULL",
            )
        try:
            hash(value)
        except TypeError:
            raise DeclarationError(
                f"{where}: shard[{column!r}] has {value!r}, which is no single value", hint=_HINT
            ) from None
    if twice := [value for i, value in enumerate(listed) if value in listed[:i]] if _repeats(listed) else []:
        raise DeclarationError(
            f"{where}: shard[{column!r}] has {twice[0]!r} twice, so its rows would get two turns",
            hint="name each value once",
        )
    return {column: listed}


def _repeats(values: tuple[Any, ...]) -> bool:
    return len(set(values)) < len(values)
