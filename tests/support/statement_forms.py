"""Which forms of a statement a distributed planner refuses, asked of the server's own parse tree.

Citus sends a statement to one node as one task, or refuses it; ``docs/explanation/scale.md`` names the forms. No Citus
is needed to find them: PostgreSQL keeps the parsed body of an SQL function, in which every operator and function is
resolved, and its catalogs say which of these are volatile, stable or immutable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

import plpgsql
from databases import Db

Node = dict[str, Any]

_TOKEN = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL)
_STATEMENT = re.compile(r"(\s|--[^\n]*\n)*(with|select|insert|update|delete|merge)\b", re.IGNORECASE)
_WRITES = re.compile(r"\b(insert\s+into|update|delete\s+from|merge|pg_notify)\b", re.IGNORECASE)
#: DDL that a distributed table has no form for, outside of a block that goes on without it.
_REFUSED_DDL = re.compile(r"\s*alter\s+table\b.*\balter\s+column\s+\S+\s+set\s+(statistics|storage)", re.IGNORECASE)
_VOID = "2278"
_SELECT, _UPDATE, _INSERT, _DELETE = "1", "2", "3", "4"
#: Where a node keeps the number of the function that it calls, or of its operator.
_FUNCTIONS = {"FUNCEXPR": "funcid", "AGGREF": "aggfnoid", "WINDOWFUNC": "winfnoid"}
_OPERATORS = ("OPEXPR", "DISTINCTEXPR", "NULLIFEXPR", "SCALARARRAYOPEXPR")
#: Fields that hold the type of a node's value.
_TYPES = ("vartype", "consttype", "paramtype", "funcresulttype", "opresulttype", "resulttype", "coalescetype",
          "casetype", "aggtype", "wintype", "minmaxtype", "array_typeid", "row_typeid", "refrestype",
          "type")  # fmt: skip
_CATALOG = """select
  array(select array[oid::text, provolatile::text] from pg_proc) as functions,
  array(select array[o.oid::text, p.provolatile::text]
    from pg_operator o join pg_proc p on p.oid = o.oprcode) as operators,
  array(select array[t.oid::text, i.provolatile::text, o.provolatile::text]
    from pg_type t join pg_proc i on i.oid = t.typinput join pg_proc o on o.oid = t.typoutput) as types"""


@dataclass
class Catalog:
    """How volatile the functions, operators and text forms of types of one server are: i, s or v."""

    functions: dict[str, str] = field(default_factory=dict)
    operators: dict[str, str] = field(default_factory=dict)
    #: Reading from text, writing to text.
    types: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    async def of(cls, connection: asyncpg.Connection) -> Catalog:
        row = await connection.fetchrow(_CATALOG)
        return cls(dict(row["functions"]), dict(row["operators"]), {t[0]: (t[1], t[2]) for t in row["types"]})

    def worst(self, node: Node) -> str:
        """How volatile this node itself is, whatever is below it."""
        kind = node["_"]
        if kind in _FUNCTIONS:
            return self.functions.get(node[_FUNCTIONS[kind]], "v")
        if kind in _OPERATORS:
            return self.operators.get(node["opno"], "v")
        if kind == "SQLVALUEFUNCTION":
            return "s"
        if kind == "NEXTVALUEEXPR":
            return "v"
        if kind == "COERCEVIAIO":
            read, written = self.types.get(node["resulttype"], ("s", "s"))[0], self._written(node["arg"])
            return max(read, written, key="isv".index)
        return "i"

    def _written(self, node: Any) -> str:
        kind = _type_of(node)
        return self.types.get(kind, ("s", "s"))[1] if kind is not None else "i"


def _type_of(node: Any) -> str | None:
    if node["_"] == "SUBLINK":
        return _type_of(node["subselect"]["targetList"][0]["expr"])
    return next((node[name] for name in _TYPES if name in node), None)


def parsed(text: str) -> Any:
    """A tree as the server prints it: nodes are dictionaries with their kind as ``_``, lists are lists."""
    tokens = _TOKEN.findall(text)
    place = 0

    def value() -> Any:
        nonlocal place
        token = tokens[place]
        place += 1
        if token == "{":
            return node()
        if token == "(":
            items = []
            while tokens[place] != ")":
                items.append(value())
            place += 1
            return items
        return token

    def node() -> Node:
        nonlocal place
        made: Node = {"_": tokens[place]}
        place += 1
        while tokens[place] != "}":
            name = tokens[place].removeprefix(":")
            place += 1
            values = []
            while tokens[place] != "}" and not tokens[place].startswith(":"):
                values.append(value())
            made[name] = values[0] if len(values) == 1 else values
        place += 1
        return made

    return value()


def _below(node: Any) -> Iterator[Any]:
    """The nodes directly below."""
    if isinstance(node, dict):
        yield from (child for name, child in node.items() if name != "_")
    elif isinstance(node, list):
        yield from node


def _nodes(tree: Any) -> Iterator[Node]:
    """All nodes of a tree."""
    if isinstance(tree, dict):
        yield tree
    for child in _below(tree):
        if isinstance(child, (dict, list)):
            yield from _nodes(child)


def _queries(tree: Any) -> Iterator[Node]:
    return (node for node in _nodes(tree) if node["_"] == "QUERY")


class Lint:
    """The rules, one method for each; what they find is in words."""

    def __init__(self, catalog: Catalog, tree: Any) -> None:
        self.catalog, self.tree = catalog, tree
        self.found: list[str] = []

    def run(self) -> list[str]:
        for query in _queries(self.tree):
            if query["commandType"] in (_UPDATE, _INSERT, _DELETE):
                self._written(query)
            elif query["commandType"] == _SELECT and query is not self.tree[0][0]:
                self._step(query)
        self._inserts()
        return list(dict.fromkeys(self.found))

    def _written(self, query: Node) -> None:
        verb = {_UPDATE: "UPDATE", _INSERT: "INSERT", _DELETE: "DELETE"}[query["commandType"]]
        assigned = [entry for entry in _listed(query["targetList"]) if entry["resjunk"] == "false"]
        if verb == "UPDATE":
            for entry in assigned:
                self._one_node(f"SET of column {entry['resno']} in an UPDATE", entry["expr"])
        if isinstance(query["jointree"], dict):
            self._one_node(f"WHERE of {verb}", query["jointree"]["quals"])
        if any(self._is_mutable(node) for node in _nodes(query["returningList"])):
            self.found.append(f"RETURNING of {verb}: a function that is not IMMUTABLE")
        if verb == "INSERT" and isinstance(conflict := query["onConflict"], dict):
            for name in ("arbiterWhere", "onConflictSet", "onConflictWhere"):
                if any(self._is_mutable(node) for node in _nodes(conflict[name])):
                    self.found.append(f"ON CONFLICT, {name}: a function that is not IMMUTABLE")
        if verb == "INSERT" and query["hasSubLinks"] == "true":
            self.found.append("a subquery in VALUES or ON CONFLICT of an INSERT")

    def _step(self, query: Node) -> None:
        """What a step returns may be kept on another node: a value of no type cannot be."""
        columns = [entry["expr"] for entry in _listed(query["targetList"])]
        if any(column.get("funcresulttype") == _VOID for column in columns):
            self.found.append("a column of type void in a step: cast it to text")

    def _is_mutable(self, node: Node) -> bool:
        return self.catalog.worst(node) != "i"

    def _one_node(self, where: str, expression: Any) -> None:
        """What is evaluated on the row's own node."""
        if any(self.catalog.worst(node) == "v" for node in _nodes(expression)):
            self.found.append(f"{where}: a VOLATILE function")
            return
        self._evaluated(where, expression)

    def _evaluated(self, where: str, node: Any, *, stable: bool = False) -> None:
        """A STABLE call is evaluated before the statement is sent: so it has no column, and no CASE around it."""
        if isinstance(node, dict):
            if node["_"] == "QUERY":
                return  # a subquery is sent as it is
            if node["_"] in ("CASEEXPR", "COALESCEEXPR"):
                if any(self._is_mutable(below) for below in _nodes(node)):
                    self.found.append(f"{where}: a function that is not IMMUTABLE in CASE or COALESCE")
                return
            if node["_"] == "VAR" and stable:
                self.found.append(f"{where}: a STABLE function over a column")
            stable = stable or self.catalog.worst(node) == "s"
        for child in _below(node):
            if isinstance(child, (dict, list)):
                self._evaluated(where, child, stable=stable)

    def _inserts(self) -> None:
        """A statement with an INSERT in a CTE is not sent as a whole: so it may not lock or change rows beside it."""
        ((top, *_), *_) = self.tree
        within = [query for query in _queries(top) if query is not top]
        if not any(query["commandType"] == _INSERT for query in within):
            if top["commandType"] == _INSERT and any(q["commandType"] in (_UPDATE, _DELETE) for q in within):
                self.found.append("an INSERT with an UPDATE or DELETE in a CTE")
            return
        if any(q["commandType"] in (_UPDATE, _DELETE) or _listed(q["rowMarks"]) for q in _queries(top)):
            self.found.append("an INSERT in a CTE, beside an UPDATE, a DELETE or a row lock")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


