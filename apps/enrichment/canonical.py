"""Canonical links: one address for what differs only in how it was written down.

The rules, in order; each has a test of its name in tests/test_canonical.py:

1. ``white_space``: white space and control characters around and inside an address go.
2. ``scheme``: only http and https, in lower case; they stay two addresses, since a site may answer on one alone.
3. ``user_info``: a user and a password are left out; they are nobody else's business.
4. ``host_case``: the host in lower case, without a dot at its end.
5. ``idn``: an international host name as it stands in DNS (UTS 46).
6. ``default_port``: ``:80`` with http and ``:443`` with https go.
7. ``dots``: ``/./`` and ``/../`` are resolved; an empty path is ``/``.
8. ``escapes``: escapes of letters, digits and ``-._~`` are resolved, others are in capitals; what must be escaped is.
9. ``trailing_slash``: slashes at the end of a path go, but for the root.
10. ``tracking``: parameters that only say where a visitor came from go; the others keep their order.
11. ``empty_query``: a question mark with nothing behind it goes.
12. ``fragment``: what stands behind ``#`` goes; it never reaches a server.

An address to which they cannot be applied (no host, another scheme, too long) is not a link that can be enriched.
"""

from __future__ import annotations

import functools
import re
from urllib.parse import quote, unquote_to_bytes, urlsplit
from uuid import NAMESPACE_URL, UUID, uuid5

import idna

from rowmill import RowmillError

MOST = 8_000
PORTS = {"http": 80, "https": 443}
#: Names of parameters that only say where a visitor came from; ``utm_*`` and the like by their beginning.
TRACKING = {
    "_ga", "_gl", "_hsenc", "_hsmi", "dclid", "fbclid", "gbraid", "gclid", "gclsrc", "igshid", "li_fat_id", "mc_cid",
    "mc_eid", "mkt_tok", "msclkid", "oly_anon_id", "oly_enc_id", "s_kwcid", "srsltid", "ttclid", "twclid", "vero_id",
    "wbraid", "wickedid", "yclid", "ysclid",
}  # fmt: skip
TRACKING_STARTS = ("utm_", "hsa_", "pk_", "piwik_", "mtm_")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]+")
_SAFE = "!$&'()*+,;=:@/%-._~"
_CLEAN = re.compile(r"[A-Za-z0-9\-._~!$&'()*+,;=:@/]*")
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class NotALink(RowmillError):
    """An address that cannot be enriched, and why."""


def canonical(url: str) -> str:
    """The canonical form of an address; ``NotALink`` where there is none."""
    text = _BLANK.sub("", url)
    if len(text) > MOST:
        raise NotALink(f"the address has {len(text)} characters, and {MOST} are the most", hint="shorten it")
    try:
        parts = urlsplit(text)
        scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError as error:
        raise NotALink(f"not an address: {error}") from None
    if scheme not in PORTS:
        raise NotALink(f"{scheme or 'no scheme'}: only http and https can be enriched")
    if not host:
        raise NotALink("the address names no host")
    place = _host(host) if port in (None, PORTS[scheme]) else f"{_host(host)}:{port}"
    query = _query(parts.query)
    return f"{scheme}://{place}{_path(parts.path)}{'?' + query if query else ''}"


def link_id(url: str) -> UUID:
    """The id of a canonical link: made from it, so that all who meet it agree without asking."""
    return uuid5(NAMESPACE_URL, url)


@functools.lru_cache(10_000)
def _host(host: str) -> str:
    name = host.rstrip(".").lower()
    if ":" in name:
        return f"[{name}]"
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise NotALink(f"the host's name is not one: {error}") from None
    if not re.fullmatch(r"[a-z0-9_.\-]+", name) or ".." in name:
        raise NotALink("the host's name is not one")
    return name


def _path(path: str) -> str:
    kept: list[str] = []
    for segment in _escaped(path).split("/")[1:]:
        if segment == "..":
            kept = kept[:-1]
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept).strip("/") if "".join(kept) else "/"


def _query(query: str) -> str:
    return "&".join(part for part in query.split("&") if part and not _tracks(part))


def _tracks(parameter: str) -> bool:
    name = unquote_to_bytes(parameter.partition("=")[0]).decode("utf-8", "replace").lower()
    return name in TRACKING or name.startswith(TRACKING_STARTS)


def _escaped(text: str) -> str:
    """Escapes that mean nothing resolved, the others in capitals, and what must be escaped is."""

    def one(match: re.Match[str]) -> str:
        byte = int(match[1], 16)
        return chr(byte) if byte in _UNRESERVED else f"%{byte:02X}"

    if _CLEAN.fullmatch(text):  # most are
        return text
    # A percent sign that begins no escape stands for itself.
    text = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", text)
    return quote(re.sub(r"%([0-9A-Fa-f]{2})", one, text), safe=_SAFE, errors="replace")
