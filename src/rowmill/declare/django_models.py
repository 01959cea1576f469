"""A Django model as a lane's table: its table name, and its fields mapped to columns. Does not import Django."""

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
    """The model's table, and a lane's options with columns in place of fields and plain values in place of choices."""
    fields = model._meta.concrete_fields
    columns = {"pk": model._meta.pk.column}
    columns |= {name: field.column for field in fields for name in (field.name, field.attname)}
    by_column = dict(options)

    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        return {columns.get(name, name): _plain(value) for name, value in values.items()}

    for state in DECLARED:
        if isinstance(values := by_column.get(state), Mapping):
            by_column[state] = named(values)
    if isinstance(ignored := by_column.get("ignore_states"), (list, tuple)):
        by_column["ignore_states"] = [named(each) if isinstance(each, Mapping) else _plain(each) for each in ignored]
    if isinstance(roles := by_column.get("roles"), Mapping):
        by_column["roles"] = {role: columns.get(name, name) for role, name in roles.items()}
    if (column := by_column.get("version_column")) is not None:
        by_column["version_column"] = columns.get(column, column)
    if (order := by_column.get("order_by")) is not None:
        parts = order.split(",") if isinstance(order, str) else order
        by_column["order_by"] = [_ORDER.sub(lambda m: m[1] + columns.get(m[2], m[2]) + m[3], part, 1) for part in parts]
    name = model._meta.db_table
    return name if '"' in name else f'"{name}"', by_column


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, enum.Enum) else value
