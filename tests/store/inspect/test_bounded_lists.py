"""Lists are bounded in bytes: long cells are cut in the database. Values that Python cannot read are shown as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import web
from databases import Db
from rowmill import Mill
from rowmill.store.inspect.lane_view import LaneView

API = "/api/v1"
LANE = f"{API}/environments/default/lanes/fetch"
HTML = {"Accept": "text/html"}
LONG = 300_000
DIGITS = f"[{'1' * 5_000}]"
DEEP = "[" * 1_500 + "]" * 1_500
#: Deep enough for json.dumps and templates to fail, not for json.loads.
NESTED = "[" * 900 + "]" * 900


@pytest.fixture
def site(db: Db) -> Db:
    web.create_pages(db)
    big = {"url": "a", "domain": "a", "title": "t" * LONG, "error": "boom " + "e" * LONG}
    db.insert("pages", [{**big, "status": "given up"}] * 50)
    db.insert("pages", [{**big, "status": "fetching", "worker": "w"}])
    db.execute("update pages set claimed_at = '2020-01-01 00:00:00' where worker = 'w'")
    return db


@pytest.fixture
def client(site: Db) -> Iterator[TestClient]:
    with web.served(web.make_mill(site)) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        f"{LANE}/rows?limit=500",
        f"{LANE}/rows?filter=title:has:ttt&limit=500",
        f"{API}/stuck",
        f"{API}/errors",
        f"{LANE}/rows/1/why",
        "/lane?lane=fetch",
        "/lane?lane=fetch&col=title&op=set&val=",
        "/errors",
    ],
)
def test_a_list_of_rows_with_long_cells_is_short(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    read = 0
    ask = LaneView.ask

    async def counted(self: LaneView, *args: Any, **options: Any) -> Any:
        nonlocal read
        rows = await ask(self, *args, **options)
        read += sum(len(cell) for row in rows for cell in row if isinstance(cell, (str, bytes)))
        return rows

    monkeypatch.setattr(LaneView, "ask", counted)
    answer = client.get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    assert "boom" in answer.text
    assert len(answer.text) < 2_000_000
    assert 0 < read < 1_000_000, "the cells are cut before they leave the database"


def test_a_cell_that_was_cut_ends_with_an_ellipsis(site: Db, client: TestClient) -> None:
    site.execute("update pages set error = 'short' where id = 2")
    rows = {row["id"]: row for row in client.get(f"{LANE}/rows?order=oldest").json()["rows"]}
    assert rows[1]["error"].endswith("e…")
    assert rows[2]["error"] == "short"
    whole = client.get(f"{LANE}/rows/1").json()
    assert len(whole["columns"]["error"]) > LONG, "one row is whole in the API"
    page = client.get("/row?lane=fetch&id=1", headers=HTML)
    assert page.status_code == 200
    assert len(page.text) < LONG + 200_000, "and cut on its page"


def make(db: Db) -> Mill:
    """A table with JSON that Python cannot read, or not show."""
    kind = {"postgresql": ("jsonb", "bytea", "text[]"), "sqlite": ("json", "blob", "text")}[db.dialect]
    db.execute(
        f"""create table documents (id integer primary key, status text not null default 'new',
        attempts integer default 0, error text, worker text, claimed_at timestamp, progress {kind[0]},
        meta {kind[0]}, raw {kind[1]}, tags {kind[2]})"""
    )
    for n, value in enumerate((DIGITS, DEEP, NESTED, '{"a": [1, "x"]}', "0.5")):
        db.execute(f"insert into documents (id, progress, meta) values ({n}, '{value}', '{value}')")
    mill = Mill(db.url)

    @mill.lane("documents", name="fetch", ready={"status": "new"}, running={"status": "r"}, done={"status": "d"},
               dead={"status": "x"})  # fmt: skip
    async def fetch(job: Any) -> None: ...

    @mill.task
    async def report() -> None: ...

    return mill


def test_json_that_python_cannot_read_is_shown_as_text(db: Db) -> None:
    with web.served(make(db)) as client:
        answer = client.get(f"{LANE}/rows?filter=meta:set:")
        assert answer.status_code == 200, answer.text
        rows = {row["id"]: row for row in answer.json()["rows"]}
        assert [rows[n]["progress"][:3] for n in (0, 1, 2)] == ["[11", "[[[", "[[["]
        assert [rows[n]["progress"] for n in (3, 4)] == [{"a": [1, "x"]}, 0.5]
        assert rows[3]["columns"]["meta"] == {"a": [1, "x"]}
        assert client.get("/lane?lane=fetch&col=meta&op=set&val=", headers=HTML).status_code == 200
        for n, value in enumerate((DIGITS, DEEP, NESTED)):
            answer = client.get(f"{LANE}/rows/{n}")
            assert answer.status_code == 200, (n, answer.text)
            assert answer.json()["columns"]["meta"] == value
            assert client.get(f"{LANE}/rows/{n}/why").status_code == 200, n
            page = client.get(f"/row?lane=fetch&id={n}", headers=HTML)
            assert page.status_code == 200, (n, page.text)
            assert value[:500] in page.text
        assert client.get(f"{LANE}/rows/3").json()["columns"]["meta"] == {"a": [1, "x"]}


def test_a_result_that_python_cannot_read_is_shown_as_text(db: Db) -> None:
    with web.served(make(db)) as client:
        id = client.post(f"{API}/tasks/report", json={"args": {}}).json()["ids"][0]
        for value in (DIGITS, DEEP, NESTED):
            db.execute(f"update rowmill_jobs set result = '{value}', args = '{value}', progress = '{value}'")
            answer = client.get(f"{API}/tasks/report/jobs/{id}")
            assert answer.status_code == 200, answer.text
            assert answer.json()["result"] == value
            assert client.get(f"{API}/environments/default/lanes/default/rows/{id}").status_code == 200
            assert client.get(f"/row?lane=default&id={id}", headers=HTML).status_code == 200
            assert client.get("/lane?lane=default", headers=HTML).status_code == 200


def test_arrays_and_bytes_in_a_list_are_as_before(pg: Db) -> None:
    with web.served(make(pg)) as client:
        pg.execute("update documents set tags = array['a', 'b'], raw = decode('00ff', 'hex') where id = 3")
        long = f"tags = array[repeat('a', {LONG})], raw = decode(repeat('00', {LONG}), 'hex')"
        pg.execute(f"update documents set {long} where id = 4")
        answer = client.get(f"{LANE}/rows?filter=tags:set:&filter=raw:set:")
        assert len(answer.text) < 100_000
        rows = {row["id"]: row["columns"] for row in answer.json()["rows"]}
        assert rows[3] == {"tags": ["a", "b"], "raw": "\\x00ff"}
        assert rows[4]["tags"].startswith('["aaa')
        assert rows[4]["raw"].startswith("\\x0000")
        assert json.loads(client.get(f"{LANE}/rows/4").text)["columns"]["tags"] == ["a" * LONG]
