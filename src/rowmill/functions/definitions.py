"""A lane's verbs as PostgreSQL functions, so that a worker in any language works beside the Python ones.

Whatever the caller's search_path is, no name in a function is looked up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..declare import roles
from ..declare.retry import Exponential, Fixed
from ..errors import DeclarationError, did_you_mean
from ..store.gates.gate_rows import as_text
from ..store.lane.binding import Binding
from ..store.lane.sql_literals import dollar_quoted
from .bodies import FunctionStatements, Parameter
from .gate_bodies import FunctionGates, check_gates
from .resolve_names import Resolved

#: verb -> what its function is called behind the prefix
VERBS = {
    "claim": "claim_next",
    "claim_batch": "claim_batch",
    "heartbeat": "heartbeat",
    "complete": "complete",
    "fail": "fail",
    "release": "release",
    "sweep": "sweep",
    "inputs": "inputs",
}
_LONGEST_NAME = 63


@dataclass(frozen=True)
class FunctionOptions:
    """The names of the functions, their schema, and who may call them."""

    prefix: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None
    definer: bool = False
    grants: Sequence[str] = ()


@dataclass(frozen=True)
class Function:
    """One function: its name, and the statement that creates it."""

    verb: str
    schema: str
    name: str
    #: Schema, name and the parameters' types in SQL, as ``drop function`` and ``grant`` take them.
    signature: str
    #: The comment that marks it as rowmill's own.
    mark: str
    sql: str


def render(
    binding: Binding, resolved: Resolved, options: FunctionOptions, gates: FunctionGates | None = None
) -> list[Function]:
    """The functions of one lane, with its gates if it has any (``resolve_gates``), or a clear error why there can be
    none.
    """
    check(binding, resolved, options)
    assert (gates is None) == (not binding.lane.groups), "a lane's functions mind its gates"
    statements, types = FunctionStatements(binding, resolved, gates), resolved.types
    worker = [Parameter("worker", "text")] if "worker" in binding.roles else []
    count, rows = f"${len(worker) + 1}", f"setof {statements.table}"
    keys = statements.fenced[: len(binding.key)]
    holder = types[binding.roles["worker"]] if worker else "text"
    swept = ", ".join(f"{statements.name(p.name)} {p.type}" for p in [Parameter("previous_worker", holder),
                                                              Parameter("poison", "boolean"), *keys])  # fmt: skip
    moved = types[binding.roles["claimed_at"]] if binding.renew == "claimed_at" else "boolean"
    most = Parameter("batch", "integer", str(binding.lane.batch or 10))
    result = Parameter("result", "jsonb", "'{}'::jsonb")
    failure = [Parameter("error", "text", "null"), Parameter("delay", "interval", "null"),
               Parameter("permanent", "boolean", "false")]  # fmt: skip
    if gates is not None:
        failure += [Parameter("retry_after", "interval", "null"), Parameter("closes", "text", "null")]
    limit = f"greatest(coalesce({count}, 1), 0)"
    made: dict[str, tuple[list[Parameter], str, str]] = {
        "claim": (worker, f"{rows}", statements.claim_body("1")),
        "claim_batch": ([*worker, most], f"{rows}", statements.claim_body(limit)),
        "complete": ([*statements.ended, result], "boolean", statements.complete_body()),
        "fail": ([*statements.ended, *failure], "text", statements.fail_body()),
        "release": (statements.fenced, "boolean", statements.release_body()),
        "sweep": ([Parameter("batch", "integer", "1000")], f"table ({swept})", statements.sweep_body()),
    }
    if binding.renew != "none":
        made["heartbeat"] = (statements.fenced, moved, statements.heartbeat_body())
    if binding.lane.inputs:
        made["inputs"] = ([Parameter("claimed", statements.table)], "text", statements.inputs_body())
    names = _names(binding, options, made)
    return [_function(statements, verb, names[verb], *made[verb], options) for verb in VERBS if verb in made]


def _function(
    statements: FunctionStatements,
    verb: str,
    name: str,
    parameters: list[Parameter],
    returns: str,
    body: str,
    options: FunctionOptions,
) -> Function:
    schema = options.schema or statements.resolved.schema
    full = f"{statements.name(schema)}.{statements.name(name)}"
    path = ["pg_catalog", *map(statements.name, statements.resolved.path), "pg_temp"]
    listed = ", ".join(
        f"{statements.name(p.name)} {p.type}" + (f" default {p.default}" if p.default else "") for p in parameters
    )
    signature = f"{full}({', '.join(p.type for p in parameters)})"
    # A column may be called like a parameter: the bodies mean the column, and say $1 for the parameter.
    body = f"#variable_conflict use_column\n{body}"
    sql = f"""create or replace function {full}({listed})
