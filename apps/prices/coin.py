"""A coin as a job asks for it, and how well something that was found matches it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: What the parts of a match are worth; those the job does not ask for are left out of the sum.
_WORTH = {"year": 0.35, "denomination": 0.2, "series": 0.2, "mintmark": 0.15, "title": 0.1}
_YEAR = re.compile(r"(?<!\d)(1[6-9]\d\d|20\d\d)(?!\d)")


class NotACoin(ValueError):
    """The job's query_params do not say which coin is meant."""


@dataclass(frozen=True)
class Coin:
    """What to look for."""

    title: str
    year: int | None = None
    mintmark: str | None = None
    denomination: str | None = None
    series: str | None = None

    @classmethod
    def of(cls, query_params: Any) -> Coin:
        """From a job's ``query_params``."""
        if not isinstance(query_params, Mapping):
            raise NotACoin(f"query_params is no object: {query_params!r}")
        title, year = query_params.get("title"), query_params.get("year")
        if not isinstance(title, str) or not title.strip():
            raise NotACoin("query_params has no title")
        if year is not None and (isinstance(year, bool) or not re.fullmatch(r"\d{1,4}", str(year))):
            raise NotACoin(f"query_params: year {year!r} is not a year")
        words = {}
        for name in ("mintmark", "denomination", "series"):
            value = query_params.get(name)
            if value is not None and not isinstance(value, str):
                raise NotACoin(f"query_params: {name} {value!r} is not text")
            words[name] = (value or "").strip() or None
        return cls(title.strip(), int(year) if year is not None else None, **words)

    def cache_key(self, source_id: int) -> str:
        """Under which an answer is kept: the parts joined by a vertical bar, empty where they are not given."""
        parts = (source_id, self.year, self.mintmark, self.denomination, self.series, self.title)
        return "|".join("" if part is None else str(part) for part in parts)

    def match_strength(self, title: str) -> float:
        """From 0 to 1: how much of what was asked for stands in a title. Another year than the one asked for is
        another coin, whatever else fits.
        """
        text = " ".join(_words(title))
        years = set(_YEAR.findall(title))
        if self.year is not None and years and str(self.year) not in years:
            return 0.0
        wanted = set(_words(self.title))
        found = {
            "year": str(self.year) in years if self.year is not None else None,
            "denomination": _has(text, self.denomination),
            "series": _has(text, self.series),
            "mintmark": _has(text, self.mintmark),
            "title": len(wanted & set(text.split())) / len(wanted) if wanted else None,
        }
        asked = {part: value for part, value in found.items() if value is not None}
        whole = sum(_WORTH[part] for part in asked)
        return round(sum(_WORTH[part] * float(value) for part, value in asked.items()) / whole, 4) if whole else 0.0


def _has(text: str, words: str | None) -> bool | None:
    """Whether the words stand in the text, as whole words; None where none were asked for."""
    if words is None:
        return None
    return f" {' '.join(_words(words))} " in f" {text} "


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
