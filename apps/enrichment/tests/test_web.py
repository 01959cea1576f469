"""The web side: creates, shows, checks who may see what; and does none of the work."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from uuid import uuid4

import httpx
import pytest

from apps.enrichment import web
from apps.enrichment.tests.conftest import App, netscape
from apps.enrichment.tests.crowd import ROOT
from apps.standins import sites
from apps.standins.internet import Internet

URLS = ("https://a.example/1", "https://a.example/2")


@pytest.fixture
async def client(app: App) -> AsyncIterator[httpx.AsyncClient]:
    side = web.app(app.db.url)
    async with (
        side.router.lifespan_context(side),
        httpx.AsyncClient(transport=httpx.ASGITransport(side), base_url="http://web") as client,
    ):
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_the_web_side_creates_and_shows_and_leaves_the_work_to_workers(
    app: App, client: httpx.AsyncClient, net: Internet
) -> None:
    """C1: an import that was uploaded stays queued until a worker finds it in the database; then it shows."""
    net.default = sites.page()
    _, token = app.user()
    made = await client.post("/imports", content=netscape(*URLS), headers=bearer(token))
    assert (made.status_code, made.json()["status"], made.json()["source_type"]) == (201, "queued", "chrome_html")
    address = f"/imports/{made.json()['id']}"
    assert app.db.value("select count(*) from enrichment_jobs") == 0
    assert (await client.get(address, headers=bearer(token))).json()["status"] == "queued"
    assert net.visits == []
    await app.kit.drain("read", "enrich")
    shown = (await client.get(address, headers=bearer(token))).json()
    assert (shown["status"], shown["total_items"], shown["processed_items"]) == ("succeeded", 2, 2)
    links = (await client.get(f"{address}/links", headers=bearer(token))).json()
    assert [(link["url"], link["status"], link["title"]) for link in links] == [
        (url, "succeeded", f"Page {url[-2:]} at a.example") for url in URLS
    ]
    rest = (await client.get(f"{address}/links", params={"after": 0}, headers=bearer(token))).json()
    assert [link["position"] for link in rest] == [1]


async def test_nobody_sees_or_changes_what_is_another_s(app: App, client: httpx.AsyncClient) -> None:
    """C1: another user's import is answered, by every route, like one that does not exist."""
    (_, ada), (_, eve) = app.user("ada"), app.user("eve")
    id = (await client.post("/imports", content=netscape(*URLS), headers=bearer(ada))).json()["id"]
    for method, path in [("GET", ""), ("GET", "/links"), ("POST", "/cancel")]:
        hers = await client.request(method, f"/imports/{id}{path}", headers=bearer(eve))
        nobodys = await client.request(method, f"/imports/{uuid4()}{path}", headers=bearer(eve))
        assert (hers.status_code, hers.content) == (nobodys.status_code, nobodys.content)
        assert hers.status_code == 404
    assert (await client.get("/imports", headers=bearer(eve))).json() == []
    assert [row["id"] for row in (await client.get("/imports", headers=bearer(ada))).json()] == [id]
    assert app.db.value("select status from import_jobs") == "queued"


async def test_without_a_valid_token_there_is_nothing(app: App, client: httpx.AsyncClient) -> None:
    """C1: no token, a wrong one, another scheme: 401 on every route, and nothing is created."""
    _, token = app.user()
    wrong = [{}, bearer(""), bearer("wrong"), {"authorization": token}, {"authorization": f"Basic {token}"}]
    hashed = app.db.value("select token_hash from users")
    wrong.append(bearer(hashed.hex()))
    for headers in wrong:
        for method, path in [("POST", ""), ("GET", ""), ("GET", f"/{uuid4()}"), ("POST", f"/{uuid4()}/cancel")]:
            answer = await client.request(method, f"/imports{path}", headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert app.db.value("select count(*) from import_jobs") == 0


async def test_tokens_are_kept_as_hashes_alone(app: App) -> None:
    """C1: the command shows a new user's token once; the database has only its hash."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "ROWMILL_DATABASE_URL": app.db.url}
    command = [sys.executable, "-m", "apps.enrichment.users", "ada"]
    ended = await asyncio.to_thread(subprocess.run, command, env=environment, cwd=ROOT, capture_output=True, text=True)
    token = ended.stdout.strip()
    assert len(token) > 30
    assert app.db.value("select token_hash from users where name = 'ada'") == hashlib.sha256(token.encode()).digest()
    assert app.db.value("select count(*) from users u where u::text like ?", f"%{token}%") == 0


async def test_a_user_cancels_his_import_once(app: App, client: httpx.AsyncClient) -> None:
    """C1, C2: canceled, and over."""
    _, token = app.user()
    id = (await client.post("/imports", content=netscape(*URLS), headers=bearer(token))).json()["id"]
    first = await client.post(f"/imports/{id}/cancel", headers=bearer(token))
    assert (first.status_code, first.json()["status"]) == (200, "canceled")
    assert (await client.post(f"/imports/{id}/cancel", headers=bearer(token))).status_code == 409
    assert await app.kit.step("read") is None
    assert app.db.value("select count(*) from import_files") == 0


async def test_mistakes_are_answered_with_what_to_do(
    app: App, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: nothing, too much, and what is not a position."""
    _, token = app.user()
    monkeypatch.setenv("ENRICHMENT_UPLOAD_BYTES", "100")
    empty = await client.post("/imports", headers=bearer(token))
    large = await client.post("/imports", content=b"x" * 101, headers=bearer(token))
    positions = ("x", "--5", "²", "٣", "1" * 10, "")
    odd = [
        await client.get(f"/imports/{uuid4()}/links", params={"after": after}, headers=bearer(token))
        for after in positions
    ]
    assert [answer.status_code for answer in (empty, large, *odd)] == [400, 413, *[400] * len(positions)]
    assert all(answer.json()["try"] for answer in (empty, large, *odd))
    assert app.db.value("select count(*) from import_jobs") == 0
