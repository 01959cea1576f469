"""How easy the prose of README.md, CHANGELOG.md, CONTRIBUTING.md and docs/ is to read: Flesch and words per sentence.

    python -m bench.readability             # the whole, and each file, hardest first
    python -m bench.readability --worst 20  # and the longest sentences

Only prose counts. Code, tables, headings and pages that a program writes are left out; inline code counts as one short
word. The formula: 206.835 - 1.015 * words per sentence - 84.6 * syllables per word. 60 to 70 is plain English.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Pages that a run writes: their words are in the program that writes them.
WRITTEN_BY_RUNS = ("report.md",)


@dataclass(frozen=True)
class Ease:
    """Counts of a text, and what follows from them."""

    sentences: int
    words: int
    syllables: int

    @property
    def words_per_sentence(self) -> float:
        return self.words / max(1, self.sentences)

    @property
    def flesch(self) -> float:
        return 206.835 - 1.015 * self.words_per_sentence - 84.6 * self.syllables / max(1, self.words)


def pages() -> list[Path]:
    """The pages whose prose is measured."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    roots = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return [*roots, *(path for path in docs if path.name not in WRITTEN_BY_RUNS)]


def paragraphs(markdown: str) -> list[str]:
    """The prose of a page: one text per paragraph or list item, without code, tables, headings and links' targets."""
    text = re.sub(r"^(```|~~~).*?^\1$", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*(\||#|!\[|=== |!!! |\?\?\? ).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)
    text = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", text, flags=re.MULTILINE)
    return [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text) if re.search(r"[A-Za-z]{2}", part)]


def sentences(markdown: str) -> list[str]:
    """The sentences of a page's prose. A heading of two words before a colon, or a caption, counts as one, too."""
    found = []
    for paragraph in paragraphs(markdown):
        plain = re.sub(r"\b(e\.g|i\.e|etc|vs)\.", r"\1", paragraph)
        found += [part for part in re.split(r"(?<=[.!?])[\")]*\s+", plain) if re.search(r"[A-Za-z]", part)]
    return found


def syllables(word: str) -> int:
    """An estimate: groups of vowels, without the silent ones of a final e, es or ed. It errs on the high side."""
    word = re.sub(r"['’]s$", "", word.lower())
    word = re.sub(r"(?<![^aeiouy]l)e$|(?<![sxzcgh])(?<![^aeiouy]l)es$|(?<![td])(?<![^aeiouy]l)ed$", "", word)
    return max(1, len(re.findall(r"[aeiouy]+", word)))


def measure(texts: Iterable[str]) -> Ease:
    """The counts over all sentences of these pages."""
    parts = [part for text in texts for part in sentences(text)]
    words = [word for part in parts for word in re.findall(r"[A-Za-z][A-Za-z'’]*|\d[\d.,:]*", part)]
    return Ease(len(parts), len(words), sum(syllables(word) for word in words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="print the N longest sentences, too")
    given = parser.parse_args()
    texts = {path.relative_to(ROOT): path.read_text() for path in pages()}
    for path, ease in sorted(((path, measure([text])) for path, text in texts.items()), key=lambda row: row[1].flesch):
        print(
            f"{ease.flesch:6.1f} Flesch {ease.words_per_sentence:6.1f} words a sentence {ease.words:7,} words  {path}"
        )
    whole = measure(texts.values())
    print(f"{whole.flesch:6.1f} Flesch {whole.words_per_sentence:6.1f} words a sentence {whole.words:7,} words  all")
    longest = sorted(((len(s.split()), s, path) for path, text in texts.items() for s in sentences(text)), reverse=True)
    for count, sentence, path in longest[: given.worst]:
        print(f"{count} words, {path}: {sentence}")


if __name__ == "__main__":
    main()
