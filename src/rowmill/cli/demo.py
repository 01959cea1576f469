"""``rowmill demo``: two tables, two worker processes, failures, and one worker killed on the way."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..engine.processes.supervisor import Supervisor
from ..errors import RowmillError
from ..events import Events, configure_logs
from ..plural import counted
from .app import app, console, errors, print_json
from .options import AsJson
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
    "new": "ready", "fetching": "running", "failed": "retrying", "fetched": "done", "gone": "dead",
    0: "ready", 1: "running", 2: "done", 9: "dead",
}  # fmt: skip
_HELD = """select worker, cast(id as text) from links where status = 'fetching'
union all select taken_by, name from documents where state = 1"""
_VICTIM = "worker-2"
_TICK, _AT_MOST, _GRACE = 0.1, 90.0, 5.0


@app.command()
def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="keep app.py and demo.db in this directory", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a demo: two tables, two workers, failures, retries and one killed worker.

    Takes about 20 seconds, needs no configuration, and leaves nothing behind.

    Exit code 0: every row ended exactly once.

    Example: `rowmill demo --keep demo`
    """
    with _folder(keep) as folder:
        _write_files(folder)
        play = Demo(folder)
        with DemoView(console, play.scene, quiet=as_json) as view:
            asyncio.run(play.run(view))
        if play.supervisor.error is not None:
            raise play.supervisor.error
        if play.interrupted:
            errors.print("Stopped before it finished.", highlight=False)
            raise typer.Exit(130)
        findings = examine(folder / "demo.db", play.scene.seconds, play.orphans, play.killed)
    if as_json:
        print_json(findings.as_dict())
    else:
        tell(console, findings, keep)
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
        raise RowmillError(f"{str(keep)!r} already exists and is not empty", hint="--keep with a new directory")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def _write_files(folder: Path) -> None:
    """The application, and two tables as a user might have them."""
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
            self.scene.say("starting two worker processes for 120 links and 40 documents")
            work = asyncio.create_task(self.supervisor.run())
            while not work.done():
                await asyncio.wait({work}, timeout=_TICK)
                self._hear(reading)
                self._look()
                view.show()
            await work

    def _interrupt(self) -> None:
        self.interrupted = True
        self.scene.say("stopping: running jobs finish, other rows are released", "bold")
        self.supervisor.stop()

    # -- the tables

    def _look(self) -> None:
        """Count the rows, kill a worker at a good moment, and notice the end."""
        for name, text in _COUNTS.items():
            self.scene.tables[name] = Counter({_MEANING[state]: n for state, n in self._db.execute(text)})
        running = self._held()
        for name, worker in self.scene.workers.items():
            worker.rows = sum(worker == name and row not in self._waiting for worker, row in running)
        self.scene.workers[_VICTIM].left = len(self._waiting)
        total = sum(self.scene.tables.values(), Counter[str]())
        if self.killed is None and total["done"] > total.total() / 4 and self.scene.workers[_VICTIM].rows >= 4:
            self._kill()
        if not self._over and total["done"] + total["dead"] == total.total():
            self._over = True
            self.scene.say("all rows are finished; stopping the workers", "bold")
            self.supervisor.stop()
        elif not self._over and self.scene.seconds > _AT_MOST:
            self._over = True
            self.scene.say(f"some rows are not finished after {_AT_MOST:.0f} seconds: giving up", "bold red")
            self.supervisor.stop()

    def _held(self) -> list[tuple[str, str]]:
        return self._db.execute(_HELD).fetchall()

    def _kill(self) -> None:
        (child,) = (child for child in self.supervisor.children if child.id == _VICTIM)
        if child.process is not None:
            self.killed = child.process.pid
            child.signal(signal.SIGSTOP)  # so that it holds these rows still when it is killed
            self.orphans = [row for worker, row in self._held() if worker == _VICTIM]
            self._waiting = set(self.orphans)
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
            self.scene.say(f"{rows} taken back from {worker}, which is dead", "green")
        self._swept.clear()

    def _happened(self, name: str, event: dict[str, Any]) -> None:
        worker = self.scene.workers.get(event.get("worker", ""), DemoWorker())
        match name:
            case "process_started":
                worker.pid = event["pid"]
                worker.state = "starting" if worker.state == "" else "restarting"
            case "process_ended":
                worker.state = "stopped"
            case "worker_dead":
                self._waiting.clear()
            case "worker_started":
                again = worker.state != "starting"
                words = "is back: the supervisor restarted it" if again else "started"
                self.scene.say(f"{event['worker']} {words} (pid {worker.pid})", "green" if again else "")
                worker.state = "alive"
            case "process_died":
                worker.state = "killed"
                rows = f"its {counted(len(self.orphans), 'row is', 'rows are')} given to the others"
                self.scene.say(f"{event['worker']} was killed; {rows}", "bold red")
            case "job_failed":
                what = f"{'link' if event['lane'] == 'fetch' else 'document'} {event['id']}"
                if event["outcome"] == "dead":
                    self.scene.say(f"{what} is dead: {event['error']}", "red")
                else:
                    self.scene.say(f"{what} failed, retrying in {event['again_in']:g} s: {event['error']}", "yellow")
            case "row_swept":
                self._swept[event["previous_worker"]] += 1
                self._waiting.discard(str(event["id"]))


