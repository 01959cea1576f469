"""``rowmill serve``, ``rowmill token`` and ``rowmill audit``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import web
from command import Command
from databases import Db
from rowmill.cli.serve import is_loopback


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def app(command: Command, db: Db) -> str:
    web.create_pages(db)
    return command.app(db.url, "from web import make_mill", f"mill = make_mill({db.url!r})")


def test_a_token_is_shown_once_listed_without_its_secret_and_revoked(db: Db, command: Command) -> None:
    app(command, db)
    made = command("token", "create", "ann", "--scope", "read", "--scope", "operate", "--lane", "fetch", "--days", "30")
    secret = made.out.strip()
    assert re.fullmatch(r"rm_[\w-]{43}", secret), made
    assert "shown only once" in made.err
    listed = command("token", "list")
    assert secret not in listed.out
    assert "read operate" in listed.out
    (value,) = command.json("token", "list")["tokens"]
    assert (value["name"], value["scopes"], value["lanes"], value["valid"]) == (
        "ann",
        ["read", "operate"],
        ["fetch"],
        True,
    )
    assert secret not in str(db.query("select * from rowmill_tokens"))
    assert "already" in command("token", "create", "ann").err
    assert command.json("token", "revoke", "ann")["token"]["valid"] is False
    assert command("token", "revoke", "ann").code == 4
    assert command.json("token", "create", "ann")["scopes"] == ["read"]


def test_what_makes_no_token_says_what_to_do(lite: Db, command: Command) -> None:
    app(command, lite)
    for words, code, said in (
        (["create", "x", "--scope", "raed"], 1, "did you mean 'read'?"),
        (["create", "x", "--lane", "fetsch"], 1, "did you mean 'fetch'?"),
        (["create"], 2, "no token name given"),
        (["make", "x"], 2, "create [APP] NAME"),
        (["list", "--scope", "read"], 2, "are for create"),
    ):
        ended = command("token", *words)
        assert (ended.code, said in ended.err) == (code, True), (words, ended)
    assert command("token", "list").out == "No tokens.\n"
    assert command("audit").out == "Nothing was done through the dashboard or the HTTP API.\n"


def test_beyond_loopback_nothing_is_served_without_a_token(lite: Db, command: Command) -> None:
    app(command, lite)
    ways = (["--host", "0.0.0.0"], ["--host", "::"], ["--proxy"], ["--trust-proxy", "10.0.0.0/8"])
    for words in (*ways, ["--allow-host", "mill.example"]):
        ended = command("serve", *words)
        assert ended.code == 2, ended
        assert "there is no token yet" in ended.err
        assert "Try: rowmill token create" in ended.err
    web.token(lite, "read", name="old", days=1)
    lite.execute("update rowmill_tokens set expires_at = created_at")
    assert command("serve", "--host", "0.0.0.0").code == 2, "one that has ended lets nobody in"


def test_loopback_addresses_are_told_from_others() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")))


def test_a_server_serves_until_it_is_told_to_end(db: Db, command: Command, tmp_path: Path) -> None:
    reference = app(command, db)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    server = subprocess.Popen(
        [sys.executable, "-m", "rowmill", "serve", reference, "--port", "0"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        lines = (server.stderr.readline() for _ in range(20))
        said = next(found for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        address = said[0]
        assert httpx.get(f"{address}/healthz", timeout=60).json() == {"status": "ok"}
        here = f"{address}/api/v1/environments/default"
        assert httpx.post(f"{here}/pause", json={"lane": "fetch"}, timeout=60).status_code == 200
        assert httpx.get(f"{address}/api/v1/status", headers={"Host": "evil.example"}, timeout=60).status_code == 421
        assert httpx.get(f"{address}/", headers={"Accept": "text/html"}, timeout=60).status_code == 200
        (entry,) = command.json("audit")["entries"]
        assert (entry["who"], entry["action"], entry["lane"], entry["outcome"]) == ("open", "pause", "fetch", "done")
        assert "pause" in command("audit").out
        taken = command("serve", "--port", address.rpartition(":")[2])
        assert (taken.code, "Try: another --port" in taken.err) == (1, True), taken
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)
        (told,) = [line for line in server.stderr if "'action'" in line]
        assert "'action': 'pause'" in told, "the audit log is in the log as well"
        assert "'lane': 'fetch'" in told
    finally:
        server.kill()
        server.communicate()
