"""Database URLs as people have them, and as the drivers take them."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from ..errors import DeclarationError

#: Query parameters that other clients read from the same URL and asyncpg would pass on to the server.
_FOREIGN = {
    "pgbouncer",
    "connection_limit",
    "pool_timeout",
    "schema",
    "supa",
    "channel_binding",
    "connect_timeout",
}
FORMS = "postgresql://user:password@host:5432/database or sqlite:///file.db"
ESCAPED = "signs like : / ? # @ in a password are written %3A %2F %3F %23 %40"
_SECRET = re.compile("(?i)pass|pwd|secret|token")
#: An address in libpq's own form, and a secret in it: quoted, or up to the next word.
_WORDS = re.compile(r"\s*\w+\s*=")
_WORD = re.compile(
    r"(?is)(\w*(?:pass|pwd|secret|token)\w*\s*=\s*)(?:'(?:[^'\\]|\\.)*'(?=\s|$)|\S.*?(?=\s+\w+\s*=|\s*$))"
)


def postgres_url(url: str) -> tuple[str, bool]:
    """The DSN asyncpg takes, and whether it goes through a transaction pooler."""
    try:
        parts = urlsplit(url)
    except ValueError:  # whose words repeat what may be a part of the password
        raise unreadable(url) from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    port = _port(parts.netloc)
    pooled = query.get("pgbouncer", "").lower() == "true" or (
        port == 6543 and "pooler" in parts.netloc  # Supabase's transaction pooler
    )
    kept = {name: value for name, value in query.items() if name not in _FOREIGN}
    return urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(kept), "")), pooled


def search_path(dsn: str) -> tuple[str, str | None]:
    """A DSN without its ``search_path``, and that."""
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = query.pop("search_path", None)
    return (dsn, None) if path is None else (urlunsplit(parts._replace(query=urlencode(query))) + "#schema", path)


def unreadable(url: str) -> DeclarationError:
    """What is said of a URL that a driver could not read."""
    return DeclarationError(f"cannot use {redact(url)}: it cannot be read as a URL", hint=f"{FORMS}; {ESCAPED}")


def _port(netloc: str) -> int | None:
    match = re.search(r":(\d+)$", netloc)
    return int(match.group(1)) if match else None


def sqlite_path(url: str) -> str:
    path = unquote(url.split("?", 1)[0].partition("://")[2].removeprefix("/"))
    if not path or path == ":memory:":
        raise DeclarationError(
            f"{url!r} is a database in memory: other connections and processes could not see its rows",
            hint="a file: sqlite:///jobs.db (relative) or sqlite:////var/lib/app/jobs.db (absolute)",
        )
    return path


def redact(url: str) -> str:
    """An address without its password, for messages: also one that cannot be read, and one in libpq's ``key=value``.

    Rather too much is hidden than too little: a password may hold any sign, and not everybody escapes them.
    """
    if url.startswith("sqlite:"):
        return url
    if _WORDS.match(url):
        return _WORD.sub(r"\1***", url)
    start = url.find("://")
    start = start + 3 if start >= 0 else 0
    end = url.rfind("@")
    user, colon, password = url[start : max(end, start)].partition(":")
    if colon and password:
        url = f"{url[:start]}{user}:***{url[end:]}"
    address, mark, query = url.partition("?")
    return address + mark + "".join(_hidden(part) for part in re.split("([&;])", query))


def _hidden(part: str) -> str:
    """One parameter of a query; its name, too, may be escaped."""
    name, given, value = part.partition("=")
    return f"{name}=***" if given and value and _SECRET.search(unquote(name)) else part
