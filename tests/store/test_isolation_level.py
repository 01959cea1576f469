"""The engine's own transactions read what is committed, whatever a database has its sessions do."""

from __future__ import annotations

import pytest

from databases import Db
from rowmill.store import Database
from rowmill.store.database import Run
from rowmill.store.postgres_database import Postgres

READS = "select current_setting('transaction_isolation') as level"


@pytest.mark.no_pooler("says by its URL whether there is one")
@pytest.mark.parametrize("suffix", ["", "pgbouncer=true"], ids=["direct", "pooled"])
async def test_every_transaction_of_the_engine_is_read_committed(pg: Db, suffix: str) -> None:
    """Gates count under a lock, and a settle meets a renewal: in a snapshot older than those, both go wrong."""
    name = pg.value("select current_database()")
    pg.execute(f"alter database {name} set default_transaction_isolation = 'serializable'")
    database = Database.open(f"{pg.url}{'&' if '?' in pg.url else '?'}{suffix}" if suffix else pg.url)
    assert isinstance(database, Postgres)
    assert database.pooled == bool(suffix)

    def level(run: Run) -> str:
        return str(run(READS, ())[0][0])

    levels = {"read": await database.read(level), "write": await database.write(level)}
    levels["transact"] = await database.transact(level)
    async with database.begin() as connection:
        levels["begin"] = (await connection.exec_driver_sql(READS)).scalar_one()
    await database.close()
    assert levels == dict.fromkeys(levels, "read committed")
    assert pg.value(READS) == "serializable", "which is what others have there"
