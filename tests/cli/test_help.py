"""The command line explains itself: panels, the version, and examples that are right."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest
import typer

from command import Command
from rowmill.cli import app
from rowmill.cli.app import PANELS

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_stands_in_one_panel() -> None:
    """A command that is added has to be put where people look for it."""
    assert sorted(name for names in PANELS.values() for name in names) == sorted(COMMANDS)


def test_the_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Command(tmp_path, monkeypatch, capsys)("--version")
    assert ended.out.strip() == f"rowmill {importlib.metadata.version('rowmill')}"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_a_sentence_and_its_example_fits(name: str) -> None:
    """Issue 21: the first paragraph is one sentence; an example names options that the command has."""
    text = COMMANDS[name].help
    assert re.fullmatch(r"[A-Z][a-z]+,? [^.]*\.", text.split("\n\n")[0].replace("\n", " ")), text
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    examples = re.findall(r"Example: `(.+)`", text)
    assert examples, "every command shows one"
    for example in examples:
        program, command_name, *words = shlex.split(example)
        assert (program, command_name) == ("rowmill", name)
        assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_shows_no_python_types(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag has no type, and a value has a word for what it is; choices are listed."""
    shown = Command(tmp_path, monkeypatch, capsys)(*([name] if name else []), "--help").out
    assert "Usage: rowmill" in shown
    assert not re.search(r"<[a-z]+(\[[a-z]+\]| range)?>", shown), "such as <bool> or <list[str]>"
    assert "Show this message" not in shown, "an option's help begins in lower case"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    options = [p for p in COMMANDS[name].params if p.param_type_name == "option" and not getattr(p, "hidden", False)]
    assert [p.name for p in options if not p.help] == []
