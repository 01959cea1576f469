"""Tables as they have grown: what adopt makes of them, what it asks, and what it says of rows that it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command import Command
from databases import Db
from rowmill.config import find_app


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capsys)


def many(number: int, insert: str) -> str:
    """An insert of ``number`` rows, for both databases; ``x`` counts them."""
    into, _, values = insert.partition(" values ")
    return f"with recursive n(x) as (select 1 union all select x + 1 from n where x < {number}) {into} select {values} from n"  # noqa: E501


def lookup(*, errors: bool = True) -> str:
    """Documents with a table of states: most are parsed, none is archived; a few states are nobody's."""
    return ";".join(
        [
            "create table statuses (id integer primary key, name text not null)",
            "insert into statuses values (1, 'new'), (2, 'fetching'), (3, 'archived'), (4, 'parsed'), (5, 'bad_html'),"
            " (6, 'on_hold')",
            "create table documents (id integer primary key, url text, status_id integer not null default 1"
            " references statuses (id), picked_up_by text, picked_up_ts timestamp, retry_cnt integer not null default"
            f" 0, {'err_txt text,' if errors else ''} created_dt timestamp)",
        ]
    )


def fill(db: Db, *, parsed: int, errors: bool = True) -> None:
    columns, values = (", err_txt", ", 'boom'") if errors else ("", "")
    db.execute(many(parsed, "insert into documents (id, status_id, picked_up_by, retry_cnt) values x, 4, 'w', 1"))
    db.execute(many(120, f"insert into documents (id) values x + {parsed}"))
    db.execute(many(37, f"insert into documents (id, status_id{columns}) values x + {parsed + 200}, 5{values}"))
    db.execute(many(12, f"insert into documents (id, status_id) values x + {parsed + 300}, 6"))


def states(document: dict[str, Any]) -> dict[str, Any]:
    return {key: document["options"].get(key) for key in ("ready", "running", "done", "dead")}


def roles(document: dict[str, Any]) -> dict[str, str]:
    return {c["what"].removeprefix("role "): c["value"] for c in document["choices"] if c["what"].startswith("role ")}


# -- a lookup of states


def test_rows_outweigh_the_order_in_which_words_are_known(db: Db, command: Command) -> None:
    """44,000 parsed rows say more about done than a state 'archived' that no row is in."""
    db.execute(lookup())
    fill(db, parsed=44_000)
    document = command.json("adopt", db.url, "documents")
    assert states(document) == {
        "ready": {"status_id": 1}, "running": {"status_id": 2}, "done": {"status_id": 4}, "dead": {"status_id": 5},
    }  # fmt: skip
    assert roles(document) == {
        "worker": "picked_up_by", "claimed_at": "picked_up_ts", "attempts": "retry_cnt", "error": "err_txt",
    }  # fmt: skip
    assert document["options"]["roles"] == roles(document)
    assert document["options"]["order_by"] == ["created_dt"]
    assert document["certain"]
    assert {s["label"]: s["rows"] for s in document["states"]} == {
        "new": 120, "fetching": 0, "archived": 0, "parsed": 44_000, "bad_html": 37, "on_hold": 12,
    }  # fmt: skip
    shown = command("adopt", db.url, "documents")
    assert shown.code == 0
    text = " ".join(shown.out.split())
    assert "documents 44,169 rows;" in text
    assert "4 (parsed)" in text
    assert "44,000 rows have it; 3 'archived' (no rows) may mean done, too" in text
    assert "Note: 6 'on_hold' (12 rows): in no state of this lane" in text
    assert 'done={"status_id": 4}, # parsed' in text


def test_states_that_nobody_understands_are_asked_with_their_rows(db: Db, command: Command) -> None:
    """Nothing says that bad_html is a failure: an open question, with the options that answer it, and no file."""
    db.execute(lookup(errors=False))
    fill(db, parsed=300, errors=False)
    ended = command("adopt", db.url, "documents", "--write", "d.py")
    assert ended.code == 5
    assert "Not certain: dead is none? no value means failed" in ended.err
    assert "5 'bad_html' (37 rows)" in ended.err
    assert "--dead none or --dead 5" in ended.err
    assert "Try: rowmill adopt " in ended.err
    assert not Path("d.py").exists()
    (question,) = command.json("adopt", db.url, "documents", code=5)["questions"]
    assert (question["about"], question["options"]) == ("dead", [None, 5])
    assert "--dead 5" in question["answer"]
    taken = command.json("adopt", db.url, "documents", "--yes")
    assert not taken["certain"]
    answered = command.json("adopt", db.url, "documents", "--dead", "bad_html")
    assert answered["certain"]
    assert answered["options"]["dead"] == {"status_id": 5}


