"""The end of a demonstration that is stopped: what it has started ends and is removed, and no traceback is shown."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


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


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, which SIGTERM cancels as Ctrl-C does.

    An error out of a signal's handler may come up anywhere, also within somebody's lookup that takes every error for
    "not found", and then it is gone.
    """

    async def stopped_in_order() -> T:
        task, loop, before = asyncio.current_task(), asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
        assert task is not None
        stopped = False

        def stop() -> None:
            nonlocal stopped
            if not stopped:  # a second one would cut short what ends the first
                stopped = task.cancel()

        loop.add_signal_handler(signal.SIGTERM, stop)
        try:
            return await main
        except asyncio.CancelledError:
            if stopped:
                sys.exit(128 + signal.SIGTERM)
            raise
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)

    return asyncio.run(stopped_in_order())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended: what it starts is either there, to be ended, or is not."""
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: waiting.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in waiting[:1]:
            signal.raise_signal(number)
