"""The prose of README and docs is plain English: the bounds of ``bench/readability.py`` over all pages."""

from __future__ import annotations

import pytest

from bench import readability


def test_the_prose_of_all_pages_is_easy_to_read() -> None:
    """Issue: Flesch reading ease of at least 55, fewer than 18 words in a sentence."""
    ease = readability.measure(page.read_text() for page in readability.pages())
    assert ease.words > 10_000, "the pages were found"
    assert ease.flesch >= 55
    assert ease.words_per_sentence < 18


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
