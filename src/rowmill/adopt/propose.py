"""From what a look at a table found to the lane over it: a pure function, with reasons and how sure it is.

What cannot be told is asked, never guessed: a proposal with open questions is not one to run.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import Any

from ..declare import roles as roles_words
from ..declare.states import NOW
from ..errors import DeclarationError
from . import vocabulary
from .proposal import Proposal, Question
from .propose_roles import Roles, birth, propose_roles
from .propose_states import StateReading, read_states
from .table_facts import TableFacts
from .vocabulary import CANCELED, DEAD, DONE, FAILED, HELD, READY, RETRY, RUNNING

#: Ends that do not say whether they are good ones: with an error beside it, a failed row ends so, too.
_PLAIN_ENDS = ("finished", "ended", "completed", "processed", "done", "handled", "executed")
_CANCEL = ("cancel", "abort", "annul", "storn", "abgebroch", "anul", "iptal", "отмен", "скасов", "取消", "キャンセル")
_TAKEN = {"mill", "job", "Mill", "NOW", "os", "td"}


def propose(facts: TableFacts, answers: Mapping[str, Any] | None = None) -> Proposal:
    """The lane over a table. ``answers``: state, ready, running, done, dead, retry, as a person gave them."""
    answers = dict(answers or {})
    made = Proposal(facts, lane_name(facts.name))
    if not facts.key:
        raise DeclarationError(
            f"table {facts.fullname!r} has no primary key, so a row cannot be told from its copy",
            hint=f"alter table {facts.fullname} add primary key (...)"
            if facts.dialect != "sqlite"
            else "SQLite cannot add primary key columns: make a new table with a key and copy the rows",
        )
    reading = read_states(facts, answers.get("state"))
    if reading.question is not None:
        made.questions.append(Question("state", reading.question, reading.columns))
        return made
    roles = propose_roles(facts, reading)
    _soft_deletes(made, reading)
    if reading.kind == "valued":
        _valued(made, reading, roles, answers)
    else:
        _flagged(made, reading, roles, answers)
    if made.questions:
        return made
    _finish(made, reading, roles)
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
    back = {c: v for c, v in idle.items() if c != roles.found.get("claimed_at") and v is False}
    made.options["done"] = {state: done, **back, **roles.times_of(DONE)}
    if retry is not None:
        made.options["retry"] = {state: retry, **{c: False if v == [False, None] else v for c, v in idle.items()}}
    if dead is not None:
        made.options["dead"] = {state: dead, **back, **roles.times_of(FAILED)}
    canceled = [v for v, m in by_class.get(CANCELED, []) if vocabulary.words(v).startswith(_CANCEL) and v != dead]
    if canceled:
        made.options["canceled"] = {state: canceled[0], **back}
    taken = {*map(_hashed, values), *map(_hashed, (running.get(state), done, dead, *canceled[:1]))}
    _left_over(made, reading, taken)


_ASKED = object()


def _hashed(value: Any) -> Any:
    return (type(value).__name__, value)


def _ready(made: Proposal, reading: StateReading, by_class: dict[str, Any], answers: Mapping[str, Any]) -> Any:
    column = reading.column
    if "ready" in answers:
        made.say("ready", answers["ready"], 1.0, "you said so")
        return answers["ready"]
    found = by_class.get(READY, [])
    born = column.default if column.has_default else None
    values = [value for value, _ in found]
    if born is not None and born in values:
        sure = next(m.sure for v, m in found if v == born)
        others = [v for v in values if v != born and column.seen.get(v)]
        why = f"{dict(found)[born].why}, and rows are born with it"
        if others and sure < 1.0:
            every = (born, *others)
            made.ask("ready", f"several values of {column.name} look ready: {_listed(every)}", every)
            return _ASKED
        if others:
            why += f"; {_listed(others)} may be ready too: --ready {born} --ready {others[0]} takes both"
        made.say("ready", born, min(sure + 0.2, 1.0) if not others else 0.6, why)
        return born
    birth_says = reading.meaning(born) if born is not None else None
    if values and birth_says is not None and birth_says.state not in (HELD, READY):
        every = (born, *values)
        made.ask("ready", f"rows are born with {born!r}, and yet {_listed(values)} sounds ready", every)
        return _ASKED
    hinted = [v for v in values if v in column.indexed_values]
    exact = [v for v, m in found if m.sure == 1.0]
    for few, why in ((values, ""), (hinted, " and an index is made for it"), (exact, "")):
        if len(few) == 1:
            made.say("ready", few[0], dict(found)[few[0]].sure, dict(found)[few[0]].why + why)
            return few[0]
    if values:
        made.ask("ready", f"several values of {column.name} look ready: {_listed(values)}", tuple(values))
        return _ASKED
    ended = by_class.get(DONE) or by_class.get(FAILED)
    if born is not None and (ended or by_class.get(RUNNING)) and reading.meaning(born) is None:
        made.say("ready", born, 0.6, f"rows are born with {born!r}, and other values say how they end")
        return born
    if born is None and column.nullable and ended and (column.seen.get(None) or not reading.unplaced()):
        made.say("ready", None, 0.7, f"{column.name} is NULL until something happens to a row")
        return None
    made.ask("ready", f"no value of {column.name} is a word for ready that I know", _known_values(reading))
    return _ASKED


def _ends(
    made: Proposal,
    reading: StateReading,
    by_class: dict[str, Any],
    roles: Roles,
    answers: Mapping[str, Any],
    ready: Any,
) -> tuple[Any, Any]:
    """Dead and retry."""
    retry = answers.get("retry")
    failed, dead = by_class.get(FAILED, []), by_class.get(DEAD, [])
    again = by_class.get(RETRY, [])
    if retry is None and again:
        retry = again[0][0]
        made.say("retry", retry, again[0][1].sure, again[0][1].why)
    if "dead" in answers:
        made.say("dead", answers["dead"], 1.0, "you said so")
        return answers["dead"], retry
    counted = {"attempts", "failures"} & roles.found.keys() and "run_after" in roles.found
    if failed and dead and retry is None and counted:
        retry = failed[0][0]
        made.say("retry", retry, 0.6, f"{dead[0][0]!r} is for good, and the table counts attempts and knows a due time,"
                 f" so {retry!r} is tried again")  # fmt: skip
        made.say("dead", dead[0][0], 0.9, dead[0][1].why)
        return dead[0][0], retry
    for value, meaning in (*failed, *dead):
        if value != ready:
            made.say("dead", value, max(meaning.sure, 0.6), meaning.why)
            return value, retry
    if word := _own_word(reading, ready, FAILED):
        made.say("dead", word, 0.6, "no row is seen that failed, and the column takes any text")
        return word, retry
    others = [value for value, _ in by_class.get(CANCELED, [])]
    if others and not {"attempts", "failures"} & roles.found.keys():
        made.say("dead", others[0], 0.5, "no value says failed, nothing counts failures, and this is another end")
        return others[0], retry
    why = "no value says failed: a row that failed too often stays as it is, and its counter keeps it out"
    made.say("dead", None, 0.7, why)
    return None, retry


def _done(
    made: Proposal, reading: StateReading, by_class: dict[str, Any], answers: Mapping[str, Any], ready: Any
) -> Any:
    column = reading.column
    if "done" in answers:
        made.say("done", answers["done"], 1.0, "you said so")
        return answers["done"]
    found = by_class.get(DONE, [])
    if found:
        value, meaning = found[0]
        rivals = [v for v, m in found[1:] if m.sure == meaning.sure and (m.sure < 1.0 or m.rank == meaning.rank)]
        if rivals:
            every = (value, *rivals)
            made.ask("done", f"several values of {column.name} may mean done: {_listed(every)}", every)
            return None
        made.say("done", value, max(meaning.sure, 0.56) if len(found) == 1 else meaning.sure, meaning.why)
        return value
    strange = reading.unplaced()
    alone = vocabulary.of_things(ready) and not by_class.keys() & {RUNNING, FAILED, RETRY}
    if alone and "ready" not in answers:
        made.ask("done", f"{ready!r} may mean something else than work to do: no other value says so", ())
        return None
    if not strange and (word := _own_word(reading, ready, DONE)):
        made.say("done", word, 0.6, "no row is seen that is done, and the column takes any text")
        return word
    others = tuple(v for v in _known_values(reading) if v in strange) or _known_values(reading)
    made.ask("done", f"no value of {column.name} is a word for done that I know", others)
    return None


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
        made.say("running", answers["running"], 1.0, "you said so")
        return {column.name: answers["running"]}, {}
    if found := by_class.get(RUNNING, []):
        value, meaning = found[0]
        made.say("running", value, max(meaning.sure, 0.56), meaning.why)
        return {column.name: value}, {}
    if flag := reading.flag(RUNNING):
        made.say("running", f"{flag.name} is true", 0.9, f"{flag.name} says that somebody is at it")
        return {flag.name: True}, {flag.name: [False, None] if flag.nullable else False}
    if word := _own_word(reading, ready, RUNNING):
        made.say("running", word, 0.6, "no row is seen running, and the column takes any text")
        return {column.name: word}, {}
    return _marked(made, roles, f"{column.name} has no value for it")


def _own_word(reading: StateReading, ready: Any, state: str) -> str | None:
    """A word of ours for a state, in the style of the table's own, where the column takes any text."""
    column = reading.column
    words = [value for value in (ready, *reading.values()) if isinstance(value, str) and value]
    if column.kind != "text" or column.allowed or isinstance(ready, list):
        return None
    word = vocabulary.styled(vocabulary.partner(ready if isinstance(ready, str) else "", state), (words or [""])[0])
    taken = {value for value in reading.values() if isinstance(value, str)}
    return word if word not in taken and (not column.length or len(word) <= column.length) else None


