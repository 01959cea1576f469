"""Golden SQL: the statements of each table shape, as they will run, kept as files to be read and reviewed.

``UPDATE_GOLDEN=1`` rewrites the files; a statement that differs from its file fails with the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest

import systems
from databases import Db
from golden import compare
from rowmill import Concurrency, Mill
from rowmill.testing import Kit
from rows import empty

GOLDEN = Path(__file__).parents[2] / "golden"
STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


async def handle(job: Any) -> None:
    return None


def _system(system: str, lane: str) -> Callable[[Db, Mill], None]:
    def declare(db: Db, mill: Mill) -> None:
        systems.create(db, system)
        getattr(systems, lane)(mill, handle)

    return declare


def _own(columns: str, after: str = "", **options: Any) -> Callable[[Db, Mill], None]:
    """A table of the test's own."""

    def declare(db: Db, mill: Mill) -> None:
        time = "timestamptz" if db.dialect == "postgresql" else "datetime"
        db.execute(f"create table jobs ({columns.replace('$time', time)}){after}")
        mill.lane("jobs", name="jobs", **STATES | options)(handle)

    return declare


_TWO = "tenant text, number integer, status text, worker text, claimed_at $time, primary key (tenant, number)"
_SHARDED = (
    "id integer primary key, tenant integer, status text, worker text, claimed_at $time, heartbeat_at $time,"
    " run_after $time, attempts integer, error text, created_at $time, approved_at $time, draft text, site text"
)
_SHARDED_ENDS: dict[str, Any] = {"canceled": {"status": "canceled"}, "expires_after": td(hours=1)}
#: shape -> how it is declared, the columns a handler returns, the dialects it is for
SHAPES: dict[str, tuple[Callable[[Db, Mill], None], tuple[str, ...], str]] = {
    "extraction": (_system("registre", "extraction"), ("document_type",), ""),
    "req": (_system("registre", "req"), (), ""),
    "ocr": (_system("registre", "ocr"), (), ""),
    "enrichment": (_system("enrichment", "enrichment"), ("url", "domain"), ""),
    "scrape": (_system("prices", "scrape"), ("query_params",), ""),
    "prompt_forming": (_system("analysis", "prompt_forming"), ("extractedInfo",), ""),
    "composite_key": (_own(_TWO), (), ""),
    "worker_alone": (_own("id integer primary key, status text, worker text"), (), ""),
    "renewed_claim": (
        _own("id integer primary key, status text, claimed_at $time", renew="claimed_at"), (), ""),
    "descending": (
        _own("id integer primary key, status text, worker text, claimed_at $time, rank integer, priority integer",
             order_by=["rank desc"], where="rank > 0"), (), ""),
    "expiring": (
        _own("id integer primary key, status text, worker text, claimed_at $time, valid_until $time,"
             " created_at $time, error text", canceled={"status": "canceled"}, expired={"status": "late"},
             roles={"expires_at": "valid_until"}, expires_after=td(hours=1)), (), ""),
    "inputs": (
        _own("id integer primary key, status text, worker text, claimed_at $time, attempts integer, url text,"
             " body text, result text", inputs=["url", "body"]), ("result",), ""),
    "waiting": (
        _own("id integer primary key, status text, worker text, claimed_at $time, run_after $time, attempts integer,"
             " error text, approved_at $time, draft text"), ("draft",), ""),
    "partitioned": (_own(_TWO, " partition by list (tenant)"), (), "postgresql"),
    "sharded": (_own(_SHARDED, shard={"tenant": 7}, **_SHARDED_ENDS), ("draft",), ""),
    "shards": (_own(_SHARDED, shard={"tenant": range(4)}, **_SHARDED_ENDS), (), ""),
    "sharded_gates": (_own(_SHARDED, shard={"tenant": range(4)}, gates=[Concurrency(2, by="site")]), (), ""),
    "sharded_partitions": (
        _own(f"{_TWO}, attempts integer", " partition by hash (tenant)", shard={"tenant": ["a", "b"]}), (),
        "postgresql"),
    "without_zone": (
        _own("id uuid primary key, status text, worker text, claimed_at timestamp, run_after timestamp,"
             " updated_at timestamp, attempts integer", untouched_for=td(seconds=30)), (), "postgresql"),
    "epochs": (
        _own("id integer primary key, status text, worker text, claimed_at real, heartbeat_at integer,"
             " run_after integer, attempts integer"), (), "sqlite"),
}  # fmt: skip


#: Sweeps and the like look at rows whose shard nobody knows before.
_OVER_ALL = ("sweep", "stale rows", "expire", "is anything ready")


