"""A Django model as a lane's table: its name, and its fields by the columns they have. Django itself is not needed."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

from .states import DECLARED

_ORDER = re.compile(r"(\s*-?)(\w+)(.*)", re.DOTALL)


def is_model(table: Any) -> bool:
    """Whether this is a Django model."""
    return hasattr(getattr(table, "_meta", None), "db_table")


def by_columns(model: Any, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model's table, and a lane's options with columns where they name fields and plain values for choices."""
    fields = model._meta.concrete_fields
    columns = {"pk": model._meta.pk.column}
    columns |= {name: field.column for field in fields for name in (field.name, field.attname)}
    found = dict(options)

    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        return {columns.get(name, name): _plain(value) for name, value in values.items()}

    for state in DECLARED:
        if isinstance(values := found.get(state), Mapping):
            found[state] = named(values)
    if isinstance(ignored := found.get("ignore_states"), (list, tuple)):
        found["ignore_states"] = [named(each) if isinstance(each, Mapping) else _plain(each) for each in ignored]
    if isinstance(roles := found.get("roles"), Mapping):
        found["roles"] = {role: columns.get(name, name) for role, name in roles.items()}
    if (column := found.get("version_column")) is not None:
        found["version_column"] = columns.get(column, column)
    if (order := found.get("order_by")) is not None:
        parts = order.split(",") if isinstance(order, str) else order
        found["order_by"] = [_ORDER.sub(lambda m: m[1] + columns.get(m[2], m[2]) + m[3], part, 1) for part in parts]
    name = model._meta.db_table
    return name if '"' in name else f'"{name}"', found


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, enum.Enum) else value
