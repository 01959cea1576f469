"""Proposes the lane over a table from the facts of a survey: a pure function, with the reason for each choice.

What cannot be told is asked, never guessed: a proposal with open questions is not one to run.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..declare import roles as roles_words
from ..declare.states import CANCELED, DEAD, DECLARED, DONE, NOW, READY, RETRY, RUNNING
from ..errors import DeclarationError, did_you_mean
from . import vocabulary
from .proposal import CERTAIN, SAID, Proposal, Question
from .propose_roles import Roles, birth, propose_roles
from .propose_states import StateReading, read_states
from .table_facts import TableFacts
from .vocabulary import FAILED, HELD

#: Ends that do not say whether they are good ones: with an error beside it, a failed row ends so, too.
_PLAIN_ENDS = ("finished", "ended", "completed", "processed", "done", "handled", "executed")
_CANCEL = ("cancel", "abort", "annul", "storn", "abgebroch", "anul", "iptal", "отмен", "скасов", "取消", "キャンセル")
#: So many rows in a value that nobody understands, and more than in those that are understood: then ask.
_FEW_ROWS = 20
_TAKEN = {"mill", "job", "Mill", "NOW", "os", "td"}


def propose(facts: TableFacts, answers: Mapping[str, Any] | None = None) -> Proposal:
    """The lane over a table. ``answers``: state, ready, running, done, retry, dead, canceled as a person gave them,
    ``roles`` and ``order_by``, a column.
    """
    answers = dict(answers or {})
    made = Proposal(facts, lane_name(facts.name))
    if not facts.key:
        raise DeclarationError(
            f"table {facts.fullname!r} has no primary key, so rows cannot be told apart",
            hint=f"alter table {facts.fullname} add primary key (...);"
            " on SQLite, create a new table with a key and copy the rows",
        )
    reading = read_states(facts, answers.get("state"))
    if reading.question is not None:
        made.questions.append(Question("state", reading.question, reading.columns))
        return made
    roles = propose_roles(facts, reading, answers.get("roles", {}))
    _soft_deletes(made, reading)
    if reading.kind == "valued":
        _valued(made, reading, roles, answers)
    else:
        _flagged(made, reading, roles, answers)
    if made.questions:
        return made
    _finish(made, reading, roles, answers)
    return made


def lane_name(table: str) -> str:
    """A Python name for the lane and its handler."""
    name = re.sub(r"\W+", "_", roles_words.snake(table)).strip("_")
    if not name or not name.isidentifier():
        name = re.sub(r"[^0-9a-z_]", "", name) or "rows"
        name = name if name.isidentifier() else f"table_{name}"
    return f"{name}_rows" if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in _TAKEN else name


# -- one column with values


def _valued(made: Proposal, reading: StateReading, roles: Roles, answers: Mapping[str, Any]) -> None:
    column = reading.column
    made.say("state", column.name, reading.sure, reading.why)
    by_class = reading.by_class()
    ready = _ready(made, reading, by_class, answers)
    if ready is _ASKED:
        return
    dead, retry = _ends(made, reading, by_class, roles, answers, ready)
    done = _done(made, reading, by_class, answers, ready)
    if made.questions:
        return
    running, idle = _running(made, reading, by_class, roles, answers, ready)
    state = column.name
    values = [ready] if not isinstance(ready, list) else list(ready)
    if retry is not None:
        values += [retry] if retry not in values else []
    name = {state: values[0] if len(values) == 1 else values}
    made.options["ready"] = {**name, **idle, **made.options.pop("ready", {})}
    made.options["running"] = running
    back = {c: v for c, v in idle.items() if c != roles.by_role.get("claimed_at") and v is False}
    made.options["done"] = {state: done, **back, **roles.times_of(DONE)}
    if retry is not None:
        made.options["retry"] = {state: retry, **{c: False if v == [False, None] else v for c, v in idle.items()}}
    if dead is not None:
        made.options["dead"] = {state: dead, **back, **roles.times_of(FAILED)}
    canceled = _canceled(made, reading, by_class, answers, dead)
    if canceled is not None:
        made.options["canceled"] = {state: canceled, **back}
    taken = {*map(_hashed, values), *map(_hashed, (running.get(state), done, retry, dead, canceled))}
    _left_over(made, reading, taken)


_ASKED = object()


def _hashed(value: Any) -> Any:
    return (type(value).__name__, value)


def _ready(made: Proposal, reading: StateReading, by_class: dict[str, Any], answers: Mapping[str, Any]) -> Any:
    column = reading.column
    if "ready" in answers:
        made.say("ready", answers["ready"], 1.0, SAID)
        return answers["ready"]
    candidates = by_class.get(READY, [])
    born = column.default if column.has_default else None
    values = [value for value, _ in candidates]
    if born is not None and born in values:
        sure = next(m.sure for v, m in candidates if v == born)
        others = [v for v in values if v != born and reading.rows(v)]
        why = f"{dict(candidates)[born].why}, and it is the column's default"
        if others and sure < 1.0:
            every = (born, *others)
            made.ask("ready", f"several values of {column.name} look ready: {_listed(reading, every)}", every)
            return _ASKED
        if others:
            why += f"; {_listed(reading, others)} may be ready too: --ready {born} --ready {others[0]} takes both"
        made.say("ready", born, min(sure + 0.2, 1.0) if not others else 0.6, why, tuple(others))
        return born
    birth_says = reading.meaning(born) if born is not None else None
    if values and birth_says is not None and birth_says.state not in (HELD, READY):
        every = (born, *values)
        made.ask("ready", f"new rows start as {born!r}, but {_listed(reading, values)} also looks ready", every)
        return _ASKED
    hinted = [v for v in values if v in column.indexed_values]
    exact = [v for v, m in candidates if m.sure == 1.0]
    in_use = [v for v in values if reading.rows(v)]
    for few, why in ((values, ""), (hinted, " and an index is made for it"), (exact, ""), (in_use, "")):
        if len(few) == 1 and not (why == "" and len(in_use) > 1):
            made.say("ready", few[0], dict(candidates)[few[0]].sure, dict(candidates)[few[0]].why + why, tuple(values))
            return few[0]
    if values:
        made.ask("ready", f"several values of {column.name} look ready: {_listed(reading, values)}", tuple(values))
        return _ASKED
    ended = by_class.get(DONE) or by_class.get(FAILED)
    if born is not None and (ended or by_class.get(RUNNING)) and reading.meaning(born) is None:
        why = f"new rows start as {born!r}, and other values say how they end"
        made.say("ready", born, 0.7 if reading.rows(born) else 0.6, why, ())
        return born
    if born is None and column.nullable and ended and (column.seen.get(None) or not reading.unplaced()):
        made.say("ready", None, 0.7, f"{column.name} is NULL until something happens to a row")
        return None
    made.ask("ready", f"which value of {column.name} means ready?", _known_values(reading))
    return _ASKED


def _ends(
    made: Proposal,
    reading: StateReading,
    by_class: dict[str, Any],
    roles: Roles,
    answers: Mapping[str, Any],
    ready: Any,
) -> tuple[Any, Any]:
    retry = answers.get("retry")
    failed, dead = by_class.get(FAILED, []), by_class.get(DEAD, [])
    again = by_class.get(RETRY, [])
    if retry is not None:
        made.say("retry", retry, 1.0, SAID)
    elif again:
        retry = again[0][0]
        made.say("retry", retry, again[0][1].sure, again[0][1].why)
    if "dead" in answers:
        made.say("dead", answers["dead"], 1.0, SAID)
        return answers["dead"], retry
    counted = {"attempts", "failures"} & roles.by_role.keys() and "run_after" in roles.by_role
    if failed and dead and retry is None and counted:
        retry = failed[0][0]
        made.say("retry", retry, CERTAIN, f"{dead[0][0]!r} is final, and the table has an attempt counter and a due"
                 f" time, so {retry!r} is tried again", (ready,))  # fmt: skip
        made.say("dead", dead[0][0], 0.9, dead[0][1].why)
        return dead[0][0], retry
    ends = [pair for pair in (*failed, *dead) if pair[0] not in (ready, retry)]
    if ends:
        value, meaning = ends[0]
        rivals = [v for v, m in ends[1:] if m.state == meaning.state and (reading.rows(v) or m.sure >= meaning.sure)]
        sure = max(meaning.sure, CERTAIN)
        why = meaning.why
        if rivals:
            sure, why = 0.6, f"{why}, and so may {_listed(reading, rivals)}"
        made.say("dead", value, sure, why, tuple(rivals))
        return value, retry
    strange = _unexplained(reading, answers, ready)
    if word := _own_word(reading, ready, FAILED):
        made.say("dead", word, 0.6, "no failed row was seen, and the column takes any text", tuple(strange))
        return word, retry
    others = [value for value, _ in by_class.get(CANCELED, [])]
    if others and not {"attempts", "failures"} & roles.by_role.keys():
        why = "no value means failed, no column counts failures, and this is another final value"
        made.say("dead", others[0], 0.5, why, tuple(others[1:]))
        return others[0], retry
    why = "no value means failed: a row without attempts left keeps its state, and its counter excludes it"
    if strange:
        made.say("dead", None, 0.5, f"{why}; or is it {_listed(reading, strange)}?", tuple(strange))
    else:
        made.say("dead", None, CERTAIN, why)
    return None, retry


def _canceled(
    made: Proposal, reading: StateReading, by_class: dict[str, Any], answers: Mapping[str, Any], dead: Any
) -> Any:
    if "canceled" in answers:
        made.say("canceled", answers["canceled"], 1.0, SAID)
        return answers["canceled"]
    for value, meaning in by_class.get(CANCELED, []):
        if vocabulary.words(reading.column.meanings.get(value, value)).startswith(_CANCEL) and value != dead:
            made.say("canceled", value, meaning.sure, meaning.why)
            return value
    return None


def _done(
    made: Proposal, reading: StateReading, by_class: dict[str, Any], answers: Mapping[str, Any], ready: Any
) -> Any:
    column = reading.column
    if "done" in answers:
        made.say("done", answers["done"], 1.0, SAID)
        return answers["done"]
    strange = reading.unplaced()
    if candidates := by_class.get(DONE, []):
        leader = next((one for one in candidates if _leads(reading, one, candidates)), None)
        if leader is None:
            every = tuple(value for value, _ in candidates)
            made.ask("done", f"several values of {column.name} may mean done: {_listed(reading, every)}", every)
            return None
        value, meaning = leader
        others = tuple(v for v, _ in candidates if v != value)
        sure, why = max(meaning.sure, CERTAIN if column.allowed or reading.rows(value) else 0.6), meaning.why
        if reading.rows(value):
            why += f", and {column.rows_of(value)} {'has' if reading.rows(value) == 1 else 'have'} it"
        if others:
            sure, why = min(sure, 0.8), f"{why}; {_listed(reading, others)} may mean done, too"
        many = [v for v in strange if reading.rows(v) > max(reading.rows(value), reading.rows(ready), _FEW_ROWS)]
        if many and "ready" not in answers:
            sure, why = 0.5, f"{why}; but {_listed(reading, many)} is not a known word"
        made.say("done", value, sure, why, (*others, *many))
        return value
    alone = vocabulary.of_things(ready) and not by_class.keys() & {RUNNING, FAILED, RETRY}
    if alone and "ready" not in answers:
        made.ask("done", f"{ready!r} may not mean work to do: no other value looks like a state of work", ())
        return None
    if not strange and (word := _own_word(reading, ready, DONE)):
        made.say("done", word, 0.6, "no done row was seen, and the column takes any text", ())
        return word
    others = tuple(v for v in _known_values(reading) if v in strange and v != ready) or _known_values(reading)
    made.ask("done", f"which value of {column.name} means done? {_listed(reading, others)}", others)
    return None


def _leads(reading: StateReading, one: tuple[Any, Any], candidates: list[tuple[Any, Any]]) -> bool:
    """Whether a value is clearly the right one: no other value has a better word or more rows."""
    value, meaning = one
    rows = reading.rows(value)
    for other, theirs in candidates:
        if other == value:
            continue
        if rows and not reading.rows(other):
            # A plain word that no row has yet may be the end of the way on which these rows are.
            outdone = theirs.sure == 1.0 > meaning.sure
        else:
            mine, its = (meaning.sure, rows), (theirs.sure, reading.rows(other))
            outdone = mine == its or mine[0] < its[0] or mine[1] < its[1]
        if outdone:
            return False
    return True


def _running(
    made: Proposal,
    reading: StateReading,
    by_class: dict[str, Any],
    roles: Roles,
    answers: Mapping[str, Any],
    ready: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What running writes, and what the same columns hold while a row is idle."""
    column = reading.column
    if "running" in answers:
        made.say("running", answers["running"], 1.0, SAID)
        return {column.name: answers["running"]}, {}
    if candidates := by_class.get(RUNNING, []):
        # One that rows rest in is no better for that: rows pass through the right one.
        candidates = sorted(candidates, key=lambda one: (-one[1].sure, one[1].rank))
        (value, meaning), others = candidates[0], tuple(v for v, _ in candidates[1:])
        rivals = [v for v, m in candidates[1:] if m.sure == meaning.sure]
        sure, why = max(meaning.sure, CERTAIN), meaning.why
        if rivals:
            sure, why = 0.6, f"{why}, and so may {_listed(reading, rivals)}"
        made.say("running", value, sure, why, others)
        return {column.name: value}, {}
    if flag := reading.flag(RUNNING):
        made.say("running", f"{flag.name} is true", 0.9, f"{flag.name} marks rows that are being processed")
        return {flag.name: True}, {flag.name: [False, None] if flag.nullable else False}
    if word := _own_word(reading, ready, RUNNING):
        made.say("running", word, 0.6, "no running row was seen, and the column takes any text", ())
        return {column.name: word}, {}
    strange = _unexplained(reading, answers, ready)
    return _marked(made, roles, f"{column.name} has no value for it", _listed(reading, strange), tuple(strange))


