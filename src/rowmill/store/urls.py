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


def postgres_url(url: str) -> tuple[str, bool]:
    """The DSN asyncpg takes, and whether a transaction pooler stands in between."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    port = _port(parts.netloc)
    pooled = query.get("pgbouncer", "").lower() == "true" or (
        port == 6543 and "pooler" in parts.netloc  # Supabase's transaction pooler
    )
    kept = {name: value for name, value in query.items() if name not in _FOREIGN}
    return urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(kept), "")), pooled


def _port(netloc: str) -> int | None:
    found = re.search(r":(\d+)$", netloc)
    return int(found.group(1)) if found else None


def sqlite_path(url: str) -> str:
    path = unquote(url.split("?", 1)[0].partition("://")[2].removeprefix("/"))
    if not path or path == ":memory:":
        raise DeclarationError(
            f"{url!r} is a database in memory: other connections and processes could not see its rows",
            hint="a file: sqlite:///jobs.db (relative) or sqlite:////var/lib/app/jobs.db (absolute)",
        )
    return path


def redact(url: str) -> str:
    """A URL without its password, for messages."""
    hidden = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"(?i)([?&](?:password|sslpassword)=)[^&]*", r"\1***", hidden)
