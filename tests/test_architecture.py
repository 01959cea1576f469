"""The layout of the source is as docs/architecture.md and CONTRIBUTING.md tell it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "rowmill"
PAGES = ["docs/architecture.md", "CONTRIBUTING.md"]
FOLDERS = sorted(path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py"))
#: Django's own Mill is a Mill for users of Django, and its commands are found by these names.
_ALLOWED_TWICE = {"Mill"}


@pytest.mark.parametrize("folder", [each for each in FOLDERS if not each.startswith("django")])
def test_every_folder_says_what_it_is_for(folder: str) -> None:
    """A newcomer reads one docstring per folder, not its files."""
    assert ast.get_docstring(ast.parse((SOURCE / folder / "__init__.py").read_text()))


def test_the_architecture_names_every_folder() -> None:
    """The table of folders is whole."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`(\w+)/`", text))
    assert {each.split("/")[-1] for each in FOLDERS if each != "." and not each.startswith("django/")} <= named


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_function_that_a_page_names_is_there(page: str) -> None:
    """Recipes and the way of a row lead to files that exist, and to functions that are in them."""
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`(?: `([a-z_]+)`)?", text)
    assert named
    for file, function in named:
        path = next((base / file for base in (SOURCE, ROOT) if (base / file).exists()), None)
        assert path is not None, file
        assert not function or re.search(rf"\bdef {function}\b", path.read_text()), f"{file}: {function}"


def test_no_class_name_stands_twice_in_the_package() -> None:
    """A name that is searched for is found once."""
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in names.items() if times > 1} <= _ALLOWED_TWICE


def test_no_folder_is_a_heap() -> None:
    """About twenty modules each; the largest have 28."""
    sizes = {folder: len(list((SOURCE / folder).glob("*.py"))) for folder in FOLDERS}
    assert {folder: size for folder, size in sizes.items() if size > 29} == {}
