"""Group equal failures: remove what differs from row to row from an error's text, and make a short name of the rest."""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus

from ...scrub import EMAIL, URL, UUID, without_addresses

#: How many characters of a text are read, and how many of its shape are compared.
READ, _KEPT = 4000, 300
LENGTH = 12

_QUOTED = re.compile(r"(?<![\w<])(?:'[^'\n]{0,400}'|\"[^\"\n]{0,400}\"|`[^`\n]{0,400}`)(?!\w)|[«“][^»”\n]{0,400}[»”]")
_PATH = re.compile(r"(?<![\w<>/])(?:[A-Za-z]:)?(?:[/\\][\w.@%+~$-]+){2,}[/\\]?|(?<![\w<>/])~?/[\w@%+~$-]+\.\w{1,8}\b")
_HEX = re.compile(r"\b(?:0[xX][0-9a-fA-F]+|(?=[a-fA-F]*[0-9])(?=[0-9]*[a-fA-F])[0-9a-fA-F]{8,})\b")
_WORD = re.compile(r"\b[\w-]{6,}\b")
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?:\s?(?:Z|UTC|[+-]\d\d:?\d\d)\b)?"
    rf"|\b(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*,? \d{{1,2}} {_MONTH} \d{{4}}(?: \d\d:\d\d:\d\d)?(?: GMT| UTC)?",
    re.IGNORECASE,
)
#: An HTTP status, recognised by the text before it ("HTTP/1.1 404", "status_code=404") or after it ("404 Not Found").
_PHRASES = "|".join(re.escape(status.phrase).replace(r"\ ", "[ _]") for status in HTTPStatus)
_STATUS = re.compile(
    r"(?:\bHTTP[\w/.]{0,40}\W{0,3}(?:(?:response|status|error|code)\W{0,3}){0,2}"
    r"|(?<![^\W_])status(?:[ _-]?code)?\W{0,3}|\b(?:error|response)[ _-]?code\W{0,3}|[\"']code[\"']\W{0,3})"
    r"(?<!\d)(?P<after>[1-5]\d\d)(?!\.?\d)"
    rf"|(?<![\w.])(?P<before>[1-5]\d\d)(?=, message=|[ _](?:{_PHRASES}|(?:Client|Server) Error)\b)",
    re.IGNORECASE,
)
#: A name in one of Python's own errors that says what is wrong: KeyError: 'title'. An id as a key is a value.
_NAMED = re.compile(
    r"(?P<lead>\bKeyError: |\battribute |\bNameError: name |\bkeyword argument )(?P<quote>['\"])"
    r"(?P<name>[^\W\d](?:[^\W\d]|-){0,39})(?P=quote)"
)
#: Keeps the digits of a status while the other digits are removed.
_KEEP = str.maketrans("0123456789", "".join(chr(0xE000 + n) for n in range(10)))
_SHOW = {character: digit for digit, character in _KEEP.items()}
_KEPT_DIGITS = re.compile("[\ue000-\ue009]+")
_NUMBER = re.compile(r"[-+]?\d(?:[\d_,.]*\d)?")
_ROW_OF_NUMBERS = re.compile(r"<n>(?:\s?[,;:/x.-]\s?<n>)+")


def shape(text: str) -> str:
    """An error's text with numbers, ids, URLs, e-mail and IP addresses, paths, times and quoted values left out.

    HTTP statuses stay: a 404 and a 503 are two failures. So do names of missing keys, attributes and arguments.
    """
    text = text[:READ]
    text = URL.sub("<url>", text)
    text = _STATUS.sub(_keep_status, text)
    if "@" in text or "%40" in text:  # without an @, a long word costs as much as a thousand short ones
        text = EMAIL.sub("<email>", text)
    text = UUID.sub("<id>", text)
    text = _TIME.sub("<time>", text)
    text = without_addresses(text, "<address>")
    text = _NAMED.sub(r"\g<lead>\g<name>", text)
    text = _QUOTED.sub(lambda quoted: f"<{' '.join(_KEPT_DIGITS.findall(quoted.group())) or 'value'}>", text)
    text = _PATH.sub("<path>", text)
    text = _HEX.sub("<id>", text)
    text = _WORD.sub(_id_or_word, text)
    text = _NUMBER.sub("<n>", text)
    text = _ROW_OF_NUMBERS.sub("<n>", " ".join(text.split()))
    return text[:_KEPT].translate(_SHOW)


def _keep_status(matched: re.Match[str]) -> str:
    lead, status = matched.group(), matched["after"] or matched["before"]
    return lead.removesuffix(status) + status.translate(_KEEP)


def _id_or_word(match: re.Match[str]) -> str:
    """A word that alternates letters and digits is an id, not a word: a6Gd93jX, 7f-31-cc."""
    word = match.group()
    is_id = len(re.findall(r"\d+", word)) > 1 and re.search(r"[^\W\d_]", word)
    return "<id>" if is_id else word


def fingerprint(text: str | None) -> str:
    """The short name of a failure's family: the same for texts that differ only in their values."""
    return hashlib.blake2b(shape(text or "").encode("utf-8", "replace"), digest_size=LENGTH // 2).hexdigest()
