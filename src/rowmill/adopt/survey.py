"""A survey of a live table: columns, constraints, indexes and sampled rows. It only reads, and reads little.

A small table is read whole. Of a large one some pages are read, the newest rows, and what the server's own
statistics say; an index on a column tells all its values. No lock is taken that is stronger than a reader's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from ..declare.states import DONE, RUNNING
from ..errors import DeclarationError, no_such_table
from ..store.database import Database, Run, runner
from ..store.dialect import POSTGRES, SQLITE
from ..store.lane.reflect import table_name, view_kind
from ..store.lane.sql_literals import allowed_by_check, comment_meanings, literals_of, plain_default
from . import vocabulary
from .table_facts import Column, Index, TableFacts

#: A table of up to so many rows (and pages) is read whole; of a larger one about SAMPLE rows.
WHOLE, WHOLE_PAGES, SAMPLE, NEWEST = 20_000, 2_000, 10_000, 1_000
#: Text longer than this is no state; more values than this are none either.
LONGEST, MOST_VALUES = 40, 61
_SECONDS = 8
_LABELS = ("name", "label", "code", "title", "slug", "key", "status", "state", "libelle", "bezeichnung", "nombre",
           "description", "text", "value")  # fmt: skip


async def survey(database: Database, table: str) -> TableFacts:
    """Survey a table; raises DeclarationError if there is none."""
    return await database.read_only(lambda connection: look_at(connection, table))


def look_at(connection: sa.Connection, table: str) -> TableFacts:
    """Survey a table on an open connection."""
    return _SURVEYS[connection.dialect.name](connection, table).facts()


class _Survey:
    """One survey, on one connection. The dialects add what their catalogs contain."""

    #: A text column's declared length binds.
    bounded_text = False

    def __init__(self, connection: sa.Connection, table: str) -> None:
        self.connection = connection
        self.run: Run = runner(connection)
        self.dialect = connection.dialect.name
        self.inspector = sa.inspect(connection)
        self.schema, self.name = self._find(table)
        preparer = connection.dialect.identifier_preparer
        self._quote: Callable[[str], str] = preparer.quote_identifier
        parts = [self.schema, self.name] if self.schema else [self.name]
        self.relation = ".".join(self._quote(part) for part in parts)
        #: Too many rows to look at each, and few enough pages to count them.
        self._cheap = False
        self._newest = 0

    def _find(self, table: str) -> tuple[str | None, str]:
        """The name as given, if a table has it; otherwise as schema.name, or in quotes."""
        if self.inspector.has_table(table):
            return None, table
        schema, name = table_name(table, self.dialect)
        known_schemas = self.inspector.get_schema_names()
        if schema in (None, *known_schemas) and self.inspector.has_table(name, schema):
            return schema, name
        known = self.inspector.get_table_names(schema) if schema in (None, *known_schemas) else []
        if schema is None:
            known += [f"{s}.{t}" for s in known_schemas if s not in ("information_schema", "public", "main")
                      for t in self.inspector.get_table_names(s)]  # fmt: skip
        raise no_such_table(table, " in this database", known)

    def facts(self) -> TableFacts:
        if view := view_kind(self.connection, self.schema, self.name):
            raise DeclarationError(
                f"{self.name!r} is {view}: rows are claimed in a table",
                hint="adopt the table behind it, and put the view's condition into the lane's where=",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sa.exc.SAWarning)  # types that SQLAlchemy does not know are no states
            described = self._readable(self.inspector.get_columns(self.name, self.schema))
            key = tuple(self.inspector.get_pk_constraint(self.name, self.schema)["constrained_columns"])
        if not key:
            key = self._unique_key(described)
        indexes = self._indexes()
        columns = self._columns(described, key, indexes)
        rows, exact, partitioned = self._size()
        raw, looked_at, how = self._sample(columns, key, exact, rows)
        seen, filled = self._seen(columns, raw, rows, exact, key)
        counted = {column.name for column in columns} if exact else self._counted(columns, seen)
        if not exact:
            self._statistics(columns, seen, rows, counted)
            self._by_index(columns, seen, indexes)
        columns = [replace(understood(c, seen.get(c.name, {})), counted=c.name in counted) for c in columns]
        return TableFacts(
            dialect=self.dialect,
            schema=self.schema,
            name=self.name,
            columns=tuple(columns),
            key=key,
            rows=rows,
            exact=exact,
            counted=exact or self._cheap,
            looked_at=looked_at,
            how=how,
            filled=filled,
            indexes=indexes,
            update_triggers=self._triggers(),
            partitioned=partitioned,
        )

    # -- the definition

    def _readable(self, described: Sequence[Any]) -> Sequence[Any]:
        """The columns that this role may read."""
        return described

    def _unique_key(self, described: Sequence[Any]) -> tuple[str, ...]:
        nullable = {c["name"] for c in described if c["nullable"]}
        for constraint in self.inspector.get_unique_constraints(self.name, self.schema):
            names = tuple(constraint["column_names"])
            if not nullable & set(names):
                return names
        return ()

    def _columns(self, described: Sequence[Any], key: Sequence[str], indexes: Sequence[Index]) -> list[Column]:
        names = [c["name"] for c in described]
        checks = [str(c["sqltext"]) for c in self.inspector.get_check_constraints(self.name, self.schema)]
        refers = {
            fk["constrained_columns"][0]: fk
            for fk in self.inspector.get_foreign_keys(self.name, self.schema)
            if len(fk["constrained_columns"]) == 1
        }
        columns = []
        for c in described:
            kind, allowed, by = _kind_of(c["type"])
            name = c["name"]
            for check in checks:
                if not allowed and (values := allowed_by_check(check, name, names, kind)):
                    allowed, by = values, "a check constraint"
            meanings: Mapping[Any, str] = comment_meanings(c.get("comment"), kind)
            refers_to = None
            if name in refers:
                refers_to = refers[name]["referred_table"]
                named = vocabulary.state_name(name) or vocabulary.lookup_name(refers_to)
                if kind in ("int", "text") and name not in key and named:
                    labels = self._labels(refers[name])
                    if labels and not allowed:
                        allowed, by = tuple(labels), f"table {refers_to}"
                        meanings = {k: v for k, v in labels.items() if v != k} or meanings
            default: Any = c.get("default")
            own = getattr(c["type"], "check", None)  # a domain's
            if own is not None:
                allowed = allowed or allowed_by_check(str(own), "VALUE", [], kind)
                by = by or f"the domain {c['type'].name}"
            if default is None:
                default = getattr(c["type"], "default", None)
            columns.append(
                Column(
                    name=name,
                    kind=kind,
                    sql_type=_sql_type_of(c["type"], self.connection.dialect),
                    nullable=bool(c["nullable"]),
                    default=plain_default(default, kind),
                    has_default=default is not None,
                    generated=bool(c.get("computed")) or bool((c.get("identity") or {}).get("always")),
                    allowed=allowed,
                    allowed_by=by,
                    meanings=meanings,
                    indexed_values=tuple(
                        v for i in indexes if i.predicate for v in literals_of(i.predicate, name, names, kind)
                    ),
                    length=getattr(c["type"], "length", None) if kind == "text" and self.bounded_text else None,
                    comment=c.get("comment"),
                    refers_to=refers_to,
                )
            )
        return columns

    def _labels(self, fk: Any) -> dict[Any, str]:
        """A small table of states: its keys, and the words beside them."""
        schema, table = fk["referred_schema"] or self.schema, fk["referred_table"]
        columns = [c["name"] for c in self.inspector.get_columns(table, schema) if _kind_of(c["type"])[0] == "text"]
        key = fk["referred_columns"][0]
        label = next((c for n in _LABELS for c in columns if c.lower() == n), (columns or [key])[0])
        relation = ".".join(self._quote(part) for part in ([schema, table] if schema else [table]))
        if not self._may_read(relation):
            return {}
        text = f"select {self._quote(key)}, {self._quote(label)} from {relation} order by 1 limit {MOST_VALUES + 1}"
        rows = self.run(text, ())
        return {row[0]: str(row[1]) for row in rows} if len(rows) <= MOST_VALUES else {}

    def _may_read(self, relation: str) -> bool:
        return True

    def _indexes(self) -> tuple[Index, ...]:
        raise NotImplementedError

    def _triggers(self) -> tuple[str, ...]:
        """The triggers that run when a row is updated."""
        raise NotImplementedError

    def _estimate(self) -> tuple[int | None, bool]:
        """The estimated rows of a table that is too large to count, else None; and whether it is partitioned."""
        raise NotImplementedError

    def _some_pages(self, fields: str, rows: int) -> list[Sequence[Any]]:
        """Sampled rows of a large table; none if only its beginning can be read cheaply."""
        return []

    def _statistics(
        self, columns: Sequence[Column], seen: dict[str, dict[Any, int]], rows: int, counted: set[str]
    ) -> None:
        """The database's own statistics over the whole table."""

    # -- the rows

    def _size(self) -> tuple[int, bool, bool]:
        """Rows, whether that is exact, and whether the table has parts."""
        estimate, partitioned = self._estimate()
        if estimate is not None:
            return estimate, False, partitioned
        count = int(self.run(f"select count(*) from (select 1 from {self.relation} limit {WHOLE + 1}) x", ())[0][0])
        if count <= WHOLE:
            return count, True, partitioned
        whole = int(self.run(f"select count(*) from {self.relation}", ())[0][0])
        self._cheap = True
        return whole, False, partitioned

    def _sample(
        self, columns: Sequence[Column], key: Sequence[str], exact: bool, rows: int
    ) -> tuple[list[Sequence[Any]], int, str]:
        fields = ", ".join(self._field(column, key) for column in columns)
        if exact:
            everything = list(self.run(f"select {fields} from {self.relation} limit {WHOLE}", ()))
            return everything, len(everything), "all of them"
        some, how = self._some_pages(fields, rows), "some pages"
        if not some:
            how = "the first ones"
            some = list(self.run(f"select {fields} from {self.relation} limit {SAMPLE}", ()))
        if len(key) == 1:
            text = f"select {fields} from {self.relation} order by {self._quote(key[0])} desc limit {NEWEST}"
            newest = self.run(text, ())
            some += newest
            self._newest = len(newest)
            how += " and the newest"
        return some, len(some), how

    def _field(self, column: Column, key: Sequence[str]) -> str:
        """A column's value if the column may be a state; otherwise whether it is filled in."""
        name = self._quote(column.name)
        if column.name in key:
            return "null"
        if column.kind == "text":
            return self._cut(name)
        if column.kind == "enum":
            return f"cast({name} as text)"
        if column.kind in ("int", "bool"):
            return name
        return f"case when {name} is null then 0 else 1 end"

    def _cut(self, name: str) -> str:
        return f"substr(cast({name} as text), 1, {LONGEST + 1})"

    def _seen(
        self, columns: Sequence[Column], raw: Sequence[Sequence[Any]], rows: int, exact: bool, key: Sequence[str]
    ) -> tuple[dict[str, dict[Any, int]], dict[str, dict[Any, dict[str, float]]]]:
        # The newest rows are not like the others: they tell which values there are, not how many rows have them.
        alike = len(raw) if exact else max(len(raw) - self._newest, 1)
        scale = 1.0 if exact or not raw else rows / alike
        seen: dict[str, dict[Any, int]] = {}
        states: dict[str, int] = {}
        for at, column in enumerate(columns):
            if column.name in key:
                continue
            if column.kind in ("time", "other"):
                if column.kind == "time" and vocabulary.event_name(column.name):
                    states[column.name] = at
                continue
            counted = Counter(row[at] for row in raw[:alike])
            newest = {row[at] for row in raw[alike:]} - counted.keys()
            if any(isinstance(v, str) and len(v) > LONGEST for v in counted):
                counted = Counter({f"{v}": n for v, n in counted.items()})
                counted.update({f"\0{n}": 0 for n in range(MOST_VALUES)})  # long text is no state
            few = dict((counted + Counter(dict.fromkeys(newest, 1))).most_common(MOST_VALUES))
            seen[column.name] = {v: 1 if v in newest else max(1, round(n * scale)) for v, n in few.items()}
            if len(few) < MOST_VALUES:
                states[column.name] = at
        filled: dict[str, dict[Any, dict[str, float]]] = {}
        for name, at in states.items():
            column = columns[at]
            named = vocabulary.state_name(name) or column.kind in ("enum", "bool") or column.kind == "time"
            if not named and not vocabulary.event_name(name):
                continue
            filled[name] = _shares_of(columns, raw, at)
        return seen, filled

    def _counted(self, columns: Sequence[Column], seen: dict[str, dict[Any, int]]) -> set[str]:
        """Count rows by value, if that is cheap, for columns that may be the state; returns the counted columns."""
        counted: set[str] = set()
        for column in columns if self._cheap else ():
            may_be = vocabulary.state_name(column.name) or column.kind == "enum" or column.meanings
            if (
                not may_be
                or column.kind not in ("text", "enum", "int")
                or len(seen.get(column.name, {})) >= MOST_VALUES
            ):
                continue
            field = self._field(column, ())
            text = f"select {field}, count(*) from {self.relation} group by 1 order by 2 desc limit {MOST_VALUES}"
            seen[column.name] = dict(map(tuple, self.run(text, ())))
            counted.add(column.name)
        return counted

    def _by_index(self, columns: Sequence[Column], seen: dict[str, dict[Any, int]], indexes: Sequence[Index]) -> None:
        """Read each value of a column with one lookup, from an index that begins with the column."""
        for column in columns:
            if not vocabulary.state_name(column.name) or len(seen.get(column.name, {})) >= MOST_VALUES:
                continue
            if not any(i.valid and i.predicate is None and i.columns[:1] == (column.name,) for i in indexes):
                continue
            name = self._quote(column.name)
            text = (
                f"with recursive v(x, n) as (select min({name}), 1 from {self.relation} union all"
                f" select (select min({name}) from {self.relation} where {name} > v.x), n + 1 from v"
                f" where v.x is not null and n < {MOST_VALUES}) select x from v where x is not null"
            )
            for row in self.run(text, ()):
                seen.setdefault(column.name, {}).setdefault(_typed(str(row[0]), column.kind), 1)


