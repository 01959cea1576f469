"""An S3 that says no to everything, as one does whose key was revoked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BODY = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class _No(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(_BODY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(_BODY)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def refusing_s3() -> Iterator[dict[str, str]]:
    """The variables that lead there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _No)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield variables(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def variables(endpoint: str, url: str = "s3://documents/pdf") -> dict[str, str]:
    return {
        "STORAGE_URL": url, "STORAGE_ENDPOINT": endpoint, "STORAGE_KEY": "key", "STORAGE_SECRET": "secret",
        "STORAGE_REGION": "us-east-1",
    }  # fmt: skip
