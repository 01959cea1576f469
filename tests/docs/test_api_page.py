"""Every snippet of docs/reference/http-api.md is run as it stands, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import web
from databases import Db
from rowmill.config import find_app
from rowmill.web.endpoints import ENDPOINTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_snippets_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / f"{text.split()[1]}").write_text(text)
    tokens, curl = (text for kind, text in BLOCKS if kind == "bash")
    db = Db(f"sqlite:///{tmp_path / 'shop.db'}")
    web.create_pages(db)
    db.insert("pages", [{"url": "u", "domain": "a.example", "status": s} for s in ("new", "new", "new", "given up")])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rowmill").write_text(f'#!/bin/sh\nexec {sys.executable} -m rowmill "$@"\n')
    (tmp_path / "rowmill").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    made = subprocess.run(["sh", "-e", "-c", tokens], env=env, capture_output=True, text=True, timeout=180, check=True)
    secret, _, *listed = made.stdout.splitlines()
    assert secret.startswith("rm_")
    assert "read operate enqueue" in "\n".join(listed)
    assert listed[-1] == "screen is no longer valid"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)  # the one of another page
    with web.listening(find_app("shop.py:mill")) as (address, _):
        env |= {"MILL": address, "MILL_TOKEN": secret}
        told = subprocess.run(
            [sys.executable, "client.py"], env=env, capture_output=True, text=True, timeout=180, check=False
        )
        assert told.returncode == 0, told.stderr
        lines = told.stdout.splitlines()
        assert lines[:3] == ["ready False", "[3, 2]", "[1]"]
        assert lines[3:6] == ["no_worker", "[{'id': '99', 'reason': 'no row has this id'}]", "fetch"]
        assert lines[6].startswith("422 application/problem+json the handler takes no 'too'")
        if shutil.which("curl"):
            said = subprocess.run(["sh", "-c", curl], env=env, capture_output=True, text=True, timeout=180, check=True)
            assert json.loads(said.stdout)["lanes"][0]["counts"]["ready"] == 4


def test_the_page_names_every_endpoint() -> None:
    text = PAGE.read_text()
    for endpoint in ENDPOINTS:
        last = [part for part in endpoint.path.split("/") if part and not part.startswith("{")][-1]
        assert last in text, endpoint.path
