"""``rowmill run --metrics-port``: one port for all processes, those that have died included."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence

from ..events import Events
from ..mill import Mill

#: Where prometheus-client keeps what several processes count, each in files of its own.
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_CHILD = "ROWMILL_METRICS"


class Metrics:
    """Serves what the children of this process count, and how the lanes stand."""

    def __init__(self, mill: Mill, environments: Sequence[str] | None, host: str, port: int) -> None:
        from .. import prometheus  # here: an extra, and a look at its folder when it is imported

        self._prometheus, self._mill, self._environments = prometheus, mill, environments
        self._host, self._port = host, port
        self._folder = tempfile.mkdtemp(prefix="rowmill-metrics-")

    def environ(self) -> dict[str, str]:
        """What a child needs to know."""
        return {**os.environ, FOLDER: self._folder, _CHILD: "1"}

    @contextlib.asynccontextmanager
    async def serving(self, events: Events) -> AsyncIterator[None]:
        """Serve for the length of the block."""
        standing = self._prometheus.Standing(self._mill, self._environments)
        try:
            port, end = self._prometheus.listen(standing, self._port, self._host, self._folder)
            events.emit("metrics_served", url=f"http://{self._host}:{port}/metrics")
            try:
                yield
            finally:
                end()
                await standing.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def count_for_supervisor(mill: Mill) -> None:
    """In a child: count what its supervisor serves, if it does."""
    if os.environ.get(_CHILD):
        from ..prometheus import observe

        observe(mill)
