"""What a handler returns: values of every type are written as their columns have them, and nonsense is told apart."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time
from datetime import timedelta as td
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from databases import Db, as_time
from rowmill import Done, Mill
from rowmill.testing import Kit, Stepped
from rows import empty, having, whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty database, once of each kind."""
    return empty(request, tmp_path, request.param)


@pytest.fixture
def pg(request: pytest.FixtureRequest, tmp_path: Path) -> Db:
    """An empty PostgreSQL database."""
    return empty(request, tmp_path, "postgresql")


def table(db: Db, columns: str) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    columns = f"id integer primary key, status text not null default 'ready', worker text, {columns}"
    db.execute(f"create table jobs ({columns}, claimed_at {time}, error text)")
    db.execute("insert into jobs (id) values (1)")


async def stepped(db: Db, returned: Any, **options: Any) -> Stepped:
    """One run of a handler that returns (or raises) this."""
    mill = Mill(db.url)

    @mill.lane("jobs", **STATES | options)
    async def lane(job: Any) -> Any:
        if isinstance(returned, BaseException):
            raise returned
        return returned

    async with Kit(mill) as kit:
        step = await kit.step()
        assert step is not None
        return step


MOMENT = datetime(2024, 2, 29, 12, 30, 15, 250000, tzinfo=UTC)
#: the column's type, what the handler returns, what then stands in the row
VALUES: dict[str, tuple[str, Any, Any]] = {
    "text": ("text", 'it\'s \\ "so" %s :a $1 ü\U0001f600\n', 'it\'s \\ "so" %s :a $1 ü\U0001f600\n'),
    "null": ("text", None, None),
    "empty": ("text", "", ""),
    "int": ("integer", -5, -5),
    "bigint": ("bigint", 2**62 + 1, 2**62 + 1),
    "boolean": ("boolean", True, True),
    "float": ("double precision", 0.1, 0.1),
    "date": ("text", date(2024, 2, 29), "2024-02-29"),
    "uuid": ("text", UUID(int=7), str(UUID(int=7))),
    "long": ("text", "x" * 2_000_000, "x" * 2_000_000),
}
POSTGRESQL_VALUES: dict[str, tuple[str, Any, Any]] = {
    "decimal": (
        "numeric(30, 10)",
        Decimal("12345678901234567890.0123456789"),
        Decimal("12345678901234567890.0123456789"),
    ),
    "numeric from a float": ("numeric", 1e-7, Decimal("1e-7")),
    "money-like": ("numeric(10, 2)", Decimal("0.10"), Decimal("0.10")),
    "timestamptz": ("timestamptz", MOMENT, MOMENT),
    "timestamp": ("timestamp", MOMENT.replace(tzinfo=None), MOMENT.replace(tzinfo=None)),
    "date": ("date", date(2024, 2, 29), date(2024, 2, 29)),
    "time": ("time", time(12, 30), time(12, 30)),
    "timestamp of another zone": ("timestamp", datetime.fromisoformat("2024-02-29T07:30:15-05:00"),
                                  datetime(2024, 2, 29, 12, 30, 15)),
    "interval": ("interval", td(days=2, seconds=5), td(days=2, seconds=5)),
    "interval of a moment": ("interval", td(microseconds=1), td(microseconds=1)),
    "uuid": ("uuid", UUID(int=7), UUID(int=7)),
    "bytes": ("bytea", b"\x00\xff'\\x", b"\x00\xff'\\x"),
    "bytearray": ("bytea", bytearray(b"ab"), b"ab"),
    "text array": ("text[]", ["a", "it's", None, '{"x"}'], ["a", "it's", None, '{"x"}']),
    "int array": ("integer[]", (1, 2), [1, 2]),
    "array of arrays": ("integer[]", [[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "empty array": ("text[]", [], []),
    "nan": ("double precision", float("nan"), "NaN"),
    "infinity": ("double precision", float("-inf"), float("-inf")),
    "numeric nan": ("numeric", Decimal("NaN"), "NaN"),
    "enum": ("mood", "glad", "glad"),
    "inet": ("inet", "10.0.0.1", "10.0.0.1"),
    "varchar": ("varchar(5)", "12345", "12345"),
}  # fmt: skip
JSON: dict[str, Any] = {
    "object": {"a": [1, 2.5, None, True, "ü'\\"], "b": {"c": "d"}},
    "list": [1, "two", {"three": 3}],
    "text": "just text",
    "number": 5,
    "boolean": True,
    "times and decimals inside": {"at": MOMENT, "price": Decimal("1.50"), "id": UUID(int=1), "day": date(2024, 1, 1)},
    "keys that are numbers": {1: "one"},
}


@pytest.mark.parametrize("kind", VALUES)
async def test_values_are_written_as_their_columns_have_them(db: Db, kind: str) -> None:
    """Issue, settle: the handler's columns, whatever their type."""
    await _value(db, *VALUES[kind])


@pytest.mark.parametrize("kind", POSTGRESQL_VALUES)
async def test_values_of_postgresqls_types_are_written_as_their_columns_have_them(pg: Db, kind: str) -> None:
    """DESIGN, settle: one JSON parameter, typed by the server."""
    pg.execute("create type mood as enum ('glad', 'sad')")
    await _value(pg, *POSTGRESQL_VALUES[kind])


async def _value(db: Db, of: str, returned: Any, stands: Any) -> None:
    table(db, f"v {of}")
    step = await stepped(db, {"v": returned})
    assert (step.outcome, step.error) == ("done", None)
    now = whole(db, "jobs", 1)["v"]
    assert now == stands or str(now).lower() == str(stands).lower()  # NaN is not equal to itself


@pytest.mark.parametrize("kind", JSON)
async def test_json_columns_take_what_json_can_say(db: Db, kind: str) -> None:
    """D1, E1: jsonb on PostgreSQL, json on SQLite; None is NULL."""
    table(db, "v jsonb, w json, n jsonb" if db.dialect == "postgresql" else "v json, w json, n json")
    value = JSON[kind]
    step = await stepped(db, {"v": value, "w": value, "n": None})
    assert (step.outcome, step.error) == ("done", None)
    row = whole(db, "jobs", 1)
    if kind == "times and decimals inside":
        found = json.loads(row["v"])
        assert as_time(found["at"]) == MOMENT
        assert (found["price"], found["id"], found["day"]) == ("1.50", str(UUID(int=1)), "2024-01-01")
    else:
        expected = {"1": "one"} if kind.startswith("keys") else value
        # SQLite keeps a bare number as a number, whatever the column is called.
        assert json.loads(str(row["v"])) == json.loads(str(row["w"])) == expected
    assert row["n"] is None


SQLITE_VALUES: dict[str, tuple[str, Any, Any]] = {
    "decimal": ("numeric", Decimal("10.5"), 10.5),
    "datetime": ("datetime", MOMENT, "2024-02-29 12:30:15.250000"),
    "datetime of another zone": ("datetime", datetime.fromisoformat("2024-02-29T07:30:15-05:00"),
                                 "2024-02-29 12:30:15.000000"),
    "time": ("time", time(12, 30), "12:30:00.000000"),
    "bytes": ("blob", b"\x00\xff", b"\x00\xff"),
    "list in text": ("text", [1, "a"], '[1, "a"]'),
    "set in text": ("text", {1}, "[1]"),
    "nan": ("real", float("nan"), None),
    "interval": ("real", td(seconds=1.5), 1.5),
}  # fmt: skip


@pytest.mark.parametrize("kind", SQLITE_VALUES)
async def test_values_on_sqlite_are_stored_in_a_form_that_it_sorts_and_reads(lite: Db, kind: str) -> None:
    """DESIGN: one declaration, both databases; SQLite has fewer types of its own."""
    of, returned, stands = SQLITE_VALUES[kind]
    table(lite, f"v {of}")
    step = await stepped(lite, {"v": returned})
    assert (step.outcome, step.error) == ("done", None)
    found = whole(lite, "jobs", 1)["v"]
    assert found == stands or (isinstance(stands, str) and stands.startswith(str(found)))


async def test_a_row_is_read_as_its_columns_are_typed(db: Db) -> None:
    """DESIGN, job: job["column"] is the value, decoded."""
    of = ("boolean", "jsonb", "timestamptz") if db.dialect == "postgresql" else ("boolean", "json", "datetime")
    table(db, f"flag {of[0]}, info {of[1]}, at {of[2]}, n integer")
    info = '{"a": [1]}'
    db.execute(f"update jobs set flag = true, info = '{info}', at = '2024-02-29 12:30:15', n = 5")
    seen: dict[str, Any] = {}
    mill = Mill(db.url)

    @mill.lane("jobs", **STATES)
    async def lane(job: Any) -> None:
        seen.update(job)
        assert len(job) == len(list(job))
        with pytest.raises(KeyError, match="did you mean 'flag'"):
            job["flags"]

    async with Kit(mill) as kit:
        assert (await kit.step()).outcome == "done"
    assert (seen["flag"], seen["info"], seen["n"]) == (True, {"a": [1]}, 5)
    assert as_time(seen["at"]) == datetime(2024, 2, 29, 12, 30, 15, tzinfo=UTC)


#: PostgreSQL types, a value in SQL, and what a handler reads
READS: dict[str, tuple[str, Any]] = {
    "numeric(10, 2)": ("12.50", Decimal("12.50")),
    "numeric": ("1e-7", Decimal("1e-7")),
    "double precision": ("0.25", 0.25),
    "uuid": (f"'{UUID(int=7)}'", UUID(int=7)),
    "text[]": ("'{a,NULL}'", ["a", None]),
    "mood": ("'glad'", "glad"),
    "mood[]": ("'{glad}'", ["glad"]),
    "interval": ("'1 day'", td(days=1)),
    "bytea": ("'\\x00ff'", b"\x00\xff"),
    "date": ("'2024-02-29'", date(2024, 2, 29)),
    "time": ("'12:30'", time(12, 30)),
    "timestamp": ("'2024-02-29 12:30:15'", datetime(2024, 2, 29, 12, 30, 15)),
    "timestamptz": ("'2024-02-29 12:30:15.25+00'", MOMENT),
    "json": ("'[1, null]'", [1, None]),
    "jsonb": ("'null'", None),
    "bigint": ("5", 5),
    "boolean": ("true", True),
}


async def test_a_row_of_postgresqls_types_is_read_and_can_be_written_back_as_it_was(pg: Db) -> None:
    """D1, DESIGN job: every column as its type says; what was read may be returned."""
    names = {of: f"c{i}" for i, of in enumerate(READS)}
    pg.execute("create type mood as enum ('glad', 'sad')")
    table(pg, ", ".join(f"{name} {of}" for of, name in names.items()))
    pg.execute("update jobs set " + ", ".join(f"{names[of]} = {sql}" for of, (sql, _) in READS.items()))
    before = whole(pg, "jobs", 1)
    seen: dict[str, Any] = {}
    mill = Mill(pg.url)

    @mill.lane("jobs", **STATES)
    async def lane(job: Any) -> Any:
        for of, name in names.items():
            try:
                seen[of] = job[name]
            except Exception as error:
                seen[of] = error
        return {name: job[name] for of, name in names.items() if of != "jsonb"}

    async with Kit(mill) as kit:
        step = await kit.step()
    assert seen == {of: value for of, (_, value) in READS.items()}
    assert step is not None
    assert (step.outcome, step.error) == ("done", None)
    written = {name: whole(pg, "jobs", 1)[name] for name in names.values()}
    assert written == {name: before[name] for name in names.values()}


# -- what a handler may not return


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"titel": "x"}, "column 'titel' that table 'jobs' does not have\nTry: did you mean 'title'?"),
        ({"status": "done"}, "the handler returned 'status', which is the row's state"),
        ({"id": 2}, "the handler returned 'id', which is the row's key"),
        ({1: 2}, "column 1 that table 'jobs' does not have"),
        ("done", "the handler returned str; a run ends with a dict of columns, None or an outcome"),
        (5, "the handler returned int"),
        ([("title", "x")], "the handler returned list"),
        (True, "the handler returned bool"),
        (Done({"titel": "x"}), "column 'titel'"),
    ],
    ids=str,
)
async def test_a_handler_that_returns_what_cannot_be_written_ends_dead_with_the_reason(
    lite: Db, returned: Any, words: str
) -> None:
    """Issue: a handler that returns an unknown column, the state, the key, or no columns at all."""
    table(lite, "title text")
    step = await stepped(lite, returned)
    assert step.outcome == "dead"
    row = whole(lite, "jobs", 1)
    assert (row["status"], row["error"], row["title"]) == ("dead", having(words), None)


