"""``settings.DATABASES`` as URLs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django
import pytest
import sqlalchemy as sa
from django.conf import settings
from django.db import connections

from rowmill import DeclarationError
from rowmill.store import Database

POSTGRES = "django.db.backends.postgresql"


@pytest.fixture
def databases() -> Iterator[dict[str, Any]]:
    if not settings.configured:
        settings.configure(DATABASES={})
        django.setup()
    kept = connections.settings
    found: dict[str, Any] = {"default": {}}
    yield found
    connections.__dict__["settings"] = kept
    for alias in found:
        if hasattr(connections._connections, alias):
            delattr(connections._connections, alias)


def asked(databases: dict[str, Any], alias: str = "default", **database: Any) -> str:
    from rowmill.django.connections import url

    databases[alias] = database
    if hasattr(connections._connections, alias):
        delattr(connections._connections, alias)
    connections.__dict__["settings"] = connections.configure_settings(dict(databases))
    return url(alias)


def test_an_address_is_taken_over_with_what_has_to_be_quoted(databases: dict[str, Any]) -> None:
    found = asked(
        databases, ENGINE=POSTGRES, NAME="my shop/1", USER="me@work", PASSWORD="p:a/s%s@?", HOST="db.example.org",
        PORT=5433, OPTIONS={"sslmode": "require", "pool": True, "isolation_level": 3},
    )  # fmt: skip
    assert found == ("postgresql://me%40work:p%3Aa%2Fs%25s%40%3F@db.example.org:5433/my%20shop%2F1?sslmode=require")
    read = sa.make_url(found)
    assert (read.username, read.password, read.host, read.port) == ("me@work", "p:a/s%s@?", "db.example.org", 5433)


def test_sockets_services_and_poolers(databases: dict[str, Any]) -> None:
    assert asked(databases, ENGINE=POSTGRES, NAME="x", USER="u", HOST="/run/pg", PORT="5433") == (
        "postgresql://u@/x?host=%2Frun%2Fpg&port=5433"
    )
    assert asked(databases, ENGINE=POSTGRES, NAME="x") == "postgresql:///x"
    assert asked(databases, ENGINE=POSTGRES, NAME="", OPTIONS={"service": "s"}) == "postgresql:///?service=s"
    pooled = asked(databases, ENGINE=POSTGRES, NAME="x", HOST="h", DISABLE_SERVER_SIDE_CURSORS=True)
    assert Database.open(pooled).pooled


def test_what_cannot_be_used_is_said(databases: dict[str, Any]) -> None:
    from rowmill.django import Mill

    lite = "django.db.backends.sqlite3"
    assert asked(databases, ENGINE=lite, NAME="/tmp/a b.db") == "sqlite:////tmp/a%20b.db"
    with pytest.raises(DeclarationError, match="is in memory"):
        asked(databases, ENGINE=lite, NAME=":memory:")
    with pytest.raises(DeclarationError, match=r"(?s)no database 'defualt'.*did you mean 'default'"):
        _ = Mill("defualt").environments
    with pytest.raises(DeclarationError, match="works on PostgreSQL and SQLite"):
        asked(databases, ENGINE="django.db.backends.dummy", NAME="x")
