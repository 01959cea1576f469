"""HTML from strangers: bytes as text, text as a tree, and neither takes long, whatever was sent."""

from __future__ import annotations

import codecs
import re
from typing import Any

import charset_normalizer
from selectolax.lexbor import LexborHTMLParser

_DECLARED = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_\-:.]+)""", re.IGNORECASE)
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
#: Python's own that no page is written in: some take hours for a page, some make what no database stores.
_NOT_OF_THE_WEB = {"punycode", "idna", "unicode_escape", "raw_unicode_escape", "utf-7", "undefined", "mbcs", "oem"}
#: What no database takes as text, and nobody misses: null characters and halves of surrogate pairs.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

#: Elements inside each other. A parser looks through all that are open for each one that opens.
DEEPEST = 500
_TAG = re.compile(r"<(/?)([a-z][a-z0-9-]*)", re.IGNORECASE)
#: These have no end, or need none, and so do not say how deep a page is.
_ENDLESS = frozenset({
    "area", "base", "body", "br", "col", "colgroup", "dd", "dt", "embed", "head", "hr", "html", "img", "input", "li",
    "link", "meta", "option", "p", "param", "rp", "rt", "source", "tbody", "td", "tfoot", "th", "thead", "tr", "track",
    "wbr",
})  # fmt: skip


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
    if found in _NOT_OF_THE_WEB:
        return None
    return "windows-1252" if found in ("iso8859-1", "ascii") else found


def _strictly(content: bytes, name: str) -> str | None:
    known = _known(name)
    try:
        text = content.decode(known) if known else None
    except (UnicodeError, LookupError):  # a codec that is none for text is no answer either
        return None
    return text if isinstance(text, str) else None


def parse(html: str) -> LexborHTMLParser:
    """A page as a tree; what stands deeper than ``DEEPEST`` is not looked at, nor what comes behind it."""
    return LexborHTMLParser(_shallow(html).replace("\x00", ""))


def _shallow(html: str) -> str:
    depth = 0
    for tag in _TAG.finditer(html):
        if tag[2].lower() not in _ENDLESS:
            depth = max(depth - 1, 0) if tag[1] else depth + 1
            if depth > DEEPEST:
                return html[: tag.start()]
    return html


def storable(value: Any) -> Any:
    """A value as every database takes it, texts inside it, too. Numbers that are none (NaN, infinite) are left out."""
    match value:
        case str():
            return _UNSTORABLE.sub("", value)
        case dict():
            return {storable(str(key)): storable(inner) for key, inner in value.items()}
        case list():
            return [storable(inner) for inner in value]
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
    return value