def test_states_and_roles_are_given_by_words_and_names(db: Db, command: Command) -> None:
    """--done parsed, and --role attempts=retry_cnt."""
    db.execute(lookup())
    fill(db, parsed=300)
    words = [
        "--ready",
        "new",
        "--ready",
        "on_hold",
        "--running",
        "FETCHING",
        "--done",
        "archived",
        "--dead",
        "Bad HTML",
    ]
    given = ["--role", "failures=retry_cnt", "--role", "error=", "--canceled", "6"]
    document = command.json("adopt", db.url, "documents", *words, *given[:4])
    assert states(document) == {
        "ready": {"status_id": [1, 6]}, "running": {"status_id": 2}, "done": {"status_id": 3}, "dead": {"status_id": 5},
    }  # fmt: skip
    assert roles(document) == {"worker": "picked_up_by", "claimed_at": "picked_up_ts", "failures": "retry_cnt"}
    assert "4 'parsed' (300 rows): in no state of this lane; such rows are left alone" in document["notes"]
    assert command.json("adopt", db.url, "documents", *given[4:])["options"]["canceled"] == {"status_id": 6}


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["--done", "parsd"], "status_id holds whole numbers, not 'parsd'", "did you mean 'parsed'?"),
        (
            ["--role", "attemps=retry_cnt"],
            "there is no role 'attemps'; the roles are worker, claimed_at",
            "did you mean 'attempts'?",
        ),
        (["--role", "attempts=retry_count"], "has no column 'retry_count'", "did you mean 'retry_cnt'?"),
        (["--role", "attempts=url"], "the role attempts needs a column for a whole number", "--role attempts="),
        (["--role", "attempts"], "expected ROLE=COLUMN", "--role attempts=retry_cnt"),
    ],
)
def test_a_mistaken_answer_is_told_with_a_way_out(
    lite: Db, command: Command, words: list[str], said: str, hint: str
) -> None:
    lite.execute(lookup())
    ended = command("adopt", lite.url, "documents", *words)
    assert ended.code in (1, 2)
    assert said in ended.err
    assert hint in ended.err


def test_an_empty_table_gives_no_evidence_and_is_asked(db: Db, command: Command) -> None:
    """The same lookup without rows: parsed or archived, nobody can tell."""
    db.execute(lookup())
    ended = command("adopt", db.url, "documents", "--yes", "--write", "d.py")
    assert ended.code == 5
    assert "Cannot tell: several values of status_id may mean done: 3 'archived' (no rows), 4 'parsed' (no rows)" in (
        ended.err
    )
    assert not Path("d.py").exists()
    document = command.json("adopt", db.url, "documents", "--done", "parsed", "--dead", "bad_html")
    assert document["certain"]
    assert roles(document)["attempts"] == "retry_cnt"
    why = {c["what"]: c["why"] for c in document["choices"]}
    assert "--role failures=retry_cnt" in why["role attempts"], "whether the first try counts is said to be open"


def test_a_word_that_says_done_and_rows_that_say_otherwise_are_asked(db: Db, command: Command) -> None:
    """A plain word without rows may be the end of the way on which the others are: neither is taken."""
    db.execute("create table t (id integer primary key, status text not null default 'new')")
    db.execute(
        many(300, "insert into t values x, case when x < 20 then 'new' when x < 30 then 'done' else 'parsed' end")
    )
    ended = command("adopt", db.url, "t", "--yes")
    assert ended.code == 5
    assert "'done' (10 rows), 'parsed' (271 rows)" in ended.err
    assert "--done done" in ended.err


def test_counters_of_retries_are_read_from_the_rows_that_are_done(db: Db, command: Command) -> None:
    """Rows that are done with no retry: the counter counts failures, not tries."""
    db.execute("create table t (id integer primary key, status text default 'new', retry_cnt integer default 0)")
    db.execute(many(20, "insert into t values x, case when x < 5 then 'new' else 'done' end, 0"))
    assert roles(command.json("adopt", db.url, "t", "--yes"))["failures"] == "retry_cnt"
    db.execute("update t set retry_cnt = 1 where status = 'done'")
    assert roles(command.json("adopt", db.url, "t", "--yes"))["attempts"] == "retry_cnt"


# -- other shapes


