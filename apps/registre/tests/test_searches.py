"""The two searches, in a real browser: what they find is stored with the row's new state, or not at all."""

from __future__ import annotations

import dataclasses
from datetime import date
from typing import Any

import pytest

from apps.registre import searches
from apps.registre.errors import PageChanged
from apps.registre.standin import holdings
from databases import Db

from . import rows
from .conftest import Start


def text(value: Any) -> str:
    """As both databases would show it: a day from SQLite is text."""
    return value.isoformat() if isinstance(value, date) else str(value)


def found(db: Db, table: str, *columns: str) -> list[tuple[str, ...]]:
    return sorted(tuple(text(row[c]) for c in columns) for row in db.query(f"select * from {table}"))


def expected(held: list[Any], *fields: str) -> list[tuple[str, ...]]:
    return sorted(tuple(text(getattr(one, field)) for field in fields) for one in held)


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_company_search_stores_companies_and_names(start: Start, dialect: str) -> None:
    """A9: pending_name_selection and req_completed, with all that the register showed."""
    kit, dbs = await start(prod=dialect)
    rows.sessions(dbs["prod"], company_name="Boulangerie Côté")
    stepped = await kit.step("req")
    row = dbs["prod"].one("select * from search_sessions")
    assert (row["status"], bool(row["req_completed"])) == ("pending_name_selection", True), stepped
    held = holdings.companies("Boulangerie Côté")
    columns = ("neq", "name", "status", "address", "registered_on")
    assert found(dbs["prod"], "companies", *columns) == expected(held, *columns)
    named = [(company.neq, name.name, name.kind) for company in held for name in company.names]
    assert found(dbs["prod"], "names", "neq", "name", "kind") == sorted(named)
    assert {row["search_session_id"] for row in dbs["prod"].query("select * from companies")} == {row["id"]}


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_rights_search_stores_the_inscriptions_of_all_pages(start: Start, dialect: str) -> None:
    """A10: completed, completed_at, and each inscription with its session."""
    name = next(name for n in range(50) if len(holdings.inscriptions(name := f"Menuiserie {n}")) > 6)
    kit, dbs = await start(prod=dialect)
    rows.searches(dbs["prod"], search_name=name)
    stepped = await kit.step("rdprm")
    row = dbs["prod"].one("select * from rdprm_searches")
    assert (row["status"], row["error_message"]) == ("completed", None), stepped
    assert row["completed_at"] is not None
    columns = ("number", "nature", "registered_on", "debtor", "creditor", "amount_cents")
    assert found(dbs["prod"], "inscriptions", *columns) == expected(holdings.inscriptions(name), *columns)
    assert {one["search_session_id"] for one in dbs["prod"].query("select * from inscriptions")} == {
        row["search_session_id"]
    }


async def test_what_a_register_shows_twice_is_stored_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A9, A10: a company in two lines, a name in two rows, an inscription on two pages."""
    (one, *_), (two, *_) = holdings.companies("Garage"), holdings.inscriptions("Garage")
    twice = dataclasses.replace(one, names=one.names * 2)
    monkeypatch.setattr(holdings, "companies", lambda asked: [twice, twice])
    monkeypatch.setattr(holdings, "inscriptions", lambda asked: [two] * 5)
    kit, dbs = await start(dev="sqlite")
    rows.sessions(dbs["dev"], company_name="Garage")
    rows.searches(dbs["dev"], search_name="Garage")
    assert await outcome(kit.step("req"), kit.step("rdprm")) == ["done", "done"]
    assert found(dbs["dev"], "companies", "neq") == [(one.neq,)]
    assert found(dbs["dev"], "names", "name") == expected(list(one.names), "name")
    assert found(dbs["dev"], "inscriptions", "number") == [(two.number,)]


async def test_a_search_that_finds_nothing_is_done(start: Start) -> None:
    """A9, A10: an empty answer is an answer."""
    kit, dbs = await start(dev="sqlite")
    rows.sessions(dbs["dev"], company_name="Aucune telle entreprise")
    rows.searches(dbs["dev"], search_name="Aucun tel nom")
    assert await outcome(kit.step("req"), kit.step("rdprm")) == ["done", "done"]
    assert found(dbs["dev"], "companies", "neq") == found(dbs["dev"], "inscriptions", "number") == []


async def outcome(*steps: Any) -> list[str]:
    return [(await step).outcome for step in steps]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("<table id=resultats><tr class=inscription></tr></table>", r"there is no number \(\.numero\)"),
        (
            "<table id=resultats><tr class=inscription><td class=numero>1<td class=nature>x<td class=date>hier</tr>",
            "registered_on is 'hier'",
        ),
    ],
)
def test_a_result_that_cannot_be_read_is_an_error_and_not_an_empty_answer(source: str, words: str) -> None:
    """A10: a register that changed its table must not look like one without inscriptions."""
    with pytest.raises(PageChanged, match=words):
        searches.parse_inscriptions(source, "https://register.example/resultats")


@pytest.mark.parametrize(
    ("shown", "cents"), [("12\u202f345,67\u00a0$", 1234567), ("0,05 $", 5), ("1 000 000,00 $", 100000000)]
)
def test_amounts_are_read_to_the_cent(shown: str, cents: int) -> None:
    """A10: with any kind of space."""
    row = "".join(f"<td class={name}>1" for name in ("numero", "nature", "debiteur", "creancier"))
    source = f"<table id=resultats><tr class=inscription>{row}<td class=date>2026-01-31<td class=montant>{shown}</tr>"
    assert searches.parse_inscriptions(source, "x")[0]["amount_cents"] == cents
