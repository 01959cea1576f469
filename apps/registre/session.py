"""Sessions: a site is logged in to once per process, and again when it has forgotten us; jobs share the session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from playwright.async_api import BrowserContext, Error

from rowmill import Job
from rowmill.errors import RowmillError

from . import evidence, settings
from .browser import Chromium, NotStarted
from .errors import BrowserLost, LoginRefused, SessionExpired, SiteError
from .sites import Site
from .visit import Visit

T = TypeVar("T")

#: How often a job is begun again because the site has logged us out, or because the browser died.
_LOGINS, _BROWSERS = 3, 3


class Session:
    """Our session with one site: a browser context, whose cookies outlive the browser."""

    def __init__(self, chromium: Chromium, site: Site) -> None:
        self.chromium, self.site = chromium, site
        self.access = settings.access(site.prefix, login=bool(site.login))
        self.timeout = settings.number("SITE_TIMEOUT_SECONDS", least=0.1)
        self._context: BrowserContext | None = None
        self._generation = 0
        self._cookies: Any = None
        #: How often we logged in: who comes late to an expired session finds it renewed.
        self.logins = 0
        self._opening, self._logging_in = asyncio.Lock(), asyncio.Lock()

    async def run(self, job: Job, work: Callable[[Visit], Awaitable[T]]) -> T:
        """Do a job's work in a visit; from its beginning again where the session has expired or the browser died."""
        logins = browsers = 0
        while True:
            known = self.logins
            try:
                async with self._visit(job) as visit:
                    return await work(visit)
            except SessionExpired:
                logins += 1
                if logins > _LOGINS:
                    raise LoginRefused(
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
            async with self._visit(job) as visit:
                await self._give_account(visit)
                self._cookies = await visit.page.context.storage_state()
                self.logins += 1

    async def _give_account(self, visit: Visit) -> None:
        await visit.open(self.access.url + self.site.login)
        await visit.fill("login_user", self.access.user)
        await visit.fill("login_password", self.access.password)
        await visit.click("login_submit")
        if await visit.wait_for("login_error", "home", logged_in=False) == "login_error":
            raise LoginRefused(
                f"{self.site.name} refuses the login of {self.access.user!r}: {await visit.text('login_error')}",
                hint=f"correct {self.site.prefix}_USER and _PASSWORD, restart the workers, then retry the row",
            )

    # -- the browser

    @contextlib.asynccontextmanager
    async def _visit(self, job: Job) -> AsyncIterator[Visit]:
        """A page of our context. What goes wrong on it is told with where the page was kept."""
        visit: Visit | None = None
        try:
            page = await (await self._opened()).new_page()
            visit = Visit(page, self.site, self.access.url, self.timeout)
            yield visit
        except RowmillError as error:
            if visit is not None:
                error.message += f" ({await evidence.keep(job, visit.page, error)})"
            raise
        except Error as error:
            if self._is_gone(error):
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
            if visit is not None:
                await visit.close()

    async def _opened(self) -> BrowserContext:
        async with self._opening:
            browser = await self.chromium.running()
            if self._context is None or self._generation != self.chromium.generation:
                self._generation = self.chromium.generation
                self._context = await browser.new_context(storage_state=self._cookies, accept_downloads=True)
            return self._context

    def _is_gone(self, error: Error) -> bool:
        """Whether this is the end of a browser, of its driver, or of one page's process."""
        if "Connection closed" in error.message:
            self.chromium.give_up(self._generation)
        died = ("Connection closed", "has been closed", "crashed")
        return self._generation != self.chromium.generation or any(words in error.message for words in died)


class BrowserDied(Exception):
    """The browser went away under a visit."""