async def tree_of(connection: asyncpg.Connection, text: str) -> Any:
    """The server's parse tree of a statement with parameters."""
    text = text.strip().rstrip(";")
    transaction = connection.transaction()
    await transaction.start()
    try:
        prepared = await connection.prepare(text)
        types = [kind.oid for kind in prepared.get_parameters()]
        names = await connection.fetchval("select array(select format_type(t, null) from unnest($1::oid[]) t)", types)
        await connection.execute(
            f"create function pg_temp._rm_lint({', '.join(names)}) returns void language sql begin atomic {text}\n; end"
        )
        return parsed(await connection.fetchval("select prosqlbody::text from pg_proc where proname = '_rm_lint'"))
    finally:
        await transaction.rollback()


def writes(text: str) -> bool:
    """Whether this is a statement that the rules are about: it writes rows, or sends a word beside them."""
    return bool(_STATEMENT.match(text) and _WRITES.search(text)) or refused_ddl(text) != []


def refused_ddl(text: str) -> list[str]:
    """What a distributed table does not take in this DDL, in words."""
    found = _REFUSED_DDL.match(text)
    return [f"ALTER COLUMN ... SET {found[1].upper()}: a distributed table takes no such DDL"] if found else []


async def refused_forms(connection: asyncpg.Connection, catalog: Catalog, text: str) -> list[str]:
    """What a distributed planner would refuse in this statement, in words."""
    if not writes(text) or refused_ddl(text):
        return refused_ddl(text)
    return Lint(catalog, await tree_of(connection, text)).run()


