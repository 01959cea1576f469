"""The audit of dependencies: red for what is known, loud where nobody could be asked, quick."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

AUDIT = str(Path(__file__).parents[1] / "audit.py")
NOBODY = "http://127.0.0.1:1"


class Osv(BaseHTTPRequestHandler):
    """An OSV that knows of one package."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        package = asked["package"]
        known = {
            "id": "PYSEC-2000-1", "summary": "says too much", "schema_version": "1.4.0",
            "affected": [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "99.0"}]}]}],
        }  # fmt: skip
        said = {"vulns": [known]} if package["name"] == "jinja2" and asked["version"] == "2.4.1" else {}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def osv() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/query"
        server.shutdown()


def audit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, AUDIT, *words], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("package", "code"), [("jinja2==2.4.1", 1), ("jinja2==99.0", 0)])
def test_a_known_vulnerability_is_red(osv: str, tmp_path: Path, package: str, code: int) -> None:
    """Issue, security: dependencies audited in make check; with what to do about it."""
    (tmp_path / "pinned.txt").write_text(package + "\n")
    ended = audit("--osv", osv, "--pypi", NOBODY, "--requirement", str(tmp_path / "pinned.txt"))
    assert ended.returncode == code, ended
    assert "1 packages audited" in ended.stdout
    assert ("PYSEC-2000-1" in ended.stdout) is bool(code)
    assert ("Try: jinja2 99.0" in ended.stdout) is bool(code)


def test_nobody_to_ask_is_said_and_goes_on() -> None:
    """Issue, security: without a network the other checks are not held up, and nobody takes it for a clean audit."""
    ended = audit("--osv", NOBODY, "--pypi", NOBODY)
    assert ended.returncode == 0
    assert "NOT audited" in ended.stdout
