"""A user's table as it is in the database: found by its name, its columns, types and partitions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ...declare.task import TABLE as TASKS
from ...errors import DeclarationError, no_such_table
from ..database import Database
from ..dialect import dialect_named

#: A table, its columns' types in SQL, whether it has partitions, and the types as the database has them.
Reflected = tuple[sa.Table, dict[str, str], bool, dict[str, Any]]


class KnownShapes:
    """Tables that were read, by their shape: those of many tenants are mostly alike, and are read only once."""

    _MOST = 100

    def __init__(self) -> None:
        self._known: dict[object, Reflected] = {}

    async def read(
        self, database: Database, given: Any, schema: str | None, name: str, where: str, place: str
    ) -> Reflected:
        """A table as ``reflect_table`` gives it."""
        quote, shape = database.dialect.identifier_preparer.quote, database.sql.table_shape
        full = ".".join(quote(part) for part in (schema, name) if part)
        rows = await database.read(lambda run: run(shape, (full,))) if shape is not None else []
        key = (schema, name, rows[0][0]) if rows and rows[0][0] is not None else None
        reflected = self._known.get(key) if key is not None else None
        if reflected is None:
            reflected = await database.reflect(lambda c: reflect_table(c, given, schema, name, where, place))
            if key is None:
                return reflected
            while len(self._known) >= self._MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = reflected
        table, types, partitioned, kinds = reflected
        return table.to_metadata(sa.MetaData()), dict(types), partitioned, dict(kinds)


def table_name(table: Any, dialect: str) -> tuple[str | None, str]:
    """Schema and name of a table given as text, SQLAlchemy Table or ORM model."""
    mapped = getattr(table, "__table__", table)
    if isinstance(mapped, sa.Table):
        schema, name = mapped.schema, mapped.name
    else:
        parts = re.findall(r'"(?:[^"]|"")+"|[^".]+', str(table))
        names = [p[1:-1].replace('""', '"') if p.startswith('"') else p for p in parts]
        if not names or len(names) > 2:
            raise DeclarationError(f"cannot read the table name {table!r}", hint='"jobs", "public.jobs" or \'"Jobs"\'')
        schema, name = (names[0], names[1]) if len(names) == 2 else (None, names[0])
    return None if schema in dialect_named(dialect).default_schemas else schema, name


def view_kind(connection: sa.Connection, schema: str | None, name: str) -> str | None:
    """What it is, where it is no table: rows can be claimed in a table only."""
    kind: str | None = connection.exec_driver_sql(
        *dialect_named(connection.dialect.name).view_kind(schema, name)
    ).scalar()
    return kind


def reflect_table(
    connection: sa.Connection, given: Any, schema: str | None, name: str, where: str, place: str = ""
) -> Reflected:
    """A table as it is, its columns' types in SQL, whether it has partitions, and the types as the database has them.

    ``given`` is what the user called it, perhaps a Table or model of his own.
    """
    with warnings.catch_warnings():
        # A column of a type SQLAlchemy does not know is carried as it is; the server knows it.
        warnings.simplefilter("ignore", sa.exc.SAWarning)
        try:
            described = _described(connection, schema, name)
            if view := view_kind(connection, schema, name):
                raise DeclarationError(
                    f"{where}: {name!r} is {view}, and rows are claimed in a table",
                    hint="name the table behind it, and put the view's condition into the lane's where=",
                )
            table = _read(connection, schema, name, described, where)
            while described is not None and not {row[0] for row in described}.issuperset(table.c.keys()):
                # Somebody altered the table between the two reads.
                described = _described(connection, schema, name)
                table = _read(connection, schema, name, described, where)
        except (sa.exc.NoSuchTableError, sa.exc.OperationalError) as error:
            if isinstance(error, sa.exc.OperationalError) and "unknown database" not in str(error):
                raise
            inspector = sa.inspect(connection)
            known = inspector.get_table_names(schema) if schema in (None, *inspector.get_schema_names()) else []
            full = f"{schema}.{name}" if schema else name
            hint = "rowmill migrate APP --apply makes it; so does the first worker, where it may create tables"
            raise no_such_table(full, place, known, where=where, hint=hint if name == TASKS else None) from None
    kinds = {column.name: column.type for column in table.c}
    known_to_user = getattr(given, "__table__", given)
    if isinstance(known_to_user, sa.Table):
        # The user's own types know more than the database's (Python enums, decorated types).
        for column in known_to_user.c:
            if column.name in table.c:
                table.c[column.name].type = column.type
    if described is None:
        types = {column.name: column.type.compile(connection.dialect) for column in table.c if _compiles(column)}
        return table, types, False, kinds
    return table, {row[0]: row[1] for row in described}, any(row[3] for row in described), kinds


def _described(connection: sa.Connection, schema: str | None, name: str) -> Sequence[Any] | None:
    """What the database's catalog says of a table's columns."""
    question = dialect_named(connection.dialect.name).described_columns(schema, name)
    return connection.exec_driver_sql(*question).fetchall() if question else None


def _read(
    connection: sa.Connection, schema: str | None, name: str, described: Sequence[Any] | None, where: str
) -> sa.Table:
    """A table's columns and its key: a third of the time that SQLAlchemy's own reflection takes, which asks for all."""
    inspector = sa.inspect(connection)
    columns = [_column(constraints) for constraints in inspector.get_columns(name, schema)]
    seen = {row[0] for row in described or () if row[2]}
    if described and 0 < len(seen) < len(described):
        # A role that may not read some columns works on the others.
        columns = [column for column in columns if column.name in seen]
    names = {column.name for column in columns}
    key = inspector.get_pk_constraint(name, schema)["constrained_columns"]
    hidden = [column for column in key if column not in names]
    if hidden:
        key = []  # the part of it that may be read does not tell rows apart
    unique = [] if key else inspector.get_unique_constraints(name, schema)
    constraints = [sa.UniqueConstraint(*one["column_names"]) for one in unique if names.issuperset(one["column_names"])]
    if hidden and not constraints:
        raise DeclarationError(
            f"{where}: this role may not read {', '.join(hidden)}, and the primary key of {name} is made of it",
            hint=f"grant select ({', '.join(hidden)}) on {name}; rowmill sql APP --role NAME prints all that is needed",
        )
    return sa.Table(name, sa.MetaData(), *columns, sa.PrimaryKeyConstraint(*key), *constraints, schema=schema)


def _column(reflected: Any) -> sa.Column[Any]:
    """A column as the inspector tells of it."""
    made: list[Any] = []
    if reflected.get("computed"):
        made.append(sa.Computed(**reflected["computed"]))
    elif reflected.get("identity"):
        made.append(sa.Identity(**reflected["identity"]))
    default = sa.FetchedValue() if not made and reflected.get("default") is not None else None
    return sa.Column(
        reflected["name"], reflected["type"], *made, nullable=reflected["nullable"], server_default=default
    )


def add_constraints(connection: sa.Connection, table: sa.Table) -> None:
    """To a table that was read: its foreign keys and check constraints, which no lane needs."""
    inspector = sa.inspect(connection)
    for check in inspector.get_check_constraints(table.name, table.schema):
        table.append_constraint(sa.CheckConstraint(check["sqltext"]))
    for key in inspector.get_foreign_keys(table.name, table.schema):
        referred_table = ".".join(part for part in (key["referred_schema"], key["referred_table"]) if part)
        referred = [f"{referred_table}.{column}" for column in key["referred_columns"]]
        if all(column in table.c for column in key["constrained_columns"]):
            table.append_constraint(sa.ForeignKeyConstraint(key["constrained_columns"], referred))


def _compiles(column: sa.Column[Any]) -> bool:
    return not isinstance(column.type, sa.types.NullType)