async def test_a_value_that_the_driver_cannot_even_send_kills_its_row_and_no_other(db: Db) -> None:
    """Issue: a value of the wrong type, refused by the database or on the way to it."""
    table(db, "v integer")
    step = await stepped(db, {"v": 2**80})
    assert step.outcome == "dead"
    assert "the database refused what the handler returned (v)" in whole(db, "jobs", 1)["error"]


async def test_an_object_that_is_no_value_does_not_stop_the_engine(db: Db) -> None:
    """Issue: a value of the wrong type has a clear error or a defined behaviour."""
    table(db, "v integer")
    step = await stepped(db, {"v": object()})
    assert step.outcome == "dead"


@pytest.mark.parametrize(
    "text",
    ["a\x00b", "lone \ud800 surrogate", b"\xff\xfe".decode("latin-1"), b"caf\xe9".decode("utf-8", "surrogateescape")],
    ids=["nul", "surrogate", "latin", "undecodable bytes"],
)
async def test_an_error_with_text_that_is_no_utf8_is_written_all_the_same(db: Db, text: str) -> None:
    """Issue: non-UTF-8 text in an error."""
    table(db, "v text")
    step = await stepped(db, ValueError(text))
    assert step.outcome == "dead"
    error = whole(db, "jobs", 1)["error"]
    assert error.startswith("ValueError: ")
    assert "\x00" not in error


async def test_a_very_long_error_is_cut(db: Db) -> None:
    """Issue, settle: error text of bounded length."""
    table(db, "v text")
    await stepped(db, ValueError("x" * 100_000))
    error = whole(db, "jobs", 1)["error"]
    assert len(error) == 2000
    assert error.endswith("…")
