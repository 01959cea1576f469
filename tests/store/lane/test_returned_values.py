"""A value that a handler returned is written as it is, or the run fails with the column's name."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from datetime import UTC, datetime, timezone
from datetime import timedelta as td
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

import safety_app
from databases import Db, as_time
from rowmill import Done, Mill
from rowmill.testing import Kit
from rows import having, whole

STATES = {state: {"status": state} for state in ("ready", "running", "done", "dead")}


def table(db: Db, columns: str) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    kept = "id integer primary key, status text not null default 'ready', worker text, attempts integer default 0"
    db.execute(f"create table jobs ({kept}, {columns}, claimed_at {time}, error text)")
    db.execute("insert into jobs (id) values (1)")


def json_type(db: Db) -> str:
    return "jsonb" if db.dialect == "postgresql" else "json"


@dataclasses.dataclass
class Page:
    title: str


class Shade(enum.Enum):
    DARK = "dark"


class Scalar:
    """As NumPy's scalars are."""

    ndim = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


async def fetch() -> str:
    return "title"


def generated() -> Iterator[int]:
    yield 1


GOT = "expected data that a column can hold, got"
#: What a handler returns for the text column ``title``, and the words of the error.
WRONG: dict[str, tuple[Any, str]] = {
    "coroutine": (fetch, f"column 'title': {GOT} coroutine (fetch)\nTry: an await is missing"),
    "object": (object, f"column 'title': {GOT} object"),
    "function": (lambda: fetch, f"column 'title': {GOT} function"),
    "dataclass": (lambda: Page("x"), f"column 'title': {GOT} Page\nTry: dataclasses.asdict"),
    "generator": (generated, f"column 'title': {GOT} generator\nTry: list(value)"),
    "bytes": (lambda: b"b", "column 'title': the handler returned bytes, and the column's type"),
    "bytearray": (lambda: bytearray(b"b"), "column 'title': the handler returned bytearray"),
    "nul": (lambda: "a\0b", "column 'title': the text has a NUL character at position 1"),
    "surrogate": (lambda: "ab\ud800", "column 'title': the text has the character '\\ud800' at position 2"),
    "object in a list": (lambda: ["x", object()], f"column 'title'[1]: {GOT} object"),
}  # fmt: skip


async def _run(db: Db, handler: Any, **options: Any) -> dict[str, Any]:
    mill = Mill(db.url)
    mill.lane("jobs", name="pages", **STATES | {"max_attempts": 3} | options)(handler)
    async with Kit(mill) as kit:
        assert await kit.step() is not None
    return whole(db, "jobs", 1)


@pytest.mark.parametrize("way", ["return", "done", "finish", "sync finish"])
@pytest.mark.parametrize("kind", WRONG)
async def test_a_value_that_is_no_data_fails_the_run_and_nothing_is_written(db: Db, kind: str, way: str) -> None:
    table(db, "title text, n integer")
    make, words = WRONG[kind]

    async def by_return(job: Any) -> Any:
        return {"n": 1, "title": make()} if way == "return" else Done({"n": 1, "title": make()})

    async def by_finish(job: Any) -> None:
        async with job.finish() as tx:
            tx.set(n=1, title=make())

    def by_sync_finish(job: Any) -> None:
        with job.finish() as tx:
            tx.set(n=1, title=make())

    row = await _run(db, {"finish": by_finish, "sync finish": by_sync_finish}.get(way, by_return))
    assert (row["status"], row["title"], row["n"]) == ("dead", None, None)
    assert row["error"].startswith(words.partition("\n")[0])
    assert words in row["error"]


@pytest.mark.parametrize("kind", ["coroutine", "object", "bytes", "nul"])
async def test_no_json_column_takes_them_inside_a_document_either(db: Db, kind: str) -> None:
    table(db, f"info {json_type(db)}")

    async def pages(job: Any) -> Any:
        return {"info": {"pages": [{"title": WRONG[kind][0]()}]}}

    row = await _run(db, pages)
    assert (row["status"], row["info"]) == ("dead", None)
    assert row["error"].startswith("column 'info'['pages'][0]['title']: ")


async def test_a_key_of_a_document_is_checked_like_a_value(db: Db) -> None:
    table(db, f"info {json_type(db)}")

    async def pages(job: Any) -> Any:
        return {"info": {object(): 1}}

    assert (await _run(db, pages))["error"].startswith(f"column 'info', a key: {GOT} object")


async def test_a_document_that_contains_itself_fails_its_run(db: Db) -> None:
    table(db, f"info {json_type(db)}")
    info: list[Any] = []
    info.append(info)

    async def pages(job: Any) -> Any:
        return {"info": info}

    assert "nested too deeply" in (await _run(db, pages))["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_coroutine", f"column 'title': {GOT} coroutine (fetch)\nTry: an await"),
        ("returns_object", f"column 'title': {GOT} Thing"),
        ("returns_bytes", "column 'title': the handler returned bytes"),
        ("notes_coroutine", f"the note of job.progress: {GOT} coroutine (fetch)"),
    ],
)
async def test_a_handler_in_a_process_of_its_own_is_told_the_same(db: Db, name: str, words: str) -> None:
    table(db, "title text")
    async with Kit(safety_app.mill, environments=db.url) as kit:
        assert await kit.step(name) is not None
    row = whole(db, "jobs", 1)
    assert (row["status"], row["title"], row["error"]) == ("dead", None, having(words))


