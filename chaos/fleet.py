"""Several hosts: network namespaces on one bridge, one database, many `rowmill run` processes.

First what workers that have nothing to do cost the database, by the statements in its log; then a drain by all of them,
during which one host is cut off and comes back.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from . import hosts
from . import stage as stages
from .bout import Result, drain, line, until
from .check import check
from .feeder import Feeder
from .hosts import Host, Network
from .records import read
from .server import Server
from .stage import Ground, Stage

#: What is promised: so many statements a minute for a worker with nothing to do, and no more for each as they get more.
MOST_A_MINUTE, MOST_GROWTH = 120.0, 1.5
#: Longer than in the bouts: fifty processes share the few cores of one machine, and each must get to its heartbeat.
LEASE = 15.0
#: Fifty interpreters take their time to start where others work, too.
_PATIENCE = 900.0
_STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*):", re.MULTILINE)


@dataclass(frozen=True)
class Idle:
    """What so many idle workers cost."""

    workers: int
    seconds: float
    statements: int
    connections: int

    @property
    def each_minute(self) -> float:
        return self.statements / self.workers / self.seconds * 60


@dataclass
class Fleet:
    """What the fleet's run came to."""

    drained: Result
    hosts: int = 0
    idle: list[Idle] = field(default_factory=list)
    #: Runs by the host they ran on.
    shares: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """What is worse than promised."""
        words = [] if self.drained.clean else ["the fleet lost, doubled or left rows"]
        words += [
            f"{idle.workers} idle workers cost {idle.each_minute:.0f} statements a minute each"
            for idle in self.idle
            if idle.each_minute > MOST_A_MINUTE or idle.each_minute > self.idle[0].each_minute * MOST_GROWTH
        ]
        if self.idle and len([count for count in self.shares.values() if count]) < self.hosts:
            words.append(f"not every host worked: {self.shares}")
        return words


def run(
    ground: Ground,
    count: int,
    each: int,
    rows: int,
    idle: Sequence[int] = (),
    seconds: float = 30.0,
    lease: float = LEASE,
) -> Fleet:
    """``count`` hosts with ``each`` processes; ``idle``: for how many workers the idle cost is measured."""
    name = f"{count} hosts, {count * each} processes"
    fleet = Fleet(Result(name, "one database; one host is cut off during the drain, and comes back"), count)
    if why := hosts.unable():
        fleet.drained.not_tried = why
        return fleet
    server = Server(ground.folder / "fleet", max_connections=str(100 + 14 * count * each))
    with contextlib.ExitStack() as undo:
        undo.callback(server.close)
        server.make()
        network = undo.enter_context(hosts.network(count))
        for workers in idle:
            fleet.idle.append(_idle(ground, server, network, workers, seconds))
            told = fleet.idle[-1]
            print(f"{workers:3} idle: {told.each_minute:.1f} statements a minute each", file=sys.stderr, flush=True)
        _drain(ground, server, network, each, rows, lease, fleet)
    print(line(fleet.drained), fleet.shares, file=sys.stderr, flush=True)
    return fleet


@contextlib.contextmanager
def _manned(ground: Ground, server: Server, network: Network, split: Sequence[int], **more: str) -> Iterator[Stage]:
    """So many processes on each host, under one `rowmill run`, and all of them at work."""
    with stages.postgres(
        server, ground.folder, url=lambda name: server.url(name, server.role, network.address)
    ) as stage:
        for host, processes in zip(network.hosts, split, strict=True):
            if processes:
                _start(stage, host, processes, more)
        until(
            lambda: stage.pg.query("select count(*) from rowmill_workers", stage.database)[0][0] == sum(split),
            _PATIENCE, "not all workers have come",
        )  # fmt: skip
        yield stage


def _start(stage: Stage, host: Host, processes: int, more: dict[str, str]) -> None:
    name = f"host{host.number}"
    stage.crew.launch(
        [*host.inside, sys.executable, "-m", "rowmill", "run", "chaos.app:mill", "--processes", str(processes),
         "--worker-id", name, "--log", "json", "--log-level", "warning", "--grace", "5"],
        name, {"CHAOS_CONCURRENCY": "10", "CHAOS_BATCH": "50", **more},
    )  # fmt: skip


def _idle(ground: Ground, server: Server, network: Network, workers: int, seconds: float) -> Idle:
    spread, rest = divmod(workers, len(network.hosts))
    split = [spread + (number < rest) for number in range(len(network.hosts))]
    with _manned(ground, server, network, split, CHAOS_LEASE="0") as stage:
        time.sleep(min(seconds, 10.0))  # past what a start costs
        server.query("alter system set log_statement = 'all'")
        server.query("select pg_reload_conf()")
        log = server.folder / "log"
        began, size = time.monotonic(), log.stat().st_size
        time.sleep(seconds)
        took, text = time.monotonic() - began, log.read_bytes()[size:].decode(errors="replace")
        server.query("alter system reset log_statement")
        server.query("select pg_reload_conf()")
        seats = server.query(f"select count(*) from pg_stat_activity where datname = '{stage.database}'")[0][0]
    return Idle(workers, took, len(_STATEMENT.findall(text)), int(seats))


def _drain(ground: Ground, server: Server, network: Network, each: int, rows: int, lease: float, fleet: Fleet) -> None:
    result, began = fleet.drained, time.monotonic()
    with _manned(ground, server, network, [each] * len(network.hosts), CHAOS_LEASE=str(lease)) as stage:
        feeder = Feeder(stage.books, rows, rows / 30.0)
        feeder.start()
        until(lambda: stage.books.settled_after(0.0), _PATIENCE, "nobody has written an outcome")
        host = network.hosts[-1]
        host.cut()
        result.injected += 1
        time.sleep(lease + 2)
        host.mend()
        healed = time.time()
        theirs = [f"host{host.number}"] if each == 1 else [f"host{host.number}-{n}" for n in range(1, each + 1)]
        back = until(
            lambda: stage.books.settled_after(healed, theirs), _PATIENCE, "the host that was cut off wrote nothing more"
        )
        result.recoveries.append(back - healed)
        feeder.finish()
        drain(stage, result)
        stage.crew.close()
        runs = list(read(stage.crew.records, stage.crew.deaths))
        books = stage.books
        result.verdict = check(
            feeder.added, books.rows(), books.ledger(), runs, books.effects(), lease, stage.crew.killed
        )
    shares = Counter(run.worker.split("-")[0] for run in runs)
    fleet.shares = {f"host{host.number}": shares[f"host{host.number}"] for host in network.hosts}
    result.seconds = time.monotonic() - began
