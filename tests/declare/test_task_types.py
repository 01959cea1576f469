"""A task's calls are typed like its handler: a type checker, and so an editor, knows its parameters and its result."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

#: What has to be refused carries a mark; nothing else may be.
CODE = """
from datetime import timedelta
from rowmill import Handle, Job, Mill, SyncJob, injected

mill = Mill("sqlite:///x.db")

@mill.task(max_attempts=5)
async def send(to: str, pages: int = 1) -> str:
    return to

@mill.task
async def with_job(job: Job, n: int, http: object = injected) -> int:
    return n

@mill.task
def plain(job: SyncJob, n: int) -> bytes:
    return b""

@mill.cron("* * * * *")
async def nightly() -> None: ...

async def main() -> None:
    handle: Handle[str] = await send.enqueue(to="a")
    await send.enqueue("a", 2)
    await send.enqueue(to="a", run_after=timedelta(1), key="k")
    n: int = await (await with_job.enqueue(5)).result()
    b: bytes = await (await plain.enqueue(n=1)).result(timeout=1)
    await send.options(key="x").enqueue(to="a")
    send.enqueue_sync("a")
    await nightly.enqueue()
    await send.enqueue(to=5)  # wrong
    await send.enqueue(nobody=5)  # wrong
    await send.enqueue(to="a", run_after="soon")  # wrong
    await with_job.enqueue("x")  # wrong
    await send.options(key="x").enqueue(two="a")  # wrong
    y: int = await handle.result()  # wrong
"""


def test_a_type_checker_knows_a_tasks_parameters_and_result(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(CODE)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(Path(__file__).parents[2] / ".mypy_cache" / "of a task's types"),  # a quarter of a minute, else
        "typed.py",
    ]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110).stdout
    found = {int(line) for line in re.findall(r"^typed\.py:(\d+): error", told, re.MULTILINE)}
    wanted = {n for n, line in enumerate(CODE.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wanted, told
