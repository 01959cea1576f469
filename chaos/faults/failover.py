"""Fail-over to a streaming standby.

Workers have both addresses in one URL and ask for the one that takes writes (``target_session_attrs``): what people
have who do without a proxy. Replication is synchronous, so a commit that was confirmed is on both.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

from .. import stage as stages
from ..server import Server
from ..stage import Stage
from .fault import Fault


class Failover(Fault):
    name = "fail-over to a standby"
    says = "the primary crashes and its synchronous standby is promoted; then the old primary is rebuilt as a standby"
    pause = 2.0
    takes = 15.0
    trace = '"environment_down"'

    def __init__(self, ground: stages.Ground) -> None:
        super().__init__(ground)
        self._numbers = itertools.count(1)
        self._ports: list[int] = []

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        with contextlib.ExitStack() as undo:
            self._primary = self._server()
            undo.callback(lambda: (self._primary.close(), self._standby.close()))
            self._standby = self._primary
            self._primary.make()
            self._standby = self._primary.standby(self._folder())
            self._ports = [self._primary.port, self._standby.port]
            made = stages.postgres(self._primary, self.ground.folder, url=self._url)
            yield undo.enter_context(made)

    def _folder(self) -> Path:
        return self.ground.folder / f"pair{next(self._numbers)}"

    def _server(self) -> Server:
        return Server(self._folder())

    def _url(self, database: str) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"postgresql://{Server.role}@{hosts}/{database}?target_session_attrs=read-write"

    def inject(self, stage: Stage) -> None:
        self._primary.stop(signal.SIGQUIT)

    def heal(self, stage: Stage) -> None:
        old, self._primary = self._primary, self._standby
        self._primary.promote()
        stage.server = self._primary
        self._old = old

    def after(self, stage: Stage) -> None:
        """The old primary's data goes: it comes back as a fresh copy, at its old address."""
        self._old.close()
        self._standby = self._primary.standby(self._folder(), port=self._old.port)
