"""What somebody tries who should not get further, and what happens to somebody without luck."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.testclient import TestClient

import web
from databases import Db
from rowmill import Mill
from rowmill.errors import Unreachable
from rowmill.web import live

HTML = {"Accept": "text/html"}
LANE = "/api/v1/environments/default/lanes"


def lone_lanes(db: Db) -> Mill:
    """The two lanes on pages, and one beside them whose table is not there."""
    mill = web.make_mill(db)

    @mill.lane("vault", name="vault", ready={"status": "new"}, running={"status": "x"}, done={"status": "y"})
    async def open_vault(job: Any) -> None: ...

    return mill


@pytest.fixture
def client(db: Db) -> Iterator[TestClient]:
    web.create_pages(db)
    with web.served(lone_lanes(db)) as client:
        yield client


def test_a_token_for_one_lane_is_told_of_no_other_on_any_page(db: Db, client: TestClient) -> None:
    """Issue 9.2: per lane; a page names no lane that its reader may not see, not even one that is broken."""
    limited = web.bearer(web.token(db, "read", "operate", lanes=["fetch"])) | HTML
    whole = web.bearer(web.token(db, "read")) | HTML
    assert "vault" in client.get("/health", headers=whole).text
    assert "lane=read" in client.get("/lane?lane=fetch", headers=whole).text
    for path in ("/", "/errors", "/workers", "/health", "/tasks", "/lane?lane=fetch"):
        page = client.get(path, headers=limited)
        assert page.status_code == 200, path
        assert "vault" not in page.text, path
        assert "lane=read" not in page.text, path
        assert "lane=mail" not in page.text, path


def test_who_may_not_see_a_lane_does_not_learn_whether_there_is_one(db: Db, client: TestClient) -> None:
    """Issue 9.2: the answer is the same for a lane of others and for none."""
    limited = web.bearer(web.token(db, "read", lanes=["fetch"])) | HTML
    for path in ("/lane", "/row", "/error"):
        assert client.get(f"{path}?lane=fetch", headers=limited).status_code != 403
        refused = [client.get(f"{path}?lane={name}", headers=limited) for name in ("vault", "nowhere")]
        assert [answer.status_code for answer in refused] == [403, 403], path
        assert [client.get(f"{path}?lane={name}", headers=HTML).status_code for name in ("vault", "nowhere")] == [
            303,
            303,
        ], path


def test_budgets_are_shown_to_who_may_see_every_lane(db: Db, client: TestClient) -> None:
    """Issue 9.2: a budget is spent by all lanes, so a token for one does not see it."""
    whole = web.bearer(web.token(db, "read", "operate"))
    assert client.post(f"{LANE}/fetch/gates/set", json={"key": "a", "most": 1}, headers=whole).status_code == 200
    db.execute("insert into rowmill_gates (lane, dim, key, cells) values ('', 'budget:vendor', '', '{}')")
    limited = web.bearer(web.token(db, "read", lanes=["fetch"]))
    assert client.get("/api/v1/gates", headers=whole).json()["budgets"][0]["budget"] == "vendor"
    assert client.get("/api/v1/gates", headers=limited).json()["budgets"] == []


@pytest.mark.parametrize("kind", ["pair", "time"])
def test_a_key_that_is_no_key_is_refused_and_is_no_mistake_of_ours(pg: Db, kind: str) -> None:
    """Issue 9, how it is judged: no 5xx, whatever stands where an id should."""
    keys = {"pair": "a text, b integer, primary key (a, b)", "time": "at timestamptz primary key"}[kind]
    pg.execute(f"create table odd (status text not null default 'new', worker text, {keys})")
    mill = Mill(pg.url)

    @mill.lane("odd", ready={"status": "new"}, running={"status": "x"}, done={"status": "y"}, dead={"status": "z"})
    async def odd(job: Any) -> None: ...

    given = ["a\rb,1", "a\nb,1", "[" * 5000, "0001-01-01T00:00+23:59", "9999-12-31T23:59:59-23:59", "a\0,1", '"', "[1"]
    with web.served(mill) as client:
        shown = client.get("/lane?lane=odd", headers=HTML)
        assert shown.status_code == 200, shown.text
        for text in given:
            sent = quote(text, safe="")
            for path in (f"/row?lane=odd&id={sent}", f"/lane?lane=odd&after={sent}", f"/lane?lane=odd&q={sent}"):
                assert client.get(path, headers=HTML).status_code < 500, (path, text)
            assert client.get(f"{LANE}/odd/rows/{sent}").status_code < 500, text
            assert client.post(f"{LANE}/odd/retry", json={"ids": [text]}).status_code < 500, text


def test_what_was_refused_is_in_the_audit_log_whatever_refused_it(db: Db, client: TestClient) -> None:
    """Issue 9.2, an audit log of every action: a missing scope, a lane of others, a task of others."""
    reader = web.bearer(web.token(db, "read", name="reader"))
    other = web.bearer(web.token(db, "read", "operate", "enqueue", lanes=["fetch"], name="other"))
    tries: list[tuple[Any, str, dict[str, Any], str]] = [
        (reader, f"{LANE}/fetch/retry", {"ids": ["1"]}, "retry"),
        (reader, "/api/v1/environments/default/pause", {}, "pause"),
        (reader, "/api/v1/tasks/mail", {"args": {"to": "a"}}, "enqueue"),
        (other, f"{LANE}/read/cancel", {"ids": ["1"]}, "cancel"),
        (other, "/api/v1/tasks/mail", {"args": {"to": "a"}}, "enqueue"),
    ]
    for headers, path, body, _ in tries:
        assert client.post(path, json=body, headers=headers).status_code == 403, path
    kept = db.query("select who, action, outcome from rowmill_audit order by id")
    told = [(entry["who"], entry["action"], entry["outcome"]) for entry in kept]
    assert told == [("reader" if who is reader else "other", action, "refused") for who, _, _, action in tries]


def test_the_audit_log_names_the_rows_and_forgets_after_half_a_year(db: Db, client: TestClient) -> None:
    """Issue 9.2: which rows an action was about stands there; what is older than it says is dropped by itself."""
    assert client.post(f"{LANE}/fetch/retry", json={"ids": ["1"]}).status_code == 200
    (first,) = db.query("select id from rowmill_audit")
    db.execute("update rowmill_audit set at = '2020-01-01 00:00:00.000'")
    client.app.state.audit._forgot = float("-inf")
    ids = [str(1_000_000 + i) for i in range(100)]
    assert client.post(f"{LANE}/fetch/retry", json={"ids": ids}).status_code == 200
    (left,) = db.query("select id, target from rowmill_audit")
    assert left["id"] != first["id"]
    assert all(id in left["target"] for id in ids)


@pytest.mark.parametrize("given", ["x" * 100_000, "a\0b"], ids=["endless", "nul"])
def test_a_form_with_text_that_nobody_typed_changes_nothing(db: Db, client: TestClient, given: str) -> None:
    """Issue 9.2: forms are held to what the API takes; what is kept is shown on every page."""
    csrf = web.csrf(client.get("/lane?lane=fetch", headers=HTML).text)
    sent = {"csrf": csrf, "env": "default", "lane": "fetch"}
    for verb, further in (
        ("pause", {"reason": given}),
        ("pause", {"key": given, "by": "domain"}),
        ("cancel", {"id": "1", "reason": given}),
        ("retry", {"id": given}),
        ("retry_family", {"error": given, "sure": "yes"}),
    ):
        answer = client.post(f"/act/{verb}", data=sent | further, headers=HTML)
        assert answer.status_code == 422, (verb, answer.text[:200])
        assert len(answer.text) < 2000
    assert client.get("/api/v1/status").json()["paused"] == []


def test_a_stream_ends_with_its_token_and_outlives_an_outage(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 9.1, 9.2: who was shut out sees nothing new; while nobody can tell, nothing is sent; then it goes on."""
    web.create_pages(db)
    monkeypatch.setattr(live, "_CHECK", 0.0)
    monkeypatch.setattr(live, "EVERY", 0.05)
    headers = web.bearer(web.token(db, "read", name="ann")) | HTML
    with web.listening(web.make_mill(db)) as (url, app):
        tokens = app.state.authenticator.tokens
        find, away = tokens.find, 0

        async def none(secret: str) -> Any:
            nonlocal away
            away += 1
            raise Unreachable("cannot reach it")

        with httpx.stream("GET", f"{url}/?live=1", headers=headers, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert any(line.startswith("data: ") for line in islice(lines, 50))
            monkeypatch.setattr(tokens, "find", none)
            while away < 3:  # the stream is still there
                next(lines)
            assert any(line == "event: away" for line in islice(lines, 50))
            db.execute("insert into pages (url) values ('x')")
            monkeypatch.setattr(tokens, "find", find)
            assert any(line.startswith("data: ") for line in islice(lines, 200))
            db.execute("update rowmill_tokens set revoked_at = '2020-01-01 00:00:00.000'")
            assert any(line == "event: gone" for line in islice(lines, 50))
            assert next(lines) == "data: {}"
            assert next(lines, None) is None


def test_an_environment_without_tables_and_one_that_is_down_leave_the_others_health(pg: Db, tmp_path: Path) -> None:
    """Issue 9.1: environments side by side; what one lacks, the others still answer. No password is told."""
    web.create_pages(pg)
    (tmp_path / "bare.db").touch()
    down = "postgresql://ann:geheim@127.0.0.1:1/none"
    mill = Mill({"main": pg.url, "bare": f"sqlite:///{tmp_path}/bare.db", "down": down})

    @mill.lane("pages", ready={"status": "new"}, running={"status": "x"}, done={"status": "y"}, dead={"status": "z"})
    async def fetch(job: Any) -> None: ...

    with web.served(mill) as client:
        answer = client.get("/api/v1/health")
        assert answer.status_code == 200, answer.text
        main, bare, down_ = answer.json()["environments"]
        assert main["findings"]
        assert not main["errors"]
        assert "there is no table" in bare["errors"][0]["error"]
        assert [error["unreachable"] for error in down_["errors"]] == [True]
        (one,) = client.get("/api/v1/health?env=bare").json()["environments"]
        assert one["environment"] == "bare"
        for path in ("/", "/health", "/errors", "/lane?lane=fetch&env=down", "/api/v1/status", "/api/v1/overview"):
            assert "geheim" not in client.get(path, headers=HTML).text, path