def rendered(store: Any, columns: tuple[str, ...]) -> str:
    """Every statement of a lane, each under its name; of several shards, those of the last, then those of all."""
    if store.shards is not None:
        *_, last = next(iter(store.binding.shard.values()))
        of_all = {"shards with ready rows": store.statements.ready_shards(), **_of_all(store)}
        texts = statements_of(store.shards.of(last), columns) | of_all
        return "\n\n".join(f"-- {name}\n{text};" for name, text in texts.items()) + "\n"
    return "\n\n".join(f"-- {name}\n{text};" for name, text in statements_of(store, columns).items()) + "\n"


def statements_of(store: Any, columns: tuple[str, ...]) -> dict[str, str]:
    """Every statement of a lane, by its name."""
    statements, lease = store.statements, td(minutes=5)
    texts = {"claim": statements.claim()}
    if store.database.dialect.name == "postgresql":
        if statements.bound() is not None:
            texts["claim from the remembered lower bound"] = statements.claim(bounded=True)
        sweeps = {"sweep": statements.sweep(lease)}
        if statements.in_arrays:
            texts["settle done with nothing beside it"] = statements.settle_done()
    else:
        if statements.loose():
            texts = {"claim of rows with a place in the order": statements.claim(placed=True)}
            texts["claim of rows without one"] = statements.claim(placed=False)
        sweeps = {"stale rows": statements.find_stale(lease), "sweep": statements.sweep(poison=False)}
        if statements.poison() is not None:
            sweeps["sweep of a poisoned row"] = statements.sweep(poison=True)
    for kind in ("done", "retry", "dead", "snooze", "release"):
        texts[f"settle {kind}"] = statements.settle(kind, ())
    if store.lane.inputs:
        texts["settle stale"] = statements.settle("stale", ())
        texts["settle done, whatever the inputs are"] = statements.settle("done", (), compare=False)
        if store.database.dialect.name == "sqlite":
            texts["note a stale run"] = statements.note_stale(statements.sent_id())
            texts["forget stale runs"] = statements.forget_stale()
    if columns:
        texts[f"settle done with {', '.join(columns)}"] = statements.settle("done", columns)
    if store.binding.renew != "none":
        texts["renew"] = statements.renew()
    texts |= {"read": statements.read(), **sweeps}
    if store.binding.expires:
        texts["expire"] = statements.expire(1000)
    if "approved_at" in store.binding.columns:
        texts |= _waiting(store)
    if store.gated is not None:
        texts |= _gated(store)
    texts["is anything ready"] = f"select 1 where {store.ready_probe()}"
    return texts


def _of_all(store: Any) -> dict[str, str]:
    """What is one statement over all shards."""
    texts = {name: text for name, text in statements_of(store, ()).items() if name in _OVER_ALL}
    return {f"{name}, all shards": text for name, text in texts.items()}


def _gated(store: Any) -> dict[str, str]:
    """The claim through gates."""
    if store.database.dialect.name == "postgresql":
        return {"claim by key": store.gated.say.claim(after_last=True), "when": store.gated.say.when()}
    (dim,) = store.gated.keyed
    counted = store.statements.beyond
    return {
        "claim of a key": store.statements.claim(also=(dim.matches(":k0"),)),
        "running rows of a key": f"select count(*) from {counted.table} where {counted.running()}",
    }


def _waiting(store: Any) -> dict[str, str]:
    """The statements of rows that wait for an approval."""
    statements, table, until = store.statements, "rowmill_waits", "approved_at is not null"
    settle = statements.settle_wait(until, ("draft",), table)
    texts: dict[str, str] = {"settle wait": settle if isinstance(settle, str) else ";\n".join(settle)}
    due = {"run_after": statements.now("run_after")}
    return texts | {
        "rows whose condition is true": statements.find_waiting(table, f"_w.condition = '{until}'", until, 1000),
        "wake": ";\n".join(statements.write_step(due, f"id in (1) and {statements.still_waits(table, ['1'])}", 1000)),
        "forget": statements.waits_no_more(table),
    }


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_statements_are_those_that_were_reviewed(db: Db, shape: str) -> None:
    """A6, B2, C6, D2, E2; issue: golden SQL for at least six table shapes per dialect."""
    declare, columns, only = SHAPES[shape]
    if only and only != db.dialect:
        pytest.skip(f"a shape of {only}")
    mill = Mill(db.url)
    declare(db, mill)
    async with Kit(mill) as kit:
        text = rendered(await kit.store(), columns)
    compare(GOLDEN / db.dialect / f"{shape}.sql", text)


def test_no_golden_file_is_left_from_a_shape_that_is_gone() -> None:
    """STYLE: what is kept is what is checked."""
    kept = {str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*")}
    wanted = {
        f"{dialect}/{shape}.sql"
        for shape, (_, _, only) in SHAPES.items()
        for dialect in ("postgresql", "sqlite")
        if only in ("", dialect)
    }
    assert kept == wanted