async def test_a_progress_note_that_is_no_text_fails_the_run(db: Db) -> None:
    table(db, "progress text")

    async def pages(job: Any) -> None:
        await job.progress(0.5, fetch())

    row = await _run(db, pages)
    assert (row["status"], row["progress"]) == ("dead", None)
    assert row["error"].startswith(f"the note of job.progress: {GOT} coroutine (fetch)")


async def test_a_progress_note_shows_what_cannot_be_stored(db: Db) -> None:
    table(db, "progress text")

    async def pages(job: Any) -> None:
        await job.progress(0.5, "a\0b\ud800")

    assert (await _run(db, pages))["progress"] == "50% a\\x00b?"


#: What is data, for a text column, and what then stands there.
RIGHT: dict[str, tuple[Any, Any]] = {
    "enum": (Shade.DARK, "dark"),
    "text of its own class": (type("Markup", (str,), {})("x"), "x"),
    "number": (5, "5"),
    "decimal": (Decimal("1.50"), "1.50"),
    "uuid": (UUID(int=7), str(UUID(int=7))),
    "path": (Path("a/b"), "a/b"),
    "scalar": (Scalar("x"), "x"),
}


@pytest.mark.parametrize("kind", RIGHT)
async def test_what_is_data_is_written(db: Db, kind: str) -> None:
    table(db, "title text")
    value, stands = RIGHT[kind]

    async def pages(job: Any) -> Any:
        return {"title": value}

    row = await _run(db, pages)
    assert (row["status"], row["title"], row["error"]) == ("done", stands, None)


async def test_numbers_that_are_not_pythons_own_and_bytes_have_their_columns(db: Db) -> None:
    table(db, f"n integer, raw {'bytea' if db.dialect == 'postgresql' else 'blob'}")

    async def pages(job: Any) -> Any:
        return {"n": Scalar(5), "raw": memoryview(b"\x00b")}

    row = await _run(db, pages)
    assert (row["status"], row["n"], bytes(row["raw"])) == ("done", 5, b"\x00b")


# -- times


async def test_a_time_without_a_zone_is_refused_for_a_column_that_has_one(pg: Db) -> None:
    """Such a time would be taken for the server's: hours off wherever the program runs in another zone."""
    table(pg, "at timestamptz, times timestamptz[]")

    async def pages(job: Any) -> Any:
        return {"at": datetime(2024, 1, 1, 12)}

    row = await _run(pg, pages)
    assert (row["status"], row["at"]) == ("dead", None)
    assert "column 'at': the handler returned a datetime without a time zone" in row["error"]
    assert "Try: datetime.now(UTC)" in row["error"]
    pg.execute("update jobs set status = 'ready', attempts = 0")

    async def lists(job: Any) -> Any:
        return {"times": [datetime(2024, 1, 1, 12)]}

    assert (await _run(pg, lists))["error"].startswith("column 'times'[0]: the handler returned a datetime without")


async def test_a_column_without_a_zone_holds_utc(db: Db) -> None:
    """A time with a zone is converted; one without is taken for UTC, as what is read from the column is."""
    table(db, "aware timestamp, naive timestamp")
    noon = datetime(2024, 1, 1, 12)

    async def pages(job: Any) -> Any:
        return {"aware": noon.replace(tzinfo=timezone(td(hours=-5))), "naive": noon}

    row = await _run(db, pages)
    assert row["status"] == "done"
    assert as_time(row["aware"]) == datetime(2024, 1, 1, 17, tzinfo=UTC)
    assert as_time(row["naive"]) == noon.replace(tzinfo=UTC)


async def test_a_column_without_a_zone_holds_utc_whoever_declared_it(db: Db) -> None:
    table(db, "at timestamp")
    declared = sa.Table(
        "jobs", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("at", sa.DateTime),
        *(sa.Column(name, sa.Text) for name in ("status", "worker", "error")), sa.Column("attempts", sa.Integer),
        sa.Column("claimed_at", sa.DateTime(timezone=True)),
    )  # fmt: skip
    mill = Mill(db.url)

    @mill.lane(declared, **STATES)
    async def pages(job: Any) -> Any:
        return {"at": datetime(2024, 1, 1, 12, tzinfo=timezone(td(hours=-5)))}

    async with Kit(mill) as kit:
        assert await kit.step() is not None
    row = whole(db, "jobs", 1)
    assert row["status"] == "done"
    assert as_time(row["at"]) == datetime(2024, 1, 1, 17, tzinfo=UTC)
