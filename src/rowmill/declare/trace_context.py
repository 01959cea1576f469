"""What a job carries beside its arguments, in the same column: the trace that it belongs to."""

from __future__ import annotations

from typing import Any

#: No name that a handler's parameter could have.
TRACE = "$trace"


def own_arguments(packed: Any) -> Any:
    """A job's arguments without what it carries."""
    if isinstance(packed, dict) and TRACE in packed:
        return {name: value for name, value in packed.items() if name != TRACE}
    return packed
