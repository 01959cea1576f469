"""What can go wrong with a site or the browser, each with what an operator can do about it.

    SiteError
    ├── PageChanged      something that should be on a page is not there
    ├── SiteRefused      the site answered, and said no: no such document, not a PDF
    ├── SiteSilent       no answer in time
    ├── BrowserLost      the browser died again and again
    └── SiteDown         the site serves nobody: it cannot be reached, or a page that every row needs does not come
        └── LoginRefused the site does not take the account

    BrowserError         there is no browser on this machine
    └── NotStarted       it is there, and did not start this time

SiteDown and BrowserError are no row's fault: see ``Session.run``.
SessionExpired is none of them: it is mended by logging in, and never seen outside.
"""

from __future__ import annotations

from rowmill.errors import RowmillError


class BrowserError(RowmillError):
    """There is no browser, or it does not start."""


class NotStarted(BrowserError):
    """The browser is there, and did not start this time."""


class SiteError(RowmillError):
    """A job that a site would not let come to its end."""


class PageChanged(SiteError):
    """A selector finds nothing."""


class SiteRefused(SiteError):
    """The site said no."""


class SiteSilent(SiteError):
    """The site did not answer."""


class BrowserLost(SiteError):
    """Every browser that tried this job died."""


class SiteDown(SiteError):
    """The site serves nobody, whatever a row asks for."""


class LoginRefused(SiteDown):
    """The account is not taken."""


class SessionExpired(Exception):
    """The login page came instead of the one that was asked for."""
