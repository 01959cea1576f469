"""A PgBouncer in transaction mode before the tests' PostgreSQL: ``pytest --pooler`` hands out databases behind it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from psycopg import pq

_PORT = 6432
_PATIENCE = 60.0
#: As Debian ships it, but for where it listens. Users are looked up in the server: roles that tests make work, too.
_SETTINGS = """[databases]
* = host={host} port={port}
[pgbouncer]
pool_mode = transaction
unix_socket_dir = {folder}
listen_addr =
listen_port = {own}
auth_type = trust
auth_file = {folder}/users.txt
auth_user = postgres
admin_users = postgres
auth_query = select usename, passwd from pg_shadow where usename = $1
max_client_conn = 2000
default_pool_size = 20
server_idle_timeout = 5
server_lifetime = 600
ignore_startup_parameters = {ignored}
logfile = {folder}/pgbouncer.log
"""


def command() -> str | None:
    """Where the program is, if it is."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")


class Pooler:
    """PgBouncer before one server, as long as it is open."""

    def __init__(self, url: str, ignored: str = "extra_float_digits") -> None:
        """``url``: any database of the server, directly; ``ignored``: startup parameters that it drops."""
        program = command()
        assert program is not None, "no pgbouncer. Try: make pgbouncer"
        query = dict(parse_qsl(urlsplit(url).query))
        self.host, self.port = query["host"], int(query.get("port", "5432"))
        self._folder = Path(tempfile.mkdtemp(prefix="rmb-", dir="/tmp"))
        settings = _SETTINGS.format(host=self.host, port=self.port, folder=self._folder, own=_PORT, ignored=ignored)
        (self._folder / "pgbouncer.ini").write_text(settings)
        (self._folder / "users.txt").write_text('"postgres" ""\n')
        words = [program, "--quiet", str(self._folder / "pgbouncer.ini")]
        if os.getuid() == 0:  # it will not be root; the owner of the server's socket may use it
            owner = Path(self.host).stat().st_uid or 65534
            for path in (self._folder, *self._folder.iterdir()):
                os.chown(path, owner, -1)
            self._process = subprocess.Popen(words, user=owner, group=65534, extra_groups=[])
        else:
            self._process = subprocess.Popen(words)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self._folder / "pgbouncer.log").read_text()
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self._folder / f".s.PGSQL.{_PORT}"))
                except OSError:
                    time.sleep(0.02)
                else:
                    return
        raise AssertionError("PgBouncer did not come up")

    def before(self, url: str) -> str:
        """The same database, through the pooler; other servers' as they are."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        if query.get("host") != self.host:
            return url
        query |= {"host": str(self._folder), "port": str(_PORT), "pgbouncer": "true"}
        return urlunsplit(parts._replace(query=urlencode(query, safe="/")))

    def transactions(self) -> int:
        """How many have gone through, by PgBouncer's own count."""
        # Its console speaks the simple protocol alone: libpq as it is.
        console = pq.PGconn.connect(f"host={self._folder} port={_PORT} dbname=pgbouncer user=postgres".encode())
        try:
            found = console.exec_(b"show stats_totals")
            names = [found.fname(i) for i in range(found.nfields)]
            at = names.index(b"xact_count")
            return sum(int(found.get_value(row, at) or 0) for row in range(found.ntuples))
        finally:
            console.finish()

    def close(self) -> None:
        """End it, and remove what it left."""
        self._process.send_signal(signal.SIGTERM)  # at once, even with open connections
        self._process.wait(_PATIENCE)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


#: The one that this run of pytest goes through, if it goes through one.
session: Pooler | None = None
