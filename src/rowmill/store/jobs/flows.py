"""Flows: jobs that wait for other jobs, and steps that ran once.

There is no counter to keep in step. One statement finds the jobs in ``joining`` that have no unfinished child, and
moves them on. The numbers of done and failed children are counted on demand. So every end of a child counts at once:
settled, swept as poison, canceled, or deleted by hand. No child's end writes to another row, and a job continues once,
whichever worker finds it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ...declare.call import Call
from ...declare.states import UNFINISHED
from ...errors import LostClaim
from ..caller_transactions import drive
from ..database import Database, runner
from ..driver_errors import translated
from ..handler_connections import shielded
from ..lane.claim import Claim, Settlement
from ..lane.lane_store import LaneStore
from .enqueue import CHANNEL, EnqueueStatements, FlowPosition, add
from .job_rows import listed


def _unfinished(table: str) -> str:
    return (
        f"exists (select 1 from {table} c where c.parent_id = p.id and c.parent_id is not null"
        f" and c.state in ({listed(UNFINISHED)}))"
    )


def _join(statements: EnqueueStatements, which: str) -> str:
    """Continue jobs whose children have all ended.

    They become ready, or canceled if they needed every child done and one failed. The statement finds them without a
    lock; the update locks them and checks again.
    """
    failed = f"exists (select 1 from {statements.table} f where f.parent_id = p.id and f.state <> 'done')"
    chosen = f"p.state = 'joining'{which} and not {_unfinished(statements.table)}"
    return statements.sql.notified(
        f"""update {statements.table} as p set
    state = case when p.needs = 'done' and {failed} then 'canceled' else 'ready' end,
    error = case when p.needs = 'done' and {failed} then 'a job that it waited for did not end well' else p.error end,
    finished_at = case when p.needs = 'done' and {failed} then s.now else p.finished_at end,
    run_after = case when p.run_after < s.now then s.now else p.run_after end
from (select {statements.now()} as now) s
where {chosen}
returning id, parent_id, state""",
        CHANNEL,
        "id, parent_id, state",
        when="state = 'ready'",
    )


async def join(database: Database, statements: EnqueueStatements, parents: Sequence[int] | None = None) -> int:
    """Continue jobs (``parents``, or all) whose children have all ended. Returns how many continued or were canceled.

    Call it after the children's ends are committed: then the call after the last commit sees all of them.
    """
    moved = 0
    waits = f"select 1 from {statements.table} where state = 'joining' limit 1"
    if statements.sql.one_writer and not await database.read(lambda run: run(waits, ())):
        return 0  # a check that finds nothing takes no write lock
    wanted = None if parents is None else set(parents)
    while wanted is None or wanted:
        which = "" if wanted is None else f" and p.id in ({', '.join(str(int(id)) for id in wanted)})"
        text = _join(statements, which)
        rows = await database.write(lambda run, text=text: statements.sql.named(run)(text, {}))  # type: ignore[misc]
        moved += len(rows)
        # A job that was canceled for its children has ended, so the job that waits for it may continue.
        wanted = {row[1] for row in rows if row[2] == "canceled" and row[1] is not None}
    return moved


async def suspend(
    store: LaneStore, connection: AsyncConnection, claim: Claim, calls: Sequence[Call], branch: str
) -> Settlement:
    """Inside a transaction: give up the claim, add the children, and let the job wait for them. Fenced."""
    statements = EnqueueStatements.to(store.database, store.clock)
    settlement = Settlement(claim, "snooze")
    if not await store.settle_in(connection, [settlement]):
        raise LostClaim(f"job {claim.id!r} is no longer claimed by this run")

    def verb(plain: Any) -> None:
        run = statements.sql.named(runner(plain))
        run(
            f"update {statements.table} set state = 'joining', needs = 'all', run_after = {statements.now()}"
            " where id = :id",
            {"id": claim.id},
        )
        drive(add(statements, calls, wake=True, place=FlowPosition(parent_id=claim.id, branch=branch)), run)

    with translated(store.database):
        await shielded(connection.run_sync(verb))
    return settlement


async def steps(store: LaneStore, id: int) -> dict[str, Any]:
    """The results of a job's steps."""
    table = store.database.own("rowmill_steps")
    text = f"select name, result from {table} where job_id = :id"
    rows = await store.database.read(lambda run: store.database.sql.named(run)(text, {"id": id}))
    return {row[0]: store.database.sql.read_json(row[1]) for row in rows}


async def keep_step(store: LaneStore, claim: Claim, name: str, result: Any) -> bool:
    """Store the result of a step if the claim is still held. Returns False if the row was locked at that moment."""
    return await store.keep_step(claim, store.database.own("rowmill_steps"), name, result)


async def results(database: Database, statements: EnqueueStatements, parent: int, branch: str | None) -> list[Any]:
    """The results of a job's children, in the order in which they were spawned; None for a child that is not done."""
    which = "" if branch is None else " and branch = :branch"
    text = f"select result from {statements.table} where parent_id = :id{which} order by id"
    values = {"id": parent} if branch is None else {"id": parent, "branch": branch}
    rows = await database.read(lambda run: statements.sql.named(run)(text, values))
    return [statements.sql.read_json(row[0]) for row in rows]
