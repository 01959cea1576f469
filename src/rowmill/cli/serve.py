"""``rowmill serve``: the dashboard and the HTTP API."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
from typing import Annotated

import typer

from ..errors import RowmillError
from ..events import configure_logs
from ..ops.access import has_token
from .app import UsageError, app, errors, run_async
from .options import App, load, not_empty

Address = Annotated[str, typer.Option("--host", help="the address to listen on", callback=not_empty)]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="the port; 0: any free port")]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@app.command()
def serve(
    reference: App = None,
    host: Address = "127.0.0.1",
    port: Port = 8321,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="a host name of this server (repeatable)", callback=not_empty),
    ] = None,
    allow_insert: Annotated[
        list[str] | None,
        typer.Option("--allow-insert", help="a lane in which the API may create rows (repeatable)", callback=not_empty),
    ] = None,
    proxy: Annotated[
        bool, typer.Option("--proxy", help="trust X-Forwarded-For and -Proto of a proxy on this machine")
    ] = False,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-proxy",
            help="trust the proxy with this address or in this network, such as 10.0.0.0/8 (repeatable)",
            callback=not_empty,
        ),
    ] = None,
) -> None:
    """Serve the dashboard and the HTTP API until Ctrl-C.

    On a loopback address it needs no token until you create one. On any other address it starts only if there is a
    token: `rowmill token create APP NAME`.

    Example: `rowmill serve app:mill --port 8321`
    """
    if importlib.util.find_spec("starlette") is None or importlib.util.find_spec("uvicorn") is None:
        raise RowmillError("serve needs Starlette and uvicorn", hint="pip install 'rowmill[web]'")
    import uvicorn

    from ..web.app import application
    from ..web.guard import LOOPBACK, Proxies, check_address

    trusted = [*(["127.0.0.1", "::1"] if proxy else []), *map(check_address, trust_proxy or ())]
    mill = load(reference)
    local = is_loopback(host) and not trusted and not allow_host
    if not local and not run_async(has_token(mill)):
        what = (
            f"{host} is reachable from other machines"
            if not is_loopback(host)
            else "a proxy forwards requests from other machines"
        )
        raise UsageError(f"{what}, and there is no token yet", hint="rowmill token create APP NAME --scope read")
    names = frozenset(name.lower() for name in allow_host) if allow_host else None
    hosts = LOOPBACK | {host.strip("[]").lower()} | (names or set()) if names or is_loopback(host) else None
    made = application(mill, hosts=hosts, may_open=local, inserts=allow_insert or ())
    config = uvicorn.Config(
        Proxies(made, trusted), host=host.strip("[]"), port=port, proxy_headers=False, server_header=False,
        log_level="warning", timeout_graceful_shutdown=3,
    )  # fmt: skip
    listening = _listen(host.strip("[]"), port)
    shown = f"[{host.strip('[]')}]" if ":" in host.strip("[]") else host
    errors.print(f"rowmill serves on http://{shown}:{listening.getsockname()[1]}  (Ctrl-C stops it)", highlight=False)
    configure_logs()  # the audit log is there, whether or not the database can keep it
    uvicorn.Server(config).run([listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # who comes before all is open waits, and is not turned away
    except OSError as error:
        listening.close()
        raise RowmillError(f"cannot listen on {host}, port {port}: {error.strerror}", hint="another --port") from error
    return listening
