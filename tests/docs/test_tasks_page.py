"""Every snippet of docs/tutorials/tasks.md is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "tasks.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

PROVE = """
import asyncio, sqlite3
import enqueue, transaction, follow, import_links, enrich, shop
db = sqlite3.connect("shop.db", isolation_level=None)
assert db.execute("select count(*) from orders").fetchone() == (1,)
db.executescript(open("plain.sql").read())
asyncio.run(enqueue.order())
asyncio.run(import_links.flows())
assert db.execute("select count(*) from rowmill_jobs where task = 'send_report'").fetchone() == (1006,)

async def both():
    running = asyncio.create_task(shop.mill.worker(drain=True).run())
    print(await follow.follow())
    await running

asyncio.run(both())
asyncio.run(import_links.mill.worker(drain=True).run())
for row in db.execute("select result from rowmill_jobs where task in ('report', 'import_all') order by id"):
    print(row[0])
db.executescript('''create table links (id integer primary key, status text, title text, worker text,
    claimed_at datetime, heartbeat_at datetime, attempts integer default 0, enriched_version integer);
    insert into links (status, enriched_version) values ('queued', null), ('done', null), ('done', 1), ('done', 2)''')
asyncio.run(enrich.mill.worker(drain=True).run())
print(db.execute("select count(*) from links where enriched_version = 2 and title is not null").fetchone()[0])
print(db.execute("select state, count(*) from rowmill_jobs group by 1 order by 1").fetchall())
db.close()
"""


def test_the_snippets_of_the_page_work(tmp_path: Path) -> None:
    unnamed = iter(("enqueue", "transaction", "follow"))
    for kind, text in BLOCKS:
        if kind == "sql":
            (tmp_path / "plain.sql").write_text(text)
        elif kind == "python":
            named = re.match(r"# (\w+)\.py\n", text)
            name = named.group(1) if named else next(unnamed)
            (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "prove.py").write_text(PROVE)
    result = subprocess.run(
        [sys.executable, "prove.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=180
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1:3] == ["done 1 None []", "3 pages to z@example.org"]
    # Children are added behind the job that waits for them.
    assert lines[3:6] == ['{"done": 20, "failed": 0, "bytes": 430}', '"2 of 2"', '"1 of 1"']
    assert lines[6] == "3"
    assert lines[7].startswith("[('done', 1"), lines[7]
