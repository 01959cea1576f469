"""Sentry's receiving end, as its SDK sees it: takes envelopes over HTTP, and keeps what was in them."""

from __future__ import annotations

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Receiver:
    """Listens on a free port for the length of a ``with`` block."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        #: Seconds it takes before it takes an envelope.
        self.slow = 0.0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                time.sleep(receiver.slow)
                receiver.bodies.append(body.decode())
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.dsn = f"http://public@127.0.0.1:{self._server.server_port}/1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The error events that arrived, in order."""
        found = []
        for body in self.bodies:
            lines = body.split("\n")
            for head, item in zip(lines[1::2], lines[2::2], strict=False):
                if json.loads(head).get("type") == "event":
                    found.append(json.loads(item))
        return found
