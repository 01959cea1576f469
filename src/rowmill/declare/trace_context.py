"""What a job carries besides its arguments, in the same column: the trace that it belongs to."""

from __future__ import annotations

from typing import Any

#: A name that no parameter of a handler can have.
TRACE = "$trace"


def own_arguments(packed: Any) -> Any:
    """A job's arguments without the trace context."""
    if isinstance(packed, dict) and TRACE in packed:
        return {name: value for name, value in packed.items() if name != TRACE}
    return packed
