"""A table's columns as types: a ``TypedDict`` of its row, and jobs whose ``job["column"]`` an editor knows."""

from __future__ import annotations

import keyword
import re

from .table_facts import Column, TableFacts

#: By what the type's name begins with, the longer ones first.
_TYPES = (
    ("timestamp", "datetime.datetime"), ("datetime", "datetime.datetime"), ("date", "datetime.date"),
    ("interval", "datetime.timedelta"), ("time", "datetime.time"),
    ("tinyint(1)", "bool"), ("bool", "bool"),
    ("bigint", "int"), ("smallint", "int"), ("tinyint", "int"), ("int", "int"), ("bigserial", "int"), ("serial", "int"),
    ("numeric", "decimal.Decimal"), ("decimal", "decimal.Decimal"),
    ("double", "float"), ("real", "float"), ("float", "float"),
    ("uuid", "uuid.UUID"), ("bytea", "bytes"), ("blob", "bytes"),
    ("text", "str"), ("varchar", "str"), ("character", "str"), ("char", "str"), ("citext", "str"), ("name", "str"),
)  # fmt: skip


def row_types(facts: TableFacts) -> str:
    """A module with the types of one table."""
    name = _class_name(facts.name)
    columns = [(column.name, python_type(column, key=column.name in facts.key)) for column in facts.columns]
    modules = sorted({word for _, hint in columns for word in re.findall(r"\b(datetime|decimal|uuid)\.", hint)})
    fields = [f"    {literal(column)}: {hint}," for column, hint in columns]
    readers = [
        f"        @overload\n        def __getitem__(self, column: Literal[{literal(column)}], /) -> {hint}: ..."
        for column, hint in columns
    ]
    if len(columns) == 1:
        readers = [readers[0].partition("\n")[2]]
    else:
        readers.append("        def __getitem__(self, column: str, /) -> Any: ...")
    title = "".join(c if c.isprintable() else " " for c in facts.fullname).replace("\\", "/").replace('"', "'")
    typing = "TYPE_CHECKING, Any, Literal, TypedDict, overload"
    return "\n".join([
        f'"""Types of the rows of {title}. Write them again with `rowmill adopt --types` when the table changes."""',
        "",
        *(f"import {module}" for module in modules),
        f"from typing import {typing}",
        "",
        "from rowmill import Job, SyncJob",
        "",
        f'{name}Row = TypedDict("{name}Row", {{',
        *fields,
        "})",
        "",
        "if TYPE_CHECKING:",
        "",
        f"    class _{name}Columns:",
        *readers,
        "",
        f"    class {name}Job(_{name}Columns, Job):  # type: ignore[misc]",
        '        """For handlers that await."""',
        "",
        f"    class {name}SyncJob(_{name}Columns, SyncJob):  # type: ignore[misc]",
        '        """For plain functions."""',
        "else:",
        f"    {name}Job, {name}SyncJob = Job, SyncJob",
        "",
    ])  # fmt: skip


def python_type(column: Column, *, key: bool = False) -> str:
    """What ``job["column"]`` is; ``Any`` where the type does not say. A ``key`` is never null."""
    text = column.sql_type.lower().strip()
    hint_text = "Any"
    if column.kind == "enum" and "[]" not in text:
        hint_text = "str"
    elif not text.endswith("[]") and "json" not in text:
        hint_text = next((hint for begin, hint in _TYPES if text.startswith(begin)), "Any")
    return hint_text if hint_text == "Any" or key or not column.nullable else f"{hint_text} | None"


def literal(text: str) -> str:
    """A name in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _class_name(table: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", table) or ["Table"]
    name = "".join(word[:1].upper() + word[1:] for word in words)
    return f"Table{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
