"""``rowmill run``: work until stopped, or, draining, until nothing is ready."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import sys
from collections.abc import Sequence
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
from ..plural import counted
from ..store.gates.pauses import COUNTED
from ..store.inspect import json_values
from ..store.inspect.lane_view import LaneView, UncountedRows
from . import show
from .app import App, AsJson, Env, app, errors, exit_code, load, print_json, said
from .environments import CommandDirectory
from .metrics import Metrics, count_for_supervisor

DIED, HELD_BACK = 3, 6  # exit codes of a drain after which rows are dead, or are left because they are paused


_RESUME = "Try: rowmill resume, and drain again"


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
    lanes: Annotated[str | None, typer.Option(help="only these lanes: a,b", show_default=False, callback=said)] = None,
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
            callback=said,
        ),
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="end when nothing is ready or running")] = False,
    grace: Annotated[float, typer.Option(min=0, help="seconds that runs may take to finish when stopped")] = 30.0,
    log: Annotated[LogForm, typer.Option(help="log lines, on standard error")] = LogForm.CONSOLE,
    log_level: Annotated[LogLevel, typer.Option()] = LogLevel.INFO,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="serve Prometheus metrics there (0: any)", show_default=False)
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="on this address")] = "127.0.0.1",
    as_json: AsJson = False,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Work on the lanes of APP until stopped.

    Ctrl-C or SIGTERM: claim nothing more, let runs finish within the grace, give the rest back. Again: at once.
    Exit codes: 0 stopped or drained; 1 an error; 3 drained, but rows died; 6 drained, but ready rows are paused; 130 or
    143 stopped before it was drained.
    """
    if not hasattr(os, "killpg"):
        raise RowmillError(
            "rowmill run needs Linux, macOS or another POSIX system: it watches over processes as only these can",
            hint="WSL or a container; or one worker without a supervisor: mill.run() in a script of your own",
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
        # Whatever is wrong with the declaration is said here, before anything is started.
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
    idle = drained and _idle(supervisor)
    elsewhere = asyncio.run(_elsewhere(mill, env, chosen["lanes"])) if idle else []
    hints = [show.elsewhere_line(found, len(mill.environments)) for found in elsewhere]
    if drained and supervisor.counts["left"]:
        hints += asyncio.run(_left_running(mill, env, chosen["lanes"]))
    _close(supervisor, drained=drained, idle=idle, hints=hints, events=events, log=log)
    if as_json:
        rows = [json_values.elsewhere_value(found) for found in elsewhere]
        left = {"held_back": supervisor.held_back}
        print_json({"drained": drained, **_numbers(supervisor), **left, "elsewhere": rows})
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
    """How a child is started: this command again, with what was chosen."""
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
    """Keep the processes until they end; also the first signal that was caught on the way."""
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


def _idle(supervisor: Supervisor) -> bool:
    """No child ever had anything to tell: not even a row that was canceled, put off or taken back."""
    return not any(child.counts for child in supervisor.children)


async def _elsewhere(mill: Mill, env: list[str] | None, lanes: list[str] | None) -> list[UncountedRows]:
    """Where nothing was ready: rows that no lane counts may be what was to be worked on."""
    with contextlib.suppress(RowmillError):
        async with CommandDirectory(mill, env, lanes) as lookout:
            return await lookout.elsewhere(await lookout.ask(LaneView.count))
    return []


def _left(supervisor: Supervisor) -> str:
    """What a drain left behind because it is paused without end."""
    told = []
    for held in supervisor.held_back:
        many = f"{held['count']:,}{' or more' if held['count'] >= COUNTED else ''}"
        told.append(f"{many} ready in lane {held['lane']!r} of {held['environment']!r} held back, {held['why']}")
    return "; ".join(told)


async def _left_running(mill: Mill, env: list[str] | None, lanes: list[str] | None) -> list[Text]:
    """Rows that a drain did not wait for: another worker may be at them, or have died long ago."""
    lines = []
    with contextlib.suppress(RowmillError):
        async with CommandDirectory(mill, env, lanes) as lookout:
            for view, counts in (await lookout.ask(LaneView.count)).found:
                if running := counts.states["running"]:
                    what = f"{counted(running, 'row')} of lane {view.lane.name!r} still running"
                    if len(mill.environments) > 1:
                        what += f" in {view.environment}"
                    lines.append(
                        Text(f"{what}: nothing shows who holds them. Try: rowmill release, or rowmill migrate")
                    )
    return lines


def _close(
    supervisor: Supervisor, *, drained: bool, idle: bool, hints: Sequence[Text], events: Events, log: LogForm
) -> None:
    """The closing word."""
    numbers = _numbers(supervisor)
    if log is LogForm.JSON:
        hint: dict[str, Any] = {"hint": "; ".join(line.plain for line in hints)} if hints else {}
        left: dict[str, Any] = {"held_back": supervisor.held_back} if supervisor.held_back else {}
        events.emit("run_ended", drained=drained, **numbers, **left, **hint)
        return
    held_back = _left(supervisor) if drained else ""
    if idle:
        nothing = [show.plain(f"Nothing was run: {held_back}."), Text(_RESUME)]
        for line in nothing if held_back else [Text("Nothing was ready."), *hints]:
            errors.print(line, soft_wrap=True)
        return
    if drained:
        rest = held_back or ("nothing is ready" if hints else "nothing is ready or running")
    elif supervisor.killed:
        rest = "what the killed had in hand is taken back when its lease runs out"
    else:
        rest = "what was not finished was given back"
    failed = counted(numbers["failed"], "failed attempt")
    canceled = f", {numbers['canceled']} canceled" if numbers["canceled"] else ""
    words = f"{numbers['done']} done, {failed}, {numbers['dead']} dead{canceled}"
    errors.print(f"{'Drained' if drained else 'Stopped'}: {words}; {rest}.", highlight=False, soft_wrap=True)
    for line in [*([Text(_RESUME)] if held_back else []), *hints]:
        errors.print(line, soft_wrap=True)
