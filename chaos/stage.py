"""A stage: one database, the workers on it, and what else a fault needs. Everything it made goes when it is closed."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .books import Books, LiteBooks
from .crew import Crew, Worker
from .server import Server

#: Seconds without a sign of life after which a row is taken back.
LEASE = 3.0
_numbers = itertools.count(1)


@dataclass
class Stage:
    """What a fault is injected into."""

    books: Books
    crew: Crew
    folder: Path
    server: Server | None = None
    database: str = ""
    #: Undone in reverse order, whatever happens.
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self._logged = self._log.stat().st_size if self._log is not None else 0

    @property
    def _log(self) -> Path | None:
        return self.server.folder / "log" if self.server is not None else None

    def logs(self) -> str:
        """What the workers, and the server since this began, have written to their logs."""
        texts = [path.read_text(errors="replace") for path in self.crew.folder.glob("*.log")]
        if self._log is not None and self._log.exists():
            texts.append(self._log.read_bytes()[self._logged :].decode(errors="replace"))
        return "\n".join(texts)

    def holder(self) -> Worker:
        """A worker that lives and is in the midst of long runs: one whose loss is felt."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (name := self.books.holder()) and (worker := self.crew.named(name)):
                return worker
            time.sleep(0.02)
        raise TimeoutError("no worker is in the midst of a long run")

    @property
    def pg(self) -> Server:
        assert self.server is not None
        return self.server


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder of the suite's own; a server that does not run as root must be able to get there."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextlib.contextmanager
def postgres(
    server: Server,
    folder: Path,
    *,
    app: Sequence[str] | None = None,
    url: Callable[[str], str] | None = None,
    space: str | None = None,
    lease: float = LEASE,
) -> Iterator[Stage]:
    """A fresh database on a server. ``url``: how workers and the suite reach it, where that is special."""
    name = f"bout{next(_numbers)}"
    server.create(name)
    if space is not None:
        server.query(f"alter database {name} set default_tablespace = {space}")
    mine = folder / name
    mine.mkdir()
    address = url(name) if url is not None else server.url(name, server.role)
    books = Books(address)
    books.prepare()
    with contextlib.ExitStack() as undo:
        crew = Crew(address, mine, lease, app)
        undo.callback(crew.close)
        yield Stage(books, crew, mine, server, name, undo)


@contextlib.contextmanager
def sqlite(folder: Path, place: Path | None = None) -> Iterator[Stage]:
    """A fresh SQLite file, in ``place`` where it is to live elsewhere."""
    mine = folder / f"bout{next(_numbers)}"
    mine.mkdir()
    path = (place or mine) / "chaos.db"
    books = LiteBooks(str(path))
    books.prepare()
    with contextlib.ExitStack() as undo:
        crew = Crew(f"sqlite:///{path}", mine, LEASE)
        undo.callback(crew.close)
        yield Stage(books, crew, mine, undo=undo)


class Ground:
    """What all bouts of a run share: a folder, and a server that is made when the first of them needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        if self._server is None:
            self._server = Server(self.folder / "shared")
            self._server.make()
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """The ground of a run; nothing of it is left."""
    with scratch() as folder, contextlib.closing(Ground(folder)) as made:
        yield made