class _PostgresSurvey(_Survey):
    bounded_text = True

    def _readable(self, described: Sequence[Any]) -> Sequence[Any]:
        """The columns that this role may read: a worker's role may have been granted some only."""
        text = "select attname from pg_attribute where attrelid = to_regclass($1::text) and attnum > 0"
        text += " and not attisdropped and has_column_privilege(attrelid, attnum, 'select')"
        names = {row[0] for row in self.run(text, (self.relation,))}
        return [c for c in described if c["name"] in names] or described

    def _may_read(self, relation: str) -> bool:
        return bool(self.run("select has_table_privilege($1::text, 'select')", (relation,))[0][0])

    def _indexes(self) -> tuple[Index, ...]:
        return tuple(
            Index(name=row[0], columns=tuple(row[1]), predicate=row[2], valid=row[3], unique=row[4])
            for row in self.run(
                "select c.relname, array(select a.attname from unnest(i.indkey::int2[]) with ordinality k(n, o)"
                " left join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.n and k.n <> 0"
                " where k.o <= i.indnkeyatts order by k.o)::text[], pg_get_expr(i.indpred, i.indrelid), i.indisvalid,"
                " i.indisunique from pg_index i join pg_class c on c.oid = i.indexrelid"
                " where i.indrelid = to_regclass($1::text) order by c.relname",
                (self.relation,),
            )
        )

    def _triggers(self) -> tuple[str, ...]:
        rows = self.run(
            "select tgname from pg_trigger where tgrelid = to_regclass($1::text) and not tgisinternal"
            " and tgtype & 16 <> 0 and tgenabled <> 'D' order by 1",
            (self.relation,),
        )
        return tuple(row[0] for row in rows)

    def _estimate(self) -> tuple[int | None, bool]:
        kind, rows, pages, parts = self.run(
            "select max(c.relkind::text) filter (where c.oid = t.oid),"
            " sum(case when l.relpages > 0 then l.reltuples / l.relpages * (pg_relation_size(l.oid) / 8192)"
            "     else greatest(l.reltuples, 0) end)::bigint,"
            " sum(pg_relation_size(l.oid) / 8192)::bigint, count(*)"
            " from (select to_regclass($1::text)::oid as oid) t join pg_class c on c.oid = t.oid"
            " cross join lateral (select x.oid, x.reltuples, x.relpages from pg_class x where x.oid = t.oid"
            "   union select x.oid, x.reltuples, x.relpages from pg_inherits i"
            "   join pg_class x on x.oid = i.inhrelid where i.inhparent = t.oid) l",
            (self.relation,),
        )[0]
        return (int(rows) or int(pages) * 50) if pages > WHOLE_PAGES else None, kind == "p" or parts > 1

    def _some_pages(self, fields: str, rows: int) -> list[Sequence[Any]]:
        share = min(100.0, max(100.0 * SAMPLE / max(rows, 1), 0.0001))
        text = f"select {fields} from {self.relation} tablesample system ({share}) limit {SAMPLE}"
        return list(self.run(text, ()))

    def _statistics(
        self, columns: Sequence[Column], seen: dict[str, dict[Any, int]], rows: int, counted: set[str]
    ) -> None:
        """Prefer the statistics of ANALYZE, which cover the whole table, to our own sample of pages."""
        by_name = {column.name: column for column in columns}
        for name, values, shares in self.run(
            "select s.attname, s.most_common_vals::text::text[], s.most_common_freqs from pg_stats s"
            " join pg_class c on c.relname = s.tablename join pg_namespace n on n.oid = c.relnamespace"
            " and n.nspname = s.schemaname where c.oid = to_regclass($1::text) and s.most_common_vals is not null",
            (self.relation,),
        ):
            column = by_name.get(name)
            if column is None or name not in seen or name in counted:
                continue
            if len(seen[name]) >= MOST_VALUES or len(values) >= MOST_VALUES:
                continue
            for value, share in zip(values, shares, strict=False):
                seen[name][_typed(value, column.kind)] = max(1, round(share * rows))


