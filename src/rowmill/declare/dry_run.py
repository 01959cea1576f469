"""Whether the current code is a dry run. A dry run lists what it would enqueue, and writes nothing."""

from __future__ import annotations

from contextvars import ContextVar

from .call import Call

#: The calls that a dry run has enqueued so far; None outside a dry run. The context carries it into a handler's thread.
dry_calls: ContextVar[list[Call] | None] = ContextVar("rowmill_dry_calls", default=None)
