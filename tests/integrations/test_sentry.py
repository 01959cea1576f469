"""Failures on their way to Sentry: the real SDK, and a server that takes its envelopes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta as td
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.integrations.logging import LoggingIntegration

from databases import Db
from farm import JOBS
from rowmill import Dead, Mill, fixed
from rowmill.sentry import report
from sentry_stand_in import Receiver

STATES: dict[str, Any] = {
    "ready": {"status": "queued"}, "running": {"status": "running"}, "done": {"status": "done"},
    "dead": {"status": "dead"},
}  # fmt: skip

#: With the SDK's own integrations: logs make breadcrumbs there, and what repeats is dropped.
APP = """
import os, time
from datetime import timedelta as td
from rowmill import Dead, Mill, fixed
from rowmill.sentry import report
import logging

mill = Mill({"prod": os.environ["DATABASE"]})
report(mill, dsn=os.environ["DSN"], release="shop@1", auto_enabling_integrations=False)

@mill.lane("jobs", name="fetch", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
           dead={"status": "dead"}, max_attempts=2, backoff=fixed(td(0)))
async def fetch(job):
    password = "hunter2-in-a-local"
    url = f"https://shop.example/item/{job.id}?customer=lovelace&card=4111-1111-1111-1111"
    job.log.warning("asking %s for ada@example.org", url)
    if job.id == 3:
        return {"note": "fine"}
    if job.id == 2:
        raise Dead(f"gone: {url}, tell ada@example.org")
    raise ConnectionError(f"no answer from {url} (10.1.2.3), token=abcdef123456")
"""
CARD = "4111-1111-1111-1111"
# Each too long or too odd to stand in a time or an id by chance.
SECRETS = ("hunter2", "customer=", "lovelace", "ada@", CARD, "10.1.2.3", "abcdef123456")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        sentry_sdk.flush(2)
        sentry_sdk.init(
            default_integrations=False, auto_enabling_integrations=False
        )  # nothing of this test's client is left


def small(receiver: Receiver, **options: Any) -> dict[str, Any]:
    """A client without the integrations, which would change the libraries of the other tests for good."""
    return {"dsn": receiver.dsn, "default_integrations": False, "auto_enabling_integrations": False, **options}


def failing(db: Db, error: BaseException, **options: Any) -> Mill:
    db.execute(JOBS[db.dialect])
    db.execute("insert into jobs (note) values ('a')")
    mill = Mill(db.url)

    @mill.lane("jobs", name="fetch", max_attempts=1, **STATES, **options)
    async def fetch(job: Any) -> None:
        raise error

    return mill


def test_every_failure_of_a_worker_process_arrives_scrubbed_and_grouped(
    lite: Db, receiver: Receiver, tmp_path: Path
) -> None:
    """C12: every job failure is captured, with personal data and query strings scrubbed, a breadcrumb at every move to
    dead; also the last ones before the process ends.
    """
    lite.execute(JOBS[lite.dialect])
    for _ in range(3):
        lite.execute("insert into jobs (note) values ('a')")
    (tmp_path / "shop.py").write_text(APP)
    ended = subprocess.run(
        [sys.executable, "-m", "rowmill", "run", "shop:mill", "--drain", "--worker-id", "w-1"],
        cwd=tmp_path, env={**os.environ, "DATABASE": lite.url, "DSN": receiver.dsn}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
    events = receiver.events
    told = sorted((e["tags"]["lane"], e["tags"]["environment"], e["tags"]["attempt"], e["tags"]["outcome"])
                  for e in events)  # fmt: skip
    assert told == [("fetch", "prod", "1", "dead"), ("fetch", "prod", "1", "retry"), ("fetch", "prod", "2", "dead")]
    by_class = {e["exception"]["values"][-1]["type"]: e["fingerprint"] for e in events}
    assert len(by_class) == len({tuple(family) for family in by_class.values()}) == 2, "one family each"
    last = next(e for e in events if e["tags"]["attempt"] == "2")
    assert last["environment"] == "prod"
    assert last["release"] == "shop@1"
    assert last["contexts"]["rowmill"]["worker"] == "w-1"
    assert "no answer from https://shop.example/item/1" in last["exception"]["values"][-1]["value"]
    frames = [f for v in last["exception"]["values"] for f in v["stacktrace"]["frames"]]
    assert frames[-1]["function"] == "fetch"
    assert not any("vars" in frame for frame in frames)
    dead = [b["data"]["id"] for b in last["breadcrumbs"]["values"] if b["category"] == "rowmill.dead"]
    assert sorted(dead) == ["1", "2"], "a breadcrumb at every move to dead"
    assert "rowmill" not in {b["category"] for b in last["breadcrumbs"]["values"]}, "the engine's log is not told twice"
    asked = [b["message"] for b in last["breadcrumbs"]["values"] if b["category"] == "rowmill.job"]
    assert all("https://shop.example/item/" in message for message in asked), "the handler's own log"
    for body in receiver.bodies:
        assert not [secret for secret in SECRETS if secret in _without_source(body)]


def _without_source(body: str) -> str:
    """Lines of the program itself are no data; the rest of the envelope is."""
    kept = []
    for line in filter(None, body.split("\n")):
        value = json.loads(line)
        for found in (value.get("exception") or {}).get("values", []):
            for frame in (found.get("stacktrace") or {}).get("frames", []):
                for name in ("pre_context", "context_line", "post_context"):
                    frame.pop(name, None)
        kept.append(json.dumps(value))
    return "\n".join(kept)


async def test_a_client_the_application_has_set_up_is_used_and_scrubbed_too(lite: Db, receiver: Receiver) -> None:
    """C12: whatever this client sends, a web request included; the user's own ``before_send`` has its say first."""
    sentry_sdk.init(**small(receiver, before_send=lambda event, hint: {**event, "extra": {"seen": "a@b.example"}}))
    mill = failing(lite, ValueError("bad"))
    report(mill)
    await mill.worker(drain=True).run()
    sentry_sdk.capture_event({
        "message": "from the web side",
        "request": {"url": "https://x.example/p?secret=1", "query_string": "secret=1", "cookies": {"a": "b"},
                    "headers": {"Authorization": "Bearer x"}, "data": {"card": CARD},
                    "env": {"REMOTE_ADDR": "10.9.8.7"}},
        "user": {"id": "7", "email": "ada@example.org", "ip_address": "10.9.8.7"},
        "threads": {"values": [{"stacktrace": {"frames": [{"function": "f", "vars": {"card": CARD}}]}}]},
        "breadcrumbs": {"values": [{"message": "GET /p?secret=1", "data": {"http.query": "secret=1"}}]},
    })  # fmt: skip
    sentry_sdk.flush(5)
    failure, web = receiver.events
    assert failure["tags"] == {"lane": "fetch", "environment": "default", "attempt": "1", "outcome": "dead",
                               "class": "transient"}  # fmt: skip
    assert failure["extra"] == {"seen": "[email]"}
    assert web["request"] == {"url": "https://x.example/p?[query]"}
    assert web["user"] == {"id": "7"}
    everything = "".join(receiver.bodies)
    assert not [s for s in ("secret=1", CARD, "10.9.8.7", "ada@", "Bearer x") if s in everything]


