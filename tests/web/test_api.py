"""The HTTP API on both databases: what it shows, what it does, and how it says no."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

import command
import systems
import web
from databases import Db, as_time, make_own_tables
from rowmill import Mill
from rowmill.web.endpoints import ENDPOINTS

API = "/api/v1"
JSON = {"Content-Type": "application/json"}
FETCH = f"{API}/environments/default/lanes/fetch"


@pytest.fixture
def site(db: Db) -> Db:
    """Seven pages: 2 new, 1 waiting, 1 being fetched by somebody silent, 1 fetched, 1 given up, 1 read."""
    web.create_pages(db)
    at = datetime.now(UTC)
    rows: list[dict[str, Any]] = [
        {"url": "https://a.example/1", "domain": "a.example"},
        {"url": "https://b.example/<script>alert(1)</script>", "domain": "b.example"},
        {"url": "https://a.example/3", "domain": "a.example", "run_after": at + timedelta(hours=1), "attempts": 1},
        {"url": "https://a.example/4", "domain": "a.example", "status": "fetching", "worker": "w-1",
         "claimed_at": at - timedelta(hours=1), "heartbeat_at": at - timedelta(hours=1)},
        {"url": "https://b.example/5", "domain": "b.example", "status": "fetched"},
        {"url": "https://b.example/6", "domain": "b.example", "status": "given up", "error": "forbidden"},
        {"url": "https://b.example/7", "domain": "b.example", "status": "read"},
    ]  # fmt: skip
    for row in rows:
        db.insert("pages", [row])
    return db


@pytest.fixture
def client(site: Db) -> Iterator[TestClient]:
    with web.served(web.make_mill(site), inserts=["fetch"]) as client:
        yield client


def get(client: TestClient, path: str, status: int = 200, **params: Any) -> Any:
    answer = client.get(path if path.startswith("/") else f"{API}/{path}", params=params)
    assert answer.status_code == status, answer.text
    return answer.json()


def post(client: TestClient, path: str, body: Any, status: int = 200) -> Any:
    answer = client.post(path if path.startswith("/") else f"{API}/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_status_counts_rows_by_lane_and_state(client: TestClient) -> None:
    found = get(client, "status")
    assert [entry["lane"] for entry in found["lanes"]] == ["fetch", "read", "default", "mail"]
    counts = found["lanes"][0]["counts"]
    assert (counts["ready"], counts["waiting"], counts["running"], counts["stuck"]) == (2, 1, 1, 1)
    assert [e["lane"] for e in get(client, "status", lane="read")["lanes"]] == ["read"]
    assert get(client, "status", 404, lane="fetsch")["hint"] == "did you mean 'fetch'?"
    assert get(client, "status", 404, env="prod")["detail"] == "there is no environment 'prod'"


def test_what_the_commands_show_is_in_the_api(site: Db, client: TestClient, tmp_path: Any, capsys: Any) -> None:
    """Everything `rowmill status, workers, stuck, jobs, why, gates` show is in the API, under the same names."""
    command.register(
        site, "w-9", state="busy", current=[{"lane": "fetch", "id": 4, "seconds": 1, "environment": "default"}]
    )
    with pytest.MonkeyPatch.context() as patch:
        run = command.Command(tmp_path, patch, capsys)
        run.app(site.url, "from web import make_mill", f"mill = make_mill({site.url!r})")

        def same(words: list[str], path: str, part: str | None = None) -> None:
            told, shown = run.json(*words), get(client, path)
            for one, other in [(told[part], shown[part])] if part else [(told, shown)]:
                for mine, theirs in zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]:
                    assert mine.keys() <= theirs.keys(), words

        same(["status"], "status", "lanes")
        same(["status"], "status")
        same(["workers"], "workers")
        same(["stuck"], "stuck", "rows")
        same(["jobs", "--lane", "fetch"], f"{FETCH}/rows", "rows")
        same(["gates"], "gates", "gates")
        same(["errors"], "errors", "environments")
        same(["why", "fetch", "3"], f"{FETCH}/rows/3/why")
        (whole,) = run.json("jobs", "--lane", "fetch", "--id", "1")["rows"]
        assert whole.items() <= get(client, f"{FETCH}/rows/1").items()


def test_rows_come_page_by_page_and_filtered(client: TestClient) -> None:
    first = get(client, f"{FETCH}/rows", limit=2)
    assert [row["id"] for row in first["rows"]] == [6, 5]  # 7 belongs to the other lane alone
    second = get(client, f"{FETCH}/rows", limit=2, after=first["next"])
    assert [row["id"] for row in second["rows"]] == [4, 3]
    last = get(client, f"{FETCH}/rows", limit=2, after=second["next"])
    assert ([row["id"] for row in last["rows"]], last["next"]) == ([2, 1], None)
    found = get(client, f"{FETCH}/rows", filter=["domain:eq:a.example", "url:has:/4"])
    assert [(row["id"], row["columns"]["domain"]) for row in found["rows"]] == [(4, "a.example")]
    assert [r["id"] for r in get(client, f"{FETCH}/rows", state="ready", order="oldest")["rows"]] == [1, 2]
    assert [r["id"] for r in get(client, f"{FETCH}/rows", search="forbidden")["rows"]] == [6]
    assert "did you mean 'domain'?" in get(client, f"{FETCH}/rows", 422, filter="domian:eq:x")["hint"]
    assert "one of eq" in get(client, f"{FETCH}/rows", 422, filter="domain:is:x")["hint"]
    get(client, f"{FETCH}/rows", 422, filter="nonsense")


def test_one_row_has_all_its_columns_and_a_script_in_one_is_only_text(client: TestClient) -> None:
    """A script in a column value is rendered harmless: as JSON, never as something that a browser would run."""
    answer = client.get(f"{FETCH}/rows/2", headers={"Accept": "text/html"})
    assert answer.json()["columns"]["url"] == "https://b.example/<script>alert(1)</script>"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    refused = client.get(f"{FETCH}/rows/<script>alert(1)<%2fscript>", headers={"Accept": "text/html"})
    assert refused.status_code in (404, 422)
    assert refused.headers["content-type"] == "application/problem+json"
    page = client.get("/<script>alert(1)</script>", headers={"Accept": "text/html"})
    assert page.status_code == 404
    assert "<script>" not in page.text
    assert get(client, f"{FETCH}/rows/99", 404)["detail"] == "no row of lane 'fetch' in 'default' has the id '99'"
    assert "is not an id" in get(client, f"{FETCH}/rows/seven", 422)["detail"]


def test_why_tells_what_holds_a_row_back(client: TestClient) -> None:
    found = get(client, f"{FETCH}/rows/3/why")
    assert (found["state"], {reason["code"] for reason in found["reasons"]}) == ("held", {"run_after", "no_worker"})
    get(client, f"{FETCH}/rows/99/why", 404)


def test_the_rows_page_shows_what_its_last_runs_logged(site: Db, client: TestClient) -> None:
    make_own_tables(site.url)
    nothing = client.get("/row?lane=fetch&id=1").text
    assert "No recent run of this row has logged anything" in nothing
    at = datetime.now(UTC)
    log = {"lane": "fetch", "row_id": "1", "at": at, "kept_until": at, "attempt": 2, "worker": "w-1", "outcome": "dead"}
    lines = json.dumps([[1.5, "info", "<b>begun</b>", None], [0.5, "error", "no\nanswer", "3"]])
    site.insert("rowmill_run_logs", [{**log, "dropped": 1200, "lines": lines}])
    page = client.get("/row?lane=fetch&id=1").text
    for shown in ("attempt 2: dead", "1,200 earlier lines", "&lt;b&gt;begun", "row 3", "no\nanswer", "2 lines"):
        assert shown in page, shown
    (run,) = get(client, f"{FETCH}/rows/1/logs")["runs"]
    began = datetime.fromisoformat(run["at"]) - datetime.fromisoformat(run["lines"][0]["at"])
    assert began == timedelta(seconds=1.5)
    assert get(client, f"{FETCH}/rows/1/logs", run=2)["runs"] == []
    get(client, f"{FETCH}/rows/99/logs", 404)


def test_rows_are_retried_canceled_and_released(site: Db, client: TestClient) -> None:
    found = post(client, f"{FETCH}/retry", {"ids": [6, "3", 4, 99]})
    assert (found["count"], sorted(found["ids"])) == (2, ["3", "6"])
    assert {p["id"]: p["reason"] for p in found["passed_over"]} == {"4": "it is running", "99": "no row has this id"}
    assert site.value("select status from pages where id = 6") == "new"
    assert post(client, f"{FETCH}/release", {"stuck": True})["count"] == 1
    assert site.value("select worker from pages where id = 4") is None
    assert post(client, f"{FETCH}/cancel", {"ids": [1], "reason": "not wanted"})["count"] == 1
    assert site.one("select status, error from pages where id = 1") == {"status": "canceled", "error": "not wanted"}
    assert post(client, f"{FETCH}/retry", {"state": "canceled"})["count"] == 1
    assert post(client, f"{FETCH}/retry", {"state": "canceled"})["count"] == 0
    for wrong in ({}, {"ids": [1], "state": "dead"}, {"ids": []}, {"state": "done"}, {"idz": [1]}):
        post(client, f"{FETCH}/retry", wrong, 422)
    assert "send running: true" in post(client, f"{FETCH}/cancel", {"state": "running"}, 422)["detail"]


def test_when_a_row_may_run_is_edited(site: Db, client: TestClient) -> None:
    when = datetime(2031, 5, 4, 3, 2, tzinfo=UTC)
    answer = client.patch(f"{FETCH}/rows/1", json={"run_after": when.isoformat()})
    assert answer.json()["count"] == 1, answer.text
    assert abs(as_time(site.value("select run_after from pages where id = 1")) - when) < timedelta(seconds=30)
    assert client.patch(f"{FETCH}/rows/4", json={"run_after": when.isoformat()}).status_code == 409
    assert client.patch(f"{FETCH}/rows/99", json={"run_after": when.isoformat()}).status_code == 404
    assert client.patch(f"{FETCH}/rows/1", json={"run_after": "tomorrow"}).status_code == 422


def test_pauses_begin_and_end(client: TestClient) -> None:
    pause, resume = f"{API}/environments/default/pause", f"{API}/environments/default/resume"
    found = post(client, pause, {"lane": "fetch", "reason": "they asked", "seconds": 600})
    assert 590 < found["seconds_left"] <= 600
    assert get(client, "status")["lanes"][0]["paused"] is True
    assert get(client, "status")["paused"][0]["reason"] == "they asked"
    assert post(client, pause, {"lane": "fetch", "key": "a.example"})["key"] == "a.example"
    assert post(client, resume, {"lane": "fetch"})["still_paused"][0]["key"] == "a.example"
    assert post(client, resume, {"lane": "fetch"})["resumed"] is None
    assert post(client, pause, {})["lane"] is None
    assert all(entry["paused"] for entry in get(client, "status")["lanes"])
    post(client, pause, {"key": "a.example"}, 422)
    post(client, pause, {"lane": "fetch", "seconds": 1, "until": "2031-01-01T00:00:00Z"}, 422)
    post(client, pause, {"lane": "read", "key": "a"}, 422)
    post(client, f"{API}/environments/prod/pause", {}, 404)


def test_gates_are_shown_set_and_reset(client: TestClient) -> None:
    found = post(client, f"{FETCH}/gates/set", {"key": "a.example", "most": 7, "closed_seconds": 60})
    assert (found["most"], found["key"]) == (7, "a.example")
    (gate,) = get(client, "gates")["gates"]
    assert (gate["by"], gate["keys"][0]["most"]) == ("domain", 7)
    assert post(client, f"{FETCH}/gates/reset", {"key": "a.example"})["count"] == 1
    assert get(client, "gates", key="a.example")["gates"][0]["keys"][0]["most"] == 2
    post(client, f"{FETCH}/gates/reset", {}, 422)
    post(client, f"{FETCH}/gates/set", {"key": "a.example"}, 422)
    assert "no rate gate" in post(client, f"{FETCH}/gates/set", {"key": "a.example", "tokens": 1}, 422)["detail"]


def test_tasks_are_enqueued_with_arguments_that_fit(site: Db, client: TestClient) -> None:
    assert [(t["task"], t["needs"]) for t in get(client, "tasks")["tasks"]] == [("report", ["to"]), ("mail", ["to"])]
    made = post(client, "tasks/report", {"args": {"to": "a@example.org", "pages": 3}, "key": "one", "priority": 5}, 201)
    assert made["lane"] == "default"
    again = post(client, "tasks/report", {"args": {"to": "a@example.org"}, "key": "one"}, 201)
    assert again["ids"] == made["ids"]
    job = get(client, f"tasks/report/jobs/{made['ids'][0]}")
    assert (job["state"], job["over"], job["attempts"]) == ("ready", False, 0)
    assert len(post(client, "tasks/mail", {"many": [{"to": "b"}, {"to": "c"}], "delay_seconds": 9}, 201)["ids"]) == 2
    assert site.value("select count(*) from rowmill_jobs") == 3
    for args in ({}, {"to": 7}, {"to": "a", "pagez": 1}, {"to": "a", "pages": "many"}, {"to": "a", "pages": True}):
        assert "handler takes" in str(post(client, "tasks/report", {"args": args}, 422)), args
    get(client, "tasks/mail/jobs/1", 404)  # it is one of the other task's
    get(client, "tasks/report/jobs/one", 422)
    assert get(client, "tasks/reprot/jobs/1", 404)["hint"] == "did you mean 'report'?"
    assert site.value("select count(*) from rowmill_jobs") == 3


def test_rows_are_made_where_that_is_allowed(site: Db, client: TestClient) -> None:
    made = post(client, f"{FETCH}/rows", {"columns": {"url": "https://c.example", "domain": "c", "size": 1.5}}, 201)
    assert (made["state"], made["columns"]["size"]) == ("ready", 1.5)
    assert site.value("select status from pages where id = ?", made["id"]) == "new"
    assert "written by rowmill" in post(client, f"{FETCH}/rows", {"columns": {"status": "read"}}, 422)["detail"]
    assert "no column" in post(client, f"{FETCH}/rows", {"columns": {"erl": "x"}}, 422)["detail"]
    post(client, f"{FETCH}/rows", {"columns": {"title": "without a url"}}, 422)
    other = post(client, FETCH.replace("fetch", "read") + "/rows", {"columns": {"url": "x"}}, 403)
    assert "--allow-insert read" in other["hint"]


def test_every_action_is_written_down_with_who_and_how_it_ended(site: Db, client: TestClient) -> None:
    secret = web.token(site, "read", "operate", name="ann")
    client.headers.update(web.bearer(secret))
    post(client, f"{FETCH}/retry", {"ids": [6]})
    post(client, f"{FETCH}/retry", {"ids": [99]})
    post(client, "tasks/report", {"args": {"to": "x"}}, 403)
    post(client, f"{API}/environments/default/pause", {"lane": "nowhere"}, 404)
    found = get(client, "audit")["entries"]
    assert [(e["who"], e["action"], e["lane"], e["outcome"]) for e in found] == [
        ("ann", "pause", "nowhere", "refused"),
        ("ann", "enqueue", None, "refused"),
        ("ann", "retry", "fetch", "nothing"),
        ("ann", "retry", "fetch", "done"),
    ]
    assert (found[1]["target"], found[3]["target"]) == ("task=report", "ids=[6]")
    assert secret not in str(found)
    assert len(get(client, "audit", limit=1)["entries"]) == 1
    assert get(client, "audit", before=found[1]["id"])["entries"] == found[2:]


def test_a_path_trick_leads_nowhere(client: TestClient) -> None:
    for path in (
        "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2f..%2fapp.py", "/api/v1/../../healthz/x",
        "/api/v1//status", "/api/v1/environments/..%2f..%2f/lanes/fetch/rows", "/api/v1/status%00", "/API/v1/status",
        "/api/v1/environments/default/lanes/fetch/rows/..%2F..%2Fread%2Frows",
    ):  # fmt: skip
        answer = client.get(path)
        assert answer.status_code in (404, 422), (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_database_that_is_down_is_said_to_be_so() -> None:
    with web.served(web.make_mill(command.NOWHERE)) as client:
        for path in ("status", "environments/default/lanes/fetch/rows", "audit"):
            answer = client.get(f"{API}/{path}")
            assert answer.status_code == 503, path
            assert answer.headers["content-type"] == "application/problem+json"
            assert "cannot reach" in answer.json()["detail"]
            assert "Traceback" not in answer.text
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").status_code == 503


def test_probes_need_neither_token_nor_name(site: Db, client: TestClient) -> None:
    web.token(site, "read")
    for path in ("/healthz", "/readyz"):
        assert client.get(path, headers={"Host": "10.2.3.4:8321"}).status_code == 200


def test_health_says_what_slows_the_queues_down(client: TestClient) -> None:
    (found,) = get(client, "health")["environments"]
    assert found["errors"] == []
    assert {"check", "level", "told", "todo"} <= found["findings"][0].keys()


def test_failures_come_in_families_and_are_retried_by_family(site: Db, client: TestClient) -> None:
    for status in ("given up", "given up", "new"):
        site.insert(
            "pages", [{"url": "u", "domain": "b.example", "status": status, "error": "no page 17 at b.example"}]
        )
    (found,) = get(client, "errors")["environments"]
    families = {f["shape"]: f for f in found["families"] if f["lane"] == "fetch"}
    assert len(families) == 2, families
    (mine,) = [f for shape, f in families.items() if "page" in shape]
    assert mine["unrecorded"] == 2
    assert post(client, f"{FETCH}/errors/retry", {"error": mine["fingerprint"]})["count"] == 2
    assert site.value("select count(*) from pages where status = 'given up'") == 1
    assert post(client, f"{FETCH}/errors/retry", {"error": "nothing"})["count"] == 0


def test_the_overview_and_the_metrics_tell_how_lanes_stand(site: Db, client: TestClient) -> None:
    (found,) = get(client, "overview")["environments"]
    assert {one["lane"]: one["counts"]["ready"]["number"] for one in found["lanes"]}["fetch"] == 2
    answer = client.get("/metrics")
    assert 'rowmill_rows{environment="default",lane="fetch",state="ready"} 2.0' in answer.text
    client.headers.update(web.bearer(web.token(site, "read", lanes=["fetch"])))
    assert client.get("/metrics").status_code == 403


@pytest.mark.bare
def test_rows_that_where_excludes_are_told_apart(db: Db) -> None:
    """D10; issue: on the pages and in the API."""
    systems.create(db, "prices")
    systems.insert_scrape(db, 2)
    (key, *_) = systems.insert_scrape(db, 3, source_id=systems.insert_source(db, enabled=False)[0])
    mill = Mill(db.url)
    systems.scrape(mill, lambda job: None)
    with web.served(mill) as client:
        (lane,) = get(client, f"{API}/status")["lanes"]
        assert (lane["counts"]["waiting"], lane["counts"]["excluded"]) == (0, 3)
        rows = get(client, f"{API}/environments/default/lanes/scrape/rows", state="excluded")["rows"]
        assert {row["state"] for row in rows} == {"excluded"}
        page = client.get("/lane?lane=scrape", headers={"Accept": "text/html"}).text
        assert 'excluded <span class="n">3</span>' in page
        assert "3 excluded</text>" in page
        assert "It should run once that condition is true." in client.get(f"/row?lane=scrape&id={key}").text


def test_what_is_sent_is_checked_and_the_answer_says_where_it_is_wrong(client: TestClient) -> None:
    found = post(client, f"{FETCH}/retry", {"ids": [1, None]}, 422)
    assert found["errors"][0]["at"] == "body.ids[1]"
    assert client.post(f"{FETCH}/retry", content=b"{", headers=JSON).status_code == 400
    assert client.post(f"{FETCH}/retry", content=b"[1e999,NaN]", headers=JSON).status_code in (400, 422)
    deep = b"[" * 100_000
    assert client.post(f"{FETCH}/retry", content=deep, headers=JSON).status_code == 400
    assert client.post(f"{FETCH}/retry", data={"ids": "1"}).status_code == 415
    assert get(client, "status", 422, lanes="fetch")["hint"] == "did you mean 'lane'?"
    get(client, f"{FETCH}/rows", 422, limit="many")
    get(client, f"{FETCH}/rows", 422, limit=501)
    get(client, f"{FETCH}/rows", 422, search="a\0b")
    half = b'{"args": {"to": "half \\ud800"}}'
    assert client.post(f"{API}/tasks/report", content=half, headers=JSON).status_code == 422
    assert client.delete(f"{API}/status").status_code == 405
    assert client.delete(f"{API}/status").headers["allow"]
    assert client.get("/api/v2/status").status_code == 404


def test_every_endpoint_is_described_and_asks_for_a_token(site: Db, client: TestClient) -> None:
    described = get(client, "openapi.json")
    assert described["openapi"].startswith("3.1")
    web.token(site, "read")
    client.get(
        f"{API}/status", headers=web.bearer("rm_any")
    )  # who shows a token has the server look for tokens at once
    for endpoint in ENDPOINTS:
        assert endpoint.method.lower() in described["paths"][endpoint.path]
        path = endpoint.path.format(environment="default", lane="fetch", id="1", task="report")
        answer = client.request(endpoint.method, API + path, json={} if endpoint.body else None)
        assert answer.status_code == 401, endpoint
        assert answer.headers["www-authenticate"] == "Bearer"