def test_camel_case_with_times_for_everything(db: Db, command: Command) -> None:
    db.execute(
        'create table "CrawlJob" ("jobId" integer primary key, "createdTs" timestamp, "pickedUpTs" timestamp,'
        ' "pickedUpBy" varchar(80), "processedTs" timestamp, "failedTs" timestamp, "tryCnt" integer not null default 0,'
        ' "lastErrMsg" text, "nextTryTs" timestamp, "hbTs" timestamp)'
    )
    db.execute('insert into "CrawlJob" ("jobId") values (1), (2), (3)')
    document = command.json("adopt", db.url, "CrawlJob", "--yes")
    assert roles(document) == {
        "worker": "pickedUpBy", "claimed_at": "pickedUpTs", "heartbeat_at": "hbTs", "attempts": "tryCnt",
        "run_after": "nextTryTs", "error": "lastErrMsg",
    }  # fmt: skip
    assert set(document["options"]["ready"]) == {"processedTs", "failedTs", "pickedUpTs"}
    assert document["options"]["order_by"] == ["createdTs"]
    command("adopt", db.url, "CrawlJob", "--yes", "--write", f"crawl_{db.dialect}.py")
    assert find_app(f"crawl_{db.dialect}:mill").run(drain=True).completed == 3
    done = 'select count(*) from "CrawlJob" where "processedTs" is not null and "tryCnt" = 1'
    assert db.value(done) == 3


def test_boolean_flags_with_abbreviated_names(db: Db, command: Command) -> None:
    no = "boolean not null default false"
    db.execute(
        f"create table uploads (id integer primary key, is_processed {no}, is_processing {no}, has_failed {no},"
        " worker_nm text, start_dt timestamp, attempt_no integer not null default 0, err_msg text)"
    )
    db.execute("insert into uploads (id, has_failed) values (1, false), (2, false), (3, true)")
    document = command.json("adopt", db.url, "uploads", "--yes")
    assert roles(document) == {
        "worker": "worker_nm", "claimed_at": "start_dt", "attempts": "attempt_no", "error": "err_msg",
    }  # fmt: skip
    command("adopt", db.url, "uploads", "--yes", "--write", f"flags_{db.dialect}.py")
    assert find_app(f"flags_{db.dialect}:mill").run(drain=True).completed == 2
    assert db.value("select count(*) from uploads where is_processed and not has_failed and attempt_no = 1") == 2


def test_french_words_in_a_text_column(db: Db, command: Command) -> None:
    """What is known is used; what is not is said with its rows."""
    db.execute("create table dossiers (id integer primary key, statut text default 'À traiter', erreur text)")
    kinds = [("À traiter", 30), ("En cours", 2), ("Traité", 400), ("Erreur", 9), ("À revoir", 25), ("Annulé", 4)]
    rows = [word for word, number in kinds for _ in range(number)]
    db.insert("dossiers", [{"id": at, "statut": word} for at, word in enumerate(rows, 1)])
    document = command.json("adopt", db.url, "dossiers", "--yes")
    assert states(document) == {
        "ready": {"statut": "À traiter"}, "running": {"statut": "En cours"}, "done": {"statut": "Traité"},
        "dead": {"statut": "Erreur"},
    }  # fmt: skip
    assert document["options"]["canceled"] == {"statut": "Annulé"}
    assert "'À revoir' (25 rows): in no state of this lane; such rows are left alone" in document["notes"]
    assert document["certain"]


def test_two_columns_that_may_be_the_state_are_asked(db: Db, command: Command) -> None:
    db.execute(
        "create table orders (id integer primary key, import_status text default 'pending', export_status text default"
        " 'pending', locked_by text)"
    )
    db.execute(many(40, "insert into orders values x, case when x < 9 then 'pending' else 'done' end, 'pending', null"))
    ended = command("adopt", db.url, "orders", "--yes")
    assert ended.code == 5
    assert "several columns look like the state: import_status, export_status" in ended.err
    assert "--state import_status" in ended.err
    document = command.json("adopt", db.url, "orders", "--yes", "--state", "import_status")
    assert document["options"]["done"] == {"import_status": "done"}


def test_a_lookup_under_another_name_is_found_by_the_table_that_it_refers_to(db: Db, command: Command) -> None:
    db.execute("create table job_states (id integer primary key, label text)")
    db.execute("insert into job_states values (10, 'queued'), (20, 'working'), (30, 'ok'), (40, 'broken')")
    db.execute("create table work (id integer primary key, js integer not null default 10 references job_states (id))")
    db.execute(many(5, "insert into work (id) values x"))
    document = command.json("adopt", db.url, "work", "--yes")
    assert states(document) == {
        "ready": {"js": 10}, "running": {"js": 20}, "done": {"js": 30}, "dead": {"js": 40},
    }  # fmt: skip


