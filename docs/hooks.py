"""What the documentation site needs beyond MkDocs: two pages generated from the code, and links that leave ``docs/``.

MkDocs checks links between pages of the site. This file checks the others: from a page to a file of the repository, and
all links of README.md, CONTRIBUTING.md, CHANGELOG.md and the READMEs of other folders. ``mkdocs build --strict`` fails
on a dead one.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.structure.files import File

import rowmill
from rowmill.cli import app

ROOT = Path(__file__).parent.parent
OTHERS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "apps/README.md",
    "apps/*/README.md",
    "bench/README.md",
    "chaos/README.md",
]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.links")


def on_pre_build(config: Any) -> None:
    """Check the links of pages that are not part of the site."""
    for page in (path for pattern in OTHERS for path in ROOT.glob(pattern)):
        for _, target, anchor in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if ":" in target:
                continue
            if not path.exists():
                log.warning("%s: there is no %s", page.relative_to(ROOT), target)
            elif anchor and path.suffix == ".md" and anchor[1:] not in anchors(path):
                log.warning("%s: %s has no %s", page.relative_to(ROOT), target, anchor)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Show a link to a file outside ``docs/`` as the file's name: the site does not have the file."""
    folder = (Path(config["docs_dir"]) / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        words, target = link.group(1), link.group(2)
        path = Path(os.path.normpath(folder / target))
        if ":" in target or path.is_relative_to(config["docs_dir"]):
            return link.group(0)
        if not path.exists():
            log.warning("%s: there is no %s", page.file.src_uri, target)
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if words in (name, path.name) else f"{words} (`{name}`)"

    return LINK.sub(replace, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    files.append(File.generated(config, "reference/python.md", content=python_names()))
    return files


def command_line() -> str:
    """Every command with its help, arguments and options, as ``--help`` has them."""
    parts = ["# Command line", "Generated from `rowmill --help`. What the commands are for: [commands](commands.md)."]
    return "\n\n".join([*parts, *_commands(typer.main.get_command(app), "rowmill")])


def _commands(group: Any, path: str) -> list[str]:
    parts: list[str] = []
    for name, command in group.commands.items():
        parameters = [each for each in command.params if not getattr(each, "hidden", False)]
        arguments = [_names(each) for each in parameters if each.param_type_name == "argument"]
        usage = " ".join([path, name, *arguments, "[OPTIONS]"])
        parts += [f"## {path} {name}", command.help or "", f"```text\n{usage}\n```"]
        records = [f"| `{_cell(_names(each))}` | {_cell((each.help or '') + _default(each))} |" for each in parameters]
        parts.append("\n".join(["| option or argument | meaning |", "|---|---|", *records]) if records else "")
        if hasattr(command, "commands"):
            parts += _commands(command, f"{path} {name}")
    return parts


def _default(parameter: Any) -> str:
    return (
        f" (default: {parameter.default})"
        if isinstance(parameter.default, int | float | str) and parameter.default
        else ""
    )


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join([*parameter.opts, *parameter.secondary_opts]) + (
        f" {parameter.metavar}" if parameter.metavar else ""
    )


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def python_names() -> str:
    """Every public name with its signature and docstring."""
    parts = ["# Python names", "Generated from the docstrings of `rowmill`. Parameters of lanes and tasks, with their "
             "defaults: [lanes and tasks](lanes-and-tasks.md)."]  # fmt: skip
    for name in sorted(rowmill.__all__, key=str.lower):
        value = getattr(rowmill, name)
        parts += [f"## {name}", _signature(name, value), inspect.getdoc(value) or ""]
        if inspect.isclass(value) and not issubclass(value, BaseException):
            parts += _members(value)
    return "\n\n".join(part for part in parts if part)


def _members(value: type) -> list[str]:
    lines = []
    for name, member in vars(value).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        doc = inspect.getdoc(function) if inspect.isfunction(function) or isinstance(member, property) else None
        if doc and not name.startswith("_"):
            first = " ".join(doc.partition("\n\n")[0].split())
            lines.append(f"- `{name}`: {first}")
    return ["\n".join(lines)] if lines else []


def _signature(name: str, value: Any) -> str:
    try:
        text = str(inspect.signature(value)).replace("'", "") if callable(value) else ""
    except (TypeError, ValueError):
        return ""
    return f"```text\n{name}{text}\n```" if text else ""
