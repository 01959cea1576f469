"""A proposal: a lane's parameters, the reason for each, and what is still to be asked. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .table_facts import TableFacts

SURE, LIKELY = 0.9, 0.55


@dataclass(frozen=True)
class Choice:
    """One thing that was chosen, how sure that is from 0 to 1, and why."""

    what: str
    value: Any
    sure: float
    why: str

    @property
    def word(self) -> str:
        """How sure, in a word."""
        return "sure" if self.sure >= SURE else "likely" if self.sure >= LIKELY else "a guess"


@dataclass(frozen=True)
class Question:
    """What the table does not tell. ``about`` is the answer's name: state, ready, running, done or dead."""

    about: str
    text: str
    options: tuple[Any, ...] = ()


@dataclass
class Proposal:
    """A lane's parameters, why they are so, and what is still to be asked."""

    facts: TableFacts
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    #: Worth knowing, and not a choice.
    notes: list[str] = field(default_factory=list)
    #: Columns that stand in the declaration and are not there yet.
    wanted: tuple[str, ...] = ()

    @property
    def sure(self) -> float:
        """As sure as its least sure part; nothing while something is to be asked."""
        return 0.0 if self.questions else min((choice.sure for choice in self.choices), default=0.0)

    def say(self, what: str, value: Any, sure: float, why: str) -> None:
        self.choices.append(Choice(what, value, sure, why))

    def ask(self, about: str, text: str, options: tuple[Any, ...] = ()) -> None:
        self.questions.append(Question(about, text, options))
