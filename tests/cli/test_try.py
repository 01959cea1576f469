"""``rowmill try`` and ``rowmill rehearse``: a handler on single rows, written nowhere unless asked."""

from __future__ import annotations

import io
import sys

import pytest

from command import Command
from databases import Db

LANE = (
    "@mill.lane('links', ready={'status': 'new'}, running={'status': 'busy'}, done={'status': 'ok'},"
    " dead={'status': 'bad'}, canceled={'status': 'off'}, max_attempts=3)\n"
)
COLUMNS = "status, title, attempts, worker, error"


@pytest.fixture
def links(db: Db) -> Db:
    number = "integer primary key" if db.dialect == "sqlite" else "bigserial primary key"
    db.execute(
        f"create table links (id {number}, url text, status text not null default 'new', title text, attempts int,"
        " worker text, claimed_at timestamp, run_after timestamp, error text, score int)"
    )
    db.execute("create table log (said text)")
    db.execute("insert into links (url) values ('a'), ('b')")
    return db


@pytest.fixture
def rowmill(tmp_path, monkeypatch, capsys) -> Command:  # type: ignore[no-untyped-def]
    return Command(tmp_path, monkeypatch, capsys)


def changes(document: dict) -> dict:  # type: ignore[type-arg]
    return {c["column"]: (c["before"], c["after"]) for c in document["columns"]}


HANDLERS = {
    "async": "async def fetch(job):\n    return {'title': job['url'].upper()}",
    "sync": "def fetch(job):\n    job.progress(0.5)\n    return {'title': job['url'].upper()}",
    "finish": "async def fetch(job):\n    async with job.finish() as tx:\n"
    "        await tx.execute(\"insert into log values ('x')\")\n        tx.set(title=job['url'].upper())",
    "sync finish": "def fetch(job):\n    with job.finish() as tx:\n"
    "        tx.execute(\"insert into log values ('x')\")\n        tx.set(title=job['url'].upper())",
    "resource": "async def fetch(job, shout):\n    return {'title': shout(job['url'])}\n"
    "@mill.resource\nasync def shout():\n    yield str.upper",
    "process": "def fetch(job):\n    return {'title': job['url'].upper()}",
}


