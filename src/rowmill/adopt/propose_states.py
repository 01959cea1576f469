"""Which column is the state, and what its values say. The first half of a proposal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..declare.states import DEAD, DONE, READY, RUNNING
from ..errors import DeclarationError, did_you_mean
from . import vocabulary
from .table_facts import Column, TableFacts
from .vocabulary import FAILED, LETTERS, WordMeaning

#: A column with more different values than this is no state.
_MOST_VALUES = 60
#: Two candidates closer than this cannot be told apart.
_MARGIN = 0.12
_ENOUGH = 0.5
#: A word as sure as this needs no rows to say what it means.
_PLAIN = 0.7
#: Shares of rows from which on "filled in" and "empty" count as such.
_FILLED, _EMPTY = 0.5, 0.1
_NOT_EVENTS = ("created", "inserted", "updated", "modified", "changed", "expires", "scheduled", "deleted", "received",
               "queued", "enqueued", "submitted", "added", "registered", "uploaded", "requested", "started",
               "attempted", "viewed", "seen", "logged", "joined", "verified", "confirmed", "born", "imported",
               "ordered", "occurred", "planned", "locked", "claimed", "reserved", "picked", "heartbeat")  # fmt: skip


@dataclass(frozen=True)
class StateReading:
    """A state column as it was understood: values, a flag or a time; or the question which column it is."""

    facts: TableFacts
    column: Column
    kind: str
    sure: float = 0.0
    why: str = ""
    question: str | None = None
    columns: tuple[str, ...] = ()

    def values(self) -> list[Any]:
        """All known values: the default first, then those with the most rows."""
        column = self.column
        known: dict[Any, None] = {}
        if column.has_default and column.default is not None:
            known[column.default] = None
        for value in (*column.allowed, *column.meanings, *sorted(column.seen, key=lambda v: -column.seen[v])):
            known.setdefault(value, None)
        return list(known)

    def meaning(self, value: Any) -> WordMeaning | None:
        """The meaning of a value: by its word, by the word it refers to, or by the columns filled in on its rows."""
        column = self.column
        if value is None:
            return None
        word: WordMeaning | None = None
        if value in column.meanings:
            stands_for = column.meanings[value]
            word = vocabulary.meaning(stands_for)
            word = word and replace(word, why=f"{value!r} stands for {stands_for!r}")
        elif isinstance(value, str):
            word = vocabulary.meaning(value)
            if word is None and len(value) == 1 and self._letters() and value.lower() in LETTERS:
                word = WordMeaning(LETTERS[value.lower()], 0.6, 100, f"{value!r} is short for {LETTERS[value.lower()]}")
        if word is not None and word.sure >= _PLAIN:
            return word
        rows = self._by_evidence(value)
        if word is None or rows is None:
            return word or rows
        if rows.state == word.state:
            return replace(word, sure=0.8, why=f"{word.why}, and {rows.why}")
        return rows if rows.state in (FAILED, DONE) else word

    def rows(self, value: Any) -> int:
        """How many rows have a value, as far as is known."""
        return self.column.seen.get(value, 0)

    def _letters(self) -> bool:
        words = [v for v in self.values() if isinstance(v, str)]
        return len(words) >= 3 and all(len(v) == 1 for v in words)

    def _by_evidence(self, value: Any) -> WordMeaning | None:
        """A value without a known word, judged by its rows: they have an error, an end, a worker, or nothing."""
        shares = self.facts.filled.get(self.column.name, {}).get(value)
        if not shares:
            return None
        by_role: dict[str, list[tuple[str, float]]] = {}
        for name, share in shares.items():
            bare = self.facts.bare(name)
            for role in ("error", "finished_at", "claimed_at", "worker", "heartbeat_at"):
                if vocabulary.means(role, bare):
                    by_role.setdefault(role, []).append((name, share))
            event = vocabulary.event_name(bare)
            if event is not None and vocabulary.time_name(bare) and event.state in (DONE, FAILED):
                by_role.setdefault({DONE: "finished_at", FAILED: "error"}[event.state], []).append((name, share))

        def most(*roles: str) -> tuple[str, float]:
            return max(
                (pair for role in roles for pair in by_role.get(role, [])), key=lambda p: p[1], default=("", 0.0)
            )

        error, finished = most("error"), most("finished_at")
        started = most("claimed_at", "worker", "heartbeat_at")
        if error[1] >= _FILLED:
            return WordMeaning(FAILED, 0.6, 300, f"rows with {value!r} have {error[0]}")
        if finished[1] >= _FILLED:
            return WordMeaning(DONE, 0.6, 300, f"rows with {value!r} have {finished[0]}")
        # Rows that are over may keep their holder: only a column for the end tells them apart.
        if started[1] >= _FILLED and "finished_at" in by_role:
            return WordMeaning(RUNNING, 0.6, 300, f"rows with {value!r} have {started[0]} and no end")
        nothing = by_role and max(error[1], finished[1], started[1]) <= _EMPTY
        if nothing and self.column.has_default and value == self.column.default:
            return WordMeaning(READY, 0.7, 300, f"rows with {value!r} have no holder, no end and no error")
        return None

    def by_class(self) -> dict[str, list[tuple[Any, WordMeaning]]]:
        """Values by meaning: those with rows first, then the surest and most usual word."""
        classes: dict[str, list[tuple[Any, WordMeaning]]] = {}
        for value in self.values():
            if (meaning := self.meaning(value)) is not None:
                classes.setdefault(meaning.state, []).append((value, meaning))
        for pairs in classes.values():
            pairs.sort(key=lambda p: (not self.rows(p[0]), -p[1].sure, -self.rows(p[0]), p[1].rank))
        return classes

    def unplaced(self) -> list[Any]:
        """Values without a known meaning."""
        return [v for v in self.values() if v is not None and self.meaning(v) is None]

    def flag(self, state: str) -> Column | None:
        """A flag column, beside the state column, whose name has this meaning."""
        for column in self.facts.columns:
            if column.kind == "bool" and column.name != self.column.name and not column.generated:
                event = vocabulary.event_name(column.name)
                if event is not None and event.state in ((state, DEAD) if state == FAILED else (state,)):
                    return column
        return None


def read_states(facts: TableFacts, named: str | None = None) -> StateReading:
    """The state column, or a Reading that holds the question which one it is."""
    if named is not None:
        return _named(facts, named)
    valued = sorted((c for c in (_valued(facts, column) for column in facts.columns) if c), key=lambda r: -r.sure)
    events = [e for e in (_event(facts, column) for column in facts.columns) if e]
    strong = [r for r in valued if r.sure >= _ENOUGH]
    clear = [r for r in strong if _has_way(r)]
    if clear:
        best = clear[0]
        rivals = [r for r in clear[1:] if best.sure - r.sure < _MARGIN]
        if not rivals:
            return best
        names = (best.column.name, *(r.column.name for r in rivals))
        return _question(best, f"several columns look like the state: {', '.join(names)}", names)
    flags = [e for e in events if e.kind == "flag"] or [e for e in events if e.kind == "time"]
    undecided = [r for r in strong if r.column.kind == "int" and not r.column.meanings]
    if flags and not undecided:
        if len(flags) == 1:
            return flags[0]
        surest = max(e.sure for e in flags)
        top = [e for e in flags if e.sure == surest]
        if len(top) == 1:
            return top[0]
        names = tuple(e.column.name for e in top)
        return _question(flags[0], f"several columns may say that a row is done: {', '.join(names)}", names)
    if undecided and flags:
        names = (undecided[0].column.name, *(e.column.name for e in flags))
        return _question(undecided[0], f"the state may be in any of {', '.join(names)}", names)
    if strong:
        return strong[0]
    every = tuple(c.name for c in facts.columns if _could_say(facts, c))
    nothing = StateReading(facts, facts.columns[0], "valued")
    text = f"no column of {facts.fullname} looks like a state: a lane needs one that says when a row is done"
    return _question(nothing, f"{text}, such as status or finished_at", every)


def _could_say(facts: TableFacts, column: Column) -> bool:
    """Whether a column could be a state: few values, a flag or a time, and no role."""
    if column.name in facts.key or column.generated or column.kind == "other" or column.refers_to:
        return False
    bare = facts.bare(column.name)
    if any(vocabulary.means(role, bare) for role in vocabulary.ROLE_NAMES) or vocabulary.birth_rank(bare) is not None:
        return False
    if column.kind == "time":
        event = vocabulary.event_name(column.name)
        return column.nullable and not column.has_default and (event is None or event.state != FAILED)
    return column.kind == "bool" or len(column.seen) <= _MOST_VALUES


def _question(reading: StateReading, text: str, names: tuple[str, ...]) -> StateReading:
    return StateReading(reading.facts, reading.column, reading.kind, question=text, columns=names)


def _named(facts: TableFacts, name: str) -> StateReading:
    column = facts.column(name)
    if column is None:
        raise DeclarationError(
            f"table {facts.fullname!r} has no column {name!r}", hint=did_you_mean(name, [c.name for c in facts.columns])
        )
    kind = {"bool": "flag", "time": "time"}.get(column.kind, "valued")
    return StateReading(facts, column, kind, 1.0, "you said so")


def _has_way(reading: StateReading) -> bool:
    """Whether the column tells ready rows from others."""
    classes = reading.by_class()
    column = reading.column
    starts = READY in classes or (column.has_default and column.default is not None) or column.nullable
    return starts and bool(READY in classes or classes.keys() & {DONE, RUNNING, FAILED})


def _valued(facts: TableFacts, column: Column) -> StateReading | None:
    """A column with a few values, and how much it looks like a state."""
    if column.kind not in ("text", "enum", "int") or column.generated or column.name in facts.key:
        return None
    name = vocabulary.state_name(facts.bare(column.name))
    if column.refers_to and column.meanings:
        name = max(name, vocabulary.lookup_name(column.refers_to))
    reading = StateReading(facts, column, "valued")
    values = [v for v in reading.values() if v is not None]
    if len(values) > _MOST_VALUES:
        return None
    if column.kind == "int" and not name and not column.meanings:
        return None
    if column.refers_to and not column.meanings and not name:
        return None
    classes = reading.by_class()
    sureness = sum(m.sure for pairs in classes.values() for _, m in pairs)
    vocabulary_share = sureness / len(values) if values else 0.0
    way = READY in classes and bool(classes.keys() & {DONE, RUNNING, FAILED})
    if not name and not (way and vocabulary_share >= 0.6):
        return None
    sure = 0.55 * name + 0.45 * vocabulary_share
    if not name:
        sure = 0.5 + 0.2 * vocabulary_share
    why = [f"its name says so ({column.name})"] if name >= 0.7 else []
    if values and vocabulary_share >= 0.5:
        some = ", ".join(str(column.meanings.get(v, v)) for v in values[:5])
        why.append(f"its values are words for states ({some}{', …' if len(values) > 5 else ''})")
    if column.allowed_by:
        why.append(f"{column.allowed_by} lists them")
    return StateReading(facts, column, "valued", min(sure, 1.0), "; ".join(why) or "nothing else comes near")


def _event(facts: TableFacts, column: Column) -> StateReading | None:
    """A flag or a time that says that a row is done."""
    if column.kind not in ("bool", "time") or column.generated or column.name in facts.key:
        return None
    name_words = vocabulary.words(column.name).split()
    if column.kind == "time" and (not column.nullable or set(name_words) & set(_NOT_EVENTS) or column.has_default):
        return None
    event = vocabulary.event_name(column.name)
    if event is None or event.state != DONE:
        return None
    how = "turns true" if column.kind == "bool" else "is set"
    kind = "flag" if column.kind == "bool" else "time"
    return StateReading(
        facts, column, kind, 0.6 + 0.3 * event.sure, f"by its name, {column.name} {how} when a row is done"
    )
