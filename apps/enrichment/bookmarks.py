"""Bookmark files: the Netscape format, as Chrome, Firefox and Safari export it, and as it is found in drawers.

A file is a list of ``<DL>`` inside each other; a folder's name is the ``<H3>`` before its ``<DL>``. Nothing is closed
reliably: ``</DT>`` never, ``</DL>`` sometimes not, or once too often. So a folder ends with its ``</DL>`` and with
nothing else, and one ``</DL>`` too many ends nothing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser

import charset_normalizer

from rowmill import RowmillError

_DECLARED = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_\-:.]+)""", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SURE = re.compile(r"<!doctype\s+netscape-bookmark|<dl\b|<a\s[^>]*href", re.IGNORECASE)
#: Deeper than anybody sorts; a file that goes on opening folders is kept flat from here on.
DEEPEST = 100


@dataclass(frozen=True, slots=True)
class Bookmark:
    """One bookmark: its address as it stands in the file, its folders, outermost first, and when it was made."""

    url: str
    title: str
    folder: tuple[str, ...]
    added_at: datetime | None


class NotBookmarks(RowmillError):
    """A file that is not a bookmarks export."""


def read(content: bytes) -> Iterator[Bookmark]:
    """All bookmarks of a file, in its order."""
    text = decode(content)
    if not _SURE.search(text):
        raise NotBookmarks(
            "this is not a bookmarks file: it has neither folders nor links",
            hint="export it from the browser's bookmark manager, as HTML",
        )
    reader = _Reader()
    reader.feed(text.replace("\x00", ""))
    reader.close()
    reader.end_link()
    yield from reader.found


def decode(content: bytes, declared: str | None = None) -> str:
    """Bytes as text: by their byte order mark, by what was ``declared``, by what they say in their first 2,000 bytes,
    as UTF-8, by what they look like; and, whatever happens, as something.
    """
    for mark, name in _BOMS:
        if content.startswith(mark):
            return content.decode(name, "replace")
    said = _DECLARED.search(content[:2000])
    for name in (declared, said[1].decode("ascii") if said else None, "utf-8"):
        if name and (text := _strictly(content, name)) is not None:
            return text
    guess = charset_normalizer.from_bytes(content[:100_000]).best()
    text = _strictly(content, guess.encoding) if guess is not None else None
    return text if text is not None else content.decode(_known(declared) or "windows-1252", "replace")


def _known(name: str | None) -> str | None:
    """A name of an encoding that Python has, by the web's rules: what calls itself Latin-1 is Windows-1252."""
    try:
        found = codecs.lookup(name or "").name
    except (LookupError, ValueError):
        return None
    return "windows-1252" if found in ("iso8859-1", "ascii") else found


def _strictly(content: bytes, name: str) -> str | None:
    known = _known(name)
    try:
        text = content.decode(known) if known else None
    except (UnicodeError, LookupError):  # a codec that is none for text is no answer either
        return None
    return text if isinstance(text, str) else None


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Bookmark] = []
        self._open: list[str | None] = []  # a folder's name per <DL>; None: one without
        self._named: str | None = None  # the <H3> that the next <DL> belongs to
        self._words: list[str] | None = None  # what stands inside an <H3> or <A>
        self._link: tuple[str, datetime | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("dl", "dt", "h3", "a"):
            self.end_link()
        if tag == "dl":
            self._end_heading()
            if len(self._open) < DEEPEST:
                self._open.append(self._named)
            else:
                self._open.append(None)
            self._named = None
        elif tag == "h3":
            self._words = []
        elif tag == "a":
            given = dict(attrs)
            if (url := given.get("href")) is not None:
                self._link, self._words = (url, _time(given.get("add_date"))), []

    def handle_endtag(self, tag: str) -> None:
        if tag == "h3":
            self._end_heading()
        elif tag in ("a", "dl"):
            self.end_link()
        if tag == "dl" and self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._words is not None:
            self._words.append(data)

    def _end_heading(self) -> None:
        if self._words is not None and self._link is None:
            self._named, self._words = _folded(self._words), None

    def end_link(self) -> None:
        """Note down the link that was open, whether it was closed or not."""
        if self._link is None:
            return
        (url, added_at), words = self._link, self._words or []
        folder = tuple(name for name in self._open if name is not None)
        self.found.append(Bookmark(url.strip(), _folded(words)[:1000], folder, added_at))
        self._link = self._words = None


def _folded(words: list[str]) -> str:
    return " ".join("".join(words).split())


def _time(seconds: str | None) -> datetime | None:
    """ADD_DATE is in seconds since 1970; some wrote milliseconds or microseconds."""
    try:
        value = float(seconds or "")
        while value > 1e11:
            value /= 1000
        return datetime.fromtimestamp(value, UTC) if value > 0 else None
    except (ValueError, OverflowError, OSError):
        return None
