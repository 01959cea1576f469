"""What a worker with nothing to do costs the database."""

from __future__ import annotations

import re
import time
from urllib.parse import urlsplit

import psutil

from ..peers import Peer
from ..session import IDLE, Session, session
from .part import PEERS_ON_POSTGRES, Column, Context, Figures, Part

#: Statements within two pauses that a worker at rest may send (the most that any peer does is 20), and how often it
#: is looked at before it is given up.
_AT_REST, _LOOKS = 30, 12
_STATEMENT = re.compile(r"LOG:  (statement|execute)")


def measure(context: Context, peer: Peer, **options: int) -> Figures:
    seconds = 10 if context.quick else 60
    with session(peer, context.server) as run:
        name = urlsplit(run.dsn).path.lstrip("/")
        run.value("select 1")  # its own connection is there before the log is on, and so not in it
        run.value(f"alter database {name} set log_statement = 'all'")
        with run.workers(**options) as workers:
            workers.go()
            _settled(context, name)
            lines, backends, cpu = context.server.log_size(), _backends(run), workers.cpu()
            time.sleep(seconds)
            spent = sum(now - backends.get(pid, 0.0) for pid, now in _backends(run).items())
            said = sum(1 for line in context.server.log_since(lines, name) if _STATEMENT.search(line))
            cpu = workers.cpu() - cpu
    minutes = seconds / 60
    return {"statements": said / minutes, "server": spent * 1000 / minutes, "worker": cpu * 1000 / minutes}


def _settled(context: Context, name: str) -> None:
    """Until the worker has started: it binds one lane after the other, with a few statements for each."""
    for _ in range(_LOOKS):
        lines = context.server.log_size()
        time.sleep(2 * IDLE)
        if sum(1 for line in context.server.log_since(lines, name) if _STATEMENT.search(line)) <= _AT_REST:
            return
    raise TimeoutError("the worker did not come to rest")


def _backends(run: Session) -> dict[int, float]:
    """CPU seconds of the server processes that serve this database, but for our own."""
    text = run.value(
        "select coalesce(string_agg(pid::text, ' '), '') from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
    )
    found = {}
    for pid in map(int, text.split()):
        times = psutil.Process(pid).cpu_times()
        found[pid] = times.user + times.system
    return found


PART = Part(
    "idle",
    "An idle worker, per minute",
    "One worker on an empty table. Statements are counted in the server's log; CPU is that of the server's processes "
    "that serve the worker's connections, in steps of 10 ms, and of the worker itself.",
    measure,
    PEERS_ON_POSTGRES,
    (
        Column("statements", "statements"),
        Column("server", "server CPU, ms"),
        Column("worker", "worker CPU, ms"),
    ),
    unit="per minute",
    quick=False,
    once=True,
)
