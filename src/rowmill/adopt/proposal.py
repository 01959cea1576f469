"""A proposal: a lane's parameters, the reason for each, and the open questions. Plain values."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from ..declare import states
from .table_facts import TableFacts

SAID = "you said so"
SURE, CERTAIN, LIKELY = 0.9, 0.7, 0.55


def given(value: Any) -> str:
    """A value as an option takes it; None means that there is no such state."""
    return "none" if value is None else str(value[0] if isinstance(value, list) else value)


@dataclass(frozen=True)
class Choice:
    """One choice, the reason for it, and how sure it is, from 0 to 1."""

    what: str
    value: Any
    sure: float
    why: str
    #: What else it may be, where a person can choose it with an option: ``--done VALUE``; None: he cannot.
    others: tuple[Any, ...] | None = None
    #: The value describes columns: it cannot be given as a state's value.
    described: bool = False

    @property
    def open(self) -> bool:
        """Whether it is not certain and should be asked."""
        return self.sure < CERTAIN and self.others is not None

    @property
    def role(self) -> str | None:
        """The role that the choice is about."""
        return self.what.removeprefix("role ") if self.what.startswith("role ") else None

    @property
    def answer(self) -> str:
        """The options of ``rowmill adopt`` that answer it: ``--done 3 or --done 4``."""
        proposed = () if self.described else (self.value,)
        values = dict.fromkeys(given(value) for value in (*proposed, *(self.others or ())))
        if self.role:
            columns = (shlex.quote(value) if value != "none" else "" for value in values)
            return " or ".join(f"--role {self.role}={column}" for column in columns)
        return " or ".join(f"--{self.what} {shlex.quote(value)}" for value in values)

    @property
    def word(self) -> str:
        """How sure, in a word."""
        return "sure" if self.sure >= SURE else "likely" if self.sure >= LIKELY else "a guess"


@dataclass(frozen=True)
class Question:
    """A question that the table leaves open. ``about`` names the answer: state, ready, running, done or dead."""

    about: str
    text: str
    options: tuple[Any, ...] = ()


@dataclass
class Proposal:
    """A lane's parameters, the reason for each, and the open questions."""

    facts: TableFacts
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    #: Remarks that are not choices.
    notes: list[str] = field(default_factory=list)
    #: The column that rows are ordered by; empty: their key.
    order: str = ""
    #: Columns that the lane has no use for.
    unused: tuple[str, ...] = ()
    #: Columns that the declaration names and the table does not have yet.
    wanted: tuple[str, ...] = ()

    @property
    def sure(self) -> float:
        """As sure as its least sure part; 0 while there are open questions."""
        return 0.0 if self.questions else min((choice.sure for choice in self.choices), default=0.0)

    def labels(self, choice: Choice) -> list[str]:
        """The words that a chosen value stands for, where the state column refers to a table of them."""
        state = next((c.value for c in self.choices if c.what == "state"), None)
        column = self.facts.column(str(state))
        values = choice.value if isinstance(choice.value, list) else [choice.value]
        if column is None or choice.what not in states.DECLARED:
            return []
        return [column.meanings[value] for value in values if value in column.meanings]

    @property
    def open(self) -> list[Choice]:
        """The choices that are not certain."""
        return [choice for choice in self.choices if choice.open]

    def say(
        self, what: str, value: Any, sure: float, why: str, others: tuple[Any, ...] | None = None,
        described: bool = False,
    ) -> None:  # fmt: skip
        self.choices.append(Choice(what, value, sure, why, others, described))

    def confirm(self, what: str) -> None:
        """Mark a choice as confirmed by a person."""
        self.choices = [replace(c, sure=1.0, why=SAID) if c.what == what else c for c in self.choices]

    def ask(self, about: str, text: str, options: tuple[Any, ...] = ()) -> None:
        self.questions.append(Question(about, text, options))
