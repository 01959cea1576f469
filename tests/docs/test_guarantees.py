"""docs/explanation/guarantees.md names tests that are there, and every promise names some."""

from __future__ import annotations

import re

from tests.mutations import MARKS, MUTATIONS, PAGE, ROOT

TEXT = PAGE.read_text()


def test_every_test_that_the_page_names_is_there() -> None:
    """Issue, guarantees: which test shows each."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 40
    missing = [f"{path}::{name}" for path, name in named if not _has(path, name)]
    assert missing == []


def _has(path: str, name: str) -> bool:
    file = ROOT / path
    return file.exists() and re.search(rf"^(?:async )?def {name}\(", file.read_text(), re.MULTILINE) is not None


def test_every_promise_names_a_test() -> None:
    promised = TEXT.partition("## Promised")[2].partition("\n## ")[0]
    rows = [line for line in promised.splitlines() if line.startswith("| **") or line.startswith("| ")][1:]
    assert len(rows) > 20
    assert [row for row in rows if "::test_" not in row] == []


def test_the_table_of_mutations_is_of_mutations_that_are_there_and_none_survived() -> None:
    """Issue, mutations: made by their run, ``make mutations ARGS=--write``."""
    table = TEXT.partition(MARKS[0])[2].partition(MARKS[1])[0]
    named = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert len(named) > 10
    assert set(named) <= {mutation.name for mutation in MUTATIONS}
    assert "survives" not in table