# -- how it looks: a live view on a terminal, plain lines elsewhere

#: state -> the mark and the colour it has in a bar, in the order in which a bar shows them
_STATES = {
    "done": ("█", "green"),
    "running": ("▓", "cyan"),
    "retrying": ("▒", "yellow"),
    "dead": ("x", "red"),
    "ready": ("░", "bright_black"),
}
_PLAIN_EVERY = 3.0


@dataclass
class DemoWorker:
    """One worker as the view shows it."""

    pid: int | None = None
    state: str = ""
    rows: int = 0
    #: Rows that a killed predecessor left behind, until they are taken back.
    left: int = 0


@dataclass
class DemoScene:
    """The state of the demo at one moment."""

    tables: dict[str, Counter[str]] = field(default_factory=dict)
    workers: dict[str, DemoWorker] = field(default_factory=dict)
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, words: str, style: str = "") -> None:
        """Add to the running commentary."""
        self.lines.append((self.seconds, words, style))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class DemoView:
    """Shows scenes, unless ``quiet``."""

    def __init__(self, console: Console, scene: DemoScene, *, quiet: bool) -> None:
        self._console, self._scene, self._quiet = console, scene, quiet
        # The other screen: it is redrawn whole after a resize, and leaves no half-drawn frames behind.
        self._live = (
            Live(console=console, screen=True, auto_refresh=False) if console.is_terminal and not quiet else None
        )
        self._told = 0
        self._next = 0.0

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._console.print(_top(self._scene, self._console.width))
            self._console.print(_commentary(self._scene, len(self._scene.lines)))
        elif not self._quiet:
            self._plain(last=True)

    def show(self) -> None:
        """Show the scene as it is now."""
        if self._live is not None:
            top = _top(self._scene, self._console.width)
            room = max(self._console.height - len(self._console.render_lines(top)), 1)
            self._live.update(Group(top, _commentary(self._scene, room)), refresh=True)
        elif not self._quiet:
            self._plain()

    def _plain(self, last: bool = False) -> None:
        for at, words, _ in self._scene.lines[self._told :]:
            print(f"{_clock(at)}  {words}", flush=True)
        self._told = len(self._scene.lines)
        if (self._scene.seconds >= self._next or last) and self._scene.tables:
            self._next = self._scene.seconds + _PLAIN_EVERY
            for name, counts in self._scene.tables.items():
                print(f"{_clock(self._scene.seconds)}  {name}: {_counts(counts)}", flush=True)


