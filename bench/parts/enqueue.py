"""How fast jobs are added: one call after another, and many in a call."""

from __future__ import annotations

from ..peers import Peer
from ..session import session
from .part import ONCE_EACH, Column, Context, Figures, Part


def measure(context: Context, peer: Peer) -> Figures:
    with session(peer, context.server) as run:
        run.calm()
        figures = {"single": run.enqueue(peer.single // (4 if context.quick else 1), chunk=1)}
        if peer.chunk > 1:
            run.calm()
            figures["bulk"] = run.enqueue(context.jobs(peer))
    return figures


PART = Part(
    "enqueue",
    "Enqueue",
    "One process, one connection. rowmill has no enqueue for a user's own table, and needs none: one by one it is a "
    "plain INSERT with `pg_notify` in the same statement, in bulk it is COPY of 5,000 rows and one NOTIFY per "
    "transaction, both over asyncpg. The peers' figures are their own calls for one and for many.",
    measure,
    (*ONCE_EACH, "huey-sqlite", "rowmill-sqlite", "rowmill-tasks-sqlite"),
    (
        Column("single", "one by one, jobs/s", plot="one by one"),
        Column("bulk", "in bulk, jobs/s", plot="in bulk"),
    ),
)
