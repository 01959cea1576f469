"""Who sees what on the pages, and what a form that was not meant gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest

import dashboard
from dashboard import Site
from databases import Db
from rowmill import Mill
from rowmill.store import Database
from rowmill.store.inspect.quick_counts import QuickCounter
from rowmill.store.own.access import Tokens

HTML = {"accept": "text/html"}


@pytest.fixture
def site(lite: Db) -> Iterator[Site]:
    lite.execute(dashboard.DOCUMENTS["sqlite"])
    with Site(dashboard.declare(Mill(lite.url)), lite) as site:
        site.add("dies", 2)
        site.drain()
        yield site


Login = Callable[..., httpx.Client]


@pytest.fixture
def login(site: Site) -> Iterator[Login]:
    """Makes a browser that is logged in with a token of these scopes, for all lanes or some."""
    clients: list[httpx.Client] = []

    def make(*scopes: str, lanes: list[str] | None = None) -> httpx.Client:
        async def create() -> str:
            database = Database.open(site.db.url)
            _, secret = await Tokens(database).create(f"t{len(clients)}", scopes, lanes, None, "test")
            await database.close()
            return secret

        secret = dashboard.run(create())
        client = httpx.Client(base_url=site.url, headers=HTML, follow_redirects=True)
        clients.append(client)
        page = client.get("/login").text
        client.post("/login", data={"csrf": field(page), "token": secret})
        return client

    yield make
    for client in clients:
        client.close()


def field(page: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
    return found[1] if found else ""


def test_who_may_only_read_sees_no_buttons_and_his_forms_are_refused(site: Site, login: Login) -> None:
    reader, operator = login("read"), login("read", "operate")
    row = site.db.value("select min(id) from documents")
    page = reader.get(f"/row?lane=extract&id={row}")
    assert page.status_code == 200
    assert "/act/" not in page.text
    for path in ("/", "/lane?lane=extract", "/errors"):
        assert "/act/" not in reader.get(path).text
    given = {"csrf": field(page.text), "env": "default", "lane": "extract", "id": str(row)}
    assert given["csrf"]
    assert reader.post("/act/retry", data=given).status_code == 403
    assert site.status(row) == "extract_failed"
    own = field(operator.get("/").text)
    assert operator.post("/act/retry", data={**given, "csrf": own}).status_code == 200
    assert site.status(row) == "new"


def test_a_token_for_one_lane_sees_nothing_of_the_others(site: Site, login: Login) -> None:
    one = login("read", "operate", lanes=["ocr"])
    page = one.get("/").text
    assert "lane=ocr" in page
    assert "lane=extract" not in page
    assert "is not there" not in one.get("/errors").text
    for path in ("/lane?lane=extract", "/row?lane=extract&id=1", "/lane?lane=extract&live=1", "/error?lane=extract"):
        assert one.get(path).status_code == 403, path
    for path in ("/errors", "/workers?all=1", "/health", "/tasks"):
        assert "extract" not in one.get(path).text.replace("extracted", "").replace("extracting", ""), path
    given = {"csrf": field(page) or field(one.get("/lane?lane=ocr").text), "env": "default", "state": "dead"}
    assert one.post("/act/retry", data={**given, "lane": "extract", "sure": "yes"}).status_code == 403
    assert one.post("/act/retry", data={**given, "lane": "extract"}).status_code == 403
    assert one.post("/act/pause", data={"csrf": given["csrf"], "env": "default"}).status_code == 403


def test_a_form_that_was_not_made_here_changes_nothing(site: Site, login: Login) -> None:
    operator, other = login("read", "operate"), login("read", "operate")
    row = site.db.value("select min(id) from documents")
    given = {"env": "default", "lane": "extract", "id": str(row)}
    for forged in ("", "0" * 64, field(other.get("/").text)):
        assert operator.post("/act/retry", data={**given, "csrf": forged}).status_code == 403
    assert site.status(row) == "extract_failed"


@pytest.mark.parametrize("back", ["https://evil.example/", "//evil.example/", "/\\evil.example", "javascript:alert(1)"])
def test_a_form_leads_back_to_this_server_and_nowhere_else(site: Site, login: Login, back: str) -> None:
    operator = login("read", "operate")
    token = field(operator.get("/").text)
    given = {"csrf": token, "env": "default", "lane": "extract", "id": "1", "back": back}
    answer = operator.post("/act/retry", data=given, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/?said=")


def test_names_that_there_are_not_are_not_found_and_strange_ones_do_no_harm(site: Site) -> None:
    with httpx.Client(base_url=site.url, headers=HTML) as client:
        missing = ["/nothing", "/row?lane=extract&id=999", "/static/../app.py", "/static/%2e%2e/app.py", "/act/none"]
        missing += ["/lane?lane=none", "/lane?lane=extract&env=none", "/lane?lane=extract&state=none"]
        for path in missing:
            assert client.get(path).status_code in (404, 405), path
        assert client.get("/row?lane=extract&id=x").status_code == 422
        for strange in ("%00", "'", "\\", "%", "a" * 5000, "%F0%9F%8C%BE"):
            for name in ("q", "after", "hours", "said"):
                assert client.get(f"/lane?lane=extract&{name}={strange}").status_code < 500, (name, strange)
            assert client.get(f"/lane?lane=extract&col=title&op=has&val={strange}").status_code < 500, strange


def test_a_stream_sends_what_changed_and_nothing_else(site: Site) -> None:
    with (
        httpx.Client(base_url=site.url, timeout=60) as client,
        client.stream("GET", "/?live=1", headers={"accept": "text/event-stream"}) as stream,
    ):
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.headers["cache-control"] == "no-store"
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines)[6:])
        assert list(first) == ["live_overview"]
        site.add("fine")
        assert "1 ready" in json.loads(next(lines)[6:])["live_overview"]


def test_many_who_look_on_ask_the_database_as_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, look = [0], QuickCounter.look

    async def counted(self: QuickCounter) -> object:
        looked[0] += 1
        return await look(self)

    monkeypatch.setattr(QuickCounter, "look", counted)
    monkeypatch.setattr("rowmill.ops.cached_mill.CachedMill.once.__defaults__", (60.0,))
    with httpx.Client(base_url=site.url, headers=HTML) as client:
        for _ in range(5):
            assert client.get("/").status_code == 200
    assert looked[0] == 3  # lanes
