"""A language model on loopback: OpenAI's chat completions and Gemini's generateContent, scriptable, with its own log.

::

    with Model(behave=throttling(every=5, after=1)) as model:
        ...                # an OpenAI-compatible client at f"{model.url}/v1", a Gemini client at model.url
        model.calls        # [Call(number=1, key="...", status=200, prompt_tokens=312, completion_tokens=60, ...)]
        model.tokens       # what the calls used up together

It answers with JSON about the prompt. ``behave`` says for each call what happens instead: it throttles with 429 and
Retry-After, fails, dawdles, or talks nonsense. ``limit=(tokens, seconds)`` throttles like a provider's own quota. With
``remembers=True`` a call with an Idempotency-Key that was answered before gets the same answer and uses up nothing.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .internet import Answer, Internet, Request

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Behaviour:
    """What happens to a call: its status, the Retry-After of a refusal, the seconds it takes, the text it gets."""

    status: int = 200
    retry_after: float | None = None
    latency: float = 0.0
    text: str | None = None


@dataclass(frozen=True)
class Call:
    """One call as the model saw it. ``at``: when it arrived, by ``time.time``; ``tokens`` are 0 unless answered."""

    number: int
    at: float
    provider: str
    model: str
    #: The caller's Idempotency-Key, or an empty text.
    key: str
    status: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Answered from memory: it had been answered before.
    replayed: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


Behave = Callable[[int, str], Behaviour]


def throttling(every: int, after: float = 1.0, latency: float = 0.0) -> Behave:
    """Every so manieth call is refused with 429 and Retry-After."""
    refused, answered = Behaviour(429, retry_after=after), Behaviour(latency=latency)
    return lambda number, prompt: refused if number % every == 0 else answered


def scripted(*script: Behaviour, then: Behaviour | None = None) -> Behave:
    """The first calls as listed, in order; those after them as ``then``."""
    return lambda number, prompt: script[number - 1] if number <= len(script) else then or Behaviour()


def count(text: str) -> int:
    """The stand-in's tokens: four bytes each."""
    return math.ceil(len(text.encode()) / 4)


@dataclass
class Model:
    """The server; a context manager. ``url`` is there inside of it."""

    behave: Behave = field(default=lambda number, prompt: Behaviour())
    limit: tuple[int, float] | None = None
    remembers: bool = False
    calls: list[Call] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[str, int, int]] = {}

    def __enter__(self) -> Model:
        self._server = Internet(default=self._answer).__enter__()
        self.url = f"http://{self._server.address}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.__exit__(*exc)

    @property
    def tokens(self) -> int:
        """Used up by all calls."""
        return sum(call.tokens for call in list(self.calls))

    def statuses(self) -> Counter[int]:
        """How many calls ended how."""
        return Counter(call.status for call in list(self.calls))

    def answered(self) -> Counter[str]:
        """How often each key was answered again."""
        return Counter(call.key for call in list(self.calls) if call.status == 200 and not call.replayed)

    def most_within(self, seconds: float) -> int:
        """The most tokens that were used up within any time of that length."""
        used = sorted((call.at, call.tokens) for call in list(self.calls) if call.tokens)
        most = total = first = 0
        for at, tokens in used:
            total += tokens
            while used[first][0] <= at - seconds:
                total -= used[first][1]
                first += 1
            most = max(most, total)
        return most

    # -- the server

    def _answer(self, request: Request) -> Answer:
        said = json.loads(request.body or b"{}")
        if request.path.endswith("/chat/completions"):
            messages = said.get("messages", [])
            prompt, most = "\n".join(str(m.get("content", "")) for m in messages), said.get("max_tokens", 1000)
            return self._serve(request, "openai", str(said.get("model", "")), prompt, most, _openai)
        if match := re.search(r"/models/([^/:]+):generateContent$", request.path):
            contents = [*said.get("contents", []), said.get("systemInstruction") or {}]
            prompt = "\n".join(str(part.get("text", "")) for content in contents for part in content.get("parts", []))
            most = said.get("generationConfig", {}).get("maxOutputTokens", 1000)
            return self._serve(request, "gemini", match[1], prompt, most, _gemini)
        return Answer(json.dumps({"error": {"code": 404, "message": f"there is no {request.path}"}}), 404, JSON)

    def _serve(
        self, request: Request, provider: str, model: str, prompt: str, most: int, shape: Callable[..., Any]
    ) -> Answer:
        key = request.headers.get("idempotency-key", "")
        with self._lock:
            number, now = len(self.calls) + 1, time.time()
            does = self.behave(number, prompt)
            if self.remembers and key in self._answers:
                text, used, made = self._answers[key]
                self.calls.append(Call(number, now, provider, model, key, 200, replayed=True))
                return Answer(json.dumps(shape(model, text, used, made)), 200, JSON, does.latency)
            text = does.text if does.text is not None else _about(prompt)
            text = text[: most * 4]
            used, made = count(prompt), count(text)
            if does.status == 200 and (wait := self._over(used + made, now)):
                does = Behaviour(429, retry_after=wait)
            if does.status != 200:
                self.calls.append(Call(number, now, provider, model, key, does.status))
                return _refuse(does, provider)
            self.calls.append(Call(number, now, provider, model, key, 200, used, made))
            self._answers[key] = text, used, made
        return Answer(json.dumps(shape(model, text, used, made)), 200, JSON, does.latency)

    def _over(self, tokens: int, now: float) -> float:
        """Seconds until the provider's own quota has room, in whole seconds as providers tell them."""
        if self.limit is None:
            return 0.0
        most, seconds = self.limit
        recent = [call for call in self.calls if call.at > now - seconds and call.tokens]
        if sum(call.tokens for call in recent) + tokens <= most or not recent:
            return 0.0
        return math.ceil(recent[0].at + seconds - now) or 1


def _about(prompt: str) -> str:
    """What a model might say: about the site that the prompt is about."""
    title = re.search(r"^Title: (.*)$", prompt, re.MULTILINE)
    words = Counter(word.lower() for word in re.findall(r"[^\W\d_]{5,}", prompt))
    keywords = [word for word, _ in words.most_common(5)]
    said = {"summary": f"A site named {title[1] if title else 'nothing'}.", "category": "business"}
    return json.dumps(said | {"audience": "everybody", "keywords": keywords})


def _openai(model: str, text: str, used: int, made: int) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}


def _gemini(model: str, text: str, used: int, made: int) -> dict[str, Any]:
    usage = {"promptTokenCount": used, "candidatesTokenCount": made, "totalTokenCount": used + made}
    content = {"role": "model", "parts": [{"text": text}]}
    candidates = [{"content": content, "finishReason": "STOP", "index": 0}]
    return {"candidates": candidates, "usageMetadata": usage, "modelVersion": model}


def _refuse(does: Behaviour, provider: str) -> Answer:
    error: dict[str, Any] = {"message": "too many requests" if does.status == 429 else "the model is unwell"}
    headers = dict(JSON)
    if does.retry_after is not None and provider == "gemini":
        # Gemini tells the delay in the body.
        info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{does.retry_after:g}s"}
        error |= {"status": "RESOURCE_EXHAUSTED", "details": [info]}
    elif does.retry_after is not None:
        headers["retry-after"] = f"{math.ceil(does.retry_after)}"
    return Answer(json.dumps({"error": error | {"code": does.status}}), does.status, headers, does.latency)
