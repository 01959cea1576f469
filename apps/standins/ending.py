"""The end of a demonstration that is stopped: what it has started ends and is removed, and no traceback is shown."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def stoppable(work: Callable[[], int]) -> int:
    """Run a demonstration; its exit code. Ctrl-C and SIGTERM unwind it, as an error would: 130 and 143."""
    # Without this SIGTERM ends the process on the spot, and its database and folders stay.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return work()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
