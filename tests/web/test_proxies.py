"""Behind a proxy: forwarded headers are believed from trusted addresses, and warned about from others."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import web
from command import Command
from databases import Db
from rowmill.errors import DeclarationError
from rowmill.web.guard import Proxies, check_address

HTML = {"Accept": "text/html"}
FORWARDED = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}


async def told(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope)
    assert request.client is not None
    await JSONResponse([request.client.host, request.url.scheme])(scope, receive, send)


async def ask(app: ASGIApp, address: str, headers: dict[str, str]) -> list[str]:
    """What the application is told of a request that comes from an address."""
    transport = httpx.ASGITransport(app, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://mill.example") as client:
        found: list[str] = (await client.get("/", headers=headers)).json()
        return found


@pytest.mark.parametrize("trusted", ["10.1.2.3", "10.0.0.0/8", "10.1.2.9/16", "fd00::/8"])
async def test_a_trusted_proxy_is_believed(trusted: str, caplog: pytest.LogCaptureFixture) -> None:
    address = "fd00::5" if ":" in trusted else "10.1.2.3"
    assert await ask(Proxies(told, [trusted]), address, FORWARDED) == ["203.0.113.9", "https"]
    assert caplog.records == []


@pytest.mark.parametrize("headers", [FORWARDED, {"Forwarded": "for=203.0.113.9"}, {"Via": "1.1 x"}, {"X-Real-IP": "x"}])
async def test_another_address_is_not_believed_and_warned_about_once(
    headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rowmill.web")
    app = Proxies(told, ["127.0.0.1"])
    for _ in range(3):
        assert await ask(app, "10.1.2.3", headers) == ["10.1.2.3", "http"]
    (record,) = caplog.records
    assert "from 10.1.2.3 are ignored" in record.getMessage()
    assert "Try: rowmill serve --trust-proxy 10.1.2.3" in record.getMessage()


async def test_a_request_without_a_proxy_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert await ask(Proxies(told, []), "10.1.2.3", {}) == ["10.1.2.3", "http"]
    assert caplog.records == []


@pytest.mark.parametrize("text", ["*", "ingress", "10.0.0.0/99", ""])
def test_a_proxy_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(DeclarationError, match="is not an address or a network") as caught:
        check_address(text)
    assert caught.value.hint == "--trust-proxy 10.0.0.0/8"


@pytest.mark.parametrize("name", ["X-Forwarded-For", "X-Forwarded-Host", "Forwarded", "Via", "X-Real-IP"])
def test_a_dashboard_without_tokens_refuses_what_a_proxy_hands_on(db: Db, name: str) -> None:
    web.create_pages(db)
    with web.served(web.make_mill(db)) as client:
        assert client.get("/api/v1/status").status_code == 200
        assert client.get("/api/v1/status", headers={name: "x"}).status_code == 401
        assert client.get("/", headers={**HTML, name: "x"}).headers["location"] == "/login"


def test_serve_takes_the_addresses_of_trusted_proxies(
    lite: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Secure flag and the audit log's address are the client's, not the proxy's."""
    command = Command(tmp_path, monkeypatch, capsys)
    web.create_pages(lite)
    reference = command.app(lite.url, "from web import make_mill", f"mill = make_mill({lite.url!r})")
    wrong = command("serve", "--trust-proxy", "ingress")
    assert (wrong.code, "Try: --trust-proxy 10.0.0.0/8" in wrong.err) == (1, True), wrong
    secret = web.token(lite, "read")
    server = subprocess.Popen(
        [sys.executable, "-m", "rowmill", "serve", reference, "--port", "0", "--trust-proxy", "127.0.0.0/8"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        lines = (server.stderr.readline() for _ in range(20))
        address = next(found for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))[0]
        with httpx.Client(base_url=address, headers={**HTML, **FORWARDED}, timeout=60) as client:
            page = client.get("/login")
            form = {"csrf": web.csrf(page.text), "token": secret}
            visit = page.headers["set-cookie"].partition(";")[0]  # a Secure cookie does not go over this plain line
            answer = client.post("/login", data=form, headers={"Cookie": visit})
        assert answer.status_code == 303, answer.text
        assert "Secure" in answer.headers["set-cookie"]
        assert lite.value("select address from rowmill_audit") == "203.0.113.9"
    finally:
        server.kill()
        server.wait(60)
        if server.stderr is not None:
            server.stderr.close()
