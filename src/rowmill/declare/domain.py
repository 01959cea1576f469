"""The registrable domain of a URL: the key of a gate by domain."""

from __future__ import annotations

import functools
import ipaddress
from urllib.parse import urlsplit

from publicsuffixlist import PublicSuffixList


def domain(url: str) -> str | None:
    """``domain("https://shop.example.co.uk/a?b")`` is ``"example.co.uk"``; None if there is no host.

    Uses the public suffix list that is bundled with a library, without a download. The result is in lower case, and
    international names are in their DNS form (xn--). An IP address, and a name without a registrable part such as
    ``localhost``, is returned as it is. Fill a column with it when you create rows, and put ``Concurrency(2,
    by="domain")`` on the lane.
    """
    text = url.strip()
    try:
        parts = urlsplit(text)
        bare = not parts.netloc and (not parts.scheme or parts.path[:1].isdigit())  # host/path, or host:port
        host = urlsplit(f"//{text}").hostname if bare else parts.hostname
    except ValueError:  # an invalid address in brackets
        return None
    if not host:
        return None
    host = host.rstrip(".")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        host = host.encode("ascii").decode() if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        return host.lower() or None
    return _suffixes().privatesuffix(host.lower()) or host.lower() or None


@functools.cache
def _suffixes() -> PublicSuffixList:
    return PublicSuffixList()
