"""The audit log has every action, also those that were cut off, and every failed login."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

import web
from databases import Db
from rowmill.ops.row_actions import STEP, Operator
from rowmill.store.inspect import failure_families
from rowmill.web import api

API = "/api/v1"
LANE = f"{API}/environments/default/lanes/fetch"


@pytest.fixture
def site(db: Db) -> Db:
    web.create_pages(db)
    db.insert("pages", [{"url": "a", "status": "given up", "error": "boom"}] * (2 * STEP))
    return db


@pytest.fixture
def client(site: Db) -> Iterator[TestClient]:
    with web.served(web.make_mill(site)) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [("retry", {"state": "dead"}), ("errors/retry", {"error": failure_families.fingerprint("boom")})],
    ids=["rows", "family"],
)
def test_an_action_that_is_cut_off_is_in_the_audit_log(
    site: Db, client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The time limit ends a bulk action after its first step of rows was written."""
    limits: list[asyncio.Timeout] = []
    before: list[Any] = []
    steps = 0
    step, timeout = Operator._step, asyncio.timeout

    def limited(seconds: float) -> asyncio.Timeout:
        limits.append(timeout(seconds))
        return limits[-1]

    async def slow(self: Operator, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 1:
            limits[0].reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()
        before.extend(site.query("select action, outcome from rowmill_audit"))
        return await step(self, *args)

    monkeypatch.setattr(Operator, "_step", slow)
    monkeypatch.setattr(api.asyncio, "timeout", limited)
    answer = client.post(f"{LANE}/{path}", json=body)
    assert answer.status_code == 503, answer.text
    assert site.value("select count(*) from pages where status = 'new'") == STEP
    assert [entry["outcome"] for entry in before] == ["started"], "the entry is there before the first row is written"
    (entry,) = site.query("select who, action, lane, target, outcome, detail from rowmill_audit")
    assert (entry["who"], entry["lane"], entry["outcome"]) == ("open", "fetch", "failed")
    assert entry["target"] == ", ".join(f"{name}={value}" for name, value in body.items())
    assert "1,000 rows" in entry["detail"]


def test_an_action_that_ended_has_one_entry_with_its_outcome(site: Db, client: TestClient) -> None:
    assert client.post(f"{LANE}/retry", json={"state": "dead"}).status_code == 200
    assert client.post(f"{LANE}/retry", json={"state": "canceled"}).status_code == 200
    assert client.post(f"{LANE}/gates/set", json={"key": "a"}).status_code == 422
    kept = site.query("select outcome, detail from rowmill_audit order by id")
    assert [(entry["outcome"], entry["detail"]) for entry in kept[:2]] == [("done", "2000 rows"), ("nothing", "0 rows")]
    assert [entry["outcome"] for entry in kept[2:]] == ["refused"]


def test_failed_logins_are_logged_and_audited(site: Db, client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    web.token(site, "read")
    caplog.set_level(logging.INFO, "rowmill.audit")
    assert web.login(client, "rm_guess").status_code == 401
    assert client.get(f"{API}/status", headers=web.bearer("rm_other")).status_code == 401
    kept = site.query("select who, address, action, target, outcome, detail from rowmill_audit order by id")
    assert [(entry["action"], entry["target"], entry["outcome"]) for entry in kept] == [
        ("login", "/login", "refused"),
        ("login", f"{API}/status", "refused"),
    ]
    assert {entry["who"] for entry in kept} == {"nobody"}
    assert {entry["address"] for entry in kept} == {"testclient"}
    told = [record.getMessage() for record in caplog.records if record.name == "rowmill.audit"]
    assert len(told) == 2
    assert all("refused" in line for line in told)
    assert "rm_" not in str(kept) + str(told)


def test_tries_at_the_same_time_are_counted(site: Db, client: TestClient) -> None:
    """Fifty guesses at once are no more than fifty in a row: ten are looked at, the others wait."""
    web.token(site, "read")
    answers = together(client, [f"rm_{n}" for n in range(50)])
    assert sorted(answers) == [401] * 10 + [429] * 40


def test_who_has_a_good_token_may_send_many_requests_at_once(site: Db, client: TestClient) -> None:
    secret = web.token(site, "read")
    assert together(client, [secret] * 50) == [200] * 50


def together(client: TestClient, secrets: list[str]) -> list[int]:
    """The answers to requests that are sent at the same time."""

    async def send() -> list[int]:
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url=web.LOCAL) as many:
            sent = [many.get(f"{API}/lanes", headers=web.bearer(secret)) for secret in secrets]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    assert client.portal is not None
    found: list[int] = client.portal.call(send)
    return found
