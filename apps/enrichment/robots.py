"""robots.txt: asked once per site, believed for a while. By RFC 9309: what is not there forbids nothing, and a site
that cannot say so at the moment is not visited now.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from protego import Protego

MOST_SITES, MOST_BYTES = 5_000, 500_000
#: Reads a robots.txt: its text, or None where there is none. Raises where the site cannot say.
Read = Callable[[str], Awaitable[str | None]]


@dataclass
class _Site:
    rules: Protego | None = None
    until: float = 0.0
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Robots:
    """The robots rules of the sites this process has met."""

    def __init__(self, read: Read, agent: str, keep: float) -> None:
        self._read, self._keep = read, keep
        #: Rules are for the name before the version.
        self._agent = agent.partition("/")[0]
        self._sites: OrderedDict[str, _Site] = OrderedDict()

    async def allow(self, url: str) -> bool:
        """Whether this address may be fetched."""
        parts = urlsplit(url)
        site = self._site(f"{parts.scheme}://{parts.netloc}")
        async with site.asking:
            if time.monotonic() >= site.until:
                text = await self._read(f"{parts.scheme}://{parts.netloc}/robots.txt")
                site.rules = Protego.parse(text) if text is not None else None
                site.until = time.monotonic() + self._keep
        return site.rules is None or bool(site.rules.can_fetch(url, self._agent))

    def _site(self, name: str) -> _Site:
        site = self._sites.setdefault(name, _Site())
        self._sites.move_to_end(name)
        while len(self._sites) > MOST_SITES:
            self._sites.popitem(last=False)
        return site
