"""Every endpoint and page with every scope: a token for some lanes never reads rows of other lanes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

import command
import web
from databases import Db
from rowmill.store.own.access import SCOPES
from rowmill.web import access, pages
from rowmill.web.api import BASE
from rowmill.web.app import templates
from rowmill.web.endpoints import ENDPOINTS

HTML = {"Accept": "text/html"}
LANE = f"{BASE}/environments/default/lanes/fetch"
#: Stands in every value that belongs to another lane or queue.
SECRET = "hush"
#: For each endpoint a request that a token for the lanes `fetch` and `mail` may send, if it has the scope.
ENDPOINT: dict[str, tuple[str, Any]] = {
    "lanes": (f"{BASE}/lanes", None),
    "status": (f"{BASE}/status", None),
    "workers": (f"{BASE}/workers?all=true", None),
    "stuck": (f"{BASE}/stuck", None),
    "health": (f"{BASE}/health", None),
    "rows": (f"{LANE}/rows?search={SECRET}", None),
    "row": (f"{LANE}/rows/1", None),
    "why": (f"{LANE}/rows/1/why", None),
    "logs": (f"{LANE}/rows/1/logs", None),
    "edit": (f"{LANE}/rows/1", {"run_after": "2031-01-01T00:00:00Z"}),
    "insert": (f"{LANE}/rows", {"columns": {"url": "x"}}),
    "retry": (f"{LANE}/retry", {"ids": [1]}),
    "cancel": (f"{LANE}/cancel", {"ids": [4]}),
    "release": (f"{LANE}/release", {"stuck": True}),
    "pause": (f"{BASE}/environments/default/pause", {"lane": "fetch"}),
    "resume": (f"{BASE}/environments/default/resume", {"lane": "fetch"}),
    "gates": (f"{BASE}/gates", None),
    "set_gate": (f"{LANE}/gates/set", {"key": "a", "most": 1}),
    "reset_gates": (f"{LANE}/gates/reset", {"all": True}),
    "tasks": (f"{BASE}/tasks", None),
    "enqueue": (f"{BASE}/tasks/mail", {"args": {"to": "x"}}),
    "job": (f"{BASE}/tasks/mail/jobs/2", None),
    "overview": (f"{BASE}/overview", None),
    "errors": (f"{BASE}/errors", None),
    "retry_family": (f"{LANE}/errors/retry", {"error": "0"}),
    "bury_family": (f"{LANE}/errors/bury", {"error": "0"}),
    "audit": (f"{BASE}/audit", None),
}
PAGE = {
    "/": "/",
    "/lane": "/lane?lane=fetch",
    "/row": "/row?lane=fetch&id=1",
    "/errors": "/errors",
    "/error": "/error?lane=fetch&error=0",
    "/workers": "/workers?all=1",
    "/tasks": "/tasks",
    "/health": "/health",
}
#: Requests for one row or job of another lane: by the lane of the token, and by the other lane.
FOREIGN = [
    f"{LANE}/rows/2",
    f"{LANE}/rows/2/why",
    f"{LANE}/rows/2/logs",
    f"{BASE}/environments/default/lanes/mail/rows/1",
    f"{BASE}/environments/default/lanes/mail/rows/1/why",
    f"{BASE}/environments/default/lanes/mail/rows/1/logs",
    f"{BASE}/environments/default/lanes/read/rows/2",
    f"{BASE}/environments/default/lanes/default/rows/1",
    f"{BASE}/tasks/mail/jobs/1",
    f"{BASE}/tasks/report/jobs/1",
    "/row?lane=fetch&id=2",
    "/row?lane=mail&id=1",
    "/row?lane=read&id=2",
    "/row?lane=default&id=1",
    "/lane?lane=read",
    f"/error?lane=read&error={SECRET}",
    "/metrics",
]


@pytest.fixture
def site(db: Db) -> Db:
    """Row 1, 3 and 4 belong to `fetch`, row 2 to `read`; job 1 to the queue `default`, job 2 to `mail`."""
    web.create_pages(db)
    secret = {"title": f"{SECRET} title", "error": f"{SECRET} error", "worker": f"{SECRET}-worker"}
    own = [{"url": "a", "domain": "a", "status": status} for status in ("new", "given up", "new")]
    other = {"url": f"{SECRET} url", "domain": SECRET, "status": "reading", **secret}
    for row in (own[0], other, own[1], own[2]):
        db.insert("pages", [row])
    return db


@pytest.fixture
def client(site: Db) -> Iterator[TestClient]:
    with web.served(web.make_mill(site), inserts=["fetch", "read"]) as client:
        fill(site, client)
        yield client


def fill(site: Db, client: TestClient) -> None:
    """Jobs, workers, pauses, failures and audit entries of other lanes, each with the secret in it."""
    for task, to in (("report", f"{SECRET} argument"), ("mail", "x")):
        assert client.post(f"{BASE}/tasks/{task}", json={"args": {"to": to}}).status_code == 201
    site.execute(f"update rowmill_jobs set error = '{SECRET} job error' where id = 1")
    jobs = [{"lane": "read", "id": SECRET, "seconds": 1.0}, {"lane": "fetch", "id": 1, "seconds": 1.0}]
    command.register(site, "w", state="busy", current=jobs)
    command.register(site, f"{SECRET}-worker", state="busy")
    site.execute(
        "update rowmill_workers set lanes = case id when 'w' then '[\"fetch\", \"read\"]' else '[\"read\"]' end"
    )
    pause = {"lane": "read", "reason": f"{SECRET} reason"}
    assert client.post(f"{BASE}/environments/default/pause", json=pause).status_code == 200
    for lane, row in (("read", "2"), ("default", "1"), ("mail", "1"), ("fetch", "2"), ("read", "1")):
        at = site.value("select current_timestamp")
        log = {"lane": lane, "row_id": row, "attempt": 1, "worker": "w", "outcome": "done", "at": at, "kept_until": at}
        site.insert("rowmill_run_logs", [{**log, "lines": f'[[0, "info", "{SECRET} log", null]]'}])
    for lane, row in (("read", "2"), ("default", "1")):
        site.insert(
            "rowmill_failures",
            [
                {
                    "lane": lane, "row_id": row, "outcome": "dead", "fingerprint": SECRET,
                    "message": f"{SECRET} failure", "at": site.value("select current_timestamp"),
                }
            ],
        )  # fmt: skip


def test_the_tables_here_name_every_endpoint_and_page() -> None:
    assert set(ENDPOINT) == {endpoint.name for endpoint in ENDPOINTS}
    listed = {route.path for route in pages.routes(templates) + access.routes(templates) if isinstance(route, Route)}
    assert set(PAGE) == listed - {"/login", "/logout", "/act/{verb}"}


@pytest.mark.parametrize("lanes", [None, ["fetch", "mail"]], ids=["all", "some"])
def test_every_endpoint_asks_for_its_scope(site: Db, client: TestClient, lanes: list[str] | None) -> None:
    tokens = {scope: web.bearer(web.token(site, scope, lanes=lanes)) for scope in SCOPES}
    client.get(f"{BASE}/lanes", headers=tokens["read"])  # from now on the server knows that there are tokens
    for endpoint in ENDPOINTS:
        path, body = ENDPOINT[endpoint.name]
        assert client.request(endpoint.method, path, json=body).status_code == 401, endpoint.name
        for scope, headers in tokens.items():
            answer = client.request(endpoint.method, path, json=body, headers=headers)
            assert (answer.status_code < 300) == (scope == endpoint.scope), (endpoint.name, scope, answer.text)
            assert answer.status_code < 300 or answer.status_code == 403, (endpoint.name, scope, answer.text)
            assert lanes is None or SECRET not in answer.text.replace(f"search={SECRET}", ""), endpoint.name
    for page, path in PAGE.items():
        assert client.get(path, headers=HTML).status_code == 303, page
        for scope, headers in tokens.items():
            answer = client.get(path, headers={**headers, **HTML})
            right = 404 if page == "/error" else 200
            assert answer.status_code == (right if scope == "read" else 403), (page, scope, answer.text)
            assert lanes is None or SECRET not in answer.text, page


def test_a_row_of_another_lane_cannot_be_read_by_id(site: Db, client: TestClient) -> None:
    some = web.bearer(web.token(site, *SCOPES, lanes=["fetch", "mail"]))
    for path in FOREIGN:
        answer = client.get(path, headers={**some, **HTML})
        assert answer.status_code in (403, 404), (path, answer.text)
        assert SECRET not in answer.text.replace(f"error={SECRET}", "").replace(f"'{SECRET}'", ""), path
    everything = web.bearer(web.token(site, *SCOPES))
    answer = client.get(f"{LANE}/rows/2", headers=everything)
    assert answer.json()["state"] is None, "a token for all lanes still sees a row that is in no state of the lane"
    assert SECRET in answer.text
    assert SECRET in client.get("/row?lane=fetch&id=2", headers={**everything, **HTML}).text


def test_a_job_that_waits_for_its_children_is_its_own_queues(site: Db, client: TestClient) -> None:
    site.execute("update rowmill_jobs set state = 'joining' where id = 2")
    some = web.bearer(web.token(site, "read", lanes=["mail"]))
    assert client.get(f"{BASE}/environments/default/lanes/mail/rows/2", headers=some).status_code == 200
    assert client.get("/row?lane=mail&id=2", headers={**some, **HTML}).status_code == 200


def test_why_names_no_lane_that_the_token_is_not_for(site: Db, client: TestClient) -> None:
    """Lanes that go first have ready rows: whose they are is told to a token that may see them."""
    site.insert("pages", [{"url": "b", "domain": "b", "status": "new"}])
    path = f"{BASE}/environments/default/lanes/read/rows/7/why"
    site.insert("pages", [{"id": 7, "url": "c", "domain": "c", "status": "fetched"}])
    site.execute("delete from rowmill_gates")
    everything = web.bearer(web.token(site, "read"))
    assert "'fetch'" in client.get(path, headers=everything).text
    some = web.bearer(web.token(site, "read", lanes=["read"]))
    answer = client.get(path, headers=some)
    assert answer.status_code == 200
    assert "fetch'" not in answer.text


def test_health_speaks_of_no_table_that_the_token_is_not_for(pg: Db) -> None:
    web.create_pages(pg)
    with web.served(web.make_mill(pg)) as client:
        text = client.get(f"{BASE}/health").text
        assert "pages: " in text
        assert "rowmill_jobs: " in text
        some = web.bearer(web.token(pg, "read", lanes=["mail"]))
        text = client.get(f"{BASE}/health", headers=some).text
        assert "rowmill_jobs: " in text
        assert "pages: " not in text


def test_a_stream_of_events_shows_no_row_of_another_lane(site: Db) -> None:
    mill = web.make_mill(site)
    with web.served(mill) as client:
        fill(site, client)
    some = web.bearer(web.token(site, "read", lanes=["fetch", "mail"]))
    with web.listening(web.make_mill(site)) as (address, _):
        for path in ("/row?lane=fetch&id=2&live=1", "/row?lane=mail&id=1&live=1"):
            with httpx.stream("GET", address + path, headers=some, timeout=60) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith(("event:", "data:")))
                assert next(lines) == "event: away", path
        for path in ("/row?lane=read&id=2&live=1", "/lane?lane=read&live=1"):
            assert httpx.get(address + path, headers=some, timeout=60).status_code == 403
        with httpx.stream("GET", f"{address}/row?lane=fetch&id=1&live=1", headers=some, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith(("event:", "data:")))
            assert "live_row" in json.loads(next(lines).removeprefix("data: "))