class _SqliteSurvey(_Survey):
    def _indexes(self) -> tuple[Index, ...]:
        indexes = []
        for index in self.inspector.get_indexes(self.name, self.schema):
            where = self.run("select sql from sqlite_master where type = 'index' and name = :n", {"n": index["name"]})
            text = str(where[0][0]) if where else ""
            at = text.lower().rfind(" where ")
            indexes.append(
                Index(
                    name=str(index["name"]),
                    columns=tuple(index["column_names"]),
                    predicate=text[at + 7 :] if at > 0 else None,
                    unique=bool(index["unique"]),
                )
            )
        return tuple(indexes)

    def _triggers(self) -> tuple[str, ...]:
        rows = self.run(
            "select name from sqlite_master where type = 'trigger' and tbl_name = :n"
            " and sql like '%update%' order by 1",
            {"n": self.name},
        )
        return tuple(row[0] for row in rows)

    def _estimate(self) -> tuple[int | None, bool]:
        if int(self.run("select page_count from pragma_page_count()", ())[0][0]) <= 50 * WHOLE_PAGES:
            return None, False
        # Counting would read the file: the highest rowid is the best that is cheap.
        top = self.run(f"select max(rowid) from {self.relation}", ())[0][0] if self._has_rowid() else None
        return int(top) if top is not None and int(top) > WHOLE else None, False

    def _has_rowid(self) -> bool:
        try:
            self.run(f"select rowid from {self.relation} limit 1", ())
        except sa.exc.DBAPIError:
            return False
        return True

    def _cut(self, name: str) -> str:
        return f"case when typeof({name}) = 'blob' then 'blob' else {super()._cut(name)} end"


