"""docs/explanation/comparison.md: every feature is there, every link leads somewhere, every named test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
PAGE = DOCS / "explanation" / "comparison.md"
LEFT_OUT = "decisions/0008-what-is-left-out.md"


def table(heading: str) -> dict[int, list[str]]:
    """The rows of the table below a heading, by number."""
    part = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| \d.*$", part, re.M)]
    assert [int(row[0]) for row in rows] == list(range(1, 43))
    return {int(row[0]): row[1:] for row in rows}


FEATURES, PLACES = table("The features"), table("Where rowmill's are")


def anchors(page: Path) -> set[str]:
    """What a link into a page may name: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_feature_has_a_word_for_each_engine() -> None:
    engines = re.findall(r"^\| # \| feature \|(.*)\|$", PAGE.read_text(), re.M)[0].split("|")
    assert [engine.strip() for engine in engines] == [
        "rowmill", "Oban", "River", "Graphile Worker", "pg-boss", "Procrastinate", "PgQueuer", "Chancy", "DBOS",
        "Celery",
    ]  # fmt: skip
    for number, row in FEATURES.items():
        assert len(row) == 1 + len(engines), number
        assert all(row), number
        assert row[1] != "?", number


@pytest.mark.parametrize("number", PLACES)
def test_what_is_there_has_a_test_and_what_is_not_has_a_reason(number: int) -> None:
    has, (documented, shown) = FEATURES[number][1], PLACES[number]
    if re.search(r"\bno\b|not|^lanes|^retention$|a state", has):
        assert LEFT_OUT in documented, f"{has!r} without a reason"
    tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", shown)
    if re.match(r"no\b|not yet$", has):
        assert shown == "-"
    else:
        assert tests, f"{has!r} without a test"
    assert re.sub(r"`test_\w+\.py::test_\w+`|, |-", "", shown) == "", "nothing else stands there"
    for file, name in tests:
        assert re.search(rf"def {name}\(", TESTS[file]), f"there is no {file}::{name}"


@pytest.mark.parametrize(
    "page", [PAGE, DOCS / LEFT_OUT, *sorted((DOCS / "how-to" / "migrate-from").glob("*.md"))], ids=str
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())
    assert links or page.stem == "hand-written-loop"
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve()
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_what_goes_by_the_row_has_a_page_and_tests() -> None:
    """Issue 23: a page for each feature, and tests that are there."""
    part = PAGE.read_text().split("\n## What working on your own rows makes possible\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| \[[^]]+\]\(\.\./how-to/[^)]+\) \| `(test_\w+\.py)` \|$", part, re.M)
    assert len(rows) == 9
    assert set(rows) <= TESTS.keys()


def test_every_reason_is_asked_for() -> None:
    """A section that no row links to is about something that is there by now, or was never missing."""
    sections = re.findall(r"^### (.*)$", (DOCS / LEFT_OUT).read_text(), re.M)
    linked = set(re.findall(rf"{re.escape(LEFT_OUT)}#([\w-]+)\)", PAGE.read_text()))
    assert linked == {section.lower().replace(",", "").replace("'", "").replace(" ", "-") for section in sections}
