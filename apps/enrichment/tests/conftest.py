"""The application over a fresh PostgreSQL and the stand-in internet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from apps.enrichment import mill, users
from apps.standins.internet import Internet
from databases import Db
from rowmill.testing import Kit

SCHEMA = Path(__file__).parents[1] / "schema.sql"


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    """A stand-in internet that this process's fetchers go to; a test names its sites."""
    with Internet() as net:
        monkeypatch.setenv("ENRICHMENT_INTERNET", net.address)
        yield net


class App:
    """The application's tables, a kit over its lanes, and what a test wants to know or to put there."""

    def __init__(self, db: Db, kit: Kit) -> None:
        self.db, self.kit = db, kit

    def user(self, name: str = "ada") -> tuple[UUID, str]:
        token = f"token-of-{name}"
        hashed = users.token_hash(token)
        return self.db.value("insert into users (name, token_hash) values (?, ?) returning id", name, hashed), token

    def upload(self, content: bytes | str, user: UUID | None = None) -> UUID:
        """An import as the web side makes it."""
        who = user or self.user(f"user-{self.db.value('select count(*) from users')}")[0]
        id = self.db.value("insert into import_jobs (user_id) values (?) returning id", who)
        raw = content.encode() if isinstance(content, str) else content
        self.db.execute("insert into import_files (import_job_id, content) values (?, ?)", id, raw)
        return id

    async def imported(self, *urls: str) -> UUID:
        """An import of these links that was read."""
        id = self.upload(netscape(*urls))
        stepped = await self.kit.step("read")
        assert stepped is not None
        assert stepped.outcome == "done", stepped
        return id

    def job(self, url: str) -> dict[str, Any]:
        return self.db.one("select * from enrichment_jobs where url = ?", url)

    def standing(self, id: UUID) -> tuple[str, int, int, int]:
        row = self.db.one("select * from import_jobs where id = ?", id)
        return row["status"], row["total_items"], row["processed_items"], row["failed_items"]


@pytest.fixture
async def app(pg: Db) -> AsyncIterator[App]:
    pg.execute(SCHEMA.read_text())
    async with Kit(mill, environments=pg.url) as kit:
        yield App(pg, kit)


def netscape(*urls: str) -> str:
    """A small bookmarks file."""
    marks = "\n".join(f'<DT><A HREF="{url}" ADD_DATE="1700000000">Mark {n}</A>' for n, url in enumerate(urls))
    return f"<!DOCTYPE NETSCAPE-Bookmark-file-1>\n<H1>Bookmarks</H1>\n<DL><p>\n{marks}\n</DL><p>"