def _top(scene: DemoScene, width: int) -> RenderableType:
    """The tables and the workers, as high as needed at any width."""
    words = "two worker processes, two tables, one SQLite file"
    parts: list[RenderableType] = [
        Text.assemble(("rowmill demo", "bold"), f"  {words}  ", (_clock(scene.seconds), "bold")),
        "",
    ]
    for name, counts in scene.tables.items():
        title = Text.assemble((name, "bold"), f"  {counted(counts.total(), 'row')}")
        parts += [title, _bar(counts, min(width, 100)), _legend(counts), ""]
    return Group(*parts, _workers(scene), "")


def _commentary(scene: DemoScene, room: int) -> RenderableType:
    """The latest of it, one line each."""
    return Group(
        *(
            Text.assemble((f"{_clock(at)}  ", "bright_black"), (words, style), no_wrap=True, overflow="ellipsis")
            for at, words, style in scene.lines[-room:]
        )
    )


def _bar(counts: Counter[str], width: int) -> Text:
    """One character per share; a state that has rows at all has at least one."""
    total = counts.total() or 1
    cells = {state: max(round(counts[state] * width / total), 1) if counts[state] else 0 for state in _STATES}
    largest = max(cells, key=lambda state: cells[state])
    cells[largest] += width - sum(cells.values())
    return Text.assemble(*((_STATES[state][0] * cells[state], _STATES[state][1]) for state in _STATES), no_wrap=True)


def _legend(counts: Counter[str]) -> Text:
    parts: list[tuple[str, str] | str] = []
    for state, (mark, colour) in _STATES.items():
        parts += [(f"{mark} ", colour), f"{counts[state]} {state}   "]
    return Text.assemble(*parts)


def _workers(scene: DemoScene) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(5):
        table.add_column(no_wrap=True)
    for name, worker in scene.workers.items():
        state = Text(worker.state, {"alive": "green", "killed": "bold red"}.get(worker.state, "yellow"))
        running = f"{counted(worker.rows, 'row')} running" if worker.state == "alive" else ""
        left = f"{counted(worker.left, 'row')} left by the killed process" if worker.left else ""
        table.add_row(Text(name, "bold"), f"pid {worker.pid or ''}", state, running, Text(left, "yellow"))
    return table


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in _STATES)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


# -- the end: the tables checked against what the handlers wrote

_ENDED = """select cast(id as text), case status when 'fetched' then 'done' when 'gone' then 'dead' end from links
union all select name, case state when 2 then 'done' when 9 then 'dead' end from documents"""
_FINALS = "select row, outcome, attempt, error, pid, times from runs where outcome in ('done', 'dead')"
_DOUBLED_PAGES = "select count(*) from (select 1 from pages group by document, page having count(*) > 1)"
_MISSING_PAGES = """select count(*) from documents d
where state = 2 and page_count <> (select count(*) from pages where document = d.name)"""


@dataclass(frozen=True)
class Findings:
    """The result of the demo: every check, and whether it held."""

    seconds: float
    rows: int
    done: int
    retried: int
    dead: dict[str, str]
    taken_back: int
    runs: int
    pages: int
    checks: dict[str, bool]

    @property
    def good(self) -> bool:
        """All checks held."""
        return all(self.checks.values())

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        checks = [{"check": check, "held": passed} for check, passed in self.checks.items()]
        return {**asdict(self), "checks": checks, "ok": self.good}


