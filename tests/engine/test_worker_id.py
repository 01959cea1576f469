"""Default worker ids: read by people, safe in columns and logs, different in every process."""

from __future__ import annotations

import os
import re
import socket

import pytest

import systems
from databases import Db
from rowmill import Mill
from rowmill.cli.run import _ids
from rowmill.engine import worker_id
from rowmill.errors import DeclarationError
from rowmill.scrub import scrubbed
from rowmill.store.lane.statements import INCARNATION

RANDOM = "[0-9a-z]{4}"


def app(**options: str) -> Mill:
    mill = Mill("sqlite:///jobs.db", **options)

    @mill.task
    async def report() -> None: ...

    return mill


def ids(mill: Mill, count: int) -> list[str]:
    return [mill.worker().id for _ in range(count)]


def test_a_worker_is_called_by_its_host_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """host-pid-xxxx, and never the same twice."""
    monkeypatch.setattr(socket, "gethostname", lambda: "mill-3")
    made = ids(app(), 50)
    assert len(set(made)) == 50
    assert all(re.fullmatch(f"mill-3-{os.getpid()}-{RANDOM}", each) for each in made), made


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("ip-10-0-0-12.eu-west-1.compute.internal", "ip-10-0-0-12"),
        ("Jean's MacBook~Pro.local", "Jean-s-MacBook-Pro"),
        ("very-long-deployment-name-with-many-parts-7d9f8b6c5-x2x4z", "d9f8b6c5-x2x4z"),
        ("машина", "worker"),
        ("", "worker"),
    ],
)
def test_any_host_name_gives_a_short_safe_id(host: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short enough for a worker column, for an incarnation behind it, and not to be scrubbed as a secret."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    made = worker_id.new()
    assert shown in made
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", made)
    assert INCARNATION not in made
    assert len(made) < 32
    assert scrubbed(f"held by {made} since 12:00") == f"held by {made} since 12:00"


def test_an_application_may_have_ids_of_its_own_form() -> None:
    """A13: unified-worker-{uuid} is a setting of the Mill."""
    mill = app(worker_id="unified-worker-{uuid}")
    assert len(set(ids(mill, 3))) == 3
    assert all(re.fullmatch(r"unified-worker-[0-9a-f-]{36}", each) for each in ids(mill, 3))
    assert mill.worker(worker_id="mine").id == "mine"
    assert all(re.fullmatch(r"unified-worker-[0-9a-f-]{36}", each) for each in _ids(mill, None, 2))
    assert _ids(mill, "w", 2) == ["w-1", "w-2"]


@pytest.mark.parametrize("form", ["w", "{host}-{pid}", "{hots}-{uuid}", "{uuid", "", 3])
def test_a_form_that_gives_no_ids_is_refused(form: str) -> None:
    """Two processes with one id would fight for it."""
    with pytest.raises(DeclarationError, match="worker_id") as refused:
        Mill("sqlite:///jobs.db", worker_id=form)
    assert "{host}-{pid}-{random}" in refused.value.hint


async def test_a_row_is_held_under_that_id(db: Db) -> None:
    """What the worker column says is what `rowmill workers` says."""
    systems.create(db, "enrichment")
    systems.insert_enrichment(db, 2)
    mill = Mill(db.url)

    @mill.lane(
        "enrichment_jobs", ready={"status": "queued"}, running={"status": "running"}, done={"status": "succeeded"},
        dead={"status": "dead"},
    )  # fmt: skip
    async def enrich(job: object) -> None: ...

    worker = mill.worker(drain=True)
    await worker.run()
    assert {row["locked_by"] for row in db.query("select locked_by from enrichment_jobs")} == {worker.id}
    assert [row["id"] for row in db.query("select id from rowmill_workers")] == [worker.id]
    assert re.fullmatch(f".+-{os.getpid()}-{RANDOM}", worker.id)
