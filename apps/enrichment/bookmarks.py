"""Bookmark files: the Netscape format, as Chrome, Firefox and Safari export it, and as it is found in drawers.

A file is a list of ``<DL>`` inside each other; a folder's name is the ``<H3>`` before its ``<DL>``. Nothing is closed
reliably: ``</DT>`` never, ``</DL>`` sometimes not, or once too often. So a folder ends with its ``</DL>`` and with
nothing else, and one ``</DL>`` too many ends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser

from apps.markup import decode, storable
from rowmill import RowmillError

_EXPORTED = re.compile(r"<!doctype\s+netscape-bookmark", re.IGNORECASE)
_LINK = re.compile(r"<a\s", re.IGNORECASE)
#: Deeper than anybody sorts; a file that goes on opening folders is kept flat from here on.
DEEPEST = 50
#: Longer names are cut, and more bookmarks are not taken: each of them has its folders' names with it.
TITLE, NAME, MOST = 1_000, 200, 500_000
#: A file is read in pieces. A tag that is longer than so many of them has no end, and looking for it would have none.
_PIECE, _LONGEST, _REST = 1 << 18, 1 << 20, 10_000


@dataclass(frozen=True, slots=True)
class Bookmark:
    """One bookmark: its address as it stands in the file, its folders, outermost first, and when it was made."""

    url: str
    title: str
    folder: tuple[str, ...]
    added_at: datetime | None


class NotBookmarks(RowmillError):
    """A file that is not a bookmarks export."""


_EXPORT = "export it from the browser's bookmark manager, as HTML"


def read(content: bytes) -> Iterator[Bookmark]:
    """All bookmarks of a file, in its order."""
    text = storable(decode(content)).replace("<![", "&lt;![")  # Python's parser gives up at these
    exported = bool(_EXPORTED.search(text))
    none = NotBookmarks("this is not a bookmarks file: it has no links", hint=_EXPORT)
    if not exported and not _LINK.search(text):
        raise none
    reader = _Reader()
    for at in range(0, len(text), _PIECE):
        reader.feed(text[at : at + _PIECE])
        if len(reader.rawdata) > _LONGEST:
            raise NotBookmarks("this is not a bookmarks file: a tag in it has no end", hint=_EXPORT)
        if len(reader.found) > MOST:
            raise NotBookmarks(f"the file has more than {MOST} bookmarks", hint="split it by folders")
    if len(reader.rawdata) <= _REST:
        reader.close()
    reader.end_link()
    if not exported and not reader.found:  # an export may be empty; a page, or bytes that look like one, is none
        raise none
    yield from reader.found


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
            self._open.append(self._named if len(self._open) < DEEPEST else None)
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
            self._named, self._words = _folded(self._words)[:NAME], None

    def end_link(self) -> None:
        """Note down the link that was open, whether it was closed or not."""
        if self._link is None:
            return
        (url, added_at), words = self._link, self._words or []
        folder = tuple(name for name in self._open[:DEEPEST] if name is not None)
        self.found.append(Bookmark(url.strip(), _folded(words)[:TITLE], folder, added_at))
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