def _own_word(reading: StateReading, ready: Any, state: str) -> str | None:
    """A word of ours for a state, in the style of the table's own, where the column takes any text."""
    column = reading.column
    words = [value for value in (ready, *reading.values()) if isinstance(value, str) and value]
    if column.kind != "text" or column.allowed or isinstance(ready, list):
        return None
    word = vocabulary.styled(vocabulary.partner(ready if isinstance(ready, str) else "", state), (words or [""])[0])
    taken = {value for value in reading.values() if isinstance(value, str)}
    return word if word not in taken and (not column.length or len(word) <= column.length) else None


def _marked(
    made: Proposal, roles: Roles, lack: str, listed: str = "", strange: tuple[Any, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Running as a time that is set: a column that is there, or one to be added."""
    name = roles.by_role.get("claimed_at")
    column = made.facts.column(name) if name else None
    if name is None or column is None or not column.nullable:
        name = roles.own_name("claimed_at")
        roles.want("claimed_at", name)
        made.wanted = (*made.wanted, name)
        why = f"{lack}; rowmill migrate adds {name}"
        if strange:
            made.say("running", f"{name} is set", 0.5, f"{why}; or is it {listed}?", strange, described=True)
        else:
            made.say("running", f"{name} is set", 0.8, why)
    else:
        made.say("running", f"{name} is set", 0.8, f"{lack}, and {name} says when processing started")
    return {name: NOW}, {name: None}


def _unexplained(reading: StateReading, answers: Mapping[str, Any], ready: Any) -> list[Any]:
    """Values that rows have, and that neither their words nor a person explains."""
    given = [ready, *(answers[state] for state in DECLARED if state in answers)]
    explained = [value for one in given for value in (one if isinstance(one, list) else [one])]
    return [value for value in reading.unplaced() if reading.rows(value) and value not in explained]


def _left_over(made: Proposal, reading: StateReading, taken: set[Any]) -> None:
    """Note rows in values that no state of the lane covers, with their number, and values without a known meaning."""
    left = [v for v in reading.values() if _hashed(v) not in taken and (reading.rows(v) or reading.meaning(v) is None)]
    left = [v for v in left if v is not None or reading.rows(v)]
    if left:
        left.sort(key=lambda value: -reading.rows(value))
        made.notes.append(f"{_listed(reading, left)}: in no state of this lane; such rows are left alone")


def _known_values(reading: StateReading) -> tuple[Any, ...]:
    return tuple(v for v in reading.values() if v is not None)[:20]


def _listed(reading: StateReading, values: Iterable[Any]) -> str:
    """Values with their words and rows: ``3 'parsed' (44,000 rows), 4 'archived' (no rows)``."""
    return ", ".join(f"{reading.column.shown(value)} ({reading.column.rows_of(value)})" for value in values)


# -- flags and times


def _flagged(made: Proposal, reading: StateReading, roles: Roles, answers: Mapping[str, Any]) -> None:
    """A flag that turns true, or a time that is set, when a row is done."""
    column = reading.column
    made.say("state", column.name, reading.sure, reading.why)
    done: dict[str, Any]
    if reading.kind == "flag":
        ready: dict[str, Any] = {column.name: [False, None] if column.nullable else False}
        done = {column.name: True, **roles.times_of(DONE)}
        made.say("ready", f"{column.name} is false", 0.8, f"{column.name} turns true when a row is done")
    else:
        ready, done = {column.name: None}, {column.name: NOW, **roles.times_of(DONE)}
        made.say("ready", f"{column.name} is null", 0.8, f"{column.name} is set when a row is done")
    made.say("done", f"{column.name} is {'true' if reading.kind == 'flag' else 'set'}", 0.8, "the other way round")
    failed = reading.flag(FAILED)
    failed_at = next(iter(roles.times_of(FAILED)), None)
    dead: dict[str, Any] | None = None
    if failed:
        ready[failed.name] = [False, None] if failed.nullable else False
        dead = {failed.name: True, **roles.times_of(FAILED)}
    elif failed_at:
        ready[failed_at] = None
        dead = roles.times_of(FAILED)
    ends = any(word in vocabulary.words(column.name).split() for word in _PLAIN_ENDS)
    if dead is not None:
        made.say("dead", f"{next(iter(dead))} is set", 0.8, "its name says so")
    elif ends and "error" in roles.by_role and not {"attempts", "failures"} & roles.by_role.keys():
        dead = {name: value for name, value in done.items() if name == column.name}
        made.say("dead", f"{column.name}, too", 0.6, f"a row that failed ends as well, with {roles.by_role['error']}")
    else:
        made.say("dead", None, 0.7, "no column means failed: a counter excludes rows without attempts left")
    busy = reading.flag(RUNNING)
    if busy:
        made.say("running", f"{busy.name} is true", 0.9, f"{busy.name} marks rows that are being processed")
        running, idle = {busy.name: True}, {busy.name: [False, None] if busy.nullable else False}
        done[busy.name] = False
        if dead is not None:
            dead[busy.name] = False
    else:
        running, idle = _marked(made, roles, "no other column marks rows that are being processed")
    made.options["ready"] = {**ready, **idle, **made.options.pop("ready", {})}
    made.options["running"], made.options["done"] = running, done
    if dead is not None:
        made.options["dead"] = dead


def _soft_deletes(made: Proposal, reading: StateReading) -> None:
    """Exclude rows that are marked as deleted."""
    for column in made.facts.columns:
        if roles_words.snake(column.name) in ("deleted_at", "is_deleted", "deleted", "deleted_on") and (
            column.name != reading.column.name
        ):
            if column.kind == "bool":
                value: Any = [False, None] if column.nullable else False
            elif column.kind == "time" and column.nullable:
                value = None
            else:
                continue
            made.options["ready"] = {column.name: value}
            made.notes.append(f"rows with {column.name} are left alone")
            return


# -- the rest of the declaration


def _finish(made: Proposal, reading: StateReading, roles: Roles, answers: Mapping[str, Any]) -> None:
    made.options = {key: made.options[key] for key in DECLARED if key in made.options}
    listed = ("state", *DECLARED)
    made.choices.sort(key=lambda choice: listed.index(choice.what))
    used = {c for state in made.options.values() for c in state}
    declared = roles.declared(used)
    for role, column in roles.by_role.items():
        sure, others = (0.6, (None,)) if role in roles.by_rows else (1.0 if role not in declared else 0.8, None)
        made.say(f"role {role}", column, sure, roles.why.get(role, "its name says so"), others)
    made.notes += roles.notes
    if "dead" not in made.options and not {"attempts", "failures"} & roles.by_role.keys():
        made.wanted = (*made.wanted, roles.own_name("attempts"))
    if declared:
        made.options["roles"] = declared
    fenced = {"worker", "claimed_at"} & roles.by_role.keys() or made.wanted
    if not fenced:
        made.options["unfenced"] = True
        lost = (
            "" if {"updated_at", "heartbeat_at"} & roles.by_role.keys() else ", and a dead worker's row stays running"
        )
        made.notes.append(
            "nothing in the table tells two claims apart, so a worker that comes back late could overwrite another's"
            f" outcome{lost}; the columns that `rowmill migrate` adds close that gap, with no change to the file"
        )
    taken = {reading.column.name, *used, *roles.by_role.values()}
    _order(made, taken, answers.get("order_by"))
    taken |= {made.order, *made.facts.key}
    made.unused = tuple(column.name for column in made.facts.columns if column.name not in taken)
    if "priority" in roles.by_role:
        column = roles.by_role["priority"]
        made.notes.append(
            f"{column}: lower goes first; if higher is more urgent in your table:"
            f' roles={{"priority": None}}, order_by=["{column} desc", ...]'
        )


def _order(made: Proposal, taken: set[str], chosen: str | None) -> None:
    """The order in which rows are claimed: as a person ``said``, or oldest first if a column has their age."""
    facts = made.facts
    if chosen is not None:
        if facts.column(chosen) is None:
            known = [column.name for column in facts.columns]
            raise DeclarationError(
                f"table {facts.fullname!r} has no column {chosen!r}", hint=did_you_mean(chosen, known)
            )
        name, sure, why = chosen, 1.0, SAID
    elif born := birth(facts, taken):
        name, sure, why = born[0].name, 0.9, "the oldest first"
        if not born[1]:
            sure, why = 0.8, "the database fills it in at insert: the oldest first"
    else:
        if any((column := facts.column(name)) is not None and column.kind != "int" for name in facts.key):
            why = "no column says when a row was made, so this is not the oldest first: --order-by COLUMN"
            made.say("order", ", ".join(facts.key), 0.5, why)
        return
    made.say("order", name, sure, why)
    made.order = name
    if roles_words.snake(name) not in roles_words.CREATED:
        made.options["order_by"] = [name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '""') + '"']
