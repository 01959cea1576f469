"""A task's arguments: checked where it is called, and given to the handler as the types it names."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID, uuid4

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databases import Db
from rowmill import Mill, WrongArguments
from rowmill.declare.arguments import Signature, Unfit, decode, encode


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Address:
    street: str
    since: date
    tags: list[Colour] = field(default_factory=list)


class Point(NamedTuple):
    x: int
    at: datetime


class Shape(TypedDict):
    name: str
    when: date


class Person(pydantic.BaseModel):
    name: str
    born: date
    home: Address | None = None


NOW = datetime(2026, 3, 8, 1, 30, tzinfo=UTC)
VALUES: list[tuple[Any, Any]] = [
    (str, "a\u00e9"), (int, 10**30), (float, 0.1), (float, 3), (bool, True), (None, None), (Any, {"a": [1, None]}),
    (datetime, NOW), (datetime, NOW.replace(tzinfo=None)), (date, NOW.date()), (time, time(3, 4)),
    (timedelta, timedelta(days=1, microseconds=5)), (UUID, uuid4()), (Decimal, Decimal("1.10")), (bytes, b"\x00\xff"),
    (Path, Path("/a/b")), (Colour, Colour.BLUE), (Level, Level.LOW), (list[date], [NOW.date()]),
    (tuple[int, ...], (1, 2)), (tuple[int, date], (1, NOW.date())), (set[int], {1, 2}),
    (frozenset[str], frozenset("a")),
    (dict[str, Decimal], {"a": Decimal(1)}), (dict[int, date], {1: NOW.date()}), (dict[Colour, int], {Colour.RED: 1}),
    (UUID | None, uuid4()), (int | str, "5"), (datetime | str, NOW), (Literal["a", 1], 1),
    (Annotated[date, "x"], NOW.date()), (Address, Address("s", NOW.date(), [Colour.RED])), (Point, Point(1, NOW)),
    (Shape, {"name": "n", "when": NOW.date()}), (Person, Person(name="n", born=NOW.date())),
    (list[Person], [Person(name="n", born=NOW.date(), home=Address("s", NOW.date()))]),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value"), VALUES)
def test_a_value_comes_back_as_it_went_in(hint: Any, value: Any) -> None:
    kept = json.loads(json.dumps(encode(value, hint)))
    back = decode(kept, hint)
    assert back == value
    assert type(back) is type(value) or isinstance(value, int), (back, value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_what_json_has_a_word_for_needs_no_hint(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value))), Any) == value


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (str, 5), (int, "5"), (int, True), (bool, 1), (date, NOW), (UUID, "x"), (list[int], "12"),
        (list[int], [1, "2"]),
        (Literal["a"], "b"), (int | None, "x"), (Address, {"street": "s"}), (Person, {"name": 1}), (Any, NOW),
        (dict[str, int], {1: 1}), (tuple[int, int], (1,)), (object, object()), (Any, {1: 2}), (Colour, "red"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises(Unfit):
        encode(value, hint)


def test_a_call_is_bound_like_a_call() -> None:
    def handler(a: int, /, b: date, *rest: Decimal, c: str = "x", **more: UUID) -> None: ...

    signature = Signature(handler, lambda p: False)
    one = uuid4()
    packed = signature.pack("task", (1, NOW.date(), Decimal("1.5")), {"c": "y", "d": one})
    assert packed == {"a": 1, "b": "2026-03-08", "rest": ["1.5"], "c": "y", "d": str(one)}
    assert signature.unpack(packed) == ([1, NOW.date(), Decimal("1.5")], {"c": "y", "d": one})
    for args, kwargs in (((), {}), ((1,), {}), ((1, "no"), {})):
        with pytest.raises(WrongArguments, match="its handler takes"):
            signature.pack("task", args, kwargs)
    with pytest.raises(WrongArguments, match="takes no 'z'"):
        Signature(lambda a: None, lambda p: False).unpack({"z": 1})


async def test_arguments_are_checked_at_the_call_and_typed_at_the_run(db: Db) -> None:
    mill, seen = Mill(db.url), list[Any]()

    @mill.task(max_attempts=3)
    async def send(to: str, when: datetime, person: Person, address: Address, colour: Colour = Colour.RED) -> Address:
        seen.append((to, when, person, address, colour))
        return address

    address = Address("s\x00", NOW.date(), [Colour.BLUE])
    handle = await send.enqueue("a\ud800", NOW, Person(name="p", born=NOW.date()), address)
    for wrong in ({"to": 5}, {"when": "today"}, {"colour": "red"}, {"nobody": 1}):
        with pytest.raises(WrongArguments):
            await send.enqueue(**{"to": "a", "when": NOW, "person": seen, "address": address} | wrong)
    db.execute("insert into rowmill_jobs (task, args) values ('send', '{\"to\": 5}')")
    await mill.worker(drain=True).run()
    ((to, *rest),) = seen
    assert to == "a?"
    assert rest == [NOW, Person(name="p", born=NOW.date()), Address("s", NOW.date(), [Colour.BLUE]), Colour.RED]
    assert await handle.result(5) == Address("s", NOW.date(), [Colour.BLUE])
    row = db.one("select state, attempts, error from rowmill_jobs where id <> ?", handle.id)
    assert (row["state"], row["attempts"]) == ("dead", 1), "no retry makes them fit"
    assert "do not fit the handler" in row["error"]
    await mill.close()


def plainly(a: int, b: str = "b", *, c: bool = False) -> None: ...


def by_place(a: int, b: str) -> None: ...


_PLAIN = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.none(), st.just(2**4000))
_GIVEN = st.one_of(
    st.tuples(st.integers(), st.text(max_size=3)),
    st.lists(_PLAIN, max_size=3).map(tuple),
    st.fixed_dictionaries({"a": st.integers(), "b": st.text(max_size=3)}),
    st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), _PLAIN, max_size=3),
)


@pytest.mark.parametrize("handler", [plainly, by_place])
@given(calls=st.lists(_GIVEN, max_size=4))
def test_many_calls_are_packed_together_as_each_would_be_alone(handler: Any, calls: list[Any]) -> None:
    """SPEC, tasks: what is looked at argument by argument is what is looked at call by call."""
    signature = Signature(handler, lambda parameter: False)
    together = signature.packed_alike(calls)
    if together is not None:
        assert together == [
            signature.pack("task 't'", call if isinstance(call, tuple) else (), {} if isinstance(call, tuple) else call)
            for call in calls
        ]


def test_many_calls_that_are_alike_are_packed_together() -> None:
    """Issue, speed: the case that is fast is the case that there is; and what was handed in stays the caller's."""
    signature = Signature(by_place, lambda parameter: False)
    given = [{"b": "x", "a": 1}, {"a": 2, "b": "y"}]
    together = signature.packed_alike(given)
    assert together == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    given[0]["a"] = 5
    assert together[0]["a"] == 1
    assert signature.packed_alike([(1, "x"), (2, "y")]) == together
    for other in ([(1, "x"), (True, "y")], [(1, "x"), (2,)], [(1, "x"), {"a": 1, "b": "x"}], [{"a": 1, "c": "x"}], [5]):
        assert signature.packed_alike(other) is None
