"""Secrets never show: in messages, tracebacks, logs, commands or pages, however a database's address is written."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import string
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import web
from command import Command
from databases import Db
from rowmill import Mill, RowmillError, configure_logs
from rowmill.adopt.lane_file import secret
from rowmill.events import logger
from rowmill.scrub import scrubbed
from rowmill.store import Database, redact
from rowmill.web.api import BASE

SECRET = "hunter2-Zq9"
#: What people's passwords are made of, and what breaks URLs.
SIGNS = string.ascii_letters + string.digits + ":/?#@&=%+;, '\\[]!$*^~|{}<>\"\t\nüß漢\u212a"
passwords = st.text(SIGNS, min_size=1, max_size=16).map(lambda text: f"Zq7{text}kX9")
words = st.text(string.ascii_lowercase + string.digits + "_.-", min_size=1, max_size=12)


def parts_of(password: str) -> list[str]:
    """What must not be read anywhere: the password, and what is left of it where its signs cut it in pieces."""
    pieces = re.split(r"[^A-Za-z0-9üß漢\u212a]+", password)
    return [password, quote(password, safe=""), *(piece for piece in pieces if len(piece) >= 5), "Zq7", "kX9"]


@st.composite
def addresses(draw: st.DrawFn, *, escaped: bool | None = None) -> tuple[str, str]:
    """An address with a password in it, in any of the forms that are about; the password."""
    password, user, host = draw(passwords), draw(words), draw(words)
    escape = draw(st.booleans()) if escaped is None else escaped
    written = quote(password, safe="") if escape else password
    query = quote(password, safe="")
    name = draw(st.sampled_from(["password", "PASSWORD", "sslpassword", "p%61ssword", "api_token"]))
    scheme = draw(st.sampled_from(["postgres", "postgresql", "postgresql+asyncpg", "mysql", "psql", "http"]))
    kv = password.replace("\\", "\\\\").replace("'", "\\'")
    shapes = [
        f"{scheme}://{user}:{written}@{host}:5432/db",
        f"{scheme}://:{written}@{host}/db?sslmode=require",
        f"{scheme}://{user}:{written}@/db?host=/tmp/x&pgbouncer=true",
        f"{scheme}:{user}:{written}@{host}/db",
        f"{scheme}//{user}:{written}@{host}/db",
        f"{user}:{written}@{host}/db",
        f"{scheme}://{host}/db?user={user}&{name}={query}",
        f"{scheme}://{user}@{host}:5432/db?{name}={query}&sslmode=require",
        f"host={host} user={user} password='{kv}' dbname=db",
        f"password='{kv}' host={host}",
    ]
    if not re.search(r"[\s'\\]", password):
        shapes += [f"host={host} password={password} dbname=db", f"host={host} password = {password}"]
    return draw(st.sampled_from(shapes)), password


@settings(max_examples=300, deadline=None)
@given(addresses())
@example(("postgresql://u:Zq7 a/b#c?d@e:fkX9@h/db", "Zq7 a/b#c?d@e:fkX9"))
def test_no_address_is_shown_with_its_password(given_: tuple[str, str]) -> None:
    """Issue, security: connection URLs masked; rather too much is hidden than too little."""
    url, password = given_
    shown = redact(url)
    assert not [part for part in parts_of(password) if part in shown], shown
    assert secret(url), "and it has no place in a file that is written for the user"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ada@db.example:5432/shop?sslmode=require", "postgresql://postgres:@/test_1?host=/tmp/rm-x",
        "sqlite:////var/lib/a:b@c.db", "host=db.example dbname=shop user=ada",
    ],
)  # fmt: skip
def test_an_address_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert redact(url) == url
    assert not secret(url)


@settings(max_examples=60, deadline=None)
@given(addresses())
@example(("postgresql://u:Zq7pa#sskX9@h/db", "Zq7pa#sskX9"))
@example(("postgresql://u:Zq7pa/ss1kX9@h/db", "Zq7pa/ss1kX9"))
@example(("postgresql://u:Zq7[kX9@h/db", "Zq7[kX9"))
@example(("postgresql://u:Zq7\u212akX9@h/db", "Zq7\u212akX9"))
@example(("host=h password='Zq7 akX9' dbname=db", "Zq7 akX9"))
def test_an_address_that_cannot_be_used_is_told_without_its_password(given_: tuple[str, str]) -> None:
    """Issue, security: nor in what a driver says of it, nor anywhere in the traceback; and with what to do."""
    url, password = given_
    # Nowhere: nothing answers, and nobody is asked for the name.
    url = re.sub(r"@[\w.-]+(?=[:/])", "@127.0.0.1", url).replace(":5432", ":1")
    said = asyncio.run(_tried(url))
    assert said == "" or "Try:" in said
    assert not [part for part in parts_of(password) if part in said], said


async def _tried(url: str) -> str:
    """What is said when the address is used; nothing where it would lead out of this test."""
    try:
        database = Database.open(url, patience=2)
        if re.search(r"://[^@/]*[a-z]", re.sub(r"://.*@", "://", url, flags=re.DOTALL)) or "@/" in url:
            return ""  # names a host that would have to be looked up, or this machine's own socket
        try:
            await database.read(lambda run: run("select 1", ()))
        finally:
            await database.close()
    except RowmillError as error:
        return "".join(traceback.format_exception(error)) + str(error)
    return ""


# -- all that is said while an environment is away

#: A password that was put into the query, one with signs that should have been escaped, and the plain case.
AWAY = {
    "plain": f"postgresql://ada:{SECRET}@127.0.0.1:1/shop",
    "escaped": f"postgresql://ada:{quote('%/' + SECRET, safe='')}@127.0.0.1:1/shop",
    "query": f"postgresql://ada@127.0.0.1:1/shop?password={SECRET}",
    "unescaped": f"postgresql://ada:a/{SECRET}@127.0.0.1:1/shop",
}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that is logged, in every detail."""
    kept = (logger.handlers[:], logger.level, logger.propagate)
    stream = io.StringIO()
    configure_logs("json", logging.DEBUG, stream)
    yield stream
    logger.handlers[:], logger.level, logger.propagate = kept[0], kept[1], kept[2]


