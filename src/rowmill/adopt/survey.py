"""A look at a live table: columns, constraints, indexes, and what its rows hold. It reads, and never much.

A small table is read whole. Of a large one some pages are read, the newest rows, and what the server's own
statistics say; an index on a column tells all its values. No lock is taken that is stronger than a reader's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..errors import DeclarationError, did_you_mean
from ..store.database import Database, Run, runner
from ..store.driver_errors import translated
from ..store.lane.reflect import table_name
from ..store.lane.sql_literals import allowed_by_check, comment_meanings, literals_of, plain_default
from . import vocabulary
from .column_kinds import kind_of, shares_of, sql_type_of, typed, understood
from .table_facts import Column, Index, TableFacts

#: A table of up to so many rows (and pages) is read whole; of a larger one about SAMPLE rows.
WHOLE, WHOLE_PAGES, SAMPLE, NEWEST = 20_000, 2_000, 10_000, 1_000
#: Text longer than this is no state; more values than this are none either.
LONGEST, MOST_VALUES = 40, 61
_SECONDS = 8
_LABELS = ("name", "label", "code", "title", "slug", "key", "status", "state", "libelle", "bezeichnung", "nombre",
           "description", "text", "value")  # fmt: skip


async def survey(database: Database, table: str) -> TableFacts:
    """Look at a table; raises DeclarationError where there is none."""
    if database.dialect.name != "postgresql":
        return await database.reflect(lambda connection: _Survey(connection, table).facts())
    found: TableFacts = await read_only(database, lambda connection: _Survey(connection, table).facts())
    return found


def look_at(connection: sa.Connection, table: str) -> TableFacts:
    """The same, on a connection that is there."""
    return _Survey(connection, table).facts()


async def read_only(database: Database, verb: Callable[[sa.Connection], Any], seconds: int = _SECONDS) -> Any:
    """Run something in a transaction that cannot write, waits for no lock and does not go on for ever."""
    if database.dialect.name != "postgresql":
        return await database.reflect(verb)

    def work(connection: sa.Connection) -> Any:
        run = runner(connection)
        run("set transaction read only", ())
        run(f"set local statement_timeout = '{seconds}s'", ())
        run("set local lock_timeout = '2s'", ())
        return verb(connection)

    async with database.begin() as connection:
        with translated(database):
            return await connection.run_sync(work)


class _Survey:
    """One look, on one connection."""

    def __init__(self, connection: sa.Connection, table: str) -> None:
        self.connection = connection
        self.run: Run = runner(connection)
        self.dialect = connection.dialect.name
        self.postgres = self.dialect == "postgresql"
        self.inspector = sa.inspect(connection)
        self.schema, self.name = self._find(table)
        preparer = connection.dialect.identifier_preparer
        self._quote: Callable[[str], str] = preparer.quote_identifier
        parts = [self.schema, self.name] if self.schema else [self.name]
        self.relation = ".".join(self._quote(part) for part in parts)

    def _find(self, table: str) -> tuple[str | None, str]:
        """The name as it stands, if a table has it; otherwise as schema.name, or in quotes."""
        if self.inspector.has_table(table):
            return None, table
        schema, name = table_name(table, self.dialect)
        known_schemas = self.inspector.get_schema_names()
        if schema in (None, *known_schemas) and self.inspector.has_table(name, schema):
            return schema, name
        known = self.inspector.get_table_names(schema) if schema in (None, *known_schemas) else []
        if schema is None and self.postgres:
            known += [f"{s}.{t}" for s in known_schemas if s not in ("information_schema", "public")
                      for t in self.inspector.get_table_names(s)]  # fmt: skip
        raise DeclarationError(
            f"there is no table {table!r} in this database",
            hint=did_you_mean(table, known) if known else "create the table first: there is none in this database",
        )

    def _is_view(self) -> str | None:
        """What it is, where it is no table: nothing can be claimed in it."""
        if self.postgres:
            text = "select relkind::text from pg_class where oid = to_regclass($1::text)"
            return {"v": "a view", "m": "a materialized view"}.get(self.run(text, (self.relation,))[0][0])
        text = "select 1 from sqlite_master where type = 'view' and name = :n"
        return "a view" if self.run(text, {"n": self.name}) else None

    def facts(self) -> TableFacts:
        if view := self._is_view():
            raise DeclarationError(
                f"{self.name!r} is {view}: rows are claimed in a table",
                hint="adopt the table behind it; what the view leaves out can stand in the lane's where=",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sa.exc.SAWarning)  # types that SQLAlchemy does not know are no states
            described = self.inspector.get_columns(self.name, self.schema)
            key = tuple(self.inspector.get_pk_constraint(self.name, self.schema)["constrained_columns"])
        if not key:
            key = self._unique_key(described)
        indexes = self._indexes()
        columns = self._columns(described, key, indexes)
        rows, exact, partitioned = self._size()
        raw, looked_at, how = self._sample(columns, key, exact, rows)
        seen, filled = self._seen(columns, raw, rows, exact, key)
        if not exact:
            self._statistics(columns, seen, rows)
            self._by_index(columns, seen, indexes)
        columns = [understood(column, seen.get(column.name, {})) for column in columns]
        return TableFacts(
            dialect=self.dialect,
            schema=self.schema,
            name=self.name,
            columns=tuple(columns),
            key=key,
            rows=rows,
            exact=exact,
            looked_at=looked_at,
            how=how,
            filled=filled,
            indexes=indexes,
            update_triggers=self._triggers(),
            partitioned=partitioned,
        )

    # -- the definition

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
        found = []
        for c in described:
            kind, allowed, by = kind_of(c["type"])
            name = c["name"]
            for check in checks:
                if not allowed and (values := allowed_by_check(check, name, names, kind)):
                    allowed, by = values, "a check constraint"
            meanings: Mapping[Any, str] = comment_meanings(c.get("comment"), kind)
            refers_to = None
            if name in refers:
                refers_to = refers[name]["referred_table"]
                if kind in ("int", "text") and name not in key and vocabulary.state_name(name):
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
            found.append(
                Column(
                    name=name,
                    kind=kind,
                    sql_type=sql_type_of(c["type"], self.connection.dialect),
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
                    length=getattr(c["type"], "length", None) if kind == "text" and self.postgres else None,
                    comment=c.get("comment"),
                    refers_to=refers_to,
                )
            )
        return found

    def _labels(self, fk: Any) -> dict[Any, str]:
        """A small table of states: its keys, and the words beside them."""
        schema, table = fk["referred_schema"] or self.schema, fk["referred_table"]
        columns = [c["name"] for c in self.inspector.get_columns(table, schema) if kind_of(c["type"])[0] == "text"]
        key = fk["referred_columns"][0]
        label = next((c for n in _LABELS for c in columns if c.lower() == n), (columns or [key])[0])
        relation = ".".join(self._quote(part) for part in ([schema, table] if schema else [table]))
        text = f"select {self._quote(key)}, {self._quote(label)} from {relation} order by 1 limit {MOST_VALUES + 1}"
        rows = self.run(text, ())
        return {row[0]: str(row[1]) for row in rows} if len(rows) <= MOST_VALUES else {}

    def _indexes(self) -> tuple[Index, ...]:
        if not self.postgres:
            found = []
            for index in self.inspector.get_indexes(self.name, self.schema):
                where = self.run(
                    "select sql from sqlite_master where type = 'index' and name = :n", {"n": index["name"]}
                )
                text = str(where[0][0]) if where else ""
                at = text.lower().rfind(" where ")
                found.append(
                    Index(
                        name=str(index["name"]),
                        columns=tuple(index["column_names"]),
                        predicate=text[at + 7 :] if at > 0 else None,
                        unique=bool(index["unique"]),
                    )
                )
            return tuple(found)
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
        if self.postgres:
            rows = self.run(
                "select tgname from pg_trigger where tgrelid = to_regclass($1::text) and not tgisinternal"
                " and tgtype & 16 <> 0 and tgenabled <> 'D' order by 1",
                (self.relation,),
            )
        else:
            rows = self.run(
                "select name from sqlite_master where type = 'trigger' and tbl_name = :n"
                " and sql like '%update%' order by 1",
                {"n": self.name},
            )
        return tuple(row[0] for row in rows)

    # -- the rows

    def _size(self) -> tuple[int, bool, bool]:
        """Rows, whether that is exact, and whether the table has parts."""
        partitioned = False
        if self.postgres:
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
            partitioned = kind == "p" or parts > 1
            if pages > WHOLE_PAGES:
                return int(rows) or int(pages) * 50, False, partitioned
        elif int(self.run("select page_count from pragma_page_count()", ())[0][0]) > 50 * WHOLE_PAGES:
            # Counting would read the file: the highest rowid is the best that is cheap.
            top = self.run(f"select max(rowid) from {self.relation}", ())[0][0] if self._has_rowid() else None
            if top is not None and int(top) > WHOLE:
                return int(top), False, False
        count = int(self.run(f"select count(*) from (select 1 from {self.relation} limit {WHOLE + 1}) x", ())[0][0])
        if count <= WHOLE:
            return count, True, partitioned
        whole = int(self.run(f"select count(*) from {self.relation}", ())[0][0])
        return whole, False, partitioned

    def _has_rowid(self) -> bool:
        try:
            self.run(f"select rowid from {self.relation} limit 1", ())
        except sa.exc.DBAPIError:
            return False
        return True

    def _sample(
        self, columns: Sequence[Column], key: Sequence[str], exact: bool, rows: int
    ) -> tuple[list[Sequence[Any]], int, str]:
        fields = ", ".join(self._field(column, key) for column in columns)
        if exact:
            found = list(self.run(f"select {fields} from {self.relation} limit {WHOLE}", ()))
            return found, len(found), "all of them"
        some: list[Sequence[Any]] = []
        how = "the first ones"
        if self.postgres:
            share = min(100.0, max(100.0 * SAMPLE / max(rows, 1), 0.0001))
            text = f"select {fields} from {self.relation} tablesample system ({share}) limit {SAMPLE}"
            some, how = list(self.run(text, ())), "some pages"
        if not some:
            some = list(self.run(f"select {fields} from {self.relation} limit {SAMPLE}", ()))
        if len(key) == 1:
            text = f"select {fields} from {self.relation} order by {self._quote(key[0])} desc limit {NEWEST}"
            some += self.run(text, ())
            how += " and the newest"
        return some, len(some), how

    def _field(self, column: Column, key: Sequence[str]) -> str:
        """A column's value where it may be a state; otherwise whether there is one."""
        name = self._quote(column.name)
        if column.name in key:
            return "null"
        if column.kind == "text":
            cut = f"substr(cast({name} as text), 1, {LONGEST + 1})"
            return cut if self.postgres else f"case when typeof({name}) = 'blob' then 'blob' else {cut} end"
        if column.kind == "enum":
            return f"cast({name} as text)"
        if column.kind in ("int", "bool"):
            return name
        return f"case when {name} is null then 0 else 1 end"

    def _seen(
        self, columns: Sequence[Column], raw: Sequence[Sequence[Any]], rows: int, exact: bool, key: Sequence[str]
    ) -> tuple[dict[str, dict[Any, int]], dict[str, dict[Any, dict[str, float]]]]:
        scale = 1.0 if exact or not raw else rows / len(raw)
        seen: dict[str, dict[Any, int]] = {}
        states: dict[str, int] = {}
        for at, column in enumerate(columns):
            if column.name in key:
                continue
            if column.kind in ("time", "other"):
                if column.kind == "time" and vocabulary.event_name(column.name):
                    states[column.name] = at
                continue
            counted = Counter(row[at] for row in raw)
            if any(isinstance(v, str) and len(v) > LONGEST for v in counted):
                counted = Counter({f"{v}": n for v, n in counted.items()})
                counted.update({f"\0{n}": 0 for n in range(MOST_VALUES)})  # long text is no state
            few = dict(counted.most_common(MOST_VALUES))
            seen[column.name] = {value: max(1, round(n * scale)) for value, n in few.items()}
            if len(few) < MOST_VALUES:
                states[column.name] = at
        filled: dict[str, dict[Any, dict[str, float]]] = {}
        for name, at in states.items():
            column = columns[at]
            named = vocabulary.state_name(name) or column.kind in ("enum", "bool") or column.kind == "time"
            if not named and not vocabulary.event_name(name):
                continue
            filled[name] = shares_of(columns, raw, at)
        return seen, filled

    def _statistics(self, columns: Sequence[Column], seen: dict[str, dict[Any, int]], rows: int) -> None:
        """What ANALYZE counted over the whole table is nearer than our own few pages."""
        if not self.postgres:
            return
        by_name = {column.name: column for column in columns}
        for name, values, shares in self.run(
            "select s.attname, s.most_common_vals::text::text[], s.most_common_freqs from pg_stats s"
            " join pg_class c on c.relname = s.tablename join pg_namespace n on n.oid = c.relnamespace"
            " and n.nspname = s.schemaname where c.oid = to_regclass($1::text) and s.most_common_vals is not null",
            (self.relation,),
        ):
            column = by_name.get(name)
            if column is None or name not in seen or len(seen[name]) >= MOST_VALUES or len(values) >= MOST_VALUES:
                continue
            for value, share in zip(values, shares, strict=False):
                seen[name][typed(value, column.kind)] = max(1, round(share * rows))

    def _by_index(self, columns: Sequence[Column], seen: dict[str, dict[Any, int]], indexes: Sequence[Index]) -> None:
        """An index that begins with a column gives each of its values at the price of one look."""
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
                seen.setdefault(column.name, {}).setdefault(typed(str(row[0]), column.kind), 1)