CHUNKED = LANE.replace("max_attempts", "chunk=10, max_attempts")
CHUNKS = {
    "list": "async def fetch(jobs):\n    return [{'title': job['url'].upper()} for job in jobs]",
    "mapping": "def fetch(jobs):\n    return {job.id: {'title': job['url'].upper()} for job in jobs}",
    "finish": "async def fetch(jobs):\n    async with jobs[0].finish() as tx:\n"
    "        tx.set(title=jobs[0]['url'].upper())",
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_a_row_of_a_lane_with_chunks_is_tried_as_a_chunk_of_one(links: Db, rowmill: Command, kind: str) -> None:
    """Issue 23: dry, for real, and rehearsed."""
    rowmill.app(links.url, CHUNKED + CHUNKS[kind])
    document = rowmill.json("try", "fetch", "1")
    assert (document["outcome"], changes(document)["title"]) == ("done", (None, "A"))
    assert links.query("select title from links where title is not null") == []
    assert changes(rowmill.json("try", "fetch", "1", "--commit"))["title"] == (None, "A")
    links.execute("update links set title = 'old' where id = 1")
    rehearsed = rowmill.json("rehearse", "fetch")
    assert rehearsed["rows"][0]["columns"] == [{"column": "title", "old": "old", "new": "A"}]


def test_a_chunk_without_an_answer_for_the_row_is_told(links: Db, rowmill: Command) -> None:
    rowmill.app(links.url, CHUNKED + "async def fetch(jobs):\n    return {}")
    document = rowmill.json("try", "fetch", "1", code=3)
    assert document["outcome"] == "retry"
    assert "no outcome for this job" in document["error"]


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_dry_run_shows_what_would_be_written_and_writes_nothing(links: Db, rowmill: Command, kind: str) -> None:
    lane = LANE.replace("max_attempts", "isolation='process', max_attempts") if kind == "process" else LANE
    rowmill.app(links.url, lane + HANDLERS[kind])
    before = links.query("select * from links order by id")
    document = rowmill.json("try", "fetch", "1")
    told = changes(document)
    assert document["outcome"] == "done"
    assert not document["committed"]
    assert told["title"] == (None, "A")
    assert told["status"] == ("new", "ok")
    assert told["attempts"] == (None, 1)
    assert links.query("select * from links order by id") == before
    assert links.query("select * from log") == []


@pytest.mark.parametrize("kind", HANDLERS)
def test_commit_claims_the_row_and_writes_the_outcome(links: Db, rowmill: Command, kind: str) -> None:
    rowmill.app(links.url, LANE + HANDLERS[kind])
    document = rowmill.json("try", "fetch", "1", "--commit")
    assert document["committed"]
    assert changes(document)["title"] == (None, "A")
    rows = links.query("select status, title, attempts from links order by id")
    assert rows == [
        {"status": "ok", "title": "A", "attempts": 1}, {"status": "new", "title": None, "attempts": None}
    ]  # fmt: skip
    assert len(links.query("select * from log")) == ("finish" in kind)


@pytest.mark.parametrize("kind", ["async", "finish"])
def test_an_input_that_changes_meanwhile_matters_only_with_commit(links: Db, rowmill: Command, kind: str) -> None:
    """A dry run shows what its outcome would be; a real one is like any other run."""
    handler = HANDLERS[kind].replace("(job):\n", "(job):\n    await edited()\n", 1)
    editor = (
        "async def edited():\n"
        "    from rowmill.store.database import Database\n"
        f"    database = Database.open({links.url!r})\n"
        "    await database.write(lambda run: run(\"update links set url = url || '+' where id = 1\", ()))\n"
        "    await database.close()\n"
    )
    lane = LANE.replace("max_attempts", "inputs=['url'], max_attempts")
    rowmill.app(links.url, editor + lane + handler)
    document = rowmill.json("try", "fetch", "1")
    assert document["outcome"] == "done"
    assert changes(document)["title"] == (None, "A")
    committed = rowmill.json("try", "fetch", "1", "--commit")
    assert committed["outcome"] == "stale"
    rows = links.query("select status, title, attempts, url from links where id = 1")
    assert rows == [{"status": "new", "title": None, "attempts": 0, "url": "a++"}]


def test_commit_refuses_a_row_that_another_worker_holds_and_says_who(links: Db, rowmill: Command) -> None:
    rowmill.app(links.url, LANE + HANDLERS["async"])
    links.execute("update links set status = 'busy', worker = 'w-7', attempts = 1 where id = 1")
    ended = rowmill("try", "fetch", "1", "--commit")
    assert ended.code == 1
    assert "held by w-7" in ended.err
    assert "Try:" in ended.err
    assert links.query("select status, worker, title from links where id = 1") == [
        {"status": "busy", "worker": "w-7", "title": None}
    ]
    assert rowmill.json("try", "fetch", "1")["outcome"] == "done"  # a dry run may look at any row


def test_commit_refuses_a_row_that_is_done(links: Db, rowmill: Command) -> None:
    rowmill.app(links.url, LANE + HANDLERS["async"])
    links.execute("update links set status = 'ok', title = 'kept' where id = 1")
    ended = rowmill("try", "fetch", "1", "--commit")
    assert ended.code == 1
    assert "it is done" in ended.err
    assert "rowmill retry" in ended.err
    assert links.query("select title from links where id = 1") == [{"title": "kept"}]


def test_an_outcome_of_a_claim_that_was_lost_meanwhile_is_not_written(links: Db, rowmill: Command) -> None:
    rowmill.app(
        links.url,
        f"from databases import Db\ndb = Db({links.direct!r})\n" + LANE + "async def fetch(job):\n"
        "    db.execute(\"update links set worker = 'other', status = 'new' where id = 1\")\n"
        "    return {'title': 'mine'}",
    )
    document = rowmill.json("try", "fetch", "1", "--commit", code=3)
    assert document["outcome"] == "lost"
    assert links.query("select status, title from links where id = 1") == [{"status": "new", "title": None}]


def test_a_failed_run_ends_with_code_3_its_traceback_and_the_next_try(links: Db, rowmill: Command) -> None:
    rowmill.app(links.url, LANE + "async def fetch(job):\n    raise TimeoutError('no answer')")
    document = rowmill.json("try", "fetch", "1", code=3)
    assert document["outcome"] == "retry"
    assert document["delay_seconds"] > 0
    assert "no answer" in document["traceback"]
    assert changes(document)["error"][1] == "TimeoutError: no answer"


def test_a_value_that_the_database_refuses_is_shown_as_the_failure_that_it_is(links: Db, rowmill: Command) -> None:
    if links.dialect == "sqlite":
        links.execute("create unique index one on links (title)")
        links.execute("update links set title = 'A' where id = 2")
    else:
        links.execute("alter table links add check (title <> 'A')")
    rowmill.app(links.url, LANE + HANDLERS["async"])
    document = rowmill.json("try", "fetch", "1", code=3)
    assert document["outcome"] == "dead"
    assert "refused" in document["error"]


def test_calls_of_a_dry_run_are_listed_and_not_enqueued(links: Db, rowmill: Command) -> None:
    rowmill.app(
        links.url,
        "@mill.task\nasync def send(to: str): ...\n" + LANE + "async def fetch(job):\n"
        "    await send.enqueue(to=job['url'])\n    await send.enqueue_many([{'to': 'x'}, {'to': 'y'}])",
    )
    document = rowmill.json("try", "fetch", "1")
    assert [call["args"] for call in document["enqueued"]] == [{"to": "a"}, {"to": "x"}, {"to": "y"}]


def test_a_sync_dry_run_enqueues_nothing_either(links: Db, rowmill: Command) -> None:
    rowmill.app(
        links.url,
        "@mill.task\nasync def send(to: str): ...\n" + LANE + "def fetch(job):\n    send.enqueue_sync(to=job['url'])",
    )
    assert [call["task"] for call in rowmill.json("try", "fetch", "1")["enqueued"]] == ["send"]


TASKS = (
    "@mill.task\nasync def send(to: str): ...\n"
    "@mill.task\nasync def whole(job, n: int):\n    await job.step('once', lambda: 5)\n"
    "    await job.spawn(send.call(to='a'), send.call(to='b'))\n    return n\n"
    "@mill.task\nasync def double(n: int) -> int:\n    return 2 * n\n"
    "import asyncio, sys\n"
    "async def add():\n    await mill.prepare()\n    await double.enqueue(n=4)\n    await whole.enqueue(n=1)\n"
    "    await mill.close()\n"
    "asyncio.run(add())"
)


def test_tasks_can_be_tried_by_their_queue(db: Db, rowmill: Command) -> None:
    rowmill.app(db.url, TASKS)
    rowmill("status")  # imports the application, which enqueues
    before = db.query("select * from rowmill_jobs order by id")
    document = rowmill.json("try", "default", "1")
    assert document["outcome"] == "done"
    assert changes(document)["result"][1] in (8, "8")
    document = rowmill.json("try", "default", "2")
    assert document["outcome"] == "joining"
    assert [c["task"] for c in document["enqueued"]] == ["send", "send"]
    assert db.query("select * from rowmill_jobs order by id") == before
    assert db.query("select * from rowmill_steps") == []


def test_mistakes_are_answered_with_what_to_try(links: Db, rowmill: Command) -> None:
    rowmill.app(
        links.url, LANE + HANDLERS["async"] + "\n" + LANE.replace("links", "links", 1) + "async def read(job): ..."
    )
    for words, code, said in [
        (("try", "fetsch", "1"), 1, "fetch"),
        (("try", "fetch", "99"), 4, "no row"),
        (("try", "fetch", "abc"), 1, "is not an id"),
        (("try",), 2, ""),
        (("rehearse", "fetch"), 4, "no row is done"),
    ]:
        ended = rowmill(*words)
        assert (ended.code, said in ended.err, "Try:" in ended.err or len(words) == 1) == (code, True, True), ended


def test_a_debugger_in_the_handler_has_the_terminal(
    links: Db, rowmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    rowmill.app(
        links.url,
        LANE + "async def fetch(job):\n    title = 'before'\n    __import__('pdb').Pdb(nosigint=True).set_trace()\n"
        "    return {'title': title}",
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("title = 'from the debugger'\ncontinue\n"))
    ended = rowmill("try", "fetch", "1")
    assert ended.code == 0
    assert "from the debugger" in ended.out


def test_the_timeout_is_off_unless_it_is_asked_for(links: Db, rowmill: Command) -> None:
    lane = LANE.replace("max_attempts", "timeout=__import__('datetime').timedelta(milliseconds=1), max_attempts")
    rowmill.app(links.url, lane + "async def fetch(job):\n    await __import__('asyncio').sleep(0.05)")
    assert rowmill.json("try", "fetch", "1")["outcome"] == "done"
    assert "timed out" in rowmill.json("try", "fetch", "1", "--timeout", "0.001", code=3)["error"]


# -- rehearse


def done(db: Db) -> None:
    db.execute("update links set status = 'ok', title = 'A' where id = 1")
    db.execute("update links set status = 'ok', title = 'old' where id = 2")
    db.execute("insert into links (url, status) values ('c', 'new')")


def test_rehearse_compares_with_the_stored_values_and_writes_nothing(links: Db, rowmill: Command) -> None:
    done(links)
    rowmill.app(links.url, LANE + HANDLERS["async"])
    before = links.query("select * from links order by id")
    document = rowmill.json("rehearse", "fetch")
    assert (document["count"], document["same"], document["different"]) == (2, 1, 1)
    (row,) = [row for row in document["rows"] if not row["same"]]
    assert row["id"] == "2"
    assert row["columns"] == [{"column": "title", "old": "old", "new": "B"}]
    assert document["new"]["p50_seconds"] <= document["new"]["p95_seconds"]
    assert document["old"] is None
    assert links.query("select * from links order by id") == before


def test_rehearse_against_another_version_shows_both_sides(links: Db, rowmill: Command) -> None:
    done(links)
    old = rowmill.app(links.url, LANE + HANDLERS["async"])
    rowmill.app(
        links.url, LANE + "async def fetch(job):\n    if job['url'] == 'a':\n        raise ValueError('new bug')\n"
        "    return {'title': job['url'].upper(), 'score': 3}",
    )  # fmt: skip
    document = rowmill.json("rehearse", "fetch", "--against", old, code=3)
    assert document["old"]["failed"] == 0
    assert document["new"]["failed"] == 1
    rows = {row["id"]: row for row in document["rows"]}
    assert rows["1"]["new"]["outcome"] in ("retry", "dead")
    assert "new bug" in rows["1"]["new"]["error"]
    assert rows["2"]["columns"] == [{"column": "score", "old": None, "new": 3}]
    ended = rowmill("rehearse", "fetch", "--against", old)
    assert "p95" in ended.out
    assert "score" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80


def test_the_same_seed_draws_the_same_rows(links: Db, rowmill: Command) -> None:
    for n in range(40):
        links.execute("insert into links (url, status) values (?, 'ok')", f"u{n}")
    rowmill.app(links.url, LANE + HANDLERS["async"])
    ids = [[row["id"] for row in rowmill.json("rehearse", "fetch", "--rows", "5", "--seed", seed)["rows"]]
           for seed in ("1", "1", "2")]  # fmt: skip
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 5
