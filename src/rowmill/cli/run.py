"""``rowmill run``: run workers until stopped, or with --drain until nothing is ready."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.text import Text

from ..config import find_app
from ..engine.processes.child import Orders, SupervisorPipe, serve
from ..engine.processes.supervisor import USERS_MISTAKES, Supervisor
from ..engine.worker import Worker
from ..errors import RowmillError
from ..events import Events, configure_logs
from ..mill import Mill
from ..ops import questions
from ..ops.directory import LaneDirectory
from ..ops.questions import COUNTED
from ..plural import counted, plural
from . import show
from .app import app, errors, exit_code, plain, print_json
from .options import App, AsJson, Env, load, not_empty

DIED, HELD_BACK = 3, 6  # exit codes of a drain after which rows are dead, or are left because they are paused


class LogForm(enum.StrEnum):
    """How log lines look."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """What is worth a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@app.command()
def run(
    reference: App = None,
    lanes: Annotated[
        str | None, typer.Option(help="only these lanes: a,b", show_default=False, callback=not_empty)
    ] = None,
    env: Env = None,
    processes: Annotated[int, typer.Option(min=1, help="worker processes")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="runs at once in each process, over all lanes", show_default=False)
    ] = None,
    worker_id: Annotated[
        str | None,
        typer.Option(
            help="the worker's id; ID-1, ID-2, ... with several processes",
            show_default="HOST-PID-xxxx",
            callback=not_empty,
        ),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="exit when no row is ready or running; rows waiting for a retry stay")
    ] = False,
    grace: Annotated[float, typer.Option(min=0, help="seconds that running jobs get to finish at shutdown")] = 30.0,
    log: Annotated[LogForm, typer.Option(help="format of the log lines on standard error")] = LogForm.CONSOLE,
    log_level: Annotated[LogLevel, typer.Option(help="the least important log lines to print")] = LogLevel.INFO,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="serve Prometheus metrics on this port (0: any free port)", show_default=False
        ),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="the address for --metrics-port")] = "127.0.0.1",
    as_json: AsJson = False,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run workers for the lanes of APP until stopped.

    On Ctrl-C or SIGTERM it claims no more rows, lets runs finish within the grace period, and makes the other rows
    ready again. A second signal stops it at once.

    Exit codes: 0 stopped or drained; 1 an error; 3 drained, but rows died; 6 drained, but ready rows are paused;
    130 or 143 stopped before it was drained.

    Example: `rowmill run app:mill --processes 4`
    """
    if not hasattr(os, "killpg"):
        raise RowmillError(
            "rowmill run needs Linux, macOS or another POSIX system, because it supervises processes",
            hint="use WSL or a container, or run one worker without a supervisor: mill.run() in your own script",
        )
    configure_logs(log, getattr(logging, log_level.upper()))
    chosen: dict[str, Any] = {
        "lanes": [name.strip() for name in lanes.split(",")] if lanes else None,
        "environments": env,
        "concurrency": concurrency,
        "drain": drain,
        "grace": grace,
    }
    if child is not None:
        _as_child(reference, Orders.read(child), chosen)
    events = Events()
    try:
        # Mistakes in the declaration are reported here, before anything is started.
        mill = load(reference)
        mill.worker(**chosen)
        metrics = None if metrics_port is None else Metrics(mill, env, metrics_host, metrics_port)
        supervisor, caught = asyncio.run(
            _supervise(_command(reference, lanes, env, concurrency, drain, grace, log, log_level),
                       _ids(mill, worker_id, processes), drain, grace, events, metrics)
        )  # fmt: skip
        if supervisor.error is not None:
            raise supervisor.error
    except RowmillError as error:
        if log is LogForm.CONSOLE:
            raise
        events.emit("run_failed", logging.ERROR, error=error.message, hint=error.hint)
        raise typer.Exit(exit_code(error)) from None
    drained = drain and caught is None
    left = asyncio.run(_left(mill, env, chosen["lanes"], supervisor)) if drained else Left()
    _close(supervisor, left, drained=drained, several=len(mill.environments), events=events, log=log)
    if as_json:
        document = {"drained": drained, **_numbers(supervisor), "held_back": supervisor.held_back}
        print_json({**document, "waiting": left.waiting, "elsewhere": left.elsewhere})
    raise typer.Exit(_exit_code(supervisor, drain, caught))


def _as_child(reference: str | None, orders: Orders, chosen: dict[str, Any]) -> None:
    """One worker, in this process."""

    def make() -> Worker:
        mill = find_app(reference)
        count_for_supervisor(mill)
        return mill.worker(
            **chosen, worker_id=orders.worker_id, incarnation=orders.incarnation, replaces=orders.replaces
        )

    sys.exit(serve(make, SupervisorPipe(orders.line), orders.flight))


def _command(
    reference: str | None, lanes: str | None, env: list[str] | None, concurrency: int | None, drain: bool,
    grace: float, log: LogForm, log_level: LogLevel,
) -> list[str]:  # fmt: skip
    """The command line of a child: this command again, with the chosen options."""
    options = {"--lanes": lanes, "--concurrency": concurrency, "--grace": grace, "--log": log, "--log-level": log_level}
    return [
        *child_command(reference),
        *(word for name, value in options.items() if value is not None for word in (name, str(value))),
        *(word for name in env or () for word in ("--env", name)),
        *(["--drain"] if drain else []),
    ]


def child_command(reference: str | None) -> list[str]:
    """The bare command of a child; the supervisor adds its orders."""
    return [sys.executable, "-m", "rowmill", "run", *([reference] if reference else [])]


def _ids(mill: Mill, worker_id: str | None, processes: int) -> list[str]:
    if worker_id is None:
        return [mill.new_worker_id() for _ in range(processes)]
    return [worker_id] if processes == 1 else [f"{worker_id}-{n}" for n in range(1, processes + 1)]


async def _supervise(
    command: list[str], ids: list[str], drain: bool, grace: float, events: Events, metrics: Metrics | None
) -> tuple[Supervisor, signal.Signals | None]:
    """Supervise the processes until they end; also returns the first signal that was caught."""
    caught: list[signal.Signals] = []
    # A drain that cannot reach its database is over; without one, a worker waits for it.
    final = (RowmillError,) if drain else USERS_MISTAKES
    given = {} if metrics is None else {"env": metrics.environ()}
    supervisor = Supervisor(command, ids, grace=grace, events=events, final=final, **given)

    def stop(number: signal.Signals) -> None:
        caught.append(number)
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    async with metrics.serving(events) if metrics is not None else contextlib.nullcontext():
        await supervisor.run()
    return supervisor, caught[0] if caught else None


def _exit_code(supervisor: Supervisor, drain: bool, caught: signal.Signals | None) -> int:
    if not drain:
        return 0
    if caught is not None:
        return 128 + caught
    return DIED if supervisor.counts["dead"] else HELD_BACK if supervisor.held_back else 0


def _numbers(supervisor: Supervisor) -> dict[str, int]:
    return {name: supervisor.counts[name] for name in ("done", "failed", "dead", "canceled")}


# -- what a drain left behind


@dataclass
class Left:
    """What a drain left: lanes still running, rows that wait for their time, pauses, and rows that no lane counts."""

    lanes: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    paused: list[dict[str, Any]] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)


async def _left(mill: Mill, env: list[str] | None, lanes: list[str] | None, supervisor: Supervisor) -> Left:
    """Ask what is left, but only if needed: counting a large table takes time."""
    left, counts, idle = Left(), supervisor.counts, _idle(supervisor)
    with contextlib.suppress(RowmillError):
        async with LaneDirectory(mill, env, lanes) as directory:
            if idle or counts["left"] or supervisor.held_back:
                document = await questions.status(directory)
                left.paused = [pause for pause in document["paused"] if pause["seconds_left"] is None]
                left.elsewhere = document["elsewhere"] if idle else []
                left.lanes = document["lanes"] if counts["left"] else []
            if idle or counts["failed"] > counts["dead"]:
                left.waiting = await questions.waiting(directory)
    return left


def _idle(supervisor: Supervisor) -> bool:
    """Whether no child handled any row."""
    return not any(child.counts for child in supervisor.children)


def _held_back(supervisor: Supervisor) -> str:
    """What a drain left behind because it is paused without end."""
    parts = []
    for paused in supervisor.held_back:
        many = f"{paused['count']:,}{' or more' if paused['count'] >= COUNTED else ''}"
        parts.append(f"{many} ready in lane {paused['lane']!r} of {paused['environment']!r} held back, {paused['why']}")
    return "; ".join(parts)


def _hints(left: Left, several: int) -> list[Text]:
    """One line for each thing that is left: waiting rows, rows that may still run, rows that no lane counts."""
    lines = []
    for lane in left.waiting:
        where = f" in {lane['environment']}" if several > 1 else ""
        wait, due = plural(lane["count"], "row waits", "rows wait"), show.span(lane["seconds"])
        many = f"{lane['count']:,}{' or more' if lane['count'] >= COUNTED else ''}"
        when = f"it is due in {due}" if lane["count"] == 1 else f"the first is due in {due}"
        lines.append(plain(f"{many} {wait} in lane {lane['lane']!r}{where}: {when}."))
    for lane in left.lanes:
        if running := lane["counts"]["running"]:
            what = f"{counted(running, 'row')} of lane {lane['lane']!r} still running"
            what += f" in {lane['environment']}" if several > 1 else ""
            lines.append(
                plain(f"{what}: no column shows which worker holds them. Try: rowmill release, or rowmill migrate")
            )
    return [*lines, *(show.elsewhere_line(rows, several) for rows in left.elsewhere)]


def _resume(left: Left, several: int) -> list[Text]:
    """The commands that resume paused rows."""
    lines = []
    for pause in left.paused:
        options = {"--env": pause["environment"] if several > 1 else None, "--lane": pause["lane"],
                   "--by": pause["by"], "--key": pause["key"]}  # fmt: skip
        words = [word for name, value in options.items() if value is not None for word in (name, shlex.quote(value))]
        lines.append(plain(f"Try: {' '.join(['rowmill resume', *words])}, and drain again"))
    return lines


def _close(supervisor: Supervisor, left: Left, *, drained: bool, several: int, events: Events, log: LogForm) -> None:
    numbers, hints = _numbers(supervisor), _hints(left, several)
    if log is LogForm.JSON:
        hint: dict[str, Any] = {"hint": "; ".join(line.plain for line in hints)} if hints else {}
        extra: dict[str, Any] = {"held_back": supervisor.held_back} if supervisor.held_back else {}
        events.emit("run_ended", drained=drained, **numbers, **extra, **hint)
        return
    held_back = _held_back(supervisor) if drained else ""
    lines = [*(_resume(left, several) if held_back else []), *hints]
    if drained and _idle(supervisor):
        nothing = plain(f"Nothing was run: {held_back}.") if held_back else Text("Nothing was ready.")
        lines = [nothing, *lines]
    else:
        lines = [Text(f"{_sentence(numbers, drained)}; {_rest(supervisor, left, held_back, drained)}."), *lines]
    for line in lines:
        errors.print(line, highlight=False, soft_wrap=True)


def _sentence(numbers: dict[str, int], drained: bool) -> str:
    failed = counted(numbers["failed"], "failed attempt")
    canceled = f", {numbers['canceled']} canceled" if numbers["canceled"] else ""
    words = f"{numbers['done']} done, {failed}, {numbers['dead']} dead{canceled}"
    return f"{'Drained' if drained else 'Stopped'}: {words}"


def _rest(supervisor: Supervisor, left: Left, held_back: str, drained: bool) -> str:
    if drained:
        return held_back or ("nothing is ready" if left.lanes else "nothing is ready or running")
    if supervisor.killed:
        return "the rows of killed processes are taken back when their lease expires"
    return "rows that were not finished are ready again"


# -- --metrics-port: one port for all processes, those that have died included


#: Where prometheus-client keeps what several processes count, each in files of its own.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_CHILD = "ROWMILL_METRICS"


class Metrics:
    """Serves the metrics of all child processes, and the gauges of the lanes."""

    def __init__(self, mill: Mill, environments: Sequence[str] | None, host: str, port: int) -> None:
        from .. import prometheus  # here: an extra, and a look at its folder when it is imported

        self._prometheus, self._mill, self._environments = prometheus, mill, environments
        self._host, self._port = host, port
        self._folder = tempfile.mkdtemp(prefix="rowmill-metrics-")

    def environ(self) -> dict[str, str]:
        """The environment variables of a child."""
        return {**os.environ, FOLDER: self._folder, _CHILD: "1"}

    @contextlib.asynccontextmanager
    async def serving(self, events: Events) -> AsyncIterator[None]:
        """Serve metrics while the block runs."""
        standing = self._prometheus.Standing(self._mill, self._environments)
        try:
            port, end = self._prometheus.listen(standing, self._port, self._host, self._folder)
            events.emit("metrics_served", url=f"http://{self._host}:{port}/metrics")
            try:
                yield
            finally:
                end()
                await standing.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def count_for_supervisor(mill: Mill) -> None:
    """In a child: count what its supervisor serves, if it does."""
    if os.environ.get(_CHILD):
        from ..prometheus import observe

        observe(mill)
