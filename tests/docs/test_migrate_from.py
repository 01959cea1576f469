"""The pages of docs/how-to/migrate-from: both programs of each page are run as they stand, and give the same.

The programs before run in a process of their own with the worker of the library they were written for; those after in
this process with a worker of rowmill's, on SQLite and on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from databases import Db, Row

pytestmark = pytest.mark.no_pooler("the library to move from connects by the same address, with settings of its own")
PAGES = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-from"
NAMES = ["celery", "hand-written-loop", "huey", "procrastinate"]
PARTS = ["Before", "After", "Names side by side", "What behaves differently"]
INVOICES = [
    "invoice 1 sent at attempt 1",
    "invoice 2 sent at attempt 2",
    "invoice 3 sent at attempt 1",
    "invoice 4 sent at attempt 1",
]
ORDERS = ["1 sent at attempt 1", "2 sent at attempt 2", "3 sent at attempt 1"]

#: Each library's own worker inside a Python process, as it documents it for tests or embedding.
WORKERS = {
    "celery": """
import os, sys
from contextlib import contextmanager
from celery.contrib.testing.worker import start_worker
from kombu.transport.sqlalchemy import Transport
Transport.polling_interval = 0.1  # a second, else
@contextmanager
def working():
    with start_worker(before.app, perform_ping_check=False):
        yield
        sys.stdout.flush()
        os._exit(0)  # all that was asked for has ended, and to stop takes it five seconds
""",
    "huey": """
from contextlib import contextmanager
@contextmanager
def working():
    consumer = before.huey.create_consumer(workers=2, periodic=False)
    consumer.start()
    yield
    consumer.stop(graceful=True)
""",
    "procrastinate": """
import asyncio, os, threading, time
from contextlib import contextmanager
import psycopg
loop = asyncio.new_event_loop()
app = before.app.with_connector(before.PsycopgConnector(conninfo=os.environ["DATABASE_URL"]))
opened = threading.Event()
async def work():
    async with app.open_async():
        opened.set()  # the tasks belong to this app now: one that is not open takes no job
        await app.run_worker_async(install_signal_handlers=False, fetch_job_polling_interval=0.2)
@contextmanager
def working():
    task = loop.create_task(work())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])), daemon=True)
    thread.start()
    assert opened.wait(60)
    yield
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        # A job that has done its work is marked so a moment later; one stopped before that stays "doing" for good.
        while connection.execute("select 1 from procrastinate_jobs where status = 'doing'").fetchone():
            time.sleep(0.05)
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
""",
}
#: The program with its worker.
BEFORE = """
import before
{worker}
with working():
    before.main()
"""
#: What is enqueued later, when no worker is there.
LEAVE = {
    "celery": "[before.send_invoice.delay(n) for n in (5, 6)]; before.send_invoice.apply_async((7,), countdown=1)",
    "huey": "[before.send_invoice(n) for n in (5, 6)]; before.send_invoice.schedule((7,), delay=1)",
    "procrastinate": """
with before.app.open():
    [before.send_invoice.defer(order=n) for n in (5, 6)]
    before.send_invoice.configure(schedule_in={"seconds": 1}).defer(order=7)
""",
}
#: The old worker with new bodies, until it is killed.
MOVING = """
import sys
import before
{worker}
with working():
    sys.stdin.read()
"""


class Page:
    """A page's programs as files in a folder, with the database that they shall use."""

    def __init__(self, name: str, folder: Path, url: str) -> None:
        text = (PAGES / f"{name}.md").read_text()
        self.name, self.folder = name, folder
        self._blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        self.sql = next((text for kind, text in self._blocks if kind == "sql"), "")
        self.environ = {**os.environ, "DATABASE_URL": url, "PYTHONPATH": "."}
        for program in ("before", "after"):
            self.write(program, f"{program}.py")

    def write(self, program: str, title: str) -> None:
        """The block whose first line is ``# title``, as a module."""
        (found,) = [text for kind, text in self._blocks if kind == "python" and text.startswith(f"# {title}\n")]
        (self.folder / f"{program}.py").write_text(found)

    def python(self, code: str) -> list[str]:
        """What a program prints that ends by itself."""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()

    @contextmanager
    def beside(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A program beside the block; nobody but us ends it before the block ends."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.folder, env=self.environ,
                stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        with process:
            try:
                yield process
                assert process.poll() is None, "it has ended by itself"
            except BaseException:
                print((self.folder / "log").read_text())
                raise
            finally:
                process.kill()

    @asynccontextmanager
    async def after(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[types.ModuleType, list[str]]]:
        """The program after as a module, with a worker of rowmill's beside the block, and what it prints."""
        printed: list[str] = []
        module = types.ModuleType("after")
        vars(module)["print"] = lambda *words: printed.append(" ".join(map(str, words)))
        with monkeypatch.context() as patched:
            patched.setenv("DATABASE_URL", self.environ["DATABASE_URL"])
            exec((self.folder / "after.py").read_text(), vars(module))
        worker = module.mill.worker()
        working = asyncio.create_task(worker.run())
        try:
            yield module, printed
        finally:
            worker.stop()
            await working
            await module.mill.close()
            if hasattr(module, "engine"):
                module.engine.dispose()


async def until(look: Callable[[], bool], seconds: float = 30) -> None:
    """Other libraries' workers give no signal that could be waited for."""
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.1)


