"""Imports beside each other: who waits for whom, so that nothing is lost between them and nobody waits in a circle."""

from __future__ import annotations

import asyncio

import asyncpg

from apps.enrichment import counters
from apps.enrichment.canonical import link_id
from apps.enrichment.tests.conftest import App, netscape
from waiting import eventually

WAITING = """select count(*) from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and pid <> pg_backend_pid()"""


async def waiting(app: App, count: int) -> None:
    """Until so many connections wait for a lock."""
    await asyncio.to_thread(eventually, lambda: app.db.value(WAITING) == count, 30)


async def test_a_link_that_an_import_is_joining_is_not_withdrawn_under_it(app: App) -> None:
    """C2, C4: canceled by one user while another user's import, not committed yet, begins to wait for the same link."""
    first, last = sorted(("https://a.example/", "https://b.example/"), key=link_id)
    canceled, _ = await app.imported(first), await app.imported(last)
    app.db.execute("update import_jobs set status = 'canceled', finished_at = now() where id = ?", canceled)
    joining = app.upload(netscape(first, last))
    (read,), (withdraw,) = await app.kit.claim("read"), await app.kit.claim("withdraw")
    holder = await asyncpg.connect(app.db.direct)
    async with holder.transaction():
        # The import has joined the first link, and waits here for the last.
        await holder.execute("select from enrichment_jobs where url = $1 for update", last)
        reading = asyncio.create_task(app.kit.run(read))
        await waiting(app, 1)
        withdrawing = asyncio.create_task(app.kit.run(withdraw))
        await waiting(app, 2)
    await holder.close()
    assert [(await task).outcome for task in (reading, withdrawing)] == ["done", "done"]
    assert app.standing(joining) == ("running", 2, 0, 0)
    assert app.job(first)["status"] == "queued", "somebody waits for it"


async def test_imports_are_counted_in_one_order(app: App) -> None:
    """C2: who ends a link of many imports locks them from the first to the last: two never wait in a circle."""
    ids = sorted([await app.imported("https://a.example/") for _ in range(12)])
    holder = await asyncpg.connect(app.db.direct)
    store = await app.kit.store("enrich")

    async def end() -> None:
        async with store.database.begin() as connection:
            await counters.count(connection, [(link_id("https://a.example/"), "done")])

    async with holder.transaction():
        await holder.execute("select from import_jobs where id = $1 for update", ids[0])
        ending = asyncio.create_task(end())
        await waiting(app, 1)
        free = await holder.fetch("select id from import_jobs order by id for update skip locked")
    await holder.close()
    await ending
    assert [row["id"] for row in free] == ids, "none behind the one it waits for"
    assert {app.standing(id) for id in ids} == {("succeeded", 1, 1, 0)}
