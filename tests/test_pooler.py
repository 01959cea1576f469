"""Behind a transaction pooler a connection is another one after every transaction."""

from __future__ import annotations

import pytest

from databases import Db
from rowmill.store import Database
from rowmill.store.database import Postgres, Run

NAMED = "select count(*) from pg_prepared_statements"


@pytest.mark.parametrize(("suffix", "left"), [("", True), ("&pgbouncer=true", False)])
async def test_no_statement_outlives_its_round_trip_behind_a_pooler(pg: Db, suffix: str, left: bool) -> None:
    """DESIGN, poolers: statement caches off, unnamed statements; without a pooler they are prepared once."""
    database = Database.open(pg.url + suffix, pool=1)

    def verb(run: Run) -> int:
        for n in range(3):
            run("select $1::int + 1", (n,))
        return int(run(NAMED, ())[0][0])

    try:
        assert (await database.write(verb) > 0) is left
    finally:
        await database.close()


@pytest.mark.parametrize(
    ("url", "pooled"),
    [
        ("postgresql://u@h/db", False),
        ("postgresql://u@h:6432/db?pgbouncer=true", True),
        ("postgres://u.ref:p@aws-0-eu-west-1.pooler.supabase.com:6543/postgres", True),
        ("postgres://u.ref:p@aws-0-eu-west-1.pooler.supabase.com:5432/postgres", False),
        ("postgresql://postgres:p@db.ref.supabase.co:5432/postgres?sslmode=require", False),
    ],
)
def test_a_pooler_is_known_by_its_url(url: str, pooled: bool) -> None:
    """DESIGN, URLs as people have them; what only other clients read is not passed on."""
    database = Database.open(url)
    assert isinstance(database, Postgres)
    assert database.pooled is pooled
    assert "pgbouncer" not in database.dsn
    assert ("sslmode=require" in database.dsn) is ("sslmode" in url)
