"""The proxy in front of ``rowmill serve``: whose forwarded headers are believed."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ..errors import DeclarationError
from .access import forwarded
from .problem import log

#: Addresses that are warned about, each once.
_MOST = 100


class Proxies:
    """ASGI middleware: takes the client's address and the scheme from ``X-Forwarded-For`` and ``X-Forwarded-Proto`` of
    trusted addresses, and warns where another address sends such headers.
    """

    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        inner: Any = app
        self._believing = ProxyHeadersMiddleware(inner, [check_address(address) for address in trusted])
        self._warned: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and forwarded(name.decode("latin-1") for name, _ in scope["headers"]):
            address = (scope.get("client") or ("",))[0]
            if address not in self._believing.trusted_hosts:
                self._warn(address)
        await self._believing(scope, receive, send)  # type: ignore[arg-type]

    def _warn(self, address: str) -> None:
        if address not in self._warned and len(self._warned) < _MOST:
            self._warned.add(address)
            log.warning(
                "forwarded headers from %s are ignored: the Secure flag of cookies, the audit log's addresses and the"
                " login limit go by the proxy, not by its clients. Try: rowmill serve --trust-proxy %s",
                address, address,
            )  # fmt: skip


def check_address(text: str) -> str:
    """An address or a network, in the form that is compared; raises DeclarationError for anything else."""
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise DeclarationError(
            f"--trust-proxy: {text!r} is not an address or a network", hint="--trust-proxy 10.0.0.0/8"
        ) from None
    return str(network) if network.num_addresses > 1 else str(network.network_address)
