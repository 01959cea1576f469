"""The registrable domain of a URL: what a gate by domain goes by."""

from __future__ import annotations

import functools
import ipaddress
from urllib.parse import urlsplit

from publicsuffixlist import PublicSuffixList


def domain(url: str) -> str | None:
    """``domain("https://shop.example.co.uk/a?b")`` is ``"example.co.uk"``; None where there is no host.

    By the public suffix list, which comes with a library and is not downloaded. Lower case, international names as
    they stand in DNS (xn--); an address, and a name without a registrable part such as ``localhost``, as it is. Fill
    a column with it when rows are made, and put ``Concurrency(2, by="domain")`` on the lane.
    """
    text = url.strip()
    try:
        parts = urlsplit(text)
        bare = not parts.netloc and (not parts.scheme or parts.path[:1].isdigit())  # host/path, or host:port
        host = urlsplit(f"//{text}").hostname if bare else parts.hostname
    except ValueError:  # a broken address in brackets
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
