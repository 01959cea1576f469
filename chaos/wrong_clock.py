"""A wrong wall clock inside a worker: everything in Python that asks for the time of day is told the wrong one.

By time-machine, which changes the interpreter's own functions: ``time.time``, ``datetime.now`` and the like, for
every module that has imported them. The monotonic clock stays, as on a machine whose date is wrong. A library loaded
before the C library would reach more, but also changes how Python's own locks wait: another fault.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

_EVERY = 0.2


def follow(path: Path) -> None:
    """Be wrong by as many seconds as stand in the file, from now on, and by others when they change."""
    import time_machine

    wrong_by = float(path.read_text())
    clock = time_machine.travel(time.time() + wrong_by, tick=True).start()

    def watch() -> None:
        nonlocal wrong_by
        while True:
            time.sleep(_EVERY)
            if (new := float(path.read_text())) != wrong_by:
                clock.shift(new - wrong_by)
                wrong_by = new

    threading.Thread(target=watch, name="chaos-clock", daemon=True).start()
