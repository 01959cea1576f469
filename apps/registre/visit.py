"""A visit: one page of the browser on one site, with errors in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.async_api import Download, Error, Frame, Locator, Page
from playwright.async_api import TimeoutError as TookTooLong

from .errors import PageChanged, SessionExpired, SiteDown, SiteError, SiteRefused, SiteSilent
from .sites import Site

_CLOSING, _LOOKS = 5.0, 5


class Visit:
    """What a job does on a site. Everything on a page is called by the name it has in ``sites.py``."""

    def __init__(self, page: Page, site: Site, base: str, timeout: float, download_timeout: float) -> None:
        self.page, self.site, self._base, self._timeout = page, site, base, timeout
        self._download_timeout = download_timeout
        page.set_default_timeout(timeout * 1000)
        self._downloads: list[Download] = []

    async def rest(self) -> bool:
        """Remove what was downloaded and leave the site, with the page ready for another visit; whether it is."""
        with suppress(Error, TimeoutError):
            async with asyncio.timeout(_CLOSING):
                await self._remove_downloads()
                await self.page.goto("about:blank")
                return True
        return False

    async def close(self) -> None:
        """Close the page, and remove what it downloaded."""
        with suppress(Error, TimeoutError):
            async with asyncio.timeout(_CLOSING):  # a page that waits for its site would wait on
                await self._remove_downloads()
                await self.page.close()

    async def _remove_downloads(self) -> None:
        while self._downloads:
            await self._downloads.pop().delete()

    async def open(self, path: str) -> None:
        """Go to a page of the site by its name, or by an address on it. That a page with a name does not come is no
        row's fault: every row needs it.
        """
        named = {**self.site.paths, "login": self.site.login}
        address = self._base + named[path] if path in named else path
        try:
            with self._answered(f"open {address}"):
                answer = await self.page.goto(address, wait_until="domcontentloaded")
        except SiteSilent as error:
            raise (SiteDown(error.message, hint=error.hint) if path in named else error) from error.__cause__
        if answer is not None and answer.status >= 400:
            refused: type[SiteError] = SiteDown if path in named else SiteRefused
            raise refused(
                f"{self.site.name} answered {answer.status} to {address}: {await self._first_words()}",
                hint="look at the site, or correct the path in apps/registre/sites.py",
            )

    async def wait_for(self, *names: str, logged_in: bool = True) -> str:
        """Wait until one of these is on the page; which one it is. The login page in its place: SessionExpired."""
        wanted = {name: self.site.selectors[name] for name in names}
        login = {"": self.site.selectors["login_form"]} if self.site.login and logged_in else {}
        for _ in range(_LOOKS):  # a page may change between being seen and being looked at
            with self._answered(f"show {' or '.join(names)}"):
                try:
                    await self._any_of([*wanted.values(), *login.values()]).wait_for()
                except TookTooLong:
                    break
                for name, selector in (wanted | login).items():
                    if await self._any_of([selector]).count():
                        if name:
                            return name
                        raise SessionExpired(self.site.name)
        raise self._changed(wanted)

    def _any_of(self, selectors: list[str]) -> Locator:
        """The first thing that can be seen of these."""
        found = self.page.locator(selectors[0])
        for selector in selectors[1:]:
            found = found.or_(self.page.locator(selector))
        return found.filter(visible=True).first

    async def fill(self, name: str, value: object) -> None:
        """Write into a field."""
        await self.wait_for(name)
        with self._answered(f"fill {name}"):
            await self.page.fill(self.site.selectors[name], "" if value is None else str(value))

    async def tick(self, name: str) -> None:
        """Tick a box."""
        await self.wait_for(name)
        with self._answered(f"tick {name}"):
            await self.page.check(self.site.selectors[name])

    async def click(self, name: str) -> None:
        """Press what is there."""
        await self.wait_for(name)
        with self._answered(f"press {name}"):
            await self.page.click(self.site.selectors[name])

    async def text(self, name: str) -> str:
        """What is written there."""
        return " ".join((await self.page.locator(self.site.selectors[name]).first.inner_text()).split())

    async def links(self, name: str) -> list[str]:
        """Where links lead, as whole addresses."""
        links = self.page.locator(self.site.selectors[name])
        return [str(address) for address in await links.evaluate_all("found => found.map(link => link.href)")]

    async def download(self, name: str) -> Path:
        """Press what begins a download, and wait for its end. The file is gone with the visit."""
        await self.wait_for(name)
        with self._answered("send a document"):
            download = await self._after_pressing(name)
        self._downloads.append(download)
        with self._answered("send the whole document", self._download_timeout, "DOWNLOAD_TIMEOUT_SECONDS"):
            async with asyncio.timeout(self._download_timeout):
                failure = await download.failure()
        if failure is not None:
            if "has been closed" in failure or self.page.is_closed():
                raise Error(failure if "closed" in failure else "the page has been closed")
            raise SiteSilent(
                f"the download from {self.site.name} broke off: {failure}",
                hint="retry the row; if it happens again, see whether the disk of the temporary directory is full",
            )
        return Path(await download.path())

    async def _after_pressing(self, name: str) -> Download:
        """The download that begins; a page that comes in its place is the login, or a refusal."""
        came: asyncio.Future[Download | Page | Frame] = asyncio.get_running_loop().create_future()

        def settle(what: Download | Page | Frame) -> None:
            if not came.done() and (not isinstance(what, Frame) or what == self.page.main_frame):
                came.set_result(what)

        events: tuple[Any, ...] = ("download", "framenavigated", "close", "crash")
        for event in events:
            self.page.on(event, settle)
        try:
            await self.page.click(self.site.selectors[name])
            async with asyncio.timeout(self._timeout):
                what = await came
        finally:
            for event in events:
                self.page.remove_listener(event, settle)
        if isinstance(what, Download):
            return what
        if isinstance(what, Page):
            raise Error("the page has been closed")
        await self.page.wait_for_load_state("domcontentloaded")
        if self.site.login and await self.page.locator(self.site.selectors["login_form"]).count():
            raise SessionExpired(self.site.name)
        raise SiteRefused(
            f"{self.site.name} showed a page instead of the document: {await self._first_words()}",
            hint="look at the page, try the document by hand, then retry the row",
        )

    # -- errors

    @contextmanager
    def _answered(
        self, what: str, timeout: float | None = None, setting: str = "SITE_TIMEOUT_SECONDS"
    ) -> Iterator[None]:
        try:
            yield
        except (TookTooLong, TimeoutError) as error:
            raise SiteSilent(
                f"{self.site.name} did not {what} within {timeout or self._timeout:g} s",
                hint=f"see whether the site is slow or down, then retry the row; a larger {setting} waits longer",
            ) from error
        except Error as error:
            if "net::" in error.message:  # the others are the browser's own, and handled where it can be replaced
                raise SiteSilent(
                    f"{self.site.name} could not {what}: {error.message.splitlines()[0]}",
                    hint=f"check {self.site.prefix}_URL, and that the site can be reached from here",
                ) from error
            raise

    def _changed(self, wanted: dict[str, str]) -> PageChanged:
        missing = " or ".join(f"{name} ({selector})" for name, selector in wanted.items())
        return PageChanged(
            f"the page {self.page.url} of {self.site.name} has changed: there is no {missing} on it",
            hint="compare the page with its selectors, and correct them in apps/registre/sites.py; then retry the row",
        )

    async def _first_words(self) -> str:
        try:
            return " ".join((await self.page.inner_text("body")).split())[:200]
        except Error:
            return "(no text)"
