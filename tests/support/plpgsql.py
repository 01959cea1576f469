"""The statements inside a function in PL/pgSQL, as texts that can be prepared by themselves.

Variables become parameters: ``$1`` keeps the type of the argument, a declared variable its own, and a field of a record
the one that the server infers. An ``execute`` becomes the statement that it builds, with the columns it is told of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

#: Quoted text, or anything else up to the next quote.
_PIECES = re.compile(r"""'(?:[^']|'')*'|"[^"]*"|[^'"]+""")
_START = re.compile(
    r"\b(insert\s+into|update|delete\s+from|with|perform|return\s+query|select|execute)\b", re.IGNORECASE
)
_DECLARED = re.compile(
    r"^\s+(_rm_\w+) ((?:bigint|boolean|double precision|text|interval|timestamp)[^;]*);", re.MULTILINE
)
_INTO = re.compile(r"\binto\s+_rm_\w+(?:,\s*_rm_\w+)*", re.IGNORECASE)
_PAIR = re.compile(r"\((?:true, |false, )?'(\w+)'::text, '((?:[^']|'')*)'::text\)")


def statements(body: str, arguments: Sequence[str]) -> Iterator[str]:
    """Every statement of a body, in its order; ``arguments``: the types of the function's arguments."""
    declared, _, code = body.partition("\nbegin\n") if "declare\n" in body else ("", "", body)
    variables = dict(_DECLARED.findall(declared)) | {"_rm_try": "integer", "sqlerrm": "text", "found": "boolean"}
    before = ""
    for chunk in _divided(re.sub(r"^\s*--.*$", "", code, flags=re.MULTILINE)):
        flat = _flat(chunk)
        if (start := _START.search(flat)) is not None:
            text = chunk[start.start() :]
            if start.group().lower() == "execute":
                text = _built(text, before)
            elif start.group().lower() == "perform":
                text = f"select{text[len('perform') :]}"
            elif start.group().lower().startswith("return"):
                text = text[len(start.group()) :].strip()
            if (loop := re.search(r"\bloop\b", _flat(text))) is not None:
                text = text[: loop.start()]
            yield _parametrised(_INTO.sub("", text).strip(), variables, arguments)
        before = chunk


def _flat(text: str) -> str:
    """The text of the same length with what is quoted or in brackets blanked."""
    blank = "".join(" " * len(piece) if piece[0] in "'\"" else piece for piece in _PIECES.findall(text))
    depth, made = 0, []
    for letter in blank:
        depth -= letter in ")]"
        made.append(letter if depth == 0 and letter not in "()[]" else " ")
        depth += letter in "(["
    return "".join(made)


def _divided(code: str) -> Iterator[str]:
    """The parts between semicolons that end a statement."""
    begin = 0
    for end, letter in enumerate(_flat(code)):
        if letter == ";":
            yield code[begin:end]
            begin = end + 1


def _parametrised(text: str, variables: dict[str, str], arguments: Sequence[str]) -> str:
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(arguments) + len(numbers) + 1)

    def mark(found: re.Match[str]) -> str:
        name = found.group()
        if name[0] == "$":
            return f"{name}::{arguments[int(name[1:]) - 1]}"
        if name in variables:
            return f"${number(name)}::{variables[name]}"
        return f"${number(name)}" if name.startswith("_rm_row.") else name

    words = re.compile(r"\$\d+|(?<![\w.])\w+(?:\.\w+)?")
    text = "".join(piece if piece[0] in "'\"" else words.sub(mark, piece) for piece in _PIECES.findall(text))
    # A statement may name its last argument alone: the numbers are those that are there.
    used = sorted({int(n) for n in re.findall(r"\$(\d+)", text)})
    return re.sub(r"\$(\d+)", lambda n: f"${used.index(int(n.group(1))) + 1}", text)


def _built(text: str, before: str) -> str:
    """What an ``execute`` runs: its columns are those that the statement before it lists."""
    built = text[len("execute") :].partition("\n    using ")[0]
    pairs = dict(_PAIR.findall(before))
    columns = ", ".join(f'"{name}" = ' + value.replace("''", "'") for name, value in pairs.items())
    parts = [piece[1:-1].replace("''", "'") for piece in re.findall(r"'(?:[^']|'')*'", built)]
    return columns.join(parts)
