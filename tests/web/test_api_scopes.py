"""Tokens are for what they say: scopes, lanes, and nobody else's."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

import command
import web
from databases import Db

API = "/api/v1"
HERE = f"{API}/environments/default"


@pytest.fixture
def site(db: Db) -> Db:
    web.create_pages(db)
    db.insert("pages", [{"url": "a", "domain": "a", "status": s} for s in ("new", "fetched", "given up")])
    return db


@pytest.fixture
def client(site: Db) -> Iterator[TestClient]:
    with web.served(web.make_mill(site), inserts=["fetch", "read"]) as client:
        yield client


def test_a_missing_scope_is_refused(site: Db, client: TestClient) -> None:
    tokens = {scope: web.bearer(web.token(site, scope)) for scope in ("read", "operate", "enqueue")}
    asked = {
        "read": ("GET", f"{API}/status", None),
        "operate": ("POST", f"{HERE}/lanes/fetch/retry", {"ids": [3]}),
        "enqueue": ("POST", f"{API}/tasks/report", {"args": {"to": "x"}}),
    }
    for scope, (method, path, body) in asked.items():
        for held, headers in tokens.items():
            answer = client.request(method, path, json=body, headers=headers)
            assert (answer.status_code < 300) == (held == scope), (scope, held, answer.text)
            if held != scope:
                assert answer.status_code == 403
                assert f"lacks the scope {scope}" in answer.json()["detail"]
    assert client.get(f"{API}/audit", headers=tokens["read"]).status_code == 403
    # What was refused for its scope did nothing.
    assert site.value("select count(*) from rowmill_jobs") == 1


def test_a_token_for_one_lane_is_refused_on_another(site: Db, client: TestClient) -> None:
    client.headers.update(web.bearer(web.token(site, "read", "operate", "enqueue", lanes=["fetch", "mail"])))
    assert client.get(f"{HERE}/lanes/fetch/rows").status_code == 200
    for path in ("rows", "rows/1", "rows/1/why"):
        assert client.get(f"{HERE}/lanes/read/{path}").status_code == 403, path
        assert client.get(f"{HERE}/lanes/nowhere/{path}").status_code == 403, "names are not told either"
    for action, body in (
        ("retry", {"ids": [1]}), ("cancel", {"ids": [1]}), ("release", {"ids": [1]}), ("gates/reset", {"all": True}),
        ("gates/set", {"key": "a", "most": 1}), ("rows", {"columns": {"url": "x"}}),
    ):  # fmt: skip
        assert client.post(f"{HERE}/lanes/read/{action}", json=body).status_code == 403, action
    assert client.patch(f"{HERE}/lanes/read/rows/2", json={"run_after": "2031-01-01T00:00:00Z"}).status_code == 403
    assert client.post(f"{HERE}/pause", json={"lane": "read"}).status_code == 403
    assert client.post(f"{HERE}/pause", json={}).status_code == 403, "the environment is more than its lanes"
    assert client.post(f"{API}/tasks/report", json={"args": {"to": "x"}}).status_code == 403
    assert client.get(f"{API}/tasks/report/jobs/1").status_code == 403
    assert client.get(f"{API}/status", params={"lane": "read"}).status_code == 403
    assert site.value("select count(*) from pages where status = 'fetched'") == 1
    # And where it is right, it works.
    assert client.post(f"{API}/tasks/mail", json={"args": {"to": "x"}}).status_code == 201
    assert client.post(f"{HERE}/pause", json={"lane": "fetch"}).status_code == 200


def test_a_token_for_one_lane_sees_nothing_of_the_others(site: Db, client: TestClient) -> None:
    jobs = [{"lane": lane, "id": 1, "seconds": 1.0, "environment": "default"} for lane in ("fetch", "read")]
    command.register(site, "w", state="busy", lanes=["fetch", "read"], current=jobs)
    site.execute('update rowmill_workers set lanes = \'["fetch", "read"]\'')
    everything = web.bearer(web.token(site, "read", "operate", name="all"))
    client.post(f"{HERE}/pause", json={"lane": "read", "reason": "secret"}, headers=everything)
    client.headers.update(web.bearer(web.token(site, "read", "operate", lanes=["fetch"], name="some")))
    for path in ("lanes", "status", "workers", "stuck", "gates", "tasks", "audit", "health"):
        answer = client.get(f"{API}/{path}")
        assert answer.status_code == 200, answer.text
        text = answer.text
        assert '"read"' not in text, path
        assert "secret" not in text, path
        assert '"read"' in client.get(f"{API}/{path}", headers=everything).text or path in (
            "stuck",
            "gates",
            "tasks",
            "health",
        )
    assert [len(w["current"]) for w in client.get(f"{API}/workers").json()["workers"]] == [1]


def test_a_second_users_token_is_his_own(site: Db, client: TestClient) -> None:
    """Two users: each is known by his name, to revoke one leaves the other, and neither can use the other's session."""
    ann, bob = web.token(site, "read", "operate", name="ann"), web.token(site, "read", name="bob")
    body = {"ids": [3]}
    assert client.post(f"{HERE}/lanes/fetch/retry", json=body, headers=web.bearer(bob)).status_code == 403
    assert client.post(f"{HERE}/lanes/fetch/retry", json=body, headers=web.bearer(ann)).status_code == 200
    assert client.get(f"{API}/audit", headers=web.bearer(ann)).json()["entries"][0]["who"] == "ann"
    web.login(client, bob)
    session = client.cookies["rowmill_session"]
    # Bob's session has Bob's rights, and is no token for a program.
    form = {"X-CSRF-Token": _csrf(session)}
    assert client.post(f"{HERE}/lanes/fetch/retry", json=body, headers=form).status_code == 403
    client.cookies.clear()
    assert client.get(f"{API}/status", headers=web.bearer(session)).status_code == 401
    site.execute("update rowmill_tokens set revoked_at = created_at where name = 'bob' and session_of is null")
    assert client.get(f"{API}/status", headers=web.bearer(bob)).status_code == 401
    client.cookies.set("rowmill_session", session)
    assert client.get(f"{API}/status").status_code == 401
    assert client.get(f"{API}/status", headers=web.bearer(ann)).status_code == 200


