"""The lane whose statements pgbench runs; its database is in ROWMILL_DATABASE_URL."""

from rowmill import Mill

from .tables import table


async def noop(job: object) -> None: ...


mill = Mill()
table({}).declare(mill, noop)
