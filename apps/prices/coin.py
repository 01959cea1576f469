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
    """Neither the job nor its intake says which coin is meant."""


@dataclass(frozen=True)
class Coin:
    """What to look for."""

    title: str
    year: int | None = None
    mintmark: str | None = None
    denomination: str | None = None
    series: str | None = None

    @classmethod
    def of(cls, query_params: Any, intake: Mapping[str, Any] | None = None) -> Coin:
        """From a job's ``query_params``; what these lack is taken from the ``coin_intakes`` row. Without a title, the
        other parts are one: ``1921-D Morgan dollar``.
        """
        if query_params is not None and not isinstance(query_params, Mapping):
            raise NotACoin(f"query_params is no object: {query_params!r}")
        given = {name: value for name, value in (query_params or {}).items() if not _blank(value)}
        for name in ("title", "mintmark", "denomination", "series"):
            if name in given and not isinstance(given[name], str):
                raise NotACoin(f"query_params: {name} {given[name]!r} is not text")
        known = {name: value for name, value in (intake or {}).items() if not _blank(value)} | given
        year = known.pop("year", None)
        if year is not None and (isinstance(year, bool) or not re.fullmatch(r"\d{1,4}", str(year).strip())):
            raise NotACoin(f"{'query_params' if 'year' in given else 'coin_intakes'}: year {year!r} is not a year")
        words = {name: str(known[name]).strip() for name in ("mintmark", "denomination", "series") if name in known}
        minted = "-".join(str(part).strip() for part in (year, words.get("mintmark")) if part is not None)
        parts = (minted, words.get("series"), words.get("denomination"))
        title = str(known.get("title", "")).strip() or " ".join(part for part in parts if part)
        if not title:
            raise NotACoin("neither query_params nor the row of coin_intakes says which coin: both have no title")
        return cls(title, int(year) if year is not None else None, **words)

    def cache_key(self, source_id: Any) -> str:
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


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _has(text: str, words: str | None) -> bool | None:
    """Whether the words stand in the text, as whole words; None where none were asked for."""
    if words is None:
        return None
    return f" {' '.join(_words(words))} " in f" {text} "


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
