"""``rowmill demo``: two tables, two worker processes, failures, and one worker killed on the way."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.processes.supervisor import Supervisor
from ..errors import RowmillError
from ..events import Events, configure_logs
from ..plural import counted
from . import demo_end
from .app import AsJson, app, console, errors, print_json
from .demo_view import DemoScene, DemoView, DemoWorker
from .run import child_command

_TABLES = """
pragma journal_mode = wal;
create table links (
  id integer primary key, url text not null, title text, status text not null default 'new',
  attempts integer not null default 0, run_after datetime, last_error text,
  worker text, claimed_at datetime, heartbeat_at datetime
);
create table documents (
  name text primary key, page_count integer not null, state integer not null default 0,
  tries integer not null default 0, taken_by text, taken_at datetime, alive_at datetime, error text
);
create table pages (document text not null, page integer not null);
create table runs (
  row text not null, attempt integer not null, worker text not null, pid integer not null,
  outcome text, error text, times integer not null default 0
);
"""
_REMOVED, _SILENT, _BUSY, _LOCKED = {31, 88}, {12}, {5, 18, 27, 40, 46, 59, 63, 71, 84, 97}, {14}
_COUNTS = {
    "links": "select status, count(*) from links group by 1",
    "documents": "select state, count(*) from documents group by 1",
}
_MEANING = {
    "new": "ready", "fetching": "running", "failed": "waiting for retry", "fetched": "done", "gone": "dead",
    0: "ready", 1: "running", 2: "done", 9: "dead",
}  # fmt: skip
_HELD = """select worker, cast(id as text) from links where status = 'fetching'
union all select taken_by, name from documents where state = 1"""
_VICTIM = "worker-2"
_TICK, _AT_MOST, _GRACE = 0.1, 90.0, 5.0


@app.command()
def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="leave app.py and demo.db there", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """See it work: two tables, two worker processes, failures, retries, and one worker killed. About 20 seconds.

    Nothing to configure, nothing left behind. Exit code 0 if every row ended exactly once.
    """
    with _folder(keep) as folder:
        _furnish(folder)
        play = Demo(folder)
        with DemoView(console, play.scene, quiet=as_json) as view:
            asyncio.run(play.run(view))
        if play.supervisor.error is not None:
            raise play.supervisor.error
        if play.interrupted:
            errors.print("Stopped before its end.", highlight=False)
            raise typer.Exit(130)
        findings = demo_end.examine(folder / "demo.db", play.scene.seconds, play.orphans, play.killed)
    if as_json:
        print_json(findings.as_dict())
    else:
        demo_end.tell(console, findings, keep)
    if not findings.good:
        for line in play.noise[-20:]:
            errors.print(line, markup=False, highlight=False)
    raise typer.Exit(0 if findings.good else 1)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="rowmill-demo-") as made:
            yield Path(made)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise RowmillError(f"{str(keep)!r} is there already, and not empty", hint="--keep with a new directory")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def _furnish(folder: Path) -> None:
    """The application, and two tables as somebody might have them."""
    shutil.copy(Path(__file__).with_name("demo_app.py"), folder / "app.py")

    def kind(n: int) -> str:
        return "removed" if n in _REMOVED else "silent" if n in _SILENT else "busy" if n in _BUSY else "pages"

    links = [(n, f"https://example.org/{kind(n)}/{n}") for n in range(1, 121)]
    documents = [(f"{'locked' if n in _LOCKED else 'report'}-{n:02}", n % 4 + 1) for n in range(1, 41)]
    with closing(sqlite3.connect(folder / "demo.db")) as db:
        db.executescript(_TABLES)
        db.executemany("insert into links (id, url) values (?, ?)", links)
        db.executemany("insert into documents (name, page_count) values (?, ?)", documents)
        db.commit()


@contextmanager
def _log() -> Iterator[tuple[int, int]]:
    """One stream of events, as a pipe: the supervisor's own, and, as their standard error, the workers'."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading, "rb", buffering=0), open(writing, "w", buffering=1) as stream:
        configure_logs("json", logging.DEBUG, stream)
        yield reading, writing


