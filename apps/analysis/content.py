"""What a page says: its main content, what it is made with, and how its owner can be reached."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from selectolax.lexbor import LexborHTMLParser, LexborNode

from apps.markup import parse, storable

MOST_TEXT = 20_000
#: Not content, wherever it stands.
_NOISE = (
    "script, style, noscript, template, svg, iframe, form, nav, header, footer, aside, [hidden], [aria-hidden=true]"
)
_MAIN = ("main", "article", "[role=main]", "#content", "body")
#: A name, and what gives it away: in the page's source, or, with a colon, in a header of the answer.
_SIGNS: Mapping[str, str] = {
    "WordPress": r"/wp-(?:content|includes)/",
    "Drupal": r"/sites/default/files|drupal-settings-json",
    "Joomla": r"/media/jui/|content=\"Joomla",
    "Shopify": r"cdn\.shopify\.com",
    "Wix": r"static\.wixstatic\.com",
    "Squarespace": r"static1?\.squarespace\.com",
    "Webflow": r"data-wf-site",
    "Next.js": r"/_next/|__NEXT_DATA__",
    "Nuxt": r"/_nuxt/|__NUXT__",
    "React": r"data-reactroot|react(?:-dom)?(?:\.production)?(?:\.min)?\.js",
    "Vue": r"data-v-[0-9a-f]{8}|vue(?:\.global)?(?:\.prod)?(?:\.min)?\.js",
    "Angular": r"ng-version=",
    "jQuery": r"jquery[.-][\d.]*(?:min\.)?js",
    "Bootstrap": r"bootstrap(?:\.bundle)?(?:\.min)?\.(?:css|js)",
    "Google Analytics": r"googletagmanager\.com/gtag|google-analytics\.com/",
    "Matomo": r"matomo\.(?:js|php)",
    "Stripe": r"js\.stripe\.com",
}
_HEADERS = {"server": "Server", "x-powered-by": "Powered by"}
_SOCIAL = ("facebook.com", "instagram.com", "linkedin.com", "x.com", "twitter.com", "youtube.com", "mastodon.social")
_MAIL = re.compile(r"\b[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{2,63}){1,4}\b")
_FILE = re.compile(r"\.(?:png|jpe?g|gif|svg|webp|css|js)$", re.IGNORECASE)


def read(source: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """All that is stored of a page, as a value for the row."""
    source = storable(source)
    page = parse(source)
    found: dict[str, Any] = {
        "title": _first(_text(page.css_first("title")), _meta(page, "og:title"), _text(page.css_first("h1")))[:300],
        "description": _first(_meta(page, "description"), _meta(page, "og:description"))[:1000],
        "language": _language(page, headers),
        "technologies": technologies(page, source, headers),
        "contacts": contacts(page),
    }
    text = main_text(page)  # last: it takes the noise out of the page
    return found | {"text": text[:MOST_TEXT], "words": len(text.split())}


def main_text(page: LexborHTMLParser) -> str:
    """The text of the page's main part: the first of the usual places that holds a good part of all there is."""
    for node in page.css(_NOISE):
        node.decompose()
    whole = _text(page.body)
    for place in _MAIN:
        text = max((_text(node) for node in page.css(place)), key=len, default="")
        if len(text) * 4 > len(whole):
            return text
    return whole


def technologies(page: LexborHTMLParser, source: str, headers: Mapping[str, str]) -> list[str]:
    """What the site is made with, as far as it shows."""
    found = [name for name, sign in _SIGNS.items() if re.search(sign, source, re.IGNORECASE)]
    if generator := _meta(page, "generator"):
        found.append(generator[:80])
    found += [f"{word}: {headers[name][:80]}" for name, word in _HEADERS.items() if headers.get(name)]
    return list(dict.fromkeys(found))


def contacts(page: LexborHTMLParser) -> dict[str, list[str]]:
    """E-mail addresses, telephone numbers, and pages on social networks."""
    links = [node.attributes.get("href") or "" for node in page.css("a[href]")]
    mails = [unquote(link[7:].partition("?")[0]) for link in links if link.lower().startswith("mailto:")]
    mails += [mail for mail in _MAIL.findall(_text(page.body)) if not _FILE.search(mail)]
    phones = [unquote(link[4:]).strip() for link in links if link.lower().startswith("tel:")]
    social = [link for link in links if _host(link).removeprefix("www.") in _SOCIAL]
    for node in page.css('script[type="application/ld+json"]'):
        mails += _spoken(node.text(), "email")
        phones += _spoken(node.text(), "telephone")
    return {"emails": _few(m.removeprefix("mailto:").lower() for m in mails), "phones": _few(phones),
            "social": _few(social)}  # fmt: skip


def _spoken(source: str, key: str) -> list[str]:
    """What JSON-LD says under a key, however deep."""
    try:
        values: list[Any] = [json.loads(source)]
    except (ValueError, RecursionError):
        return []
    found = []
    while values:
        value = values.pop()
        if isinstance(value, dict):
            found += [str(value[key])] if isinstance(value.get(key), str) else []
            values += value.values()
        elif isinstance(value, list):
            values += value
    return found


def _language(page: LexborHTMLParser, headers: Mapping[str, str]) -> str:
    root = page.css_first("html")
    said = (root.attributes.get("lang") if root else None) or headers.get("content-language") or ""
    return said.strip().split(",")[0][:20].lower()


def _meta(page: LexborHTMLParser, name: str) -> str:
    for node in page.css("meta"):
        said = node.attributes.get("name") or node.attributes.get("property") or ""
        if said.lower() == name and (content := node.attributes.get("content")):
            return _folded(content)
    return ""


def _text(node: LexborNode | None) -> str:
    return _folded(node.text(separator=" ")) if node is not None else ""


def _folded(text: str) -> str:
    return " ".join(text.split())


def _first(*texts: str) -> str:
    return next((text for text in texts if text), "")


def _few(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(value[:200] for value in values if value))[:10]


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
