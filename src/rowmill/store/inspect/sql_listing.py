"""A lane's statements as they will run, for people to read."""

from __future__ import annotations

from ...declare.outcome import KINDS
from ..gates.claim_by_key_sql import ClaimByKeyStatements
from ..lane.postgres_statements import PostgresStatements
from .gate_view import lane_gates
from .lane_view import LaneView


async def texts(view: LaneView) -> dict[str, str]:
    """The statements of a lane in one environment, by what they do."""
    say, lane, found = view.statements, view.lane, dict[str, str]()
    if lane.groups:
        found |= await _gated(view)
    elif isinstance(say, PostgresStatements):
        found["claim"] = say.claim()
        if say.bound() is not None:
            found["claim, from the remembered lower bound"] = say.claim(bounded=True)
    elif say.loose():
        found["claim"] = say.claim(placed=True)
        found["claim, of rows without a place in the order"] = say.claim(placed=False)
    else:
        found["claim"] = say.claim()
    for kind in KINDS:
        found[f"settle, {kind}"] = say.settle(kind, ())
        if kind == "done" and isinstance(say, PostgresStatements) and say.in_arrays:
            found["settle, done, with columns"] = found["settle, done"]
            found["settle, done"] = say.settle_done()
    if view.binding.renew != "none":
        found["renew"] = say.renew()
    if "progress" in view.binding.roles:
        found["progress"] = say.progress()
    if isinstance(say, PostgresStatements):
        found["sweep"] = say.sweep(lane.lease)
        return found
    found["sweep, find"] = say.find_stale(lane.lease)
    found["sweep, back to ready"] = say.sweep(poison=False)
    if say.poison() is not None:
        found["sweep, poison"] = say.sweep(poison=True)
    return found


async def _gated(view: LaneView) -> dict[str, str]:
    """The claim through gates: one statement, or the last of those that a transaction is made of."""
    gates = await lane_gates(view)
    say, dims, table = view.statements, gates.dims, gates.rows.table
    keyed = [dim for dim in dims if dim.phrase is not None]
    if isinstance(say, PostgresStatements):
        if len(dims) == 1 and keyed:
            by_key = ClaimByKeyStatements(say, dims[0], table)
            return {
                "claim, each key in turn": by_key.claim(begun=True),
                "claim, when held back rows may go": by_key.when(),
                "claim, gate rows of keys that are over": by_key.forget(),
                "claim, stretches of keys": by_key.mark_out(by_key.divide()),
            }
        phrases, kinds = [str(dim.phrase) for dim in keyed], [dim.kind for dim in keyed]
        return {"claim, after the gate rows are locked and running rows counted": say.claim_units(phrases, kinds, ())}
    also = tuple(dim.matches(f":k{i}") for i, dim in enumerate(keyed)) or ("1 = 1",)
    return {"claim, after running rows are counted": say.claim(also=also)}


_HELD = "The claims that still hold: the state, the holder, the claim's own time and count are as the claim left them."
_PASSED = "What somebody else has locked at this moment is passed over, and tried again at once: nobody waits."
_TAKEN = "Taken in the statement that found them, with the mark the fence will ask for."
_OUTCOME = "The outcome, for a whole batch of claims; a handler's own columns are set here, too."
_FENCE = "The fence: a lost claim writes nothing."
_WRITTEN = "What was written; the others are read before they are called lost."
#: Why a step is as it is: the statement's name, how the step's line begins, why.
_WHY = (
    ("claim", "with picked", "Materialized: the walk stops at the limit, and is done once."),
    ("claim", "    and (", "Nothing below where the last claim ended: dead index entries are not walked again."),
    ("claim", "  for no key", "A row that is locked is being claimed: it is passed over, and nobody gets it twice."
     " No key: rows that refer to it do not hide it."),
    ("claim", "), taken", _TAKEN),
    ("claim", "select ", "Handed over in the lane's order."),
    ("claim", "update ", _TAKEN + " Nothing comes between looking and taking."),
    ("claim", "  select ", "The ready rows, in the lane's order."),
    ("settle", "with held", _HELD),
    ("renew", "with held", _HELD),
    ("progress", "with held", _HELD),
    ("progress", "where ", _FENCE),
    ("settle", "    for no key", _PASSED),
    ("renew", "    for no key", _PASSED + " Anything else would deadlock with outcomes that are being written."),
    ("progress", "    for no key", _PASSED),
    ("settle", "update ", _OUTCOME),
    ("settle", "  update ", _OUTCOME),
    ("renew", "update ", "The sign of life and nothing else: no index is touched."),
    ("settle", "where ", _FENCE),
    ("settle", "  where t.id = any", _FENCE),
    ("renew", "where ", "The fence: a lost claim is not renewed."),
    ("settle", "returning ", _WRITTEN),
    ("settle", "select array_agg", _WRITTEN),
    ("renew", "returning ", "What was renewed; the others are read before they are called lost."),
    ("sweep", "with held", "Running rows without a sign of life for longer than the lease, and whether that is once"
     " too often."),
    ("sweep", "  for no key", "A row that is locked is being written by its holder: it lives."),
    ("sweep", "select ", "Running rows without a sign of life for longer than the lease."),
    ("sweep", "update ", "Back to ready without counting as a failure; dead where it was taken back too often."),
    ("sweep", "returning ", "Who held them, for the log."),
)  # fmt: skip


def commented(name: str, text: str) -> str:
    """A statement with a comment above each step that says why it is there."""
    whys = [(start, why) for kind, start, why in _WHY if name.startswith(kind)]
    lines: list[str] = []
    inside = ""  # a literal or a name that goes on over several lines is left as it is
    for line in text.split("\n"):
        found = None if inside else next((each for each in whys if line.startswith(each[0])), None)
        if found:
            whys.remove(found)
            lines.append(f"{line[: len(line) - len(line.lstrip())]}-- {found[1]}")
        lines.append(line)
        for sign in line:
            if sign in "'\"" and inside in ("", sign):
                inside = "" if inside else sign
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Text that may stand in a comment: nothing in it can end the line."""
    return " ".join(text.split())
