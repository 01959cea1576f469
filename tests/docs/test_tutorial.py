"""Every step of the tutorial is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_readme import shell

from databases import Db
from postgres_programs import dump

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "adopt-a-table.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
#: The row that raises is given up after five attempts, a quarter of a minute and more apart: not in a test.
HURRY = "from datetime import timedelta as td\nfrom rowmill import fixed\n"


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Commands, each with the lines that stand below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() not in ("", "..."):  # "..." stands for lines that the page leaves out
            found[-1][1].append(line.strip())
    return found


def head(text: str) -> str:
    """A file's text down to the handler's body."""
    return text[: text.index("async def")]


@pytest.mark.no_pooler("migrate, or what goes with it, needs the database's direct address")
def test_the_tutorial_works_from_the_first_step_to_the_last(
    pg: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: from a table in a Supabase-like database to a running lane, and back."""
    monkeypatch.setenv("ROWMILL_DATABASE_URL", pg.url)
    (sql,) = [text for kind, text in BLOCKS if kind == "sql"]
    (python,) = [text for kind, text in BLOCKS if kind == "python"]
    pg.execute(sql)
    before = dump(pg)
    worker = tmp_path / "worker.py"
    commands = [step for kind, text in BLOCKS if kind == "console" for step in steps(text)]
    assert len(commands) == 9
    for number, (command, lines) in enumerate(commands):
        if number == 1:
            proposed = worker.read_text()
            assert head(python.removeprefix("# worker.py\n")) == head(proposed), (
                "the file in the text is the one written"
            )
            hurried = python.replace("    unfenced", "    backoff=fixed(td(milliseconds=1)), unfenced")
            worker.write_text(HURRY + hurried)
        ended = shell(tmp_path, command)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        said = re.sub(r"[ \t]+", " ", ended.stdout)
        for line in lines:
            assert re.sub(r"[ \t]+", " ", line) in said, f"{command}: {line}"
        if command.startswith("rowmill run"):
            rows = pg.query("select status::text, attempts, count(*) as n from documents group by 1, 2 order by 1")
            assert [(row["status"], row["attempts"], row["n"]) for row in rows] == [
                ("completed", 1, 199), ("failed", 5, 1),
            ]  # fmt: skip
            row = pg.one("select error_message from documents where status = 'failed'")
            assert "not a PDF" in row["error_message"]
    assert dump(pg) == before
