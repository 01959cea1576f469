"""Parse plain values from SQL text: a column's default, a check constraint's list, an index predicate, a comment.

Also quotes any text as an SQL literal, and gives conditions with every name in full, for any search_path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..database import Run

_TEXT = re.compile(r"'((?:[^']|'')*)'")
_NUMBER = re.compile(r"(?<![\w.'])-?\d+(?![\w.'])")
_RANGE = re.compile(r">=\s*\(?(-?\d+)\)?.*<=\s*\(?(-?\d+)\)?", re.DOTALL)
_OTHERWISE = re.compile(r"<>|!=|~|\blike\b|\bnot\b|[^<>]>[^=]|<[^=>]|\blength\b|\bis\b", re.IGNORECASE)
_STANDS = r"-?\d+\s*(?:=>|->|[=:)–—-])"
_MEANING = re.compile(rf"(?<![\w.])(?={_STANDS})(-?\d+)\W+?([^\W\d_](?:(?!\s+{_STANDS})[\w' -])*\w)")


def plain_default(text: Any, kind: str) -> Any:
    """A default as a plain value; None for a computed default, and for none."""
    if text is None:
        return None
    default = str(text).strip()
    while default.startswith("(") and default.endswith(")"):
        default = default[1:-1].strip()
    if match := re.fullmatch(r"'((?:[^']|'')*)'(?:\s*::.*)?", default, re.DOTALL):
        value = match.group(1).replace("''", "'")
        if kind == "int":
            return int(value) if re.fullmatch(r"-?\d+", value) else None
        if kind == "bool":
            return value.lower() in ("t", "true", "1")
        return value
    if kind == "bool":
        return {"true": True, "1": True, "false": False, "0": False}.get(default.lower())
    if match := re.fullmatch(r"\(?(-?\d+)\)?(?:\s*::.*)?", default):
        return int(match.group(1)) if kind == "int" else match.group(1) if kind == "text" else None
    if kind == "text" and (match := re.fullmatch(r'"([^"]*)"', default)):  # SQLite reads this as text
        return match.group(1)
    return None


def mentions(text: str, column: str) -> bool:
    """Whether SQL text names a column outside quoted strings."""
    bare = _TEXT.sub("''", text)
    if '"' + column.replace('"', '""') + '"' in bare:
        return True
    return re.search(rf'(?<![\w"]){re.escape(column)}(?![\w"])', bare, re.IGNORECASE) is not None


def allowed_by_check(text: str, column: str, columns: Sequence[str], kind: str) -> tuple[Any, ...]:
    """The values that a check constraint on one column lists; empty if the constraint has another form."""
    if kind not in ("text", "int") or not mentions(text, column):
        return ()
    if any(mentions(text, other) for other in columns if other.lower() != column.lower()):
        return ()
    bare = _TEXT.sub("''", text)
    if kind == "int":
        if match := _RANGE.search(bare):
            low, high = int(match.group(1)), int(match.group(2))
            return tuple(range(low, high + 1)) if 0 < high - low <= 20 else ()
        if _OTHERWISE.search(bare):
            return ()
        return tuple(dict.fromkeys(int(n) for n in _NUMBER.findall(re.sub(r"::\w+|\"[^\"]*\"", "", bare))))
    if _OTHERWISE.search(re.sub(r"::\w+( \w+)*(\[\])?", "", bare)):
        return ()
    return tuple(dict.fromkeys(value.replace("''", "'") for value in _TEXT.findall(text)))


def literals_of(predicate: str, column: str, columns: Sequence[str], kind: str) -> tuple[Any, ...]:
    """The literal values in a predicate that reads only this column."""
    if not mentions(predicate, column) or "<>" in predicate or "!=" in predicate:
        return ()
    if any(mentions(predicate, other) for other in columns if other != column):
        return ()
    if kind == "int":
        bare = re.sub(r"::\w+|\"[^\"]*\"", "", _TEXT.sub("''", predicate))
        return tuple(int(n) for n in _NUMBER.findall(bare))
    return tuple(value.replace("''", "'") for value in _TEXT.findall(predicate))


def comment_meanings(comment: str | None, kind: str) -> dict[Any, str]:
    """Parse meanings from a column's comment, such as ``0 = pending, 1 = running``."""
    if not comment or kind != "int":
        return {}
    meanings = {int(number): word.strip() for number, word in _MEANING.findall(comment)}
    return meanings if len(meanings) > 1 else {}


def dollar_quoted(text: str) -> str:
    """Quote text between dollar signs, with a tag that is not in it: names and states may hold anything."""
    tag = next(tag for i in range(len(text) + 1) if (tag := f"$rowmill{i or ''}$") not in text)
    return f"{tag}\n{text}\n{tag}"


def resolve_conditions(run: Run, table: str, conditions: Mapping[str, str]) -> dict[str, str]:
    """Conditions on a table with every name in full. To be run in a transaction that is rolled back.

    They are resolved by the server, not read here: it parses them as a view and prints them back. From here on the
    transaction has the search_path pg_catalog.
    """
    views = {name: f"rowmill_condition_{i}" for i, name in enumerate(conditions)}
    view_of = "create temporary view {} as select 1 as one from {}"
    if views:
        run(view_of.format("rowmill_bare", table), ())
    for name, view in views.items():
        run(f"{view_of.format(view, table)} where ({conditions[name]})", ())
    # Whatever is not the server's own is now printed with its schema.
    run("set local search_path = pg_catalog", ())
    return {name: _printed(run, view) for name, view in views.items()}


def _printed(run: Run, view: str) -> str:
    """The view's condition: what stands behind what the view without one says."""
    ((bare, whole),) = run(
        f"select pg_get_viewdef('pg_temp.rowmill_bare'::regclass), pg_get_viewdef('pg_temp.{view}'::regclass)", ()
    )
    return str(whole).removeprefix(bare.removesuffix(";") + "\n  WHERE ").removesuffix(";")
