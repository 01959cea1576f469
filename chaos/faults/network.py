"""The network between a host and the database is cut, and mended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from .. import hosts
from .. import stage as stages
from ..check import Verdict
from ..records import Run
from ..stage import LEASE, Stage
from .fault import Fault


class Cut(Fault):
    name = "network cut"
    says = f"one of two hosts (network namespaces) is cut off for {LEASE + 2:g} s; neither side is told"
    hold = LEASE + 2
    pause = 0.5
    takes = 6.0
    longest_run = LEASE

    def unable(self) -> str | None:
        return hosts.unable()

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        server = self.ground.server
        with hosts.network(2) as self._network:
            url = lambda name: server.url(name, server.role, self._network.address)  # noqa: E731
            with stages.postgres(server, self.ground.folder, url=url, lease=self.lease) as stage:
                yield stage

    def prepare(self, stage: Stage) -> None:
        for host in self._network.hosts:
            for _ in range(2):
                stage.crew.start(host.inside)

    def inject(self, stage: Stage) -> None:
        inside = stage.holder().before
        self._host = next(host for host in self._network.hosts if host.inside == inside)
        self._host.cut()

    def heal(self, stage: Stage) -> None:
        self._host.mend()
        self.victims = [worker.name for worker in stage.crew.workers if worker.before == self._host.inside]

    def unfelt(self, stage: Stage, verdict: Verdict, runs: Sequence[Run]) -> str | None:
        return None if verdict.swept else "no row was taken back from the host that was cut off"