returns {returns}
language plpgsql volatile security {"definer" if options.definer else "invoker"}
set search_path = {", ".join(path)}
as {dollar_quoted(body)}"""
    return Function(verb, schema, name, signature, mark_of(statements.lane.name, statements.table, verb), sql)


def mark_of(lane: str, table: str, verb: str) -> str:
    """The comment that marks a function as rowmill's own."""
    return f"rowmill: {verb} of lane {lane} over {table}"


def after(functions: Sequence[Function], options: FunctionOptions, quote: Callable[[str], str]) -> list[str]:
    """The statements after the creation: the mark, and rights for the named roles alone."""
    listed = ", ".join(f"{as_text(f.signature)}::regprocedure" for f in functions)
    texts = [f"comment on function {f.signature} is {as_text(f.mark)}" for f in functions]
    texts += [f"revoke all on function {f.signature} from public" for f in functions]
    # Default privileges (Supabase has some) may have granted them to others the moment they were created.
    block = f"""declare
  _found record;
begin
  for _found in
    select p.oid::regprocedure as function, r.rolname as role
    from pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a join pg_catalog.pg_roles r on r.oid = a.grantee
    where p.oid = any (array[{listed}]) and a.grantee <> p.proowner
  loop
    execute pg_catalog.format('revoke all on function %s from %I', _found.function, _found.role);
  end loop;
end"""
    texts.append(f"do {dollar_quoted(block)}")
    for role in options.grants:
        texts += [f"grant execute on function {f.signature} to {quote(role)}" for f in functions]
    return texts


def notes(
    binding: Binding, resolved: Resolved, options: FunctionOptions, gates: FunctionGates | None = None
) -> list[str]:
    """Notes for callers, one per line."""
    lane, table = binding.lane, f"{resolved.schema}.{resolved.name}"
    texts = ["Commit a claim before working on it: until then nobody else can see that the row is taken."]
    if marks := _marks(binding):
        held = " and ".join(["its key", *marks])
        texts.append(f"The verbs about a claim take {held} as the claim returned them. If the row is no longer so, the"
                     " claim is lost: nothing is written, and the answer is false (of fail: null).")  # fmt: skip
    if binding.incarnated:
        texts.append("Nothing but the worker tells two claims apart: a worker needs a new name at every start.")
    if binding.renew == "none":
        texts.append(
            f"No column is renewed: a run must end within the lease of {lane.lease}, or its row is taken back."
        )
    else:
        texts.append(f"Call heartbeat about every {lane.heartbeat} while a run goes on; the lease is {lane.lease}.")
    if binding.renew == "claimed_at":
        texts.append("A heartbeat moves the claim's time and returns it: it is the claimed_at of the next call.")
    if gates is not None:
        texts.append(
            "They keep to the lane's gates, and to pauses: no row may mean that none may start yet. fail tells"
            " the breaker; its retry_after closes the key for all workers, closes => 'lane' the lane."
        )
    if lane.inputs:
        inputs = _names(binding, options, dict.fromkeys(VERBS))["inputs"]
        texts.append(
            "complete and fail take inputs, by which a change of"
            f" {', '.join(lane.inputs)} is found: select c.*, {inputs}(c) as inputs from ... c, over the claim. If they"
            " changed, no end is final: complete answers false, fail 'stale', and the row is ready again."
        )
    if lane.settled_hooks:
        texts.append("The lane's on_settled is Python: it does not run for rows that these functions settle.")
    if resolved.path:
        texts.append(f"The table's triggers ({', '.join(resolved.triggers)}) look names up in the search_path, so the"
                     f" functions have {', '.join(resolved.path)} in it.")  # fmt: skip
    if resolved.open:
        texts.append(
            f"Everybody may create objects in {', '.join(resolved.open)}: the triggers could be made to use them."
        )
    if options.definer:
        texts.append("They run with the rights of their owner, so callers need no rights on the table.")
    else:
        more = f"; the same on {', '.join(gates.tables)}, and insert on {gates.table}" if gates is not None else ""
        if lane.inputs and resolved.stale_runs:
            more += f"; select, insert, update and delete on {resolved.stale_runs}"
        texts.append(
            f"They run with the caller's rights: he needs usage of the schema, and select and update on {table}{more}."
        )
    who = ", ".join(options.grants) or "nobody"
    texts.append(f"Granted to {who}; rights given by hand are taken away when they are installed again (--grant ROLE).")
    return texts