_BODIES = """select p.proname, p.prosrc, array(select format_type(t, null) from unnest(p.proargtypes) t) as arguments
from pg_proc p join pg_language l on l.oid = p.prolang
where l.lanname = 'plpgsql' and position('#variable_conflict' in p.prosrc) > 0
  and p.prorettype <> 'trigger'::regtype order by 1"""


async def function_statements(connection: asyncpg.Connection) -> dict[str, str]:
    """The statements inside of the functions of lanes that are in this database, by a name for each."""
    return {
        f"{row['proname']}, statement {number}": text
        for row in await connection.fetch(_BODIES)
        for number, text in enumerate(plpgsql.statements(row["prosrc"], row["arguments"]), 1)
    }


def told(text: str, found: Sequence[str]) -> str:
    """A statement with what is wrong with it."""
    return "\n".join([*(f"-- {each}" for each in found), text])


def refused(db: Db, texts: Iterable[str] | None = None) -> list[str]:
    """The statements that a distributed planner would refuse; without texts, those inside the functions of lanes."""

    async def judge(connection: asyncpg.Connection) -> list[str]:
        catalog = await Catalog.of(connection)
        judged = (await function_statements(connection)).values() if texts is None else texts
        found = [(text, await refused_forms(connection, catalog, text)) for text in judged]
        assert any(writes(text) for text, _ in found), "there is nothing to judge"
        return [told(text, why) for text, why in found if why]

    return db.connected(judge)
