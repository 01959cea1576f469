"""A disk that is soon full."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(at: Path, size: int = 16384) -> Iterator[Path]:
    """A file system of ``size`` bytes; where this user may mount none, no file of this process may be larger."""
    at.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at)]
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        try:
            yield at
        finally:
            subprocess.run(["umount", "--lazy", str(at)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield at
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
