"""The browser: the system's Chromium, started on first use, shared by the slots of a process, replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from playwright.async_api import Browser, Error, Playwright, async_playwright

from . import settings
from .errors import BrowserError, NotStarted

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PREFIX, _LOCK = "registre-browser-", "in-use"
#: What a browser wants for its profile, in bytes.
_ROOM = 20_000_000


def find() -> str:
    """The Chromium of this machine."""
    given = settings.text("CHROMIUM_PATH")
    if given and not shutil.which(given):
        raise BrowserError(f"CHROMIUM_PATH={given!r} is no program", hint="leave it unset, or give the whole path")
    found = given or next(filter(None, map(shutil.which, _NAMES)), None)
    if not found:
        raise BrowserError(
            f"there is no browser on this machine: none of {', '.join(_NAMES)}",
            hint="sudo apt-get install chromium (or: make browser), or CHROMIUM_PATH=/path/to/chromium",
        )
    return found


class Chromium:
    """A browser that is there when it is asked for. ``running`` gives it; one that died is replaced."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._scratch: Scratch | None = None
        self._lost = False
        #: The last start succeeded, or none was tried yet.
        self.works = True
        #: Held by a job that tries again after a browser died under it: see ``Session.run``.
        self.suspects = asyncio.Lock()
        #: How often a browser was started: what belongs to an earlier one is gone with it.
        self.generation = 0

    async def running(self) -> Browser:
        """The browser, started where there is none."""
        async with self._lock:
            if self._browser is None or self._lost or not self._browser.is_connected():
                await self._stop()
                self.works = False
                self._browser, self._lost = await self._start(), False
                self.works = True
                self.generation += 1
            return self._browser

    def give_up(self, generation: int) -> None:
        """The way to this browser is gone, though it did not say goodbye: the next who asks gets another."""
        self._lost = self._lost or generation == self.generation

    async def gone(self) -> None:
        """Wait until a browser that is dying is known to be dead, so that nobody tries it once more: on a busy machine
        that takes seconds. One whose page alone died lives on.
        """
        for _ in range(100):
            if self._browser is None or self._lost or not self._browser.is_connected():
                return
            await asyncio.sleep(0.05)

    async def _start(self) -> Browser:
        path = find()
        try:
            self._scratch = Scratch()
            with self._scratch.as_temporary():
                self._playwright = await async_playwright().start()
            return await self._playwright.chromium.launch(
                executable_path=path,
                headless=settings.text("HEADLESS") != "0",
                # As root there is no sandbox; containers often have a /dev/shm that is too small.
                args=["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])],
                # A worker that is told to stop lets its runs finish: their browser must not go before them.
                handle_sigint=False, handle_sigterm=False, handle_sighup=False,
            )  # fmt: skip
        except (Error, OSError) as error:
            await self._stop()
            if shutil.disk_usage(above := tempfile.gettempdir()).free < _ROOM:
                raise NotStarted(
                    f"the browser {path} does not start: no space is left in {above} for its profile",
                    hint="free some space there, or TMPDIR=/another/directory",
                ) from error
            raise NotStarted(
                f"the browser {path} does not start: {_reason(error)}",
                hint=f"see whether this works: {path} --headless --no-sandbox --dump-dom about:blank",
            ) from error

    async def _stop(self) -> None:
        browser, playwright, scratch = self._browser, self._playwright, self._scratch
        self._browser = self._playwright = self._scratch = None
        with contextlib.suppress(Error):
            if browser is not None:
                await browser.close()
        with contextlib.suppress(Error):
            if playwright is not None:
                await playwright.stop()
        if scratch is not None:
            scratch.close()

    async def close(self) -> None:
        """Stop the browser, and remove what it left."""
        async with self._lock:
            await self._stop()


class Scratch:
    """The browser's own temporary directory: profile and downloads. What killed processes left is removed with it."""

    def __init__(self) -> None:
        above = Path(tempfile.gettempdir())
        _clear(above)
        made = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._held: IO[str] = (made / _LOCK).open("w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        # Under the name that others clear away only with its lock held.
        self.path = made.rename(above / made.name.removeprefix("new-"))

    @contextlib.contextmanager
    def as_temporary(self) -> Iterator[None]:
        """While the driver is started: it takes its temporary directory from the environment."""
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = str(self.path)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before

    def close(self) -> None:
        """Remove it, and once more what others left: the successor of a killed worker may never need a browser."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()
        _clear(self.path.parent)


def _reason(error: Error | OSError) -> str:
    """What the browser itself said last, or Playwright's own words."""
    words = str(error).splitlines()
    said = [line.partition("[err]")[2].strip() for line in words if "[err]" in line]
    return next(filter(None, reversed(said)), words[0])


def _clear(above: Path) -> None:
    """The lock of a process that was killed is free: its directory is nobody's."""
    for left in above.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (left / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