def _marked(made: Proposal, roles: Roles, lack: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Running as a time that is set: a column that is there, or one to be added."""
    name = roles.found.get("claimed_at")
    held = made.facts.column(name) if name else None
    if name is None or held is None or not held.nullable:
        name = roles.own_name("claimed_at")
        roles.want("claimed_at", name)
        made.wanted = (*made.wanted, name)
        made.say("running", f"{name} is set", 0.8, f"{lack}; {name} is to be added: rowmill migrate")
    else:
        made.say("running", f"{name} is set", 0.8, f"{lack}, and {name} says since when somebody is at it")
    return {name: NOW}, {name: None}


def _left_over(made: Proposal, reading: StateReading, taken: set[Any]) -> None:
    left = [v for v in reading.values() if v is not None and _hashed(v) not in taken]
    placed = [v for v in left if (m := reading.meaning(v)) is not None and m.state in (CANCELED, HELD, DEAD, FAILED)]
    strange = [v for v in left if v not in placed]
    if strange:
        counts = [f"{v!r}" + (f" ({reading.column.seen[v]:,} rows)" if reading.column.seen.get(v) else "")
                  for v in strange]  # fmt: skip
        made.notes.append(f"{', '.join(counts)}: in no state of this lane; such rows are left alone")


def _known_values(reading: StateReading) -> tuple[Any, ...]:
    return tuple(v for v in reading.values() if v is not None)[:20]


def _listed(values: Any) -> str:
    return ", ".join(repr(value) for value in values)


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
    elif ends and "error" in roles.found and not {"attempts", "failures"} & roles.found.keys():
        dead = {name: value for name, value in done.items() if name == column.name}
        made.say("dead", f"{column.name}, too", 0.6, f"a row that failed ends as well, with {roles.found['error']}")
    else:
        made.say("dead", None, 0.7, "nothing says failed: a counter keeps rows out that failed too often")
    busy = reading.flag(RUNNING)
    if busy:
        made.say("running", f"{busy.name} is true", 0.9, f"{busy.name} says that somebody is at it")
        running, idle = {busy.name: True}, {busy.name: [False, None] if busy.nullable else False}
        done[busy.name] = False
        if dead is not None:
            dead[busy.name] = False
    else:
        running, idle = _marked(made, roles, "nothing else says that somebody is at it")
    made.options["ready"] = {**ready, **idle, **made.options.pop("ready", {})}
    made.options["running"], made.options["done"] = running, done
    if dead is not None:
        made.options["dead"] = dead


def _soft_deletes(made: Proposal, reading: StateReading) -> None:
    """Rows that are marked as deleted are nobody's work."""
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


def _finish(made: Proposal, reading: StateReading, roles: Roles) -> None:
    order = ("ready", "running", "done", "retry", "dead", "canceled")
    made.options = {key: made.options[key] for key in order if key in made.options}
    said = ("state", *order)
    made.choices.sort(key=lambda choice: said.index(choice.what))
    used = {c for state in made.options.values() for c in state}
    declared = roles.declared(used)
    for role, column in roles.found.items():
        made.say(f"role {role}", column, 1.0 if role not in declared else 0.8, roles.why.get(role, "its name says so"))
    made.notes += roles.notes
    if "dead" not in made.options and not {"attempts", "failures"} & roles.found.keys():
        made.wanted = (*made.wanted, roles.own_name("attempts"))
    if declared:
        made.options["roles"] = declared
    fenced = {"worker", "claimed_at"} & roles.found.keys() or made.wanted
    if not fenced:
        made.options["unfenced"] = True
        lost = "" if {"updated_at", "heartbeat_at"} & roles.found.keys() else ", and a dead worker's row stays running"
        made.notes.append(
            "nothing in the table tells two claims apart, so a worker that comes back late could overwrite another's"
            f" outcome{lost}; the columns that `rowmill migrate` adds close that gap, with no change to the file"
        )
    if born := birth(made.facts):
        if roles_words.snake(born.name) not in ("created_at", "inserted_at", "created", "created_on"):
            made.options["order_by"] = [_ordered(born.name)]
        made.say("order", born.name, 0.9, "the oldest first")
    if "priority" in roles.found:
        column = roles.found["priority"]
        made.notes.append(
            f"{column}: lower goes first; if higher is more urgent in your table:"
            f' roles={{"priority": None}}, order_by=["{column} desc", ...]'
        )


def _ordered(name: str) -> str:
    """A column's name as ``order_by`` reads it."""
    return name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '""') + '"'
