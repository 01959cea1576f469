"""A stand-in for the Gemini API: ``generateContent`` with inline images, over HTTP, offline.

It reads images with the local engine, or says what it is told to; and it refuses as the real one does: 429 with
Retry-After or RetryInfo, a day's quota, a key it does not know, 500 and 503, half an answer.

    python -m apps.ocr.standin --port 8790
    GEMINI_API_KEY=anything GEMINI_BASE_URL=http://127.0.0.1:8790 python -m apps.ocr
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import typer
from PIL import Image

from apps.ocr.cleaner import clean, found_in

_PLAINLY = str.maketrans("-_", "+/")


@dataclass(frozen=True)
class Refusal:
    """One answer that is none."""

    code: int
    status: str
    message: str
    headers: dict[str, str] = field(default_factory=dict)
    details: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def too_many(cls, seconds: float | None = None, info: float | None = None, quota: str = "PerMinute") -> Self:
        """429: ``seconds`` in Retry-After, ``info`` in RetryInfo; ``quota`` names which one is used up."""
        metric = "generativelanguage.googleapis.com/generate_content_requests"
        violation = {"quotaMetric": metric, "quotaId": f"GenerateRequests{quota}PerProjectPerModel"}
        details = [{"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [violation]}]
        if info is not None:
            details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{info:g}s"})
        headers = {} if seconds is None else {"Retry-After": f"{seconds:g}"}
        return cls(429, "RESOURCE_EXHAUSTED", "You exceeded your current quota.", headers, details)


class Standin:
    """A server in a thread: ``with Standin() as gemini: gemini.url``.

    ``says``: the text on an image, where the local engine is not to be used. ``refusals``: answered first, each once.
    ``most``: from then on every request is over the day's quota. ``finish``: how an answer says that it ended.
    """

    def __init__(self, says: Callable[[Image.Image], str] | None = None, key: str = "", port: int = 0) -> None:
        self._says, self.key = says, key
        self.refusals: list[Refusal] = []
        self.most: int | None = None
        self.finish = "STOP"
        #: What was asked: "read" or "boost", and of which model, in order; only what was answered.
        self.asked: list[tuple[str, str]] = []
        self.refused = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Where it is: for GEMINI_BASE_URL."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @cached_property
    def _engine(self) -> Any:
        from apps.ocr.local import LocalReader

        return LocalReader()

    def answer(self, path: str, key: str, body: dict[str, Any]) -> Refusal | dict[str, Any]:
        """What a request is answered with."""
        model, _, verb = path.rpartition("/")[2].partition(":")
        if verb != "generateContent":
            return Refusal(404, "NOT_FOUND", f"{path} is not found.")
        with self._lock:
            if refusal := self._refusal(key):
                self.refused += 1
                return refusal
            parts = [part for content in body["contents"] for part in content["parts"]]
            images = [part["inlineData"] for part in parts if "inlineData" in part]
            self.asked.append(("read" if images else "boost", model))
        text = self._read(images) if images else _boosted(parts[0]["text"])
        return {
            "candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, "finishReason": self.finish}],
            "usageMetadata": {"totalTokenCount": len(text) // 4},
            "modelVersion": model,
        }

    def _refusal(self, key: str) -> Refusal | None:
        if self.key and key != self.key:
            reason = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
            return Refusal(400, "INVALID_ARGUMENT", "API key not valid.", details=reason)
        if self.refusals:
            return self.refusals.pop(0)
        if self.most is not None and len(self.asked) >= self.most:
            return Refusal.too_many(info=33, quota="PerDay")
        return None

    def _read(self, images: list[dict[str, str]]) -> str:
        # The library writes it for use in addresses; others write it plainly.
        files = [base64.b64decode(image["data"].translate(_PLAINLY)) for image in images]
        pages = [Image.open(io.BytesIO(file)) for file in files]
        return "\n\n".join((self._says or self._engine.text)(page) for page in pages)


def _boosted(prompt: str) -> str:
    """By the local rules: behind the instruction comes the text."""
    text = clean([prompt.partition("\n\n")[2]])
    return json.dumps({"text": text} | found_in(text))


def _handler(standin: Standin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = standin.answer(self.path.partition("?")[0], self.headers.get("x-goog-api-key", ""), body)
            headers = found.headers if isinstance(found, Refusal) else {}
            if isinstance(found, Refusal):
                words = {"code": found.code, "message": found.message, "status": found.status, "details": found.details}
                self._send(found.code, {"error": words}, headers)
            else:
                self._send(200, found, headers)

        def _send(self, code: int, value: dict[str, Any], headers: dict[str, str]) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    return Handler


def main(port: int = 8790) -> None:
    """Serve until stopped."""
    with Standin(port=port) as standin:
        typer.echo(f"GEMINI_BASE_URL={standin.url}")
        threading.Event().wait()


if __name__ == "__main__":
    typer.run(main)
