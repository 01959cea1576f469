"""Small file systems in memory, to be filled."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_BALLAST = "ballast"


def unable() -> str | None:
    """Why nothing can be mounted here; None where it can."""
    if os.geteuid() != 0:
        return "mounting a small file system needs root"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
        if done.returncode:
            return f"mounting is not permitted: {done.stderr.strip()}"
        subprocess.run(["umount", folder], check=True)
    return None


@contextlib.contextmanager
def small(folder: Path, megabytes: int, user: str | None) -> Iterator[Path]:
    """A file system of that size, with a folder ``space`` in it that belongs to ``user``."""
    place = Path(tempfile.mkdtemp(prefix="full-", dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "none", str(place)], check=True)
    try:
        (place / "space").mkdir(mode=0o700)
        if user is not None:
            shutil.chown(place / "space", user)
        yield place
    finally:
        # Lazily: a process that is still on its way out must not keep the mount.
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def fill(place: Path) -> None:
    """Nothing more fits."""
    with (place / _BALLAST).open("ab", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(_Full):
                while True:
                    _write(ballast.fileno(), size)


def relieve(place: Path) -> None:
    """There is room again."""
    (place / _BALLAST).unlink(missing_ok=True)


class _Full(Exception):
    pass


def _write(file: int, size: int) -> None:
    try:
        os.write(file, bytes(size))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _Full from None
