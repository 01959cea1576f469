"""Sites for the stand-in internet: each function makes one, with the manners it is named for.

A site is a function from ``internet.Request`` to ``internet.Answer``; ``by_path`` puts several behind one host name.
"""

from __future__ import annotations

import asyncio
import html
from collections import Counter
from collections.abc import Mapping

from .internet import Answer, Request, Site

HTML = {"content-type": "text/html; charset=utf-8"}
TEXT = {"content-type": "text/plain; charset=utf-8"}


def by_path(paths: Mapping[str, Site], default: Site | None = None) -> Site:
    """The site of the longest path that the request's begins with."""

    def answer(request: Request) -> Answer:
        for path in sorted(paths, key=len, reverse=True):
            if request.path.startswith(path):
                return paths[path](request)
        return default(request) if default else Answer("not found", 404)

    return answer


def page(
    latency: float = 0.0,
    lang: str = "en",
    head: str = "",
    body: str = "<p>Some words.</p>",
    together: asyncio.Barrier | None = None,
) -> Site:
    """An article at every path: title, description, canonical link, icon, Open Graph and JSON-LD. No robots rules."""

    def answer(request: Request) -> Answer:
        if request.path == "/robots.txt":
            return Answer("not found", 404)
        name, url = html.escape(f"{request.path} at {request.host}"), f"https://{request.host}{request.path}"
        words = f"""<!doctype html><html lang="{lang}"><head><title>Page {name}</title>
<meta name="description" content="What is at {name}"><link rel="canonical" href="{url}">
<link rel="icon" href="/icon.png"><meta property="og:title" content="Page {name}">
<meta property="og:type" content="article"><meta property="og:image" content="/image.png">
<script type="application/ld+json">{{"@type": "Article", "headline": "Page {name}"}}</script>{head}</head>
<body><h1>{name}</h1>{body}</body></html>"""
        return Answer(words, latency=latency, together=together)

    return answer


def saying(
    body: bytes | str, status: int = 200, content_type: str = "text/html; charset=utf-8", latency: float = 0
) -> Site:
    """The same answer at every path; none to a question for robots rules."""

    def answer(request: Request) -> Answer:
        if request.path == "/robots.txt":
            return Answer("not found", 404)
        return Answer(body, status, {"content-type": content_type}, latency)

    return answer


def refusing(status: int = 403, latency: float = 0.0) -> Site:
    """Shut to everybody."""
    return saying("<title>Forbidden</title>", status, latency=latency)


def robots(rules: str, site: Site, status: int = 200) -> Site:
    """A site with robots rules."""
    return lambda request: Answer(rules, status, TEXT) if request.path == "/robots.txt" else site(request)


def redirecting(to: str, status: int = 302) -> Site:
    """Everything is elsewhere."""
    return lambda request: (
        Answer("not found", 404) if request.path == "/robots.txt" else Answer("", status, {"location": to})
    )


def circling(length: int = 3) -> Site:
    """Redirects in a circle: ``/circle/0`` to ``/circle/1`` and so on, and back."""

    def answer(request: Request) -> Answer:
        if request.path == "/robots.txt":
            return Answer("not found", 404)
        at = int(request.path.removeprefix("/circle/")) if request.path.startswith("/circle/") else -1
        return Answer("", 302, {"location": f"/circle/{(at + 1) % length}"})

    return answer


def captcha(status: int = 200) -> Site:
    """Asks every visitor to prove that he is human."""
    words = """<!doctype html><title>Just a moment...</title><h1>Verify you are human</h1>
<form id="challenge-form" action="/check"><div class="g-recaptcha" data-sitekey="x"></div></form>"""
    return saying(words, status)


def endless(content_type: str = "text/html") -> Site:
    """A body that never ends; its head has a title."""
    words = "<!doctype html><title>Endless</title>" + "<p>more and more</p>" * 2000
    return lambda request: (
        Answer("not found", 404)
        if request.path == "/robots.txt"
        else Answer(words, headers={"content-type": content_type}, endless=True)
    )


def mislabelled(text: str, real: str, said: str | None) -> Site:
    """A page in one encoding that is announced as another, or not at all."""
    body = f"<!doctype html><title>{text}</title><p>{text}</p>".encode(real)
    return saying(body, content_type=f"text/html; charset={said}" if said else "text/html")


def failing(times: int, site: Site, status: int = 500) -> Site:
    """Each page answers with an error so many times, and then like the other one; robots rules do at once."""
    failures: Counter[str] = Counter()

    def answer(request: Request) -> Answer:
        if request.path == "/robots.txt" or failures[request.path] >= times:
            return site(request)
        failures[request.path] += 1
        return Answer("out of order", status, TEXT)

    return answer


def dropping(in_the_middle: bool = False) -> Site:
    """Cuts the connection, before the answer or within it."""
    return lambda request: (
        Answer("not found", 404)
        if request.path == "/robots.txt"
        else Answer("half an ans", drops=not in_the_middle, cut_off=in_the_middle)
    )