def test_a_session_writes_through_the_api_only_with_its_forms_number(site: Db, client: TestClient) -> None:
    """A forged request of another site's page carries the cookie, and nothing else."""
    web.login(client, web.token(site, "read", "operate"))
    path, body = f"{HERE}/lanes/fetch/retry", {"ids": [3]}
    assert client.get(f"{API}/status").status_code == 200
    assert client.post(path, json=body).status_code == 403
    assert client.post(path, json=body, headers={"X-CSRF-Token": "0" * 64}).status_code == 403
    assert site.value("select status from pages where id = 3") == "given up"
    form = {"X-CSRF-Token": _csrf(client.cookies["rowmill_session"])}
    assert client.post(path, json=body, headers={**form, "Origin": "https://evil.example"}).status_code == 403
    assert client.post(path, json=body, headers=form).status_code == 200


def test_another_sites_page_does_nothing_on_an_open_server(site: Db, client: TestClient) -> None:
    """No token is needed on a loopback address; a page in the same browser must not profit from that."""
    path, body = f"{HERE}/lanes/fetch/retry", {"ids": [3]}
    evil = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert client.post(path, json=body, headers=evil).status_code == 403
    assert client.post(path, json=body, headers={"Sec-Fetch-Site": "same-site"}).status_code == 403
    assert client.post(path, content=b'{"ids": [3]}', headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.options(path, headers=evil).headers.get("access-control-allow-origin") is None
    assert site.value("select status from pages where id = 3") == "given up"
    assert client.post(path, json=body).status_code == 200


def test_a_token_past_its_end_is_refused(site: Db, client: TestClient) -> None:
    secret = web.token(site, "read", days=1)
    assert client.get(f"{API}/status", headers=web.bearer(secret)).status_code == 200
    site.execute("update rowmill_tokens set expires_at = created_at")
    assert client.get(f"{API}/status", headers=web.bearer(secret)).status_code == 401


def _csrf(session: str) -> str:
    return hmac.new(session.encode(), b"rowmill form", "sha256").hexdigest()