class Demo:
    """The demo from the first row to the last. What happens is read from the workers' own logs and tables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scene = DemoScene(workers={"worker-1": DemoWorker(), _VICTIM: DemoWorker()})
        #: The victim's process, and the rows it had in hand.
        self.killed: int | None = None
        self.orphans: list[str] = []
        self.interrupted = False
        #: What came out of the workers and was no event of theirs: shown if the demo fails.
        self.noise: list[str] = []
        self.supervisor: Supervisor
        self._db = sqlite3.connect(folder / "demo.db", isolation_level=None, timeout=10)
        self._swept: Counter[str] = Counter()
        self._waiting: set[str] = set()
        self._over = False
        self._unread = b""

    async def run(self, view: DemoView) -> None:
        """Two workers over the tables until every row has ended."""
        with closing(self._db), _log() as (reading, writing):
            command = [*child_command("app:mill"), "--log", "json", "--grace", str(_GRACE)]
            self.supervisor = Supervisor(
                command, list(self.scene.workers), grace=_GRACE, events=Events(), cwd=self.folder, stderr=writing
            )
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
            self.scene.say("two worker processes are started over 120 links and 40 documents")
            work = asyncio.create_task(self.supervisor.run())
            while not work.done():
                await asyncio.wait({work}, timeout=_TICK)
                self._hear(reading)
                self._look()
                view.show()
            await work

    def _interrupt(self) -> None:
        self.interrupted = True
        self.scene.say("stopping: runs may finish, the rest is given back", "bold")
        self.supervisor.stop()

    # -- the tables

    def _look(self) -> None:
        """Count the rows; kill a worker when it is a good moment; see the end."""
        for name, text in _COUNTS.items():
            self.scene.tables[name] = Counter({_MEANING[state]: n for state, n in self._db.execute(text)})
        held = self._held()
        for name, seat in self.scene.workers.items():
            seat.rows = sum(worker == name and row not in self._waiting for worker, row in held)
        self.scene.workers[_VICTIM].left = len(self._waiting)
        total = sum(self.scene.tables.values(), Counter[str]())
        if self.killed is None and total["done"] > total.total() / 4 and self.scene.workers[_VICTIM].rows >= 4:
            self._kill()
        if not self._over and total["done"] + total["dead"] == total.total():
            self._over = True
            self.scene.say("every row has ended; the workers are asked to stop", "bold")
            self.supervisor.stop()
        elif not self._over and self.scene.seconds > _AT_MOST:
            self._over = True
            self.scene.say(f"not all rows have ended after {_AT_MOST:.0f} seconds: giving up", "bold red")
            self.supervisor.stop()

    def _held(self) -> list[tuple[str, str]]:
        return self._db.execute(_HELD).fetchall()

    def _kill(self) -> None:
        (child,) = (child for child in self.supervisor.children if child.id == _VICTIM)
        if child.process is not None:
            self.killed = child.process.pid
            child.signal(signal.SIGKILL)

    # -- the workers' logs

    def _hear(self, reading: int) -> None:
        try:
            while data := os.read(reading, 65536):
                self._unread += data
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                self.noise.append(line.decode(errors="replace"))
                continue
            if event["level"] == "error":
                self.noise.append(line.decode())
            self._happened(event["event"], event)
        for worker, count in self._swept.items():
            rows = counted(count, "row was", "rows were")
            self.scene.say(f"{rows} taken back from {worker}: their lease ran out", "green")
        self._swept.clear()

    def _happened(self, name: str, event: dict[str, Any]) -> None:
        seat = self.scene.workers.get(event.get("worker", ""), DemoWorker())
        match name:
            case "process_started":
                seat.pid = event["pid"]
                seat.state = "starting" if seat.state == "" else "starting again"
            case "process_ended":
                seat.state = "stopped"
            case "worker_started":
                again = seat.state != "starting"
                words = "is back, started again by its supervisor" if again else "is at work"
                self.scene.say(f"{event['worker']} {words} (pid {seat.pid})", "green" if again else "")
                seat.state = "alive"
            case "process_died":
                seat.state = "killed"
                self.orphans = [row for worker, row in self._held() if worker == event["worker"]]
                self._waiting = set(self.orphans)
                rows = f"its {counted(len(self.orphans), 'row is', 'rows are')} taken back when their lease runs out"
                self.scene.say(f"{event['worker']} was killed; {rows}", "bold red")
            case "job_failed":
                what = f"{'link' if event['lane'] == 'fetch' else 'document'} {event['id']}"
                if event["outcome"] == "dead":
                    self.scene.say(f"{what} is dead: {event['error']}", "red")
                else:
                    self.scene.say(f"{what} failed, again in {event['again_in']:g} s: {event['error']}", "yellow")
            case "row_swept":
                self._swept[event["previous_worker"]] += 1
                self._waiting.discard(str(event["id"]))
