"""The stand-in as a server: in a thread of this process, or on its own with ``python -m apps.registre.standin``."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import uvicorn

from .site import Conduct, application


class Standin:
    """The three registers on a free port of this machine, for the time of a ``with`` block."""

    def __init__(self, **conduct: Any) -> None:
        self.conduct = Conduct(**conduct)
        config = uvicorn.Config(
            application(self.conduct), host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, name="standin", daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the stand-in did not start")
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)

    def variables(self) -> dict[str, str]:
        """The settings that lead registre here."""
        return {
            "LAND_REGISTRY_URL": self.url,
            "LAND_REGISTRY_USER": self.conduct.user,
            "LAND_REGISTRY_PASSWORD": self.conduct.password,
            "COMPANY_REGISTER_URL": self.url,
            "RIGHTS_REGISTER_URL": self.url,
            "RIGHTS_REGISTER_USER": self.conduct.user,
            "RIGHTS_REGISTER_PASSWORD": self.conduct.password,
        }
