"""Gemini as reader and booster, through google-genai. A quota that is used up closes the lane, and costs no attempt."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from datetime import timedelta as td
from typing import Any

import httpx
from google import genai
from google.genai import errors, types
from PIL import Image

from apps.ocr.cleaner import plainly
from apps.ocr.provider import BUDGET, Boosted
from apps.ocr.settings import Settings
from rowmill import Dead, Job, Snooze
from rowmill.declare.retry import retry_after

_READ = (
    "Transcribe all text of this scanned page of a French land registry document, exactly as printed, with accents. "
    "One printed line per line, an empty line between paragraphs. No comments, no formatting, nothing else."
)
_BOOST = (
    "This is the recognised text of a French land registry document. Correct recognition errors only; put words "
    "together that were broken at the end of a line; one paragraph per line. Then give its registration number, its "
    "date as YYYY-MM-DD, and its parties with their role. Leave out what the text does not say.\n\n"
)
_SCHEMA = {
    "type": "OBJECT",
    "required": ["text", "parties"],
    "properties": {
        "text": {"type": "STRING"},
        "number": {"type": "STRING"},
        "date": {"type": "STRING"},
        "parties": {
            "type": "ARRAY",
            "items": {
                "type": "OBJECT",
                "required": ["role", "name"],
                "properties": {"role": {"type": "STRING"}, "name": {"type": "STRING"}},
            },
        },
    },
}
#: How long to leave it alone where it does not say: a minute's quota, a day's quota, a key or a model it does not take.
_MINUTE, _DAY, _MISSET = td(minutes=1), td(hours=1), td(minutes=5)


class NoAnswer(RuntimeError):
    """Gemini answered, but with no text, or with half of one."""


class Gemini:
    """Reads pages and boosts texts with one model. Each request is taken from the Mill's budget ``gemini`` first."""

    def __init__(self, settings: Settings) -> None:
        self.name = settings.gemini_model
        # A client of its own: else the library takes whichever it finds installed, each with errors of its own.
        self._http = httpx.AsyncClient(timeout=settings.gemini_timeout)
        options = types.HttpOptions(
            base_url=settings.gemini_url or None,
            httpx_async_client=self._http,
            timeout=int(settings.gemini_timeout * 1000),
            retry_options=types.HttpRetryOptions(attempts=1),  # the queue does the trying again
        )
        self._client = genai.Client(api_key=settings.gemini_key, http_options=options).aio

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        await self._http.aclose()

    async def read(self, page: Image.Image, job: Job) -> str:
        """The text of one page, from its image."""
        file = io.BytesIO()
        page.save(file, "PNG")
        return await self._ask(job, [types.Part.from_bytes(data=file.getvalue(), mime_type="image/png"), _READ])

    async def boost(self, pages: Sequence[str], job: Job) -> Boosted:
        """The text of a document, corrected, and its fields."""
        if not any(page.strip() for page in pages):
            return Boosted("")
        config = types.GenerateContentConfig(
            temperature=0.0, response_mime_type="application/json", response_schema=_SCHEMA
        )
        answer = await self._ask(job, [_BOOST + "\n\n".join(pages)], config)
        try:
            found: dict[str, Any] = json.loads(answer)
            text = plainly(found["text"])
            parties = [{key: plainly(party[key]) for key in ("role", "name")} for party in found["parties"]]
            fields = {key: plainly(found[key]) for key in ("number", "date") if found.get(key)}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NoAnswer(
                f"Gemini ({self.name}) did not answer with the JSON it was asked for: {answer[:200]!r}"
            ) from None
        return Boosted(text, {**fields, "parties": parties})

    async def _ask(self, job: Job, contents: list[Any], config: types.GenerateContentConfig | None = None) -> str:
        await job.spend(BUDGET, requests=1)
        config = config or types.GenerateContentConfig(temperature=0.0)
        try:
            answer = await self._client.models.generate_content(model=self.name, contents=contents, config=config)
        except errors.APIError as error:
            if (refused := refusal(error)) is not None:
                job.log.warning("gemini_refuses: %s", refused.reason)
                raise refused from error
            raise
        ended = answer.candidates[0].finish_reason if answer.candidates else None
        if ended != types.FinishReason.STOP:
            blocked = answer.prompt_feedback.block_reason if answer.prompt_feedback else None
            raise NoAnswer(f"Gemini ({self.name}) gave no whole text: {blocked or ended or 'no candidate'}")
        return answer.text or ""  # a blank page


def refusal(error: errors.APIError) -> Snooze | Dead | None:
    """What a refusal means for the document: put off with all others, dead, or a failure like any other (None)."""
    words = f"Gemini: {error.code} {error.status}: {error.message}"
    if error.code == 429:
        return Snooze(_pause(error), words, closes=True)
    if error.code in (401, 403, 404) or "API_KEY_INVALID" in str(error.details):
        return Snooze(_MISSET, f"{words} Try: check GEMINI_API_KEY, GEMINI_MODEL and GEMINI_BASE_URL.", closes=True)
    if error.code in (400, 413):
        return Dead(f"{words} Try: a lower OCR_DPI, or read this document with the local engine.")
    return None


def _pause(error: errors.APIError) -> td:
    """As long as it says, in the header or in RetryInfo; a day's quota an hour, whatever seconds RetryInfo says."""
    details = str(error.details)
    if re.search(r"PerDay", details):
        return _DAY
    if (after := retry_after(getattr(error.response, "headers", None))) is not None:
        return after
    delay = re.search(r"'retryDelay': '([\d.]+)s'", details)
    return td(seconds=float(delay[1])) if delay else _MINUTE
