"""The prose of README, CHANGELOG, CONTRIBUTING and docs is plain English: the bounds of ``bench/readability.py``."""

from __future__ import annotations

import pytest

from bench import readability


def test_the_prose_of_every_page_is_easy_to_read() -> None:
    """Issue 21: Flesch reading ease of at least 55, fewer than 18 words in a sentence."""
    measured = {page.name: readability.measure([page.read_text()]) for page in readability.pages()}
    assert sum(ease.words for ease in measured.values()) > 10_000, "the pages were found"
    hard = {name: ease for name, ease in measured.items() if ease.flesch < 55 or ease.words_per_sentence >= 18}
    assert hard == {}


def test_only_prose_counts() -> None:
    """Code, tables, headings and links' targets are left out; a list item ends its sentence."""
    page = "# Title\n\nOne `x = y` two.\n\n```python\ncode()\n```\n\n| a | b |\n\n- [three](four.md)\n- five six\n"
    assert readability.sentences(page) == ["One code two.", "three", "five six"]
    ease = readability.measure([page])
    assert (ease.sentences, ease.words) == (3, 6)


@pytest.mark.parametrize(("word", "count"), [("row", 1), ("table", 2), ("made", 1), ("claimed", 1), ("tested", 2),
                                             ("queue", 1), ("lane's", 1), ("documentation", 5)])  # fmt: skip
def test_syllables_are_counted(word: str, count: int) -> None:
    """By groups of vowels, without silent ones."""
    assert readability.syllables(word) == count
