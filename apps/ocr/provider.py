"""What reads a page and what tidies a text: two small interfaces, met by the local engine and by Gemini."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image

from rowmill import Job

#: What all workers together may ask of a service, as a budget of the Mill.
BUDGET = "gemini"


@dataclass(frozen=True)
class Boosted:
    """A document's text, cleaned, and what was found in it: ``number``, ``date``, ``parties``."""

    text: str
    fields: dict[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """Takes the text off the image of a page: a line a line, an empty line between paragraphs."""

    name: str

    async def read(self, page: Image.Image, job: Job) -> str:
        """The text of one page; ``job`` is whose page it is, for budgets."""


class Booster(Protocol):
    """Cleans and structures the text of a document."""

    name: str

    async def boost(self, pages: Sequence[str], job: Job) -> Boosted:
        """One text of all pages, and its fields."""
