"""The layout of the source is as docs/architecture.md and CONTRIBUTING.md tell it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowmill.declare import roles, states
from rowmill.store.dialect import Dialect, SqliteDialect

ROOT = Path(__file__).resolve().parents[2]
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
    """About twenty modules each; the largest have 25."""
    sizes = {folder: len(list((SOURCE / folder).glob("*.py"))) for folder in FOLDERS}
    assert {folder: size for folder, size in sizes.items() if size > 25} == {}


# -- one dialect

#: The files that speak to one database: its dialect, its driver, its lanes.
_OF_ONE_DATABASE = re.compile(
    r"store/(dialect|database|postgres_database|sqlite_database|sqlite_file|driver_errors)\.py|store/lane/(postgres|sqlite)\w*\.py"
)
_DIALECT_NAMES = {"postgresql", "sqlite"}
_DIALECT_FLAGS = {"postgres", "_postgres", "is_postgres", "lite", "_lite", "is_sqlite"}
_DIALECT_CLASSES = {"Postgres", "Sqlite", "PostgresLane", "SqliteLane", "PostgresStatements", "SqliteStatements"}
#: Branches on the dialect that are left elsewhere, by folder; docs/architecture.md says why. These only go down.
_BRANCHES_LEFT = {".": 1, "store": 1, "store/inspect": 1}


_ANSWERS = (ast.Compare, ast.BoolOp)


def _asks_for_the_dialect(test: ast.AST) -> bool:
    for node in ast.walk(test):
        if isinstance(node, (ast.Name, ast.Attribute)):
            if (node.id if isinstance(node, ast.Name) else node.attr) in _DIALECT_FLAGS | _DIALECT_CLASSES:
                return True
        elif isinstance(node, ast.Constant) and node.value in _DIALECT_NAMES:
            return True
    return False


def _conditions(tree: ast.AST) -> Iterator[ast.AST]:
    """What decides something: conditions, and comparisons whose answer is kept for later."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, (ast.Assign, ast.Return, ast.keyword)) and isinstance(node.value, _ANSWERS):
            yield node.value


def test_no_new_branch_on_the_dialect() -> None:
    """A statement outside the lanes' own is written once, from the pieces of store/dialect.py."""
    branches: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if not _OF_ONE_DATABASE.fullmatch(name):
            folder = path.parent.relative_to(SOURCE).as_posix()
            branches[folder] += sum(map(_asks_for_the_dialect, _conditions(ast.parse(path.read_text()))))
    assert {folder: n for folder, n in branches.items() if n > _BRANCHES_LEFT.get(folder, 0)} == {}


def test_sqlite_spells_every_piece_itself() -> None:
    """A piece that it took from PostgreSQL would be met first by its users. Some are made of other pieces."""
    pieces = {name for name in vars(Dialect) if not name.startswith("_")}
    assert pieces - vars(SqliteDialect).keys() == {"marks", "age"}


# -- constants once

_STATE_LISTS = {frozenset(words) for words in (states.DECLARED, states.WRITTEN, states.FINAL, states.SEEN, states.OPEN)}


def _lists_of_words(path: Path) -> Iterator[list[str]]:
    """Lists in the code; a type, Literal[...], has to spell its words."""
    tree = ast.parse(path.read_text())
    types = {node.slice for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)) and node not in types:
            yield [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_the_roles_are_listed_once() -> None:
    """To add a role, edit one list: in declare/roles.py."""
    again = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for words in _lists_of_words(path)
        if len(set(words) & roles.ROLES.keys()) > len(roles.ROLES) / 2
    ]
    assert again == []


def test_the_states_are_listed_once() -> None:
    """To add a state, edit one list of each kind: in declare/states.py."""
    again = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for words in _lists_of_words(path)
        if frozenset(words) in _STATE_LISTS
    }
    assert again <= {"declare/states.py"}


def test_every_event_is_in_the_reference() -> None:
    """A log line that somebody meets is found in the table of events."""
    emitted = set()
    for path in SOURCE.rglob("*.py"):
        for call in (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args
        ):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in ("emit", "_emit_settled", "Event") and isinstance(call.args[0], ast.Constant):
                emitted.add(call.args[0].value)
    assert len(emitted) > 30
    page = (ROOT / "docs/reference/lanes-and-tasks.md").read_text()
    assert {name for name in emitted if f"`{name}`" not in page} == set()