def test_a_column_of_a_role_and_something_more_is_named_and_not_taken(db: Db, command: Command) -> None:
    db.execute("create table t (id integer primary key, status text default 'new', ocr_started_at timestamp)")
    document = command.json("adopt", db.url, "t", "--yes")
    assert roles(document) == {}
    assert "ocr_started_at may have the role claimed_at: --role claimed_at=ocr_started_at" in document["notes"]
    document = command.json("adopt", db.url, "t", "--yes", "--role", "claimed_at=ocr_started_at")
    assert roles(document) == {"claimed_at": "ocr_started_at"}


def test_what_was_not_counted_is_printed_as_an_estimate(pg: Db, command: Command) -> None:
    """A large table: its counts come from the server's statistics or from a sample."""
    pg.execute("create table big (id bigint primary key, status text not null default 'queued', note text)")
    kinds = "case when n % 1000 = 0 then 'queued' when n % 100 = 1 then 'on_hold' else 'parsed' end"
    pg.execute(f"insert into big select n, {kinds}, repeat('x', 300) from generate_series(1, 60000) n; analyze big")
    ended = command("adopt", pg.url, "big", "--yes")
    text = " ".join(ended.out.split())
    assert "big about 60,000 rows; sampled" in text
    assert "about 59,000 rows have it" in text
    assert "'on_hold' (about " in text
    assert all(state["estimated"] for state in command.json("adopt", pg.url, "big", "--yes")["states"])


def test_a_table_without_a_database_is_answered_with_where_the_database_goes(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROWMILL_DATABASE_URL", raising=False)
    ended = command("adopt", "photos")
    said = " ".join(ended.err.split())
    assert ended.code == 2
    assert "adopt photos: no database is given" in said
    assert "ROWMILL_DATABASE_URL" in said
    assert "sqlite:///file.db" in said


def test_adopt_asks_before_it_adds_a_column_beside_one_that_the_rows_speak_for(db: Db, command: Command) -> None:
    time = "timestamptz" if db.dialect == "postgresql" else "datetime"
    db.execute(
        "create table photos (id integer primary key, status text not null default 'pending', owner text,"
        f" last_msg text, width integer, added {time} default current_timestamp)"
    )
    kinds = [("pending", None, None), ("processing", "loop-1", None), ("done", "loop-1", None),
             ("failed", "loop-2", "no such file")]  # fmt: skip
    for n, (status, owner, message) in enumerate(kinds * 5):
        db.execute("insert into photos (id, status, owner, last_msg) values (?, ?, ?, ?)", n, status, owner, message)
    ended = command("adopt", db.url, "photos")
    said = " ".join(ended.err.split())
    assert ended.code == 5, ended
    assert "--role worker=owner or --role worker=" in said
    assert "--role error=last_msg --" in said or "--role worker=owner --role error=last_msg" in said
    assert "No role: width (--role ROLE=COLUMN gives one)" in " ".join(ended.out.split())
    document = command.json("adopt", db.url, "photos", "--role", "worker=owner", "--role", "error=last_msg")
    assert document["options"]["roles"] == {"worker": "owner", "error": "last_msg"}
    assert document["options"]["order_by"] == ["added"]
    assert not [
        d for d in document["ddl"] if "add column worker" in d["statement"] or "add column error" in d["statement"]
    ]
    assert document["unused"] == ["width"]
    assert command.json("adopt", db.url, "photos", "--yes", "--order-by", "id")["options"]["order_by"] == ["id"]


def test_the_steps_that_come_next_are_those_of_the_tutorial_and_line_up(db: Db, command: Command) -> None:
    db.execute("create table photos (id integer primary key, status text not null default 'pending')")
    db.execute("insert into photos (id) values (1)")
    words = ["--yes", "--running", "processing", "--done", "done", "--dead", "failed"]
    lines = command("adopt", db.url, "photos", *words).out.splitlines()
    steps = [line.strip() for line in lines[lines.index("Next") + 1 :]]
    starts = [step.partition("  ")[0] for step in steps if not step.startswith(("export", "rowmill adopt"))]
    assert starts == [
        "edit worker.py", "rowmill check worker:mill", "rowmill migrate worker:mill",
        "rowmill migrate worker:mill --apply", "rowmill check worker:mill", "rowmill run worker:mill",
    ]  # fmt: skip
    columns = {len(step) - len(step.partition("  ")[2].strip()) for step in steps if "  " in step}
    assert len(columns) == 1, steps
