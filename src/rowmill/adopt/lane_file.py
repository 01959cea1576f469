"""A proposal as a Python file that runs: the lane, and a handler to fill in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..declare.states import DECLARED
from ..store import redact
from .proposal import CERTAIN, Proposal

_SIMPLE = re.compile(r"[a-z_][a-z0-9_]*|\w+", re.ASCII)


def quoted_table(schema: str | None, name: str) -> str:
    """A table's name as a lane reads it, in quotes where it needs them."""
    parts = [schema, name] if schema else [name]
    return ".".join(p if _SIMPLE.fullmatch(p) else '"' + p.replace('"', '""') + '"' for p in parts)


def secret(url: str) -> bool:
    """Whether a URL contains a password, which must not be written to a file."""
    return redact(url) != url


def lane_source(made: Proposal, url: str | None) -> str:
    """The file. ``url`` None, or one with a password: then it is read from ROWMILL_DATABASE_URL."""
    facts = made.facts
    uses_now = any("NOW" in repr(made.options.get(k)) for k in DECLARED)
    imports = "NOW, Mill" if uses_now else "Mill"
    address = "" if url is None or secret(url) else repr(url)
    title = f"Processes the rows of {facts.fullname}.".replace("\\", "\\\\").replace('"""', "'''")
    title = "".join(c if c.isprintable() else " " for c in title)
    where = "" if address else "  # the address is in ROWMILL_DATABASE_URL"
    lines = [
        f'"""{title} Proposed by `rowmill adopt`; yours to change."""',
        "",
        f"from rowmill import {imports}",
        "",
        f"mill = Mill({address.replace(chr(39), chr(34)) if address.count(chr(34)) == 0 else address}){where}",
        "",
        "",
        "@mill.lane(",
        f"    {literal(quoted_table(facts.schema, facts.name))},",
    ]
    for key, value in made.options.items():
        lines.append(f"    {key}={literal(value)},{_remark(made, key)}")
    columns = [c.name for c in facts.columns if c.name not in facts.key][:3]
    example = literal(columns[0]) if columns else '"column"'
    lines += [
        ")",
        f"async def {made.name}(job):",
        "    # Your work on one row goes here. job.id is the row's key,",
        f"    # job[{example}] is one of its columns.",
        '    # Return {"column": value} to set columns together with the outcome.',
        "    # Raise an exception if the work failed: the row is then retried.",
        "    # As it stands, a row is only logged, and then done.",
        '    job.log.info("row %s", job.id)',
        "",
    ]
    return "\n".join(lines)


def _remark(made: Proposal, key: str) -> str:
    choice = next((c for c in made.choices if c.what == key), None)
    if key == "unfenced":
        return "  # until the table has the columns that `rowmill migrate` adds"
    if choice is None:
        return ""
    remarks = [*made.labels(choice), *(["not certain"] if choice.sure < CERTAIN else [])]
    text = "".join(c if c.isprintable() else " " for c in ", ".join(remarks))
    return f"  # {text}" if text else ""


def literal(value: Any) -> str:
    """A value as Python text, with double quotes as formatters like them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    if isinstance(value, str):
        text = repr(value)
        if text.startswith("'") and '"' not in text and "\\'" not in text:
            return f'"{text[1:-1]}"'
        return text
    return repr(value)