def test_every_page_has_all_its_parts() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == NAMES
    for name in NAMES:
        parts = re.findall(r"^## (.*)$", (PAGES / f"{name}.md").read_text(), re.MULTILINE)
        assert parts == [*PARTS, "Move without losing jobs"], name


@pytest.mark.parametrize("name", ["celery", "huey", "procrastinate"])
async def test_the_program_after_prints_what_the_one_before_does(
    name: str, db: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Page(name, tmp_path, db.url).after(monkeypatch) as (module, printed):
        await asyncio.to_thread(module.main)
    assert printed == (ORDERS if name == "procrastinate" else INVOICES)


@pytest.mark.parametrize("name", ["celery", "huey", "procrastinate"])
async def test_the_program_before_prints_the_same_and_what_then_waits_is_handed_over(
    name: str, fresh: Callable[[str], Db], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = fresh("postgresql" if name == "procrastinate" else "sqlite")
    page = Page(name, tmp_path, db.url)
    if name == "procrastinate":
        from procrastinate.schema import SchemaManager

        db.execute(SchemaManager.get_schema())
    printed = await asyncio.to_thread(page.python, BEFORE.format(worker=WORKERS[name]))
    assert printed == (ORDERS if name == "procrastinate" else INVOICES)
    await asyncio.to_thread(page.python, f"import before\n{LEAVE[name]}")

    page.write("before", "before.py, while moving")
    async with page.after(monkeypatch) as (module, _):
        await module.mill.prepare()
        with page.beside("-c", MOVING.format(worker=WORKERS[name])):
            await until(lambda: db.value("select count(*) from rowmill_jobs where state = 'done'") == 3)
            if name == "procrastinate":  # marks its job a moment after the body has handed it over
                await until(lambda: not db.query("select 1 from procrastinate_jobs where status <> 'succeeded'"))
    assert sorted(json.loads(row["args"])["order"] for row in db.query("select args from rowmill_jobs")) == [5, 6, 7]


# -- the hand-written loop: what it does is seen in the table


def made(db: Db, page: Page, *, empty: bool = False) -> None:
    db.execute(page.sql.replace("timestamptz", "datetime") if db.dialect == "sqlite" else page.sql)
    if empty:
        db.execute("delete from invoices")


def invoices(db: Db) -> list[Row]:
    sql = "select id, status, note, attempts, last_error, completed_at is not null as completed from invoices"
    return [{**row, "completed": bool(row["completed"])} for row in db.query(f"{sql} order by id")]


async def ended(db: Db) -> list[Row]:
    await until(lambda: db.value("select count(*) from invoices where status in ('sent', 'given up')") == 4)
    return invoices(db)


async def test_the_hand_written_loop_and_the_lane_leave_the_same_rows(
    fresh: Callable[[str], Db], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except that the lane says of what kind an error was, and when a row was given up."""

    def page(db: Db) -> Page:
        page = Page("hand-written-loop", tmp_path_factory.mktemp("loop"), db.url)
        made(db, page)
        return page

    before, after, lite = fresh("postgresql"), fresh("postgresql"), fresh("sqlite")
    async with page(after).after(monkeypatch), page(lite).after(monkeypatch):
        with page(before).beside("before.py"):
            rows = await ended(before)
        expected = [
            rows[0],
            rows[1] | {"last_error": "MailServerBusy: try later"},
            rows[2] | {"last_error": "ValueError: no address", "completed": True},
            rows[3],
        ]
        assert await ended(after) == expected
        assert await ended(lite) == expected
    assert [row["note"] for row in rows if row["status"] == "sent"] == [
        "sent to Ann at attempt 1",
        "sent to Bo at attempt 2",
        "sent to Cy at attempt 1",
    ]
    assert (rows[2]["status"], rows[2]["attempts"]) == ("given up", 3)


async def test_loop_and_lane_share_the_table_and_what_a_dead_loop_left_is_swept(
    pg: Db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page("hand-written-loop", tmp_path, pg.url)
    made(pg, page, empty=True)
    pg.execute("""insert into invoices (id, customer, status, attempts, locked_by, locked_at)
                  values (0, 'Cy', 'sending', 1, 'a loop that was killed', now() - interval '10 minutes')""")
    async with page.after(monkeypatch) as (module, _):  # it sweeps at its start, before there is a loop to do so
        await until(lambda: pg.value("select status from invoices where id = 0") == "sent")

        with page.beside("before.py"):
            for _ in range(100):
                pg.execute("""insert into invoices (id, customer)
                              select max(id) + n, 'Ann' from invoices, generate_series(1, 50) n group by n""")
                await module.mill.wake()
                if pg.value("select count(distinct locked_by) from invoices where id > 0") == 2:
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("one of them took nothing")
            await until(lambda: not pg.value("select count(*) from invoices where status <> 'sent'"))
    assert pg.value("select note from invoices where id = 0") == "sent to Cy at attempt 2"
    assert pg.value("select max(attempts) from invoices where id > 0") == 1, "nobody took what the other one held"