def examine(file: Path, seconds: float, orphans: Sequence[str], killed: int | None) -> Findings:
    """Compare the tables with ``runs``, which the handlers wrote."""
    with closing(sqlite3.connect(file)) as db:

        def one(text: str) -> int:
            return int(db.execute(text).fetchone()[0])

        ended = dict(db.execute(_ENDED).fetchall())
        finals = db.execute(_FINALS).fetchall()
        runs, retries = one("select count(*) from runs"), one("select count(*) from runs where outcome = 'retry'")
        cut = one("select count(*) from runs where times = 0")
        under_way = one(f"select count(*) from runs where times = 0 and pid = {killed or 0}")
        pages, wrong_pages = one("select count(*) from pages"), one(_DOUBLED_PAGES) + one(_MISSING_PAGES)
        retried = one("select count(distinct row) from runs where outcome = 'retry'")
        twice = one("select count(*) from runs where times > 1")
    left = counted(len(orphans), "row")
    outcomes = Counter((row, outcome) for row, outcome, *_ in finals)
    finished_by = {row: pid for row, _, _, _, pid, _ in finals}
    return Findings(
        seconds=round(seconds, 1),
        rows=len(ended),
        done=sum(state == "done" for state in ended.values()),
        retried=retried,
        dead={
            _name(row): error if attempt == 1 else f"{error} ({counted(attempt, 'attempt')})"
            for row, outcome, attempt, error, _, _ in finals
            if outcome == "dead"
        },
        taken_back=len(orphans),
        runs=runs,
        pages=pages,
        checks={
            "every row is finished": None not in ended.values(),
            "every row has exactly one outcome, and its table shows the same one": outcomes == Counter(ended.items()),
            f"no outcome is recorded twice ({runs} runs: {len(finals)} final, {retries} retries, {cut} cut off)": (
                twice == 0 and runs == len(finals) + retries + cut
            ),
            f"the {left} of the killed worker ({under_way} under way) were finished by others": (
                bool(orphans) and all(finished_by.get(row) not in (None, killed) for row in orphans)
            ),
            f"{pages} pages were read: none missing, none twice": wrong_pages == 0,
        },
    )


def _name(row: str) -> str:
    return f"link {row}" if row.isdigit() else f"document {row}"


def tell(console: Console, findings: Findings, kept: Path | None) -> None:
    """The summary, the proof, and what to try next: on a screen of 24 lines the first is still to be seen."""

    def say(text: str | Text = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say()
    took = f"{counted(findings.rows, 'row')} in {findings.seconds:.0f} seconds"
    say(Text(f"{took}, by two processes, one of them killed in mid-run:", "bold"))
    say(f"  {findings.done:>4} done, each exactly once")
    say(f"  {findings.retried:>4} failed at first and were retried")
    say(f"  {findings.taken_back:>4} were taken back from the killed worker")
    say(f"  {len(findings.dead):>4} dead:")
    for row, reason in findings.dead.items():
        say(f"         {row}: {reason}")
    say(Text("Checked against the table `runs`, which the handlers write to:", "bold"))
    for check, passed in findings.checks.items():
        say(Text.assemble("  ", ("yes", "green") if passed else ("NO ", "bold red"), f"  {check}"))
    say()
    for line in _next(kept):
        say(line)


def _next(kept: Path | None) -> list[str]:
    if kept is None:
        here, there = command(Path.cwd()), command(Path.cwd() / "mill")
        return [
            "[bold]Next, your own table:[/bold]",
            *_aligned({
                f"{here} demo --keep mill": "run again, keep app.py and demo.db",
                "cd mill": "put your database and table into app.py",
                f"{there} run app:mill": "work on it",
            }),
        ]  # fmt: skip
    there = command(kept.resolve())
    return [
        f"[bold]Kept in {escape(str(kept))}:[/bold] app.py, demo.db. To look at it:",
        f"  cd {escape(shlex.quote(str(kept)))}",
        *_aligned({
            f"{there} status app:mill": "rows by state",
            f"{there} jobs app:mill --lane fetch --state dead": "the dead rows",
            f"{there} retry app:mill --lane fetch --state dead": "ready again",
            f"{there} run app:mill --drain": "work on them",
        }),
    ]  # fmt: skip


def _aligned(words: dict[str, str]) -> list[str]:
    width = max(map(len, words))
    return [f"  {escape(typed):<{width}}  {meaning}" for typed, meaning in words.items()]


def command(folder: Path) -> str:
    """What to type for ``rowmill`` in a folder: the word, or the way to it where the shell does not find it."""
    if shutil.which("rowmill"):
        return "rowmill"
    script = Path(sys.executable).with_name("rowmill")
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m rowmill"
    if script.is_relative_to(Path.cwd()):
        return shlex.quote(os.path.relpath(script, folder))
    return shlex.quote(str(script))
