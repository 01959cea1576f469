"""Whether the code that runs now is a dry run: what it enqueues is listed, and not written."""

from __future__ import annotations

from contextvars import ContextVar

from .call import Call

#: What a dry run has enqueued so far; None outside of one. It goes with the context, also into a handler's thread.
dry_calls: ContextVar[list[Call] | None] = ContextVar("rowmill_dry_calls", default=None)
