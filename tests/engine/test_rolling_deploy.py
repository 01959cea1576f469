"""A rolling deploy: workers of the old version leave alone what only the new version can run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from databases import Db
from rowmill import Concurrency, Mill


def version(db: Db, ran: list[Any], *, new: bool, **options: Any) -> Mill:
    mill = Mill(db.url)
    if new:

        @mill.task(name="send", **options)
        async def send_new(to: str, copy: str | None = None) -> None:
            ran.append((to, copy))

    else:

        @mill.task(name="send", **options)
        async def send_old(to: str) -> None:
            ran.append(to)

    return mill


@pytest.mark.parametrize("options", [{}, {"gates": [Concurrency(1, by="task")]}], ids=["plain", "gated"])
async def test_a_job_with_an_argument_that_only_newer_code_takes_is_given_back_untouched(
    db: Db, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[Any] = []
    old, new = version(db, ran, new=False, **options), version(db, ran, new=True, **options)
    task = new.tasks["send"]
    await task.enqueue_many([{"to": "a", "copy": "b"}, {"to": "c"}, {"to": "d", "copy": "e"}])
    wanted = db.query("select id, state, attempts, run_after, error from rowmill_jobs order by id")
    with caplog.at_level(logging.WARNING, "rowmill"):
        await old.worker(drain=True).run()
        await old.worker(drain=True).run()
    assert ran == ["c"], "what the old version takes, it runs"
    now = db.query("select id, state, attempts, run_after, error from rowmill_jobs order by id")
    assert [now[0], now[2]] == [wanted[0], wanted[2]]
    told = [record for record in caplog.records if getattr(record, "event", "") == "arguments_unknown"]
    assert len(told) == 1, "once, not for every job"
    assert "takes no 'copy'" in told[0].fields["error"]  # type: ignore[attr-defined]
    await new.worker(drain=True).run()
    assert sorted(ran[1:]) == [("a", "b"), ("d", "e")]
    assert db.value("select count(*) from rowmill_jobs where state = 'done' and attempts = 1") == 3
    await old.close()
    await new.close()


async def test_arguments_that_are_no_object_still_end_their_job_beside_newer_ones(db: Db) -> None:
    ran: list[Any] = []
    old, new = version(db, ran, new=False), version(db, ran, new=True)
    await new.tasks["send"].enqueue(to="a", copy="b")
    await old.worker(drain=True).run()
    db.execute("insert into rowmill_jobs (task, args) values ('send', '[1]'), ('send', '5')")
    await old.worker(drain=True).run()
    states = [row["state"] for row in db.query("select state from rowmill_jobs order by id")]
    assert states == ["ready", "dead", "dead"]
    await old.close()
    await new.close()
