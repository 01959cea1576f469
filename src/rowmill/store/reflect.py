"""A user's table as it is in the database: found by its name, its columns, types and partitions."""

from __future__ import annotations

import re
import warnings
from typing import Any

import sqlalchemy as sa

from ..errors import DeclarationError, did_you_mean
from ..task import TABLE as TASKS


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
    if dialect == "sqlite" and schema in ("public", "main"):
        schema = None
    return schema, name


def reflect_table(
    connection: sa.Connection, given: Any, schema: str | None, name: str, where: str, place: str = ""
) -> tuple[sa.Table, dict[str, str], bool, dict[str, Any]]:
    """A table as it is, its columns' types in SQL, whether it has partitions, and the types as the database has them.

    ``given`` is what the user called it, perhaps a Table or model of his own.
    """
    with warnings.catch_warnings():
        # A column of a type SQLAlchemy does not know is carried as it is; the server knows it.
        warnings.simplefilter("ignore", sa.exc.SAWarning)
        try:
            table = sa.Table(name, sa.MetaData(), schema=schema, autoload_with=connection, resolve_fks=False)
            if seen := _seen(connection, table):
                # A role that may not read some columns works on the others.
                table = sa.Table(
                    name, sa.MetaData(), schema=schema, autoload_with=connection, resolve_fks=False,
                    include_columns=seen,
                )  # fmt: skip
        except (sa.exc.NoSuchTableError, sa.exc.OperationalError) as error:
            if isinstance(error, sa.exc.OperationalError) and "unknown database" not in str(error):
                raise
            inspector = sa.inspect(connection)
            known = inspector.get_table_names(schema) if schema in (None, *inspector.get_schema_names()) else []
            full = f"{schema}.{name}" if schema else name
            if name == TASKS:
                hint = "rowmill migrate APP --apply makes it; so does the first worker, where it may create tables"
            elif known:
                hint = did_you_mean(name, known)
            else:
                hint = "create the table first: there is none in this database"
            raise DeclarationError(f"{where}: there is no table {full!r}{place}", hint=hint) from None
    kinds = {column.name: column.type for column in table.c}
    known_to_user = getattr(given, "__table__", given)
    if isinstance(known_to_user, sa.Table):
        # The user's own types know more than the database's (Python enums, decorated types).
        for column in known_to_user.c:
            if column.name in table.c:
                table.c[column.name].type = column.type
    if connection.dialect.name != "postgresql":
        types = {column.name: column.type.compile(connection.dialect) for column in table.c if _compiles(column)}
        return table, types, False, kinds
    relation = connection.dialect.identifier_preparer.format_table(table)
    rows = connection.exec_driver_sql(
        "select attname, format_type(atttypid, atttypmod) from pg_attribute"
        " where attrelid = to_regclass($1::text) and attnum > 0 and not attisdropped",
        (relation,),
    )
    types = {row[0]: row[1] for row in rows}
    spread = connection.exec_driver_sql(
        "select relkind = 'p' or relhassubclass from pg_class where oid = to_regclass($1::text)", (relation,)
    ).scalar()
    return table, types, bool(spread), kinds


def _seen(connection: sa.Connection, table: sa.Table) -> list[str] | None:
    """The columns that this role may read, where it may read some and not others."""
    if connection.dialect.name != "postgresql":
        return None
    relation = connection.dialect.identifier_preparer.format_table(table)
    rows = connection.exec_driver_sql(
        "select attname, has_column_privilege(attrelid, attnum, 'select') from pg_attribute"
        " where attrelid = to_regclass($1::text) and attnum > 0 and not attisdropped",
        (relation,),
    ).fetchall()
    seen = [row[0] for row in rows if row[1]]
    return seen if 0 < len(seen) < len(rows) else None


def _compiles(column: sa.Column[Any]) -> bool:
    return not isinstance(column.type, sa.types.NullType)
