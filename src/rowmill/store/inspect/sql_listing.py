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


_HELD = "Claims that are still valid: state, worker, claim time and counter are as the claim left them."
_PASSED = "Skip rows that another transaction has locked, and retry them at once, so that nothing waits."
_TAKEN = "Claim them in the statement that found them, and write what the fence checks later."
_OUTCOME = "Write the outcome of a whole batch of claims, with the columns that handlers returned."
_FENCE = "The fence: a lost claim writes nothing."
_WRITTEN = "What was written. The others are read again before they count as lost."
#: Why a step is as it is: the statement's name, how the step's line begins, why.
_WHY = (
    ("claim", "with picked", "Materialized: the scan runs once, and stops at the limit."),
    ("claim", "    and (", "Start where the last claim ended, so that dead index entries are not scanned again."),
    ("claim", "  for no key", "Skip locked rows: another worker is claiming them, so no row is claimed twice."
     " No key: foreign keys to a row do not block its claim."),
    ("claim", "), taken", _TAKEN),
    ("claim", "select ", "Return them in the lane's order."),
    ("claim", "update ", _TAKEN + " No other claim can come in between."),
    ("claim", "  select ", "The ready rows, in the lane's order."),
    ("settle", "with held", _HELD),
    ("renew", "with held", _HELD),
    ("progress", "with held", _HELD),
    ("progress", "where ", _FENCE),
    ("settle", "    for no key", _PASSED),
    ("renew", "    for no key", _PASSED + " Waiting could deadlock with outcomes that are being written."),
    ("progress", "    for no key", _PASSED),
    ("settle", "update ", _OUTCOME),
    ("settle", "  update ", _OUTCOME),
    ("renew", "update ", "Write only the heartbeat: no index changes."),
    ("settle", "where ", _FENCE),
    ("settle", "  where t.id = any", _FENCE),
    ("renew", "where ", "The fence: a lost claim is not renewed."),
    ("settle", "returning ", _WRITTEN),
    ("settle", "select array_agg", _WRITTEN),
    ("renew", "returning ", "What was renewed. The others are read again before they count as lost."),
    ("sweep", "with held", "Running rows without a heartbeat for longer than the lease, and whether they"
     " were taken back too often."),
    ("sweep", "  for no key", "Skip locked rows: their worker is writing to them, so it is alive."),
    ("sweep", "select ", "Running rows without a heartbeat for longer than the lease."),
    ("sweep", "update ", "Move them back to ready, without counting a failure; to dead if they were taken"
     " back too often."),
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
