"""The local booster: words put together again, lines joined to paragraphs, accents restored, fields found. Offline."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from apps.ocr.lexicon import ACCENTED, MONTH_OF, MONTHS, PARTY_OF, plain
from apps.ocr.provider import Boosted
from rowmill import Job

#: What a hyphen keeps even where a line ends behind it.
_SECOND = {
    "ci",
    "là",
    "la",
    "même",
    "mêmes",
    "je",
    "tu",
    "il",
    "elle",
    "on",
    "nous",
    "vous",
    "ils",
    "elles",
    "ce",
    "dessus",
}
_FIRST = {
    "arrière",
    "avant",
    "après",
    "au",
    "contre",
    "demi",
    "ex",
    "grand",
    "haut",
    "mi",
    "non",
    "sous",
    "sud",
    "nord",
    "vice",
}
_MONTH = "|".join({*MONTHS, *(plain(month) for month in MONTHS)})
_SIGNS = {
    "’": "'",
    "‘": "'",
    "`": "'",
    "´": "'",
    "“": '"',
    "”": '"',
    "\u00a0": " ",
    "\u202f": " ",
    "\u00ad": "-",
    "：": ":",
}
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_NUMBER = re.compile(r"(?:num[ée]ro(?:\s+d['e]\s*inscription)?|inscription(?:\s+n[o°º])?)\s*:?\s*(\d[\d ]{3,}\d)", re.I)
_DATE = re.compile(rf"\b(1er|\d{{1,2}})\s+({_MONTH})\s+(\d{{4}})\b", re.I)
_DATED = re.compile(r"\bdate\b[^:\n]*:\s*(.+)", re.I)
#: An empty line, or one that begins with a label: "Vendeur : ...".
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=[A-ZÀ-Þ][\w'’ -]{2,30}?\s*:\s)")
_LABEL = re.compile(r"^([^\W\d_][\w'’ -]{2,30}?)\s*:\s*(\S.*)$")


class LocalBooster:
    """Cleans by rules. It knows French, and nothing of any single document."""

    name = "rules"

    async def boost(self, pages: Sequence[str], job: Job) -> Boosted:
        """The pages as one text, and what it says."""
        text = clean(pages)
        return Boosted(text, found_in(text))


def clean(pages: Sequence[str]) -> str:
    """One text of all pages: a paragraph a line."""
    paragraphs = [joined(block) for page in pages for block in _PARAGRAPH.split(plainly(page))]
    return "\n".join(mended(paragraph) for paragraph in paragraphs if paragraph)


def plainly(text: str) -> str:
    """Signs as a keyboard has them, and none that a database refuses."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(_SIGNS.get(sign, sign) for sign in text)
    text = "".join(
        sign for sign in text if sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cf", "Co", "Cs")
    )
    return text.replace("ﬁ", "fi").replace("ﬂ", "fl")


def joined(block: str) -> str:
    """The lines of a paragraph as one; a word that was broken between two of them is whole again."""
    whole = ""
    for line in (" ".join(line.split()) for line in block.splitlines()):
        if not line:
            continue
        if whole.endswith("-") and whole[-2:-1].isalpha() and line[0].isalpha():
            whole = f"{whole if _stays(whole, line) else whole[:-1]}{line}"
        else:
            whole = f"{whole} {line}" if whole else line
    return whole


def _stays(before: str, after: str) -> bool:
    """Whether the hyphen at the end of a line is the word's own."""
    first, second = re.split(r"[\s']", before[:-1])[-1], re.split(r"[\W]", after)[0]
    return second[0].isupper() or second.lower() in _SECOND or first.lower() in _FIRST


def mended(text: str) -> str:
    """What readers commonly get wrong: spaces around signs, the first of a month, accents that were not seen."""
    text = re.sub(r"\s+([,;.)])(?=\s|$)", r"\1", text)
    text = re.sub(r"(?<=[^\W\d_])\s*:(?=\s)", " :", text)  # a colon has a space before it, but not in 10:35
    text = re.sub(rf"\b[lI|]er(?=\s+(?:{_MONTH})\b)", "1er", text, flags=re.I)
    return _WORD.sub(lambda found: accented(found.group()), text)


def accented(word: str) -> str:
    """The word with its accents, where it has none and there is only one way to write it."""
    right = ACCENTED.get(word.lower())
    if right is None:
        return word
    return right.upper() if word.isupper() else right.capitalize() if word[0].isupper() else right


def found_in(text: str) -> dict[str, Any]:
    """Number, date and parties of a document, as far as it says them."""
    fields: dict[str, Any] = {"parties": [party for line in text.splitlines() if (party := _party(line))]}
    if number := _NUMBER.search(text):
        fields["number"] = number[1].strip()
    dated = _DATED.search(text)
    if date := (_DATE.search(dated[1]) if dated else None) or _DATE.search(text):
        day, month, year = date.groups()
        fields["date"] = f"{year}-{MONTH_OF[plain(month)]:02}-{int(day.lower().removesuffix('er')):02}"
    return fields


def _party(line: str) -> dict[str, str] | None:
    label = _LABEL.match(line)
    role = PARTY_OF.get(plain(label[1]).strip()) if label else None
    return {"role": role, "name": label[2].strip()} if label and role else None
