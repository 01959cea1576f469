"""Whether rowmill stays as fast as the table grows. Only where it is asked for: sizes are the command's arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..peers import Peer
from ..session import Session, session
from ..tables import table
from . import idle, pickup
from .part import Context, Figures, Part

_MILLION = 1_000_000
_BACKLOG_SECONDS = 10.0
#: A drain here is so many times as long as elsewhere: each begins after a checkpoint, and at first every page that is
#: written to goes into the log as a whole. The more pages, the longer that lasts; in a day's work it is soon over.
_LONGER = 5
_PICKUPS = 200
_OWN, _TASKS = "rowmill", "rowmill-tasks"


def variant(peer: Peer, **options: Any) -> Peer:
    """The same peer on another shape of its table."""
    chosen = {**peer.options, **options}
    there = table(chosen)
    return dataclasses.replace(peer, options=chosen, left=there.left, wrong=there.wrong, open=there.open)


def _add(run: Session, count: int, status: str) -> None:
    """Rows made by the server itself, a million at a time."""
    there = table(dict(run.peer.options))
    for first in range(0, count, _MILLION):
        run.value(there.made(first, min(_MILLION, count - first), status))


def finished(context: Context, peer: Peer) -> Figures:
    figures: Figures = {}
    for count in context.arguments.finished:
        with session(peer, context.server) as run:
            _add(run, count, "succeeded")
            figures[f"drain, {count:,} finished"] = run.drain(_LONGER * context.jobs(peer)).rate
            found, _ = run.latencies(_PICKUPS, 0.02)
            figures |= {f"pickup {key}, ms, {count:,} finished": ms for key, ms in pickup.told(found).items()}
    return figures


def backlog(context: Context, peer: Peer) -> Figures:
    figures: Figures = {}
    for count in context.arguments.backlog:
        with session(peer, context.server) as run:
            _add(run, count, "queued")
            figures[f"{count:,}"] = run.drain(count, for_seconds=_BACKLOG_SECONDS).rate
    return figures


def processes(context: Context, peer: Peer) -> Figures:
    figures: Figures = {}
    for count in context.arguments.processes:
        with session(peer, context.server) as run:
            figures[f"{count}"] = run.drain(context.jobs(peer), count).rate
    return figures


def lanes(context: Context, peer: Peer) -> Figures:
    figures: Figures = {}
    for count in context.arguments.lanes:
        shaped = variant(peer, lanes=count)
        with session(shaped, context.server) as run:
            figures[f"drain, lanes: {count}"] = run.drain(context.jobs(peer)).rate
        cost = idle.measure(context, shaped)
        figures[f"idle statements/s, lanes: {count}"] = cost["statements"] / 60
        figures[f"idle server CPU ms/s, lanes: {count}"] = cost["server"] / 60
    return figures


def partitioned(context: Context, peer: Peer) -> Figures:
    figures: Figures = {}
    count = context.arguments.partitions
    shapes = {"one table": {}, f"partitions: {count}": {"partitions": count}, f"shards: {count}": {"buckets": count}}
    for shape, options in shapes.items():
        with session(variant(peer, **options), context.server) as run:
            for number in (1, 2):
                figures[f"{shape}, processes: {number}"] = run.drain(context.jobs(peer), number).rate
    return figures


def _part(name: str, title: str, method: str, measure: Any, *ours: str, line: bool = False) -> Part:
    return Part(f"growth-{name}", title, method, measure, ours or (_OWN,), line=line, quick=False, on_request=True)


PARTS = (
    _part(
        "finished",
        "Growth: finished rows in the table",
        "A drain with one process of five times as many jobs as elsewhere, and pickup on an idle worker "
        "right after it, before a vacuum has come; beside that many rows that ended long ago.",
        finished,
        _OWN,
        _TASKS,
    ),
    _part(
        "backlog",
        "Growth: a long backlog",
        f"The first {_BACKLOG_SECONDS:.0f} seconds of a drain with one process, by the number of rows that wait.",
        backlog,
        _OWN,
        _TASKS,
        line=True,
    ),
    _part("processes", "Growth: processes", "The same drain, by the number of worker processes.", processes, line=True),
    _part(
        "lanes",
        "Growth: lanes",
        "A drain spread over that many lanes, each on a table of its own, by one process; and what the same process "
        "costs the database when all of them are idle.",
        lanes,
    ),
    _part(
        "partitioned",
        "Growth: a partitioned table",
        "The same drain on a table partitioned by a hash of its key, and on one partitioned by a bucket that the lane "
        "names (shard=). A partitioned table takes no unique constraint without that key, so one index is a plain one "
        "there.",
        partitioned,
    ),
)