def _marks(binding: Binding) -> list[str]:
    columns = (binding.roles.get("worker"), binding.fence_time, binding.roles.get("attempts"))
    return [column for column in columns if column]


def check(binding: Binding, resolved: Resolved, options: FunctionOptions) -> None:
    """Refuse a lane that functions could not serve by its own rules."""
    lane, where = binding.lane, f"lane {binding.lane.name!r}"
    if lane.groups:
        check_gates(binding, resolved)
    if lane.shared_rate is not None:
        raise DeclarationError(
            f"{where}: only rowmill's workers lease from a rate with shared=, and functions would start rows beyond it",
            hint="Rate(n, per=...) without shared: one for each database",
        )
    if type(lane.backoff) not in (Fixed, Exponential):
        raise DeclarationError(
            f"{where}: its backoff is a Python function, which the database cannot run",
            hint="backoff=fixed(...) or exponential(...)",
        )
    if not binding.roles.keys() & roles.SIGNS_OF_LIFE:
        raise DeclarationError(
            f"{where}: the table has no heartbeat or claim time, and workers in other languages are not in"
            " rowmill_workers, so their rows would be taken back at once",
            hint=f"alter table {resolved.schema}.{resolved.name} add column heartbeat_at timestamptz",
        )
    if options.definer and resolved.open:
        raise DeclarationError(
            f"{where}: with security definer, the table's triggers ({', '.join(resolved.triggers)}) would look names up"
            f" in {', '.join(resolved.open)} with the owner's rights, and anyone may create objects there",
            hint=f"revoke create on schema {resolved.open[0]} from public, or alter the trigger functions to set"
            " search_path",
        )


def _names(binding: Binding, options: FunctionOptions, made: Mapping[str, Any]) -> dict[str, str]:
    """The name of each function."""
    for verb in options.names:
        if verb not in VERBS:
            raise DeclarationError(f"--name: there is no function {verb!r}", hint=did_you_mean(verb, VERBS))
        if verb not in made and verb == "inputs":
            raise DeclarationError(
                f"lane {binding.lane.name!r} has no inputs, so it has no function for them",
                hint='inputs=["url", "body"]',
            )
        if verb not in made:
            raise DeclarationError(
                f"lane {binding.lane.name!r} has no {verb}: no column is renewed while a run goes on",
                hint="add a heartbeat_at column, or leave this name out",
            )
    prefix = f"{binding.lane.name}_" if options.prefix is None else options.prefix
    plain = {verb: options.names.get(verb, f"{prefix}{VERBS[verb]}") for verb in VERBS if verb in made}
    for verb, name in plain.items():
        if len(name.encode()) > _LONGEST_NAME or "\0" in name:
            raise DeclarationError(
                f"PostgreSQL cuts names at {_LONGEST_NAME} bytes, and {name!r} has {len(name.encode())}",
                hint=f"--prefix, or --name {verb}=...",
            )
        if list(plain.values()).count(name) > 1:
            raise DeclarationError(f"two functions would be called {name!r}", hint=f"--name {verb}=...")
    return plain
