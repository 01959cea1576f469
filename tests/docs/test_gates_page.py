"""The snippets of docs/gates.md are run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from databases import Db

DOC = (Path(__file__).parents[2] / "docs" / "gates.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)


def test_the_lane_of_the_page_works_its_rows_off(tmp_path: Path) -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    for command in (["fill.py"], ["-m", "rowmill", "run", "crawl:mill", "--drain"]):
        ended = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
        )
        assert ended.returncode == 0, ended.stderr
    db = Db(f"sqlite:///{tmp_path}/crawl.db")
    assert db.value("select count(*) from pages where status = 'fetched' and title = url") == 4
    assert db.value("select count(*) from rowmill_gates where dim = 'domain'") == 3


def test_the_indexes_of_the_page_can_be_made(pg: Db) -> None:
    pg.execute("create table pages (id bigint primary key, domain text, run_after timestamptz, status text)")
    (text,) = [text for kind, text in BLOCKS if kind == "sql"]
    pg.execute(text)
    assert pg.value("select count(*) from pg_indexes where tablename = 'pages'") == 3
