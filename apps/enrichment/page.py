"""What is worth knowing of a page: taken from its head, and nothing of its body is kept."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

from apps.markup import parse, storable

SHORT, LONG, MOST = 300, 1_000, 40
#: Of a JSON-LD object that says the whole text of a page: that is not stored.
_BODIES = frozenset({"articlebody", "text", "reviewbody", "transcript", "recipeinstructions"})
_CHALLENGE = re.compile(
    r"^\s*(just a moment|attention required|verify(ing)? (that )?you are (a )?human|are you (a )?(human|robot)"
    r"|(please )?(complete|solve) the captcha|captcha|security check|pardon our interruption|robot check)\b",
    re.IGNORECASE,
)
_WIDGETS = ".g-recaptcha, .h-captcha, .cf-turnstile, #challenge-form, #px-captcha, [data-sitekey]"


class Page:
    """An HTML document and the address it came from."""

    def __init__(self, html: str, url: str) -> None:
        self._tree = parse(html)
        self._base = url
        with contextlib.suppress(ValueError):  # a base that is no address is none
            self._base = urljoin(url, self._attribute("base[href]", "href") or "")

    def facts(self) -> dict[str, Any]:
        """The columns of the row that are filled from it."""
        graph = self.open_graph()
        return {
            "title": self.title() or graph.get("og:title"),
            "description": _cut(self._meta("description") or graph.get("og:description"), LONG),
            "canonical_url": self._address("link[rel~=canonical]", "href"),
            "icon_url": self._address("link[rel~=icon], link[rel=apple-touch-icon]", "href"),
            "open_graph": graph,
            "json_ld": self.json_ld(),
            "language": _language(self._attribute("html", "lang")) or _language(graph.get("og:locale")),
        }

    def title(self) -> str | None:
        """The document's title; not one inside a drawing."""
        node = self._tree.css_first("head > title") or self._tree.css_first("title")
        return _cut(node.text(), SHORT) if node is not None else None

    def asks_for_a_human(self, status: int) -> bool:
        """A captcha in place of the page: by its title; a widget counts only where the page was refused, since many
        pages have one at their comments.
        """
        if _CHALLENGE.match(self.title() or ""):
            return True
        return status in (401, 403, 429, 503) and self._tree.css_first(_WIDGETS) is not None

    def open_graph(self) -> dict[str, str]:
        """``og:`` properties, the first of each."""
        found: dict[str, str] = {}
        for node in self._tree.css("meta[property^='og:'], meta[name^='og:']"):
            name = node.attributes.get("property") or node.attributes.get("name") or ""
            content = _cut(node.attributes.get("content"), LONG)
            if content and len(name) < 50 and name not in found and len(found) < MOST:
                found[name] = content
        return found

    def json_ld(self) -> list[Any]:
        """JSON-LD objects that can be read, without the texts of whole bodies."""
        found = []
        for node in self._tree.css("script[type='application/ld+json']")[:MOST]:
            try:
                value = json.loads(node.text())
            except (ValueError, RecursionError):
                continue
            found += [
                storable(_without_bodies(part)) for part in (value if isinstance(value, list) else [value])[:MOST]
            ]
        return found[:MOST]

    # -- where it stands

    def _attribute(self, selector: str, name: str) -> str | None:
        return next(self._attributes(selector, name), None)

    def _attributes(self, selector: str, name: str) -> Iterator[str]:
        for node in self._tree.css(selector):
            if value := (node.attributes.get(name) or "").strip():
                yield value

    def _meta(self, name: str) -> str | None:
        return self._attribute(f"meta[name='{name}' i]", "content")

    def _address(self, selector: str, name: str) -> str | None:
        """A web address, made whole; data and scripts are none."""
        for value in self._attributes(selector, name):
            try:
                url = urljoin(self._base, value)
            except ValueError:
                continue
            if url.startswith(("http://", "https://")) and len(url) <= LONG:
                return url
        return None


def _cut(text: str | None, most: int) -> str | None:
    words = " ".join(storable(text or "").split())
    return words[:most] or None


def _language(text: str | None) -> str | None:
    """``de-CH`` and ``de_CH`` are ``de-ch``."""
    found = (text or "").strip().replace("_", "-").lower()
    return found if re.fullmatch(r"[a-z]{2,3}(-[a-z0-9]{2,8})*", found) else None


def _without_bodies(value: Any, depth: int = 0) -> Any:
    """The same value, no deeper, wider or longer than metadata is."""
    if isinstance(value, str):
        return _cut(value, LONG)
    if isinstance(value, list):
        return [_without_bodies(part, depth + 1) for part in value[:MOST]] if depth < 6 else None
    if isinstance(value, dict):
        kept = [(k, v) for k, v in value.items() if k.lower() not in _BODIES][:MOST] if depth < 6 else []
        return {key[:100]: _without_bodies(part, depth + 1) for key, part in kept}
    return value