_SURVEYS: Mapping[str, type[_Survey]] = {POSTGRES.name: _PostgresSurvey, SQLITE.name: _SqliteSurvey}


# -- what columns hold


def _shares_of(columns: Sequence[Column], raw: Sequence[Sequence[Any]], at: int) -> dict[Any, dict[str, float]]:
    """For each value of a column: the share of its rows in which each other column is filled in."""
    total: Counter[Any] = Counter()
    filled: dict[Any, Counter[str]] = {}
    timed = columns[at].kind == "time"
    for row in raw:
        value = (True if row[at] else None) if timed else row[at]
        total[value] += 1
        counts = filled.setdefault(value, Counter())
        for i, column in enumerate(columns):
            if i != at and (row[i] if column.kind in ("time", "other") else row[i] not in (None, "", 0)):
                counts[column.name] += 1
    names = [column.name for i, column in enumerate(columns) if i != at]
    return {value: {name: filled[value][name] / n for name in names} for value, n in total.items()}


def _kind_of(of: Any) -> tuple[str, tuple[Any, ...], str]:
    """The kind of a type, and the values that it allows."""
    base = getattr(of, "data_type", of)  # a domain's own
    if isinstance(base, sa.Enum):
        return "enum", tuple(base.enums), f"the enum {base.name}" if base.name else "an enum"
    for kind, name in ((sa.Boolean, "bool"), (sa.Integer, "int"), (sa.DateTime, "time"), (sa.String, "text")):
        if isinstance(base, kind):
            return name, (), ""
    return "other", (), ""


def _sql_type_of(kind: Any, dialect: sa.Dialect) -> str:
    """A type as the database writes it."""
    try:
        return str(kind.compile(dialect))
    except sa.exc.CompileError:
        return "?"


def _typed(value: str, kind: str) -> Any:
    """A value that the server gave as text."""
    if kind == "int":
        return int(value)
    if kind == "bool":
        return value in ("t", "true", "True", "1")
    return value


def understood(column: Column, seen: Mapping[Any, int]) -> Column:
    """A column with what its rows hold; a number that is only ever 0 or 1 and is called a flag is one."""
    kind, default = column.kind, column.default
    if kind == "int" and seen.keys() <= {0, 1, None} and not column.refers_to and not column.meanings:
        event = vocabulary.event_name(column.name)
        flag = event is not None and event.state in (DONE, RUNNING)
        flag = flag and not vocabulary.time_name(column.name)  # seconds since 1970, and nothing has happened yet
        if flag and not vocabulary.state_name(column.name) and (seen or default in (0, 1)):
            kind, default = "bool", bool(default) if default is not None else None
            seen = {None if v is None else bool(v): n for v, n in seen.items()}
    return Column(**{**vars(column), "kind": kind, "default": default, "seen": dict(seen)})
