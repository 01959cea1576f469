"""From facts to a proposal: a pure function that says why, and never proposes what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill import NOW
from rowmill.adopt import vocabulary
from rowmill.adopt.proposal import Proposal
from rowmill.adopt.propose import lane_name, propose
from rowmill.adopt.survey import understood
from rowmill.adopt.table_facts import Column, TableFacts
from rowmill.declare.lane import declare
from rowmill.errors import DeclarationError
from rowmill.store.lane.sql_literals import allowed_by_check, comment_meanings, literals_of, plain_default


def table(*columns: Column, **facts: Any) -> TableFacts:
    key = Column(name="id", kind="int", nullable=False)
    return TableFacts(**{"dialect": "postgresql", "schema": None, "name": "t", "key": ("id",), "rows": 10} | facts,
                 columns=(key, *columns))  # fmt: skip


def states(made: Proposal) -> dict[str, Any]:
    assert made.questions == [], made.questions
    return {k: v for k, v in made.options.items() if k in ("ready", "running", "done", "retry", "dead", "canceled")}


WORDS = {
    "ready": ["pending", "QUEUED", "not-started", "toDo", "en_attente", "Pendiente", "offen", "в ожидании", "待处理"],
    "running": ["in_progress", "PROCESSING", "inFlight", "En traitement", "in Bearbeitung", "处理中", "transcoding"],
    "done": ["done", "Succeeded", "COMPLETE", "terminé", "erledigt", "готово", "完了", "transcribed", "ocr_complete"],
    "failed": ["failed", "ERROR", "échec", "Fehler", "ошибка", "job_failed"],
    "dead": ["dead", "dead_letter", "permanently_failed", "given up"],
    "retry": ["retryable", "pending_retry"],
    "canceled": ["cancelled", "storniert", "skipped"],
    "held": ["draft", "on_hold", "pending_review"],
}


@pytest.mark.parametrize(("state", "word"), [(s, w) for s, several in WORDS.items() for w in several])
def test_words_for_states_are_known_however_they_are_written(state: str, word: str) -> None:
    found = vocabulary.meaning(word)
    assert found is not None
    assert found.state == state


@pytest.mark.parametrize("word", ["foo", "CA", "42", "", "blue", "user; drop table"])
def test_other_words_say_nothing(word: str) -> None:
    assert vocabulary.meaning(word) is None


def test_a_word_of_ours_is_written_as_the_tables_own_are() -> None:
    styles = ["PENDING", "notStarted", "Not Started", "to-do"]
    found = [vocabulary.styled("in progress", like) for like in styles]
    assert found == ["IN_PROGRESS", "inProgress", "In Progress", "in-progress"]


def test_values_that_only_a_comment_or_a_table_explains_are_understood() -> None:
    status = Column(name="status", kind="int", default=0, has_default=True, nullable=False,
                    meanings={0: "new", 5: "in progress", 7: "ok", 9: "error"})  # fmt: skip
    found = states(propose(table(status)))
    assert found == {"ready": {"status": 0}, "running": {"status": 5}, "done": {"status": 7}, "dead": {"status": 9}}


def test_a_closed_list_without_a_word_for_running_is_marked_by_a_time() -> None:
    status = Column(name="status", kind="enum", allowed=("new", "done", "failed"), default="new", has_default=True)
    locked = Column(name="locked_at", kind="time")
    found = states(propose(table(status, locked)))
    assert found["ready"] == {"status": "new", "locked_at": None}
    assert found["running"] == {"locked_at": NOW}


def test_a_time_that_ready_rows_have_already_is_no_claim_time() -> None:
    """Data of the user's own are never taken for the engine's."""
    status = Column(name="status", kind="text", default="new", has_default=True, seen={"new": 5, "done": 3})
    started = Column(name="started_at", kind="time")
    shares = {"status": {"new": {"started_at": 1.0}, "done": {"started_at": 1.0}}}
    made = propose(table(status, started, filled=shares))
    assert "role claimed_at" not in [choice.what for choice in made.choices]
    assert any("started_at does not get the role" in note for note in made.notes)


def test_answers_are_taken_as_they_are() -> None:
    status = Column(name="status", kind="text", seen={"a": 1, "b": 1})
    made = propose(table(status), {"ready": "a", "running": "r", "done": "b", "dead": "x"})
    assert states(made)["ready"] == {"status": "a"}
    assert made.sure > 0


def test_without_a_key_there_is_no_lane() -> None:
    with pytest.raises(DeclarationError, match="no primary key"):
        propose(table(key=()))


@pytest.mark.parametrize("name", ["jobs", "class", "2024 data", "AnalysisJob", "状態", "a-b.c", "!!!", "mill", "🐘"])
def test_any_table_gives_a_python_name(name: str) -> None:
    compile(f"def {lane_name(name)}(): pass", "name", "exec")


# -- whatever the table looks like

NAMES = [
    "status", "state", "payment_status", "processed", "processed_at", "sent", "sent_at", "failed_at", "in_progress",
    "locked_at", "locked_by", "worker_id", "started_at", "finished_at", "completed_at", "attempts", "retry_count",
    "max_attempts", "run_after", "error", "last_error", "updated_at", "created_at", "deleted_at", "is_deleted",
    "priority", "progress", "heartbeat_at", "name", "x y", "phase", "done", "failed", "status_id",
]  # fmt: skip
VALUES = [word for several in WORDS.values() for word in several] + ["foo", "bar", "P", "R", "D", "E", "x y"]


@st.composite
def columns(draw: st.DrawFn) -> Column:
    kind = draw(st.sampled_from(["text", "enum", "int", "bool", "time", "other"]))
    values: st.SearchStrategy[Any] = {
        "text": st.sampled_from(VALUES), "enum": st.sampled_from(VALUES), "int": st.integers(0, 6),
        "bool": st.booleans(),
    }.get(kind, st.none())  # fmt: skip
    some = draw(st.lists(values, max_size=6, unique=True))
    closed = kind == "enum" or (kind in ("text", "int") and draw(st.booleans()))
    default = draw(st.sampled_from([None, *some]))
    return Column(
        name=draw(st.sampled_from(NAMES)),
        kind=kind,
        nullable=draw(st.booleans()),
        default=default,
        has_default=default is not None,
        generated=draw(st.integers(0, 9)) == 0,
        allowed=tuple(some) if closed and some and None not in some else (),
        seen={value: draw(st.integers(1, 9)) for value in some},
        length=draw(st.sampled_from([None, 1, 10, 80])) if kind == "text" else None,
        refers_to=draw(st.sampled_from([None, None, None, "others"])),
        meanings={v: draw(st.sampled_from(VALUES)) for v in some} if kind == "int" and draw(st.booleans()) else {},
    )


@settings(max_examples=200, deadline=None)
@given(found=st.lists(columns(), min_size=1, max_size=8, unique_by=lambda column: column.name), dialect=st.booleans())
def test_what_is_proposed_is_a_lane_and_what_is_not_is_asked(found: list[Column], dialect: bool) -> None:
    """Nothing is proposed that the declaration refuses, that a column cannot hold, or that nobody can write."""
    facts = table(*found, dialect="postgresql" if dialect else "sqlite")
    made = propose(facts)
    if made.questions:
        assert made.sure == 0
        assert not made.choices or made.questions[0].text
        return

    async def handler(job: Any) -> None: ...

    lane = declare("t", handler, {**made.options, "name": "t"})
    assert 0 < made.sure <= 1
    assert all(choice.why for choice in made.choices)
    for state in ("running", "done", "dead", "retry", "canceled"):
        for name, value in (getattr(lane, state) or {}).items():
            column = facts.column(name)
            if column is None:
                assert name in made.wanted
                continue
            assert name not in facts.key
            assert not column.generated
            assert not column.allowed or column.kind == "bool" or value in column.allowed
            assert value is not NOW or column.kind == "time" or facts.dialect == "sqlite"
            assert value is not None or column.nullable
            assert not (isinstance(value, str) and column.length and len(value) > column.length and not column.seen)
    for column_name in lane.roles.values():
        assert column_name is None or facts.column(column_name) is not None


# -- values out of SQL text


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("'pending'::text", "text", "pending"), ("'it''s'::character varying", "text", "it's"), ("0", "int", 0),
        ("'0'::smallint", "int", 0), ("(-1)", "int", -1), ("false", "bool", False), ("now()", "time", None),
        ("nextval('s'::regclass)", "int", None), ("'a'::my.enum", "enum", "a"), ("CURRENT_TIMESTAMP", "text", None),
        (None, "text", None), ('"new"', "text", "new"), ("1", "bool", True),
    ],
)  # fmt: skip
def test_a_default_that_is_a_plain_value_is_read(text: str | None, kind: str, value: Any) -> None:
    assert plain_default(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("status = ANY (ARRAY['a'::text, 'b'::text])", "text", ("a", "b")),
        ("status IN ('a', 'it''s')", "text", ("a", "it's")),
        (
            "((status)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])::text[]))",
            "text",
            ("a", "b"),
        ),
        ("status >= 0 AND status <= 3", "int", (0, 1, 2, 3)),
        ("status = ANY (ARRAY[1, 2])", "int", (1, 2)),
        ("length(status) > 3", "text", ()),
        ("status <> 'x'", "text", ()),
        ("status = 'a' OR other = 'b'", "text", ()),
        ("status ~ 'abc'", "text", ()),
    ],
)
def test_a_check_that_lists_values_is_read_and_any_other_is_not(text: str, kind: str, values: tuple[Any, ...]) -> None:
    assert allowed_by_check(text, "status", ["status", "other"], kind) == values


def test_predicates_and_comments_are_read() -> None:
    assert literals_of("(status = 'queued'::text)", "status", ["status"], "text") == ("queued",)
    assert literals_of("status = 0", "status", ["status"], "int") == (0,)
    assert literals_of("status = 'a' and x = 'b'", "status", ["status", "x"], "text") == ()
    assert comment_meanings("0=new, 1 = in progress; 2: done", "int") == {0: "new", 1: "in progress", 2: "done"}
    assert comment_meanings("0=new 1=in progress 2=done", "int") == {0: "new", 1: "in progress", 2: "done"}
    assert comment_meanings("see ticket 42 - urgent", "int") == {}


def test_a_time_that_says_failed_is_the_end_of_rows_that_are_not_done() -> None:
    """Beside completed_at, rows that failed are not done either: they are not ready, and they had been started."""
    times = [Column(name=name, kind="time", nullable=True) for name in ("started_at", "completed_at", "failed_at")]
    filled = {"completed_at": {None: {"started_at": 0.5, "failed_at": 0.5}, True: {"started_at": 1.0}}}
    made = propose(table(*times, filled=filled))
    assert states(made) == {
        "ready": {"completed_at": None, "failed_at": None, "started_at": None},
        "running": {"started_at": NOW},
        "done": {"completed_at": NOW},
        "dead": {"failed_at": NOW},
    }


def test_a_number_that_is_called_a_time_is_no_flag() -> None:
    """SQLite and Laravel keep seconds since 1970; as long as they are all NULL they look like a flag."""
    for name, kind in (("locked_at", "int"), ("processed_on", "int"), ("is_processed", "bool"), ("locked", "bool")):
        assert understood(Column(name=name, kind="int", nullable=True), {None: 3}).kind == kind


def test_columns_with_a_role_of_their_own_are_not_offered_as_the_state() -> None:
    columns = [
        Column(name=name, kind=kind, nullable=True)
        for name, kind in (
            ("attempts", "int"),
            ("run_at", "time"),
            ("locked_at", "time"),
            ("failed_at", "time"),
            ("queue", "text"),
        )
    ]
    [question] = propose(table(*columns)).questions
    assert question.options == ("queue",)
    assert "says when a row is done" in question.text


STATE = Column(name="status", kind="text", nullable=False, default="pending", has_default=True,
               allowed=("pending", "processing", "done", "failed"), allowed_by="a check")  # fmt: skip


def _time(name: str, *, default: bool = True) -> Column:
    return Column(name=name, kind="time", nullable=not default, has_default=default)


@pytest.mark.parametrize("name", ["inserted", "added", "enqueued", "ts"])
def test_the_oldest_row_goes_first_whatever_the_creation_time_is_called(name: str) -> None:
    made = propose(table(STATE, _time(name)))
    assert made.options["order_by"] == [name]


def test_a_time_that_the_database_fills_in_at_insert_is_a_creation_time_unless_it_is_something_else() -> None:
    assert propose(table(STATE, _time("born"))).options["order_by"] == ["born"]
    assert "order_by" not in propose(table(STATE, _time("updated_at"))).options
    assert "order_by" not in propose(table(STATE, _time("born", default=False))).options
    assert "order_by" not in propose(table(STATE, _time("born"), _time("weighed"))).options, "which of them?"


def test_an_order_by_a_key_without_an_order_is_a_guess_and_can_be_answered() -> None:
    uuid = Column(name="doc_uuid", kind="other", nullable=False)
    facts = table(STATE, uuid, _time("seen", default=False), key=("doc_uuid",))
    order = next(choice for choice in propose(facts).choices if choice.what == "order")
    assert (order.value, order.word) == ("doc_uuid", "a guess")
    assert "--order-by" in order.why
    assert propose(facts, {"order_by": "seen"}).options["order_by"] == ["seen"]
    with pytest.raises(DeclarationError, match="no column 'sen'"):
        propose(facts, {"order_by": "sen"})


def test_columns_that_only_rows_speak_for_are_asked_about_before_others_are_added() -> None:
    shares = {"pending": (0.0, 0.0, 1.0), "processing": (1.0, 0.0, 1.0), "done": (1.0, 0.0, 1.0),
              "failed": (1.0, 1.0, 1.0)}  # fmt: skip
    names = ("owner", "last_msg", "width")
    filled = {"status": {state: dict(zip(names, each, strict=True)) for state, each in shares.items()}}
    texts = [Column(name=name, kind="text") for name in names]
    made = propose(table(STATE, *texts, filled=filled))
    assert made.options["roles"] == {"worker": "owner", "error": "last_msg"}
    assert [(choice.what, choice.value) for choice in made.open] == [
        ("role worker", "owner"),
        ("role error", "last_msg"),
    ]
    assert made.unused == ("width",)
    refused = propose(table(STATE, *texts, filled=filled), {"roles": {"worker": None}})
    assert "worker" not in refused.options["roles"] or refused.options["roles"]["worker"] is None


def test_grabbed_by_grabbed_at_and_failure_are_known() -> None:
    made = propose(
        table(
            Column(name="status", kind="text", seen={"new": 5, "working": 2, "done": 3, "failed": 1}, counted=True),
            Column(name="grabbed_by", kind="text"),
            Column(name="grabbed_at", kind="time"),
            Column(name="failure", kind="text"),
        )
    )
    taken = {choice.role: choice.value for choice in made.choices if choice.role}
    assert taken == {"worker": "grabbed_by", "claimed_at": "grabbed_at", "error": "failure"}