@pytest.mark.parametrize("form", AWAY)
async def test_no_event_and_no_log_line_tells_a_password(lite: Db, log: io.StringIO, form: str) -> None:
    """Issue, security: of a worker, while one of its environments is away or its address wrong."""
    web.create_pages(lite)
    mill = Mill({"here": lite.url, "away": AWAY[form]})
    states = {"ready": {"status": "new"}, "running": {"status": "busy"}, "done": {"status": "done"}}
    mill.lane("pages", name="fetch", **states)(lambda job: None)
    said: list[str] = []
    mill.on_event(lambda event: said.append(f"{event.name} {event.fields} {event.cause!r}"))
    worker = mill.worker(drain=True, worker_id="w")
    try:
        async with asyncio.timeout(60):
            await worker.run()
    except RowmillError as error:
        said.append("".join(traceback.format_exception(error)))
    assert said
    assert SECRET not in "".join(said) + log.getvalue() + repr(mill) + repr(worker)


@pytest.mark.parametrize("form", AWAY)
def test_no_command_tells_a_password(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue, security: neither in words nor in JSON."""
    command = Command(tmp_path, monkeypatch, capsys)
    command.app(
        AWAY[form], "mill.lane('pages', name='fetch', ready={'a': 1}, running={'a': 2}, done={'a': 3})(handler)"
    )
    said = []
    for words in (["status"], ["check"], ["run", "--drain"], ["migrate"], ["workers"], ["errors"], ["gates"]):
        for more in ([], ["--json"]) if words[0] != "run" else ([],):
            ended = command(*words, *more)
            assert ended.code != 0, words
            said.append(ended.out + ended.err)
    ended = command("adopt", AWAY[form], "pages")
    assert ended.code != 0
    text = "".join([*said, ended.out, ended.err])
    assert SECRET not in text
    assert "Try:" in text


@pytest.mark.parametrize("form", AWAY)
def test_no_page_and_no_answer_tells_a_password(lite: Db, form: str) -> None:
    """Issue, security: the dashboard and its API, of an environment that is away."""
    web.create_pages(lite)
    mill = web.make_mill(lite)
    mill._given = {"here": lite.url, "away": AWAY[form]}
    with web.served(mill) as client:
        description = client.get(f"{BASE}/openapi.json").json()
        paths = [path for path, verbs in description["paths"].items() if "get" in verbs and "{" not in path]
        assert paths
        pages = ["/", "/health", "/workers", "/errors", "/tasks", "/lane?lane=fetch", *paths]
        answers = [client.get(page, params={"environment": "away"}) for page in pages] + [client.get(p) for p in pages]
    assert any(answer.status_code == 200 for answer in answers)
    said = "".join(f"{answer.text} {json.dumps(dict(answer.headers))}" for answer in answers)
    assert SECRET not in said


def test_what_a_url_hides_in_a_failure_of_a_handler_is_scrubbed_where_it_leaves() -> None:
    """C12: a handler may put its own database's address into an exception; Sentry and OpenTelemetry do not get it."""
    for url in AWAY.values():
        assert SECRET not in scrubbed(f"OperationalError: connection to {url} failed")
