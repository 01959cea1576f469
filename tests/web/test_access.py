"""Who may use the dashboard and the API: logins, forms, hosts, sizes. Each attack is a test of its own."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

import web
from databases import Db

HTML = {"Accept": "text/html"}


@pytest.fixture
def mill_db(db: Db) -> Db:
    web.create_pages(db)
    return db


@pytest.fixture
def client(mill_db: Db) -> Iterator[TestClient]:
    with web.served(web.make_mill(mill_db)) as client:
        yield client


def test_a_login_gives_a_session_that_ends_with_its_token(mill_db: Db, client: TestClient) -> None:
    secret = web.token(mill_db, "read", name="ann")
    answer = web.login(client, secret)
    assert answer.status_code == 303, answer.text
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert secret not in cookie
    assert client.get("/login", headers=HTML).headers["location"] == "/"
    kept = mill_db.query("select digest, session_of from rowmill_tokens order by created_at")
    assert all(secret not in row["digest"] and len(row["digest"]) == 64 for row in kept)
    mill_db.execute("update rowmill_tokens set revoked_at = created_at where session_of is null")
    assert client.get("/login", headers=HTML).status_code == 200


def test_logging_out_ends_the_session_for_good(mill_db: Db, client: TestClient) -> None:
    web.login(client, web.token(mill_db, "read"))
    cookie = client.cookies["rowmill_session"]
    assert client.post("/logout", headers=HTML).status_code == 403  # without the form's own number
    right = hmac.new(cookie.encode(), b"rowmill form", "sha256").hexdigest()
    assert client.post("/logout", data={"csrf": right}, headers=HTML).status_code == 303
    assert mill_db.value("select count(*) from rowmill_tokens where session_of is not null") == 0
    client.cookies.set("rowmill_session", cookie)
    assert client.get("/login", headers=HTML).status_code == 200


def test_a_forged_form_is_refused(mill_db: Db, client: TestClient) -> None:
    secret = web.token(mill_db, "read")
    assert client.post("/login", data={"token": secret}, headers=HTML).status_code == 403
    page = client.get("/login", headers=HTML)
    form = {"csrf": web.csrf(page.text), "token": secret}
    evil = {**HTML, "Origin": "https://evil.example"}
    assert client.post("/login", data=form, headers=evil).status_code == 403
    assert client.post("/login", data=form, headers={**HTML, "Origin": "null"}).status_code == 403
    assert client.post("/login", data=form, headers={**HTML, "Sec-Fetch-Site": "same-site"}).status_code == 403
    assert client.post("/login", data=form, headers={**HTML, "Origin": web.LOCAL}).status_code == 303


def test_a_form_of_another_visitor_is_refused(mill_db: Db, client: TestClient) -> None:
    theirs = web.csrf(client.get("/login", headers=HTML).text) if web.token(mill_db, "read") else ""
    client.cookies.clear()
    client.get("/login", headers=HTML)
    assert client.post("/login", data={"csrf": theirs, "token": "x"}, headers=HTML).status_code == 403


def test_a_foreign_host_header_is_refused(client: TestClient) -> None:
    """A name of the attacker's that leads to this machine (DNS rebinding)."""
    for host in ("evil.example", "evil.example:8321", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        answer = client.get("/login", headers={"Host": host})
        assert answer.status_code == 421, host
        assert answer.headers["content-type"] == "application/problem+json"
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8321", "[::1]:8321"):
        assert client.get("/login", headers={"Host": host}).status_code != 421, host


def test_brute_forced_logins_have_to_wait(mill_db: Db, client: TestClient) -> None:
    secret = web.token(mill_db, "read")
    codes = [web.login(client, f"rm_guess{n}").status_code for n in range(14)]
    assert codes == [401] * 10 + [429] * 4
    answer = web.login(client, secret)
    assert answer.status_code == 429
    assert client.get("/api/v1/status", headers=web.bearer("rm_other")).status_code == 429


def test_who_has_shown_a_good_token_does_not_wait_for_what_others_tried(mill_db: Db, client: TestClient) -> None:
    secret = web.token(mill_db, "read")
    known = client.get("/nothing", headers=web.bearer(secret)).status_code
    for n in range(12):
        client.get("/nothing", headers=web.bearer(f"rm_{n}"))
    assert client.get("/nothing", headers=web.bearer("rm_more")).status_code == 429
    assert client.get("/nothing", headers=web.bearer(secret)).status_code == known == 404


def test_a_huge_body_is_refused_before_it_is_read(client: TestClient) -> None:
    answer = client.post("/login", content=b"x" * (1024 * 1024 + 1))
    assert answer.status_code == 413
    assert answer.json()["status"] == 413

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 65536

    assert client.post("/login", content=parts()).status_code == 413
    assert client.post("/login", content=b"", headers={"Content-Length": "9" * 30}).status_code == 413


def test_every_answer_keeps_a_browser_on_its_guard(client: TestClient) -> None:
    for path in ("/login", "/nothing", "/api/v1/status"):
        headers = client.get(path, headers=HTML).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_what_a_proxy_hands_on_is_not_open(client: TestClient) -> None:
    assert client.get("/login", headers=HTML).headers.get("location") == "/"
    assert client.get("/login", headers={**HTML, "X-Forwarded-For": "203.0.113.9"}).status_code == 200


def test_to_revoke_the_last_token_opens_nothing(mill_db: Db, client: TestClient) -> None:
    web.token(mill_db, "read")
    mill_db.execute("update rowmill_tokens set revoked_at = created_at")
    assert client.get("/login", headers=HTML).status_code == 200
