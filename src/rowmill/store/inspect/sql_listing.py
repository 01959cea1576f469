"""A lane's statements as they will run, for people to read."""

from __future__ import annotations

from ...declare.outcome import KINDS
from ...declare.states import SEEN
from ..gates.claim_by_key_sql import ClaimByKeyStatements
from ..lane.postgres_statements import PostgresStatements
from .gate_view import lane_gates
from .lane_view import LaneView


async def texts(view: LaneView) -> dict[str, str]:
    """The statements of a lane in one environment, by what they do; of several shards, those of the first."""
    statements, lane = view.statements.one(), view.lane
    texts = await _gated(view) if lane.groups else statements.claim_texts()
    texts |= statements.done_texts()
    for kind in KINDS:
        texts.setdefault(f"settle, {kind}", statements.settle(kind, ()))
    if lane.inputs:
        texts["settle, stale"] = statements.settle("stale", ())
    if view.binding.renew != "none":
        texts["renew"] = statements.renew()
    if "progress" in view.binding.roles:
        texts["progress"] = statements.progress()
    return texts | view.statements.sweep_texts(lane.lease)


async def every(view: LaneView) -> dict[str, str]:
    """Every statement about the lane's rows: also those that only read, and those of its shards."""
    statements, lane = view.statements, view.lane
    listed = await texts(view)
    listed |= {"read": statements.read(), "is any row ready": f"select 1 where {statements.ready_probe()}"}
    listed["is any row running"] = f"select 1 where {statements.running_probe()}"
    if view.binding.expires:
        listed["expire"] = statements.expire(1000)
    if "run_after" in view.binding.roles and not lane.own:
        table = view.database.own("rowmill_waits")
        listed["waits, whose condition is true"] = statements.find_waiting(table, "1 = 1", "1 = 1", 1000)
        listed["waits, that are over"] = statements.waits_no_more(table)
    for state in SEEN:
        if condition := view.condition(state):
            listed[f"status, {state}"] = f"select count(*) from {statements.table} where {condition}"
    if view.store.shards is not None:
        listed["shards with ready rows"] = statements.ready_shards()
    return listed


async def _gated(view: LaneView) -> dict[str, str]:
    """The claim through gates: one statement, or the last of those that a transaction is made of."""
    gates = await lane_gates(view)
    statements, dims, table = view.statements.one(), gates.dims, gates.rows.table
    keyed = [dim for dim in dims if dim.phrase is not None]
    if isinstance(statements, PostgresStatements):
        if len(dims) == 1 and keyed:
            by_key = ClaimByKeyStatements(statements, dims[0], table)
            created = {"claim, gate rows of new keys": by_key.create_keys()} if dims[0].group.rate else {}
            return {
                "claim, each key in turn": by_key.claim(after_last=True),
                **created,
                "claim, when held back rows may go": by_key.when(),
                "claim, gate rows of keys that are over": by_key.forget(),
                "claim, the first key range": by_key.create_first_range(),
                "claim, further key ranges": by_key.create_ranges(by_key.range_starts()),
            }
        phrases, kinds = [str(dim.phrase) for dim in keyed], [dim.kind for dim in keyed]
        return {
            "claim, after the gate rows are locked and running rows counted": statements.claim_units(phrases, kinds, ())
        }
    also = tuple(dim.matches(f":k{i}") for i, dim in enumerate(keyed)) or ("1 = 1",)
    return {"claim, after running rows are counted": statements.claim(also=also)}


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
        reason = None if inside else next((each for each in whys if line.startswith(each[0])), None)
        if reason:
            whys.remove(reason)
            lines.append(f"{line[: len(line) - len(line.lstrip())]}-- {reason[1]}")
        lines.append(line)
        for sign in line:
            if sign in "'\"" and inside in ("", sign):
                inside = "" if inside else sign
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Text that may stand in a comment: nothing in it can end the line."""
    return " ".join(text.split())
