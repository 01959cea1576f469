"""The disk is full: a small file system in memory is, so nobody else's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .. import mounts
from .. import stage as stages
from ..server import Server
from ..stage import Stage
from .fault import Fault, OnSqlite

_TABLES, _CLUSTER, _FILE = 160, 400, 96  # megabytes


class _Full(Fault):
    hold = 3.0
    pause = 1.0
    takes = 4.0
    trace = "No space left on device"
    place: Path

    def unable(self) -> str | None:
        return mounts.unable()

    def inject(self, stage: Stage) -> None:
        mounts.fill(self.place)

    def heal(self, stage: Stage) -> None:
        mounts.relieve(self.place)


class TablesFull(_Full):
    name = "disk full: tables"
    says = "the tablespace of the table and its indexes has no room left (SQLSTATE 53100), for 3 s"

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        server = self.ground.server
        with mounts.small(self.ground.folder, _TABLES, server.user) as self.place:
            server.query(f"create tablespace tight location '{self.place / 'space'}'")
            server.query(f"grant create on tablespace tight to {server.role}")
            with stages.postgres(server, self.ground.folder, space="tight") as stage:
                yield stage
            server.query(f"drop database {stage.database} with (force)")
            server.query("drop tablespace tight")


class ServerFull(_Full):
    name = "disk full: server"
    says = "the server's own log has no room: the server stops with PANIC, and is started again when there is room"

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        user = self.ground.server.user
        with mounts.small(self.ground.folder, _CLUSTER, user) as self.place, contextlib.ExitStack() as undo:
            server = Server(self.place / "space", max_wal_size="64MB")
            undo.callback(server.close)
            server.make()
            yield undo.enter_context(stages.postgres(server, self.ground.folder))

    def heal(self, stage: Stage) -> None:
        super().heal(stage)
        if not stage.pg.running:
            stage.pg.start()


class LiteFull(OnSqlite, _Full):
    name = "SQLite: disk full"
    trace = "disk is full|disk I/O error"
    says = "the file system of the file and its log has no room left, for 3 s"

    @contextlib.contextmanager
    def stage(self) -> Iterator[Stage]:
        with mounts.small(self.ground.folder, _FILE, None) as self.place:
            os.chmod(self.place, 0o777)
            with stages.sqlite(self.ground.folder, self.place / "space") as stage:
                yield stage
