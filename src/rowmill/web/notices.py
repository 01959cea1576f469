"""What an action has to say, shown once on the page it leads to."""

from __future__ import annotations

import secrets

from starlette.requests import HTTPConnection

_NOTICES = 200


class Notices:
    """What an action has to say, kept until the page it leads to has shown it."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, str]] = {}

    def keep(self, level: str, text: str) -> str:
        """Keep a notice; its name."""
        name = secrets.token_hex(8)
        self._kept[name] = level, text
        while len(self._kept) > _NOTICES:
            self._kept.pop(next(iter(self._kept)))
        return name

    def take(self, name: str | None) -> tuple[str, str] | None:
        """A notice, once."""
        return self._kept.pop(name, None) if name else None


def notices_of(request: HTTPConnection) -> Notices:
    """The application's notices."""
    state = request.app.state
    if not hasattr(state, "notices"):
        state.notices = Notices()
    found: Notices = state.notices
    return found