async def test_two_jobs_that_fail_by_the_same_exception_are_two_failures(lite: Db, receiver: Receiver) -> None:
    """C12: every failure; the SDK itself would drop the second as a repetition."""
    mill = failing(lite, Dead("the same object each time"))
    lite.execute("insert into jobs (note) values ('b')")
    sentry_sdk.init(dsn=receiver.dsn, auto_enabling_integrations=False, default_integrations=False,
                    integrations=[sentry_sdk.integrations.dedupe.DedupeIntegration()])  # fmt: skip
    report(mill)
    receiver.slow = 0.3
    await mill.worker(drain=True).run()
    assert len(receiver.events) == 2, "and a worker that stops has sent what it had to send"


async def test_a_poisoned_row_is_a_failure_with_a_breadcrumb(lite: Db, receiver: Receiver) -> None:
    """C12, B7: a row that dies without a run of its own is told too, and so are the engine's own errors."""
    mill = failing(lite, ValueError("never run"), max_reclaims=0, lease=td(seconds=1))
    lite.execute(
        "update jobs set status = 'running', worker = 'gone', attempts = 9, claimed_at = '2020-01-01 00:00:00.000',"
        " heartbeat_at = '2020-01-01 00:00:00.000'"
    )
    report(
        mill, **small(receiver, integrations=[LoggingIntegration()])
    )  # by itself it sends what is logged as an error
    await mill.worker(drain=True).run()
    mill.events.emit("environment_down", 40, environment="default", error="connect to 10.0.0.9 failed")
    sentry_sdk.flush(5)
    poisoned, down = receiver.events
    assert poisoned["tags"]["class"] == "poison"
    assert [b["category"] for b in poisoned["breadcrumbs"]["values"]] == ["rowmill.dead"]
    assert down["fingerprint"] == ["environment_down", "default"]
    assert down["contexts"]["rowmill"]["error"] == "connect to [address] failed"


async def test_without_a_dsn_nothing_is_sent_and_nothing_is_wrong(
    lite: Db, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C12: on a developer's machine the same module runs, and says that Sentry is off."""
    monkeypatch.delenv("SENTRY_DSN", raising=False)
    mill = failing(lite, ValueError("bad"), backoff=fixed(td(0)))
    monkeypatch.setattr("rowmill.events.logger.propagate", True)
    with caplog.at_level("INFO", "rowmill"):
        report(mill, default_integrations=False, auto_enabling_integrations=False)
    assert "sentry_off" in [message.split()[0] for message in caplog.messages]
    tally = await mill.worker(drain=True).run()
    assert tally.died == 1
