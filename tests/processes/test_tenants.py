"""A shared rate under worker processes over many databases, one of which is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from databases import Db
from tenant_farm import TenantFarm, fill, most_within

N, TENANTS, PROCESSES = 40, 8, 4


def test_no_second_has_more_starts_than_the_rate_in_all_databases_and_processes(
    db: Db, fresh: Callable[[str], Db], tmp_path: Path
) -> None:
    """Four processes over eight databases, of which one is killed (kill -9) with what it had leased."""
    tenants = {f"t{n}": fresh(db.dialect) for n in range(TENANTS)}
    for tenant in tenants.values():
        fill(tenant, 5 * N)
    urls = {name: tenant.url for name, tenant in tenants.items()}
    farm = TenantFarm(tmp_path, urls, GATES=f'[Rate({N}, per=td(seconds=1), shared="{db.url}")]')
    try:
        first, *_ = farm.start(PROCESSES)
        farm.until(3 * N)
        farm.kill(first)
        farm.until(6 * N)
        farm.stop()
    finally:
        farm.close()
    starts = [at for at, _, _ in farm.starts()]
    assert most_within(starts, 1.0) <= N
    assert {environment for _, _, environment in farm.starts()} == set(urls)
    used = (len(starts) - 1) / (starts[-1] - starts[0]) / N
    print(f"{len(starts)} starts, {used:.2f} of the rate")
