"""Sessions: a site is logged in to once per process, and again when it has forgotten us; jobs share the session."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from playwright.async_api import BrowserContext, Error, Page

from apps.storage import Unusable
from rowmill import Job, Snooze
from rowmill.errors import RowmillError

from . import evidence, settings
from .browser import Chromium
from .errors import (
    BrowserError,
    BrowserLost,
    LoginRefused,
    NotStarted,
    SessionExpired,
    SiteDown,
    SiteError,
    SiteRefused,
)
from .sites import Site
from .visit import Visit

T = TypeVar("T")

#: How often a job is begun again because the site has logged us out, or because the browser died.
_LOGINS, _BROWSERS = 3, 3
#: How long an account that was refused is not tried: with every row once more, the site would lock it.
_REFUSED_FOR = 300.0


class Session:
    """Our session with one site: a browser context, whose cookies outlive the browser."""

    def __init__(self, chromium: Chromium, site: Site) -> None:
        self.chromium, self.site = chromium, site
        self.access = settings.access(site.prefix, login=bool(site.login))
        timeouts = ("SITE_TIMEOUT_SECONDS", "DOWNLOAD_TIMEOUT_SECONDS")
        self._timeouts = [settings.number(name, least=0.1) for name in timeouts]
        self._outage = settings.outage()
        self._context: BrowserContext | None = None
        #: Pages at rest: a new one is a new window, which costs the browser more than all the rest of a visit.
        self._pages: list[Page] = []
        self._generation = 0
        self._cookies: Any = None
        #: How often we logged in: who comes late to an expired session finds it renewed.
        self.logins = 0
        #: What the site said of our account, and when it may be asked again.
        self._refused, self._ask_again = "", 0.0
        self._opening, self._logging_in = asyncio.Lock(), asyncio.Lock()

    async def run(self, job: Job, work: Callable[[Visit], Awaitable[T]]) -> T:
        """Do a job's work in a visit. Where that fails for what no row can help, the row is put off and loses nothing:
        all workers leave the lane alone for a while, or this process alone where it is its browser.
        """
        try:
            return await self._run(job, work)
        except (SiteDown, Unusable, BrowserError) as error:
            job.log.warning("put_off: %s", error)
            raise Snooze(self._outage, str(error), closes=not isinstance(error, BrowserError)) from error

    async def _run(self, job: Job, work: Callable[[Visit], Awaitable[T]]) -> T:
        """From its beginning again where the session has expired or the browser died."""
        logins = browsers = 0
        while True:
            known = self.logins
            try:
                # Who was there when a browser died may have been its death: such jobs try again one at a time, so
                # that the one whose page kills every browser takes no other with it more than once.
                turn = self.chromium.suspects if browsers else contextlib.nullcontext()
                async with turn, self._visit(job) as visit:
                    return await work(visit)
            except SessionExpired:
                logins += 1
                if logins > _LOGINS:
                    raise SiteRefused(
                        f"{self.site.name} asks for the login again and again, right after it was given",
                        hint=f"log in by hand as {self.access.user!r}: is the account in use elsewhere, or limited?",
                    ) from None
            except (BrowserDied, NotStarted) as error:
                browsers += 1
                job.log.warning("browser_died")
                await self.chromium.gone()
                if browsers < _BROWSERS:
                    continue
                if isinstance(error, NotStarted):
                    raise
                raise BrowserLost(
                    f"the browser died {browsers} times while it worked on this job",
                    hint="see whether the machine is out of memory, then retry the row",
                ) from None
            with contextlib.suppress(BrowserDied, NotStarted):  # the work finds out, and counts it
                await self._log_in(job, known)

    # -- login

    async def _log_in(self, job: Job, known: int) -> None:
        async with self._logging_in:
            if self.logins != known:
                return
            if time.monotonic() < self._ask_again:
                raise self._login_refused()
            async with self._visit(job) as visit:
                await self._give_account(visit)
                self._cookies = await visit.page.context.storage_state()
                self.logins += 1

    async def _give_account(self, visit: Visit) -> None:
        await visit.open("login")
        await visit.fill("login_user", self.access.user)
        await visit.fill("login_password", self.access.password)
        await visit.click("login_submit")
        if await visit.wait_for("login_error", "home", logged_in=False) == "login_error":
            self._refused, self._ask_again = await visit.text("login_error"), time.monotonic() + _REFUSED_FOR
            raise self._login_refused()

    def _login_refused(self) -> LoginRefused:
        return LoginRefused(
            f"{self.site.name} refuses the login of {self.access.user!r}: {self._refused}",
            hint=f"correct {self.site.prefix}_USER and _PASSWORD, and restart the workers",
        )

    # -- the browser

    @contextlib.asynccontextmanager
    async def _visit(self, job: Job) -> AsyncIterator[Visit]:
        """A page of our context. What goes wrong on it is told with where the page was kept."""
        visit: Visit | None = None
        generation = self.chromium.generation
        try:
            page = await self._page()
            generation = self._generation
            visit = Visit(page, self.site, self.access.url, *self._timeouts)
            yield visit
            if await visit.rest() and visit.page.context is self._context:
                self._pages.append(visit.page)
        except RowmillError as error:
            if visit is not None:
                error.message += f" ({await evidence.keep(job, visit.page, error)})"
            raise
        except Error as error:
            if self._is_gone(error, generation):
                raise BrowserDied from error
            kept = await evidence.keep(job, visit.page, error) if visit is not None else "before any page was open"
            raise SiteError(
                f"the browser could not go on with {self.site.name}: {error.message.splitlines()[0]} ({kept})",
                hint="look at the page; retry the row",
            ) from error
        except Exception as error:
            if visit is not None and not isinstance(error, SessionExpired):
                await evidence.keep(job, visit.page, error)
            raise
        finally:
            if visit is not None and visit.page not in self._pages:
                await visit.close()

    async def _page(self) -> Page:
        context = await self._opened()
        while self._pages:
            if not (page := self._pages.pop()).is_closed():
                return page
        return await context.new_page()

    async def _opened(self) -> BrowserContext:
        async with self._opening:
            browser = await self.chromium.running()
            if self._context is None or self._generation != self.chromium.generation:
                self._generation = self.chromium.generation
                self._context = await browser.new_context(storage_state=self._cookies, accept_downloads=True)
                self._pages = []
            return self._context

    def _is_gone(self, error: Error, generation: int) -> bool:
        """Whether this is the end of the visit's browser, of its driver, or of one page's process."""
        if "Connection closed" in error.message:
            self.chromium.give_up(generation)
        died = ("Connection closed", "has been closed", "crashed")
        return generation != self.chromium.generation or any(words in error.message for words in died)


class BrowserDied(Exception):
    """The browser went away under a visit."""
