"""Django's databases as rowmill's engine reaches them, and Django's own connections inside handlers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections

from ..errors import DeclarationError, did_you_mean

#: What libpq's options are called in a URL, too. Django's other OPTIONS are for Django's connections.
_OPTIONS = ("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "passfile", "service", "options",
            "target_session_attrs")  # fmt: skip


def url(alias: str) -> str:
    """The URL of a database of ``settings.DATABASES``."""
    if alias not in connections.settings:
        raise DeclarationError(
            f"there is no database {alias!r} in settings.DATABASES", hint=did_you_mean(alias, connections.settings)
        )
    connection = connections[alias]
    if connection.vendor not in _URLS:
        raise DeclarationError(
            f"database {alias!r} is {connection.display_name}, but rowmill works on PostgreSQL and SQLite",
            hint='name another one: Mill("...")',
        )
    return _URLS[connection.vendor](alias, connection.settings_dict)


def _server_url(_alias: str, settings: Mapping[str, Any]) -> str:
    query = {name: str(value) for name, value in settings["OPTIONS"].items() if name in _OPTIONS}
    if settings.get("DISABLE_SERVER_SIDE_CURSORS"):  # what Django wants behind a transaction pooler
        query["pgbouncer"] = "true"
    host = str(settings["HOST"] or "")
    if host.startswith("/"):
        query["host"], host = host, ""
    user, password = quote(settings["USER"] or "", safe=""), quote(settings["PASSWORD"] or "", safe="")
    who = f"{user}:{password}@" if password else f"{user}@" if user else ""
    if settings["PORT"] and "host" in query:
        query["port"] = str(settings["PORT"])
    where = f"{host}:{settings['PORT']}" if settings["PORT"] and host else host
    asked = f"?{urlencode(query)}" if query else ""
    name = settings["NAME"] or ("" if "service" in query else "postgres")
    return f"postgresql://{who}{where}/{quote(name, safe='')}{asked}"


def _file_url(alias: str, settings: Mapping[str, Any]) -> str:
    name = str(settings["NAME"])
    if ":memory:" in name or "mode=memory" in name:
        raise DeclarationError(
            f"database {alias!r} is in memory: a worker and Django could not both see its rows",
            hint=f'in tests that run a worker: DATABASES["{alias}"]["TEST"] = {{"NAME": "test.sqlite3"}}',
        )
    return f"sqlite:///{quote(str(Path(name).absolute()))}"


_URLS = {"postgresql": _server_url, "sqlite": _file_url}


def guarded(handler: Any, options: Mapping[str, Any]) -> Any:
    """A handler whose Django connections are looked after as a request's are: those that are broken or too old are
    closed, so that a restart of the database costs a run at most, and an idle worker holds none.
    """
    if not inspect.isroutine(handler):
        return handler  # what is no function is refused by whom it is given to
    guard: Callable[..., Any]
    if inspect.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def guard(*args: Any, **kwargs: Any) -> Any:
            try:
                return await handler(*args, **kwargs)
            finally:
                await sync_to_async(close_old_connections)()

    else:

        @functools.wraps(handler)
        def guard(*args: Any, **kwargs: Any) -> Any:
            close_old_connections()
            try:
                return handler(*args, **kwargs)
            finally:
                close_old_connections()

    return _apart(guard) if options.get("isolation") == "process" else guard


def _apart(guard: Callable[..., Any]) -> Callable[..., Any]:
    """A handler in a process of its own: found by way of a module that sets Django up, and, where it does not await,
    outside of that process's event loop, in which Django refuses to be called.
    """
    apart = guard
    if not inspect.iscoroutinefunction(guard):

        @functools.wraps(guard)
        def apart(*args: Any, **kwargs: Any) -> Any:
            return _thread().submit(guard, *args, **kwargs).result()

    apart.__module__ = "rowmill.django.project"
    return apart


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "rowmill-handler")
