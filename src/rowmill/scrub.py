"""What must not leave the house: query strings, e-mail addresses, secrets and IP addresses, taken out of any text."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

#: Nobody reads further, and a text without end must not cost without end.
MOST = 20_000
SECRET, QUERY, EMAIL_SHOWN, ADDRESS_SHOWN = "[secret]", "[query]", "[email]", "[address]"

URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{1,30}://[^\s\"'<>`]+")
EMAIL = re.compile(r"[\w.+%'-]{1,64}(?:@|%40)[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{2,39}(?:(?:\d{1,3}\.){3}\d{1,3})?(?:%\w{1,16})?(?![\w:])")
#: A query string without its site in front: what a web server logs.
_BARE_QUERY = re.compile(r"\?[^\s\"'<>`=&?]{1,80}=[^\s\"'<>`)\]}]*")
#: Names whose values are nobody's business, in whatever notation.
_WORDS = (
    r"pass(?:word|wd|phrase)|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|signature|csrf|jwt"
)
_SHORT = r"pass|pwd|session(?:[_-]?id)?|auth|otp|pin"
_NAME = rf"(?:[\w-]{{0,40}}(?:{_WORDS})[\w-]{{0,40}}|(?:[\w-]{{0,40}}[_-])?(?:{_SHORT})(?:[_-][\w-]{{0,40}})?)"
SENSITIVE = re.compile(
    rf"(?:{_NAME}|.*authorization|.*cookie.*|e-?mail.*|user_?name|ip_?addr(?:ess)?|remote_addr|x-forwarded-for|x-real-ip"
    r"|forwarded|query_?string|http\.query|http\.fragment|url\.query)",
    re.IGNORECASE,
)
_GIVEN = re.compile(rf"(?i)(?<![\w-])({_NAME})([\"']?\s{{0,4}}[:=]\s{{0,4}})(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&)}}\]\"']+)")
_HEADER = re.compile(r"(?i)((?:proxy-)?authorization|(?:set-)?cookie)([\"']?\s{0,4}[:=]\s{0,4}[\"']?)[^\n\"']+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+(?=[^\s]*[\dA-Z=])[\w.~+/=-]{6,}")
#: Tokens that say what they are by how they begin, and long opaque words with digits in them.
_KNOWN = re.compile(
    r"\b(?:eyJ[\w-]+\.[\w-]+(?:\.[\w-]*)?|(?:sk|pk|rk)[-_][\w-]{12,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}"
    r"|xox[abeprs]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}|sb[ap]_\w{16,})"
)
_LONG = 32
_OPAQUE = re.compile(rf"(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{{{_LONG},}}(?![\w-])")


def scrubbed(text: str) -> str:
    """The text without query strings, e-mail addresses, secrets and IP addresses; what is left still reads."""
    if len(text) > MOST:
        text = text[:MOST] + "…"
    text = URL.sub(lambda match: _plain_url(match.group()), text)
    text = _BARE_QUERY.sub(f"?{QUERY}", text)
    text = _HEADER.sub(rf"\1\2{SECRET}", text)
    text = _BEARER.sub(rf"\1 {SECRET}", text)
    text = _GIVEN.sub(rf"\1\2{SECRET}", text)
    text = EMAIL.sub(EMAIL_SHOWN, text)
    text = _KNOWN.sub(SECRET, text)
    # A long word is no secret for the UUID in it: ``worker-0b5e…`` is how a worker is called.
    text = _OPAQUE.sub(lambda match: SECRET if len(UUID.sub("", match[0])) >= _LONG else match[0], text)
    return without_addresses(text, ADDRESS_SHOWN)


def _plain_url(url: str) -> str:
    """Where it leads, without who asked and with what."""
    scheme, _, rest = url.partition("://")
    address, mark, _ = _cut(rest)
    host, slash, path = address.partition("/")
    host = host.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{path}{f'?{QUERY}' if mark == '?' else ''}"


def _cut(rest: str) -> tuple[str, str, str]:
    match = re.search(r"[?#]", rest)
    return (rest, "", "") if match is None else (rest[: match.start()], match.group(), rest[match.end() :])


def without_addresses(text: str, shown: str) -> str:
    """The text with every IP address, of either kind, replaced."""

    def replace(match: re.Match[str]) -> str:
        word = match.group()
        # A colon may belong to the sentence, and be the end of an address all the same.
        for ending in ("", ":"):
            with contextlib.suppress(ValueError):
                ipaddress.ip_address(word.removesuffix(ending))
                return shown + ending
        return word

    return _IPV6.sub(replace, _IPV4.sub(replace, text))


def scrubbed_value(value: Any, spared: Callable[[str], bool] = lambda key: False) -> Any:
    """The same through lists and dicts, where a key may say by its name that its value is secret. ``spared``: keys
    whose values are left as they are.
    """
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {k: one if spared(str(k)) else _under(str(k), one, spared) for k, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed_value(one, spared) for one in value]
    return value


def _under(key: str, value: Any, spared: Callable[[str], bool]) -> Any:
    if value is not None and not isinstance(value, bool) and SENSITIVE.fullmatch(key):
        return SECRET
    return scrubbed_value(value, spared)
