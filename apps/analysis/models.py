"""Language models behind one call: an OpenAI-compatible endpoint, or Gemini."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import httpx

from apps import guard
from apps.markup import decode, storable
from rowmill import Dead, DeclarationError
from rowmill.declare.retry import retry_after

from .prompts import estimate
from .settings import Settings

OPENAI = ("https://api.openai.com/v1", "gpt-4o-mini")
GEMINI = ("https://generativelanguage.googleapis.com", "gemini-2.0-flash")
#: What every analysis has.
KEYS = ("summary", "category", "audience", "keywords")
_PATIENCE, _LONGEST, _NEW_KEY = timedelta(seconds=10), timedelta(hours=1), timedelta(minutes=5)
_MOST_BYTES, _LONG, _SHORT, _MANY = 5_000_000, 2_000, 100, 20


class Throttled(Exception):
    """The model wants to be left alone for a while. Nothing was used up."""

    def __init__(self, after: timedelta | None, why: str = "the model is throttled") -> None:
        self.after = min(after or _PATIENCE, _LONGEST)
        super().__init__(f"{why} for {self.after.total_seconds():g} s")


def _key_refused(status: int) -> Throttled:
    """No row can help a key that is refused: all wait until somebody has changed it."""
    return Throttled(_NEW_KEY, f"the model refuses the API key ({status}): rows wait")


class BadAnswer(Exception):
    """The model answered, and what it said is not an analysis."""


@dataclass(frozen=True)
class Reply:
    """What a model said, and what that used up."""

    text: str
    model: str
    input_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Provider(Protocol):
    """A model service. ``key`` tells it that two calls are one, where it can tell."""

    async def ask(self, prompt: str, key: str) -> Reply: ...


class Model:
    """A provider, and for how long it wants to be left alone: told to one run, heeded by all of the process."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._closed_until = 0.0

    @property
    def throttled_for(self) -> timedelta:
        """How long nobody should ask; zero: go ahead."""
        return timedelta(seconds=max(self._closed_until - time.monotonic(), 0.0))

    async def ask(self, prompt: str, key: str) -> Reply:
        """One call. Raises ``Throttled``, ``Dead`` for a prompt that the model will never take, or what went wrong."""
        try:
            return await self._provider.ask(prompt, key)
        except Throttled as throttled:
            self._closed_until = max(self._closed_until, time.monotonic() + throttled.after.total_seconds())
            raise


class OpenAI:
    """Any endpoint that speaks OpenAI's chat completions."""

    def __init__(self, client: httpx.AsyncClient, model: str, most: int) -> None:
        self._client, self._model, self._most = client, model, most

    async def ask(self, prompt: str, key: str) -> Reply:
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}], "max_tokens": self._most,
                "temperature": 0, "response_format": {"type": "json_object"}}  # fmt: skip
        headers = {"idempotency-key": key, "accept-encoding": "gzip"}
        async with self._client.stream("POST", "chat/completions", json=body, headers=headers) as answer:
            if answer.status_code in (429, 503):
                raise Throttled(retry_after(answer.headers))
            if answer.status_code in (401, 403):
                raise _key_refused(answer.status_code)
            text = decode(await guard.body(answer, _MOST_BYTES), "utf-8")
            if answer.status_code in (400, 413, 422):
                raise Dead(f"the model refuses the prompt: {answer.status_code} {text[:300]}")
            answer.raise_for_status()
        try:
            said = json.loads(text)
            content = said["choices"][0]["message"]["content"]
            # One that does not say what it used is taken to have used all it was given.
            usage = said.get("usage") or {"prompt_tokens": estimate(prompt), "completion_tokens": self._most}
            used, made = (max(int(usage[name]), 0) for name in ("prompt_tokens", "completion_tokens"))
            return Reply(str(content), str(said.get("model") or self._model), used, made)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BadAnswer(f"not an answer of chat completions: {error!r}"[:300]) from None


class Gemini:
    """Google's Gemini, through its own library."""

    def __init__(self, http: httpx.AsyncClient, url: str, key: str, model: str, most: int) -> None:
        from google import genai  # takes seconds to import, and half of the users never need it

        # A client of our own: the library takes another one where that happens to be installed.
        options = genai.types.HttpOptions(base_url=url, httpx_async_client=http)
        self._client = genai.Client(api_key=key, http_options=options)
        self._model, self._most = model, most

    async def ask(self, prompt: str, key: str) -> Reply:
        from google.genai import errors, types

        config = types.GenerateContentConfig(
            max_output_tokens=self._most, temperature=0, response_mime_type="application/json",
            http_options=types.HttpOptions(headers={"idempotency-key": key}),
        )  # fmt: skip
        try:
            answer = await self._client.aio.models.generate_content(model=self._model, contents=prompt, config=config)
        except errors.APIError as error:
            if error.code in (429, 503):
                raise Throttled(_gemini_delay(error)) from None
            if error.code in (401, 403):
                raise _key_refused(error.code) from None
            if error.code == 400:
                raise Dead(f"the model refuses the prompt: {error.message}") from None
            raise
        used = answer.usage_metadata
        if used is None or answer.text is None:
            raise BadAnswer("Gemini answered without a text")
        made = (used.candidates_token_count or 0) + (used.thoughts_token_count or 0)
        return Reply(answer.text, answer.model_version or self._model, used.prompt_token_count or 0, made)


def _gemini_delay(error: Any) -> timedelta | None:
    """Gemini tells the delay in the body: ``"retryDelay": "17s"``."""
    if match := re.search(r"retryDelay['\"]: ['\"](\d{1,9}(?:\.\d+)?)s", str(error.details)):
        return timedelta(seconds=float(match[1]))
    return retry_after(getattr(error.response, "headers", None))


def read(text: str) -> dict[str, Any]:
    """A model's answer as an analysis; models like to put their JSON into a fence."""
    fenced = re.sub(r"^\s*```(?:json)?|```\s*$", "", text)
    try:
        said = json.loads(fenced)
    except (ValueError, RecursionError):
        raise BadAnswer(f"the model's answer is not JSON: {text[:200]!r}") from None
    if not isinstance(said, dict):
        raise BadAnswer("the model's answer lacks everything")
    if lacking := [key for key in KEYS if not said.get(key) or not isinstance(said[key], (str, list))]:
        raise BadAnswer(f"the model's answer lacks {', '.join(lacking)}")
    return {key: _bounded(storable(said[key])) for key in KEYS}


def _bounded(said: str | list[Any]) -> str | list[str]:
    """No longer than an analysis is."""
    return said[:_LONG] if isinstance(said, str) else [str(part)[:_SHORT] for part in said[:_MANY]]


@asynccontextmanager
async def open_model(settings: Settings) -> AsyncIterator[Model]:
    """The model that the settings name."""
    url, name = OPENAI if settings.provider == "openai" else GEMINI
    url, name = settings.model_url or url, settings.model_name or name
    most = settings.answer_tokens
    if not settings.model_key:
        raise DeclarationError(f"no key for the model at {url}", hint="ANALYSIS_MODEL_KEY=...")
    if settings.provider == "gemini":
        async with httpx.AsyncClient(timeout=settings.model_seconds, trust_env=False) as http:
            yield Model(Gemini(http, url, settings.model_key, name, most))
        return
    async with httpx.AsyncClient(
        base_url=url.rstrip("/") + "/", timeout=settings.model_seconds, trust_env=False,
        headers={"authorization": f"Bearer {settings.model_key}"},
    ) as http:  # fmt: skip
        yield Model(OpenAI(http, name, most))
