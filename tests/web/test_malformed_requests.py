"""Requests that nobody's browser sends are answered with what is wrong, never with 500."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

import web
from databases import Db

API = "/api/v1"
HTML = {"Accept": "text/html"}


@pytest.fixture
def client(db: Db) -> Iterator[TestClient]:
    web.create_pages(db)
    with web.served(web.make_mill(db), inserts=["fetch"]) as client:
        yield client


@pytest.mark.parametrize("origin", ["http://[bad", "http://[::1", "//[", "null", ""])
def test_an_origin_that_is_no_address_is_another_sites(client: TestClient, origin: str) -> None:
    body = {"lane": "fetch"}
    answer = client.post(f"{API}/environments/default/pause", json=body, headers={"Origin": origin})
    assert answer.status_code == 403, answer.text


def test_a_form_that_leads_back_to_no_address_leads_to_the_first_page(client: TestClient) -> None:
    page = client.get("/lane?lane=fetch", headers=HTML)
    form = {"csrf": web.csrf(page.text), "env": "default", "lane": "fetch", "back": "//[bad"}
    answer = client.post("/act/pause", data=form, headers=HTML)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/?said=")


@pytest.mark.parametrize("depth", [101, 500, 990, 5_000, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deeply_nested_json_is_refused(client: TestClient, opening: str, depth: int) -> None:
    nested = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
    headers = {"Content-Type": "application/json"}
    for path, body in (
        (f"{API}/tasks/report", f'{{"args": {{"to": {nested}}}}}'),
        (f"{API}/environments/default/lanes/fetch/rows", f'{{"columns": {{"title": {nested}}}}}'),
        (f"{API}/environments/default/pause", nested),
    ):
        answer = client.post(path, content=body.encode(), headers=headers)
        assert answer.status_code in (400, 422), (path, answer.status_code)
        assert "nested" in answer.json()["detail"]


def test_json_of_a_usual_depth_is_taken(client: TestClient) -> None:
    nested = json.loads("[" * 90 + "]" * 90)
    answer = client.post(f"{API}/environments/default/lanes/fetch/rows", json={"columns": {"url": nested}})
    assert answer.status_code == 201, answer.text


FOREIGN = ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "https://evil.example"})
PATHS = (
    "/",
    "/lane?lane=fetch&exact=ready",
    "/row?lane=fetch&id=1",
    f"{API}/status",
    f"{API}/errors",
    "/metrics",
    "/?live=1",
)


@pytest.mark.parametrize("headers", FOREIGN, ids=["cross-site", "same-site", "origin"])
def test_another_sites_page_reads_nothing_from_a_dashboard_without_tokens(
    db: Db, client: TestClient, headers: dict[str, str]
) -> None:
    """Everybody on this machine may read it; a page in the same browser may not."""
    for path in PATHS:
        answer = client.get(path, headers={**HTML, **headers})
        assert answer.status_code == 403, path
        assert "Try:" in answer.text or "hint" in answer.json()
    assert client.get("/", headers={**HTML, "Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert client.get("/", headers={**HTML, "Sec-Fetch-Site": "none"}).status_code == 200
    assert client.get("/static/style.css", headers=headers).status_code == 200
    # A token or a session says who it is: links from elsewhere work.
    token = web.bearer(web.token(db, "read"))
    assert client.get(f"{API}/status", headers={**headers, **token}).status_code == 200
