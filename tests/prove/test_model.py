"""The store against its oracle: any sequence of verbs, faults and operators, rows are as support/model.py has them.

A rule-based machine drives the verbs that workers use (claim, renew, settle, finish, sweep, recover), what operators
do, and time, which only the database has: the clock of the process is wrong all along. After every step every column of
every row is compared. At the end of every example all that is left is worked off: each row reaches a final state.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Coroutine, Iterator
from datetime import timedelta as td
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import model
from databases import Db
from model import FINAL, End, Oracle
from model_ground import ENDS, SETUPS, SITES, Ground, Hold, WrongClock, all_of, hours, picked
from rowmill import Claim, Dead
from rowmill.engine.execute import decide
from rowmill.ops.row_actions import Operator, Selection
from rowmill.store.gates.pauses import Target, pause, resume
from rowmill.store.inspect.lane_view import view_lane
from rowmill.testing import Kit

#: The long form: ``make prove-model``, or as many examples as ROWMILL_MODEL says.
EXAMPLES = int(os.environ.get("ROWMILL_MODEL", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or 6, stateful_step_count=60 if EXAMPLES else 40, deadline=None, derandomize=not EXAMPLES,
    suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
    database=None, print_blob=True,
)  # fmt: skip
NEAR = 0.05  # hours: what an example may take, and less than anything here waits for


@pytest.fixture(autouse=True)
def _wrong_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process knows nothing of the time: neither rowmill's modules nor ``time.time``."""
    WrongClock.rule(monkeypatch)
    yield
    WrongClock.skew = td(0)


class Machine(RuleBasedStateMachine):
    """One example: a few workers, an operator, and time."""

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground, self.setup = ground, ground.setup
        ground.clear()
        self.oracle = Oracle(self.setup.gates, not self.setup.own, self.setup.inputs)
        if self.setup.own:
            self.oracle.states = ("ready",)  # type: ignore[assignment]
        self.runner = asyncio.Runner()
        self.mill = ground.mill(self._behave)
        self.kits: dict[str, Kit] = {}
        self.all_kits: list[Kit] = []
        self.holds: list[Hold] = []
        self.effects: dict[int, int] = {}
        self.number = 0
        self._plan: Any = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _behave_together(self, jobs: Any) -> Any:
        """The handler of a chunk does with each row what the step says; one that is poison fails its whole call."""
        if any(self._plan[job.id] == "poison" for job in jobs):
            raise ValueError("boom")
        answers = {}
        for job in reversed(jobs):
            match self._plan[job.id]:
                case "finish":
                    async with job.finish() as tx:
                        await tx.execute("insert into effects (page) values (:page)", {"page": job.id})
                        tx.set(result="finished")
                case "missing":
                    pass
                case name:
                    answers[job.id] = ENDS[name][0]()
        return answers

    async def _behave(self, job: Any) -> Any:
        """The handler does what the step says."""
        if self.setup.chunk is not None:
            return await self._behave_together(job)
        if self._plan != "finish":
            raise self._plan
        async with job.finish() as tx:
            await tx.execute("insert into effects (page) values (:page)", {"page": job.id})
            tx.set(**({} if self.setup.own else {"result": "finished"}))

    def kit(self, worker: str) -> Kit:
        if worker not in self.kits:
            self.kits[worker] = Kit(self.mill, worker_id=worker)
            self.all_kits.append(self.kits[worker])
            self.run(self.kits[worker].__aenter__())
        return self.kits[worker]

    def _hold(self, pick: int) -> Hold:
        return self.holds[pick % len(self.holds)]

    def read(self, text: str) -> Any:
        return self.run(self.database.read(lambda run: run(text, ())))

    @initialize(sites=st.lists(st.sampled_from(SITES), min_size=2, max_size=8))
    def begin(self, sites: list[str | None]) -> None:
        self.database = self.kit("w1")._databases["default"]
        now = "now()" if self.ground.postgres else "'now'"
        self.base = float(self.read(f"select {self.ground.at(now)}")[0][0])
        (self.enqueue if self.setup.own else self.add)(sites, 0)

    # -- rows come in

    @precondition(lambda self: not self.setup.own)
    @rule(sites=st.lists(st.sampled_from(SITES), min_size=1, max_size=4), delay=st.integers(0, 2),
          life=st.sampled_from([math.inf, 0.5, 2.5, 5.5]))  # fmt: skip
    def add(self, sites: list[str | None], delay: int, life: float = math.inf) -> None:
        expires = self.oracle.now + life if self.setup.expires else math.inf
        shard = (len(self.oracle.rows) + delay) % (self.setup.shards or 1)
        text = self.ground.insert(self.oracle.now + delay, expires, shard)

        def verb(run: Any) -> list[int]:
            return [run(text, (site,))[0][0] for site in sites]

        for id, site in zip(self.run(self.database.write(verb)), sites, strict=True):
            self.oracle.rows[id] = model.Row(id, site, self.oracle.now + delay, expires=expires, shard=shard)

    @precondition(lambda self: self.setup.own)
    @rule(keys=st.lists(st.sampled_from(SITES), min_size=1, max_size=4), delay=st.integers(0, 2))
    def enqueue(self, keys: list[str | None], delay: int) -> None:
        """A key that an unfinished job has is not enqueued again: the handle is that job's."""
        for key in keys:
            options = {"run_after": hours(delay)} if delay else {}
            handle = self.run(self.mill.tasks["work"].enqueue(key=key, **options))
            there = [r.id for r in self.oracle.rows.values() if key and r.site == key and r.state not in FINAL]
            if there:
                assert [handle.id] == there, "a second job with a key that is taken"
            else:
                assert handle.id not in self.oracle.rows
                self.oracle.rows[handle.id] = model.Row(
                    handle.id, key, self.oracle.now + delay, state=self.oracle.states[0]
                )

    # -- workers

    def _taken(self, kit: Kit, count: int, claims: list[Claim], recovered: bool = False) -> None:
        numbers = {}
        for claim in claims:
            self.number += 1
            assert claim.id not in numbers, "one row twice in one claim"
            numbers[claim.id] = self.number
            site = None if recovered or not self.setup.gates.any else self.oracle.rows[claim.id].site
            self.holds.append(Hold(self.number, claim, kit, 0, site))
        self.oracle.claimed(kit.worker_id, count, numbers)
        for hold in self.holds[-len(claims) :] if claims else ():
            hold.attempt = self.oracle.attempt(hold.id)
            limit = self.run(kit.store()).limit(hold.claim)
            assert (hold.claim.attempt, limit) == (hold.attempt, model.LIMIT), "attempts drifted"
        self.holds = self.holds[-14:]

    @precondition(lambda self: self.setup.inputs)
    @rule(pick=st.integers(0, 30), held=st.booleans(), body=st.sampled_from(["", "a", "b"]))
    def edit(self, pick: int, held: bool, body: str) -> None:
        """Another program changes a row's input, most often while somebody works on it; or changes it back."""
        rows = [r for r in self.oracle.rows.values() if r.state == "running" or not held]
        if rows:
            row = rows[pick % len(rows)]
            text = f"update pages set body = '{body}' where id = {row.id}"
            self.run(self.database.write(lambda run: run(text, ())))
            row.body = body

    @precondition(lambda self: self.setup.inputs)
    @rule(worker=st.sampled_from(["w1", "w2"]), times=st.integers(1, 4))
    def keep_editing(self, worker: str, times: int) -> None:
        """Rows are edited in every run: at last their outcomes are final all the same."""
        for n in range(times):
            self.claim(worker, 2)
            for hold in [h for h in self.holds[-2:] if self.oracle.holds(h.id, h.number)]:
                row = self.oracle.rows[hold.id]
                row.body = f"{row.body[:3]}{n}"
                text = f"update pages set body = '{row.body}' where id = {row.id}"
                self.run(self.database.write(lambda run, text=text: run(text, ())))
                self._settle(hold.kit, [hold], [ENDS["columns"]])

    @rule(worker=st.sampled_from(["w1", "w2"]), count=st.integers(1, 5))
    def claim(self, worker: str, count: int) -> None:
        kit = self.kit(worker)
        self._taken(kit, count, self.run(kit.claim(count=count)))

    @rule(worker=st.sampled_from(["w1", "w2"]), count=st.integers(1, 3))
    def claim_without_a_reply(self, worker: str, count: int) -> None:
        """The connection broke after the commit: the process finds what is its own by its mark."""
        kit = self.kit(worker)
        store = self.run(kit.store())
        lost = {c.id for c in self.run(kit.claim(count=count))}
        mine = self.run(store.mine())
        known = {h.id for h in self.holds if h.kit is kit and self.oracle.holds(h.id, h.number)}
        # A second process under one id may be running: what that holds is not told apart, and not touched here.
        assert lost <= {c.id for c in mine}
        self._taken(kit, count, [c for c in mine if c.id in lost - known], recovered=True)

    @precondition(lambda self: self.holds)
    @rule(picks=picked(4), how=st.lists(st.sampled_from(sorted(ENDS)), min_size=4, max_size=4))
    def settle(self, picks: list[int], how: list[str]) -> None:
        """A batch of outcomes of one worker: of claims that hold, were lost, or were settled long ago."""
        kit = self._hold(picks[0]).kit
        chosen = list({id(h): h for h in map(self._hold, picks) if h.kit is kit}.values())
        # A task's job cannot wait: that is tested elsewhere.
        how = ["snooze" if self.setup.own and name.startswith("wait") else name for name in how]
        self._settle(kit, chosen, [ENDS[name] for name, _ in zip(how, chosen, strict=False)])

    def _settle(self, kit: Kit, holds: list[Hold], ended: list[Any]) -> None:
        store = self.run(kit.store())
        settlements = [decide(store, h.claim, make()) for h, (make, _) in zip(holds, ended, strict=True)]
        report = self.run(store.settle(settlements))
        failed = any(e.closes or e.word for _, e in ended)
        if failed:
            for hold, (_, end) in zip(holds, ended, strict=True):
                self.oracle.learned(hold.site, end)
        if store.gate_learning is not None:
            self.run(store.gate_learning.note([*report.written, *report.refused]))
        assert not [*report.locked, *report.refused, *report.stuck, *report.unhooked]
        written = {id(s) for s in report.written}
        for hold, settlement, (_, end) in zip(holds, settlements, ended, strict=True):
            held = self.oracle.holds(hold.id, hold.number)
            assert (id(settlement) in written) is held, f"an outcome without its claim, or lost with it: {hold}"
            if held:
                self.oracle.settled(hold.id, hold.attempt, self._as_kept(end))
                if not failed:
                    self.oracle.learned(hold.site, end)

    def _as_kept(self, end: End) -> End:
        own = self.setup.own and end.kind == "done" and end.text is not None
        return End("done", f'"{end.text}"', word="") if own else end

    @precondition(lambda self: self.holds and self.setup.chunk is not None)
    @rule(picks=picked(4), how=st.lists(st.sampled_from([*sorted(ENDS), "poison", "missing", "finish"]), min_size=4,
                                        max_size=4))  # fmt: skip
    def run_chunk(self, picks: list[int], how: list[str]) -> None:
        """One call for claims that hold, were lost, or were settled long ago: each ends as its own answer says."""
        kit = self._hold(picks[0]).kit
        holds = list({h.id: h for h in map(self._hold, picks) if h.kit is kit}.values())
        self._plan = {hold.id: name for hold, name in zip(holds, how, strict=False)}
        missing = "the handler returned no outcome for this job: there is none for {} (int)"
        # A finish block of a lost row ends the call, and the others are called once more.
        for hold in holds:
            if self._plan[hold.id] == "finish" and not self.oracle.holds(hold.id, hold.number):
                self._plan[hold.id] = "done"
        for hold, stepped in zip(holds, self.run(kit.run_chunk([h.claim for h in holds])), strict=True):
            name = self._plan[hold.id]
            ends = {
                "poison": ENDS["error"][1], "finish": End("done", "finished", word=""),
                "missing": End("retry", missing.format(hold.id), model.BACKOFF, "transient"),
            }  # fmt: skip
            held = self.oracle.holds(hold.id, hold.number)
            assert (stepped.outcome != "lost") is held, hold
            if held:
                self.oracle.settled(hold.id, hold.attempt, ends[name] if name in ends else ENDS[name][1])
                if name == "finish":
                    self.effects[hold.id] = self.effects.get(hold.id, 0) + 1

    @precondition(lambda self: self.holds and self.setup.chunk is None)
    @rule(pick=st.integers(0, 30), name=st.sampled_from(["finish", "error", "snooze", "dead"]))
    def run_handler(self, pick: int, name: str) -> None:
        """The whole run, with a finish block of the handler's own: what it wrote stands if the outcome does."""
        hold = self._hold(pick)
        end = End("done", None if self.setup.own else "finished", word="")
        self._plan = "finish"
        if name != "finish":
            make, end = ENDS[name]
            self._plan = make()
        held = self.oracle.holds(hold.id, hold.number)
        if name != "finish":
            self.oracle.learned(hold.site, end)
        stale = held and self.oracle.is_stale(hold.id, hold.attempt, end)
        stepped = self.run(hold.kit.run(hold.claim))
        assert (stepped.outcome != "lost") is held
        assert (stepped.outcome == "stale") is stale
        if held:
            self.oracle.settled(hold.id, hold.attempt, end)
            if name == "finish" and not stale:
                self.oracle.learned(hold.site, end)
                self.effects[hold.id] = self.effects.get(hold.id, 0) + 1

    @precondition(lambda self: self.holds)
    @rule(pick=st.integers(0, 30))
    def settle_without_a_reply(self, pick: int) -> None:
        """Sent, written, and no reply: sent again, it is known as written, and nothing is written twice."""
        hold = self._hold(pick)
        store, held = self.run(hold.kit.store()), self.oracle.holds(hold.id, hold.number)
        stale = held and self.oracle.is_stale(hold.id, hold.attempt, ENDS["dead"][1])
        self._settle(hold.kit, [hold], [ENDS["dead"]])
        again = decide(store, hold.claim, Dead("no"))
        if stale:  # as the settlement itself has become
            again.go_stale(write=False)
        again.reply_lost = again.heard = True
        report = self.run(store.settle([again]))
        assert not held or report.written == [again]

    @precondition(lambda self: self.holds)
    @rule(picks=picked(6))
    def renew(self, picks: list[int]) -> None:
        kit = self._hold(picks[0]).kit
        chosen = list({id(h): h for h in map(self._hold, picks) if h.kit is kit}.values())
        store = self.run(kit.store())
        renewed = {id(c) for c in self.run(store.renew([h.claim for h in chosen]))}
        for hold in chosen:
            held = self.oracle.holds(hold.id, hold.number)
            assert (id(hold.claim) in renewed) is held, "a lease that was renewed without its claim, or not with it"
            if held:
                self.oracle.renewed(hold.id)

    @rule(worker=st.sampled_from(["w1", "w2"]), killed=st.booleans())
    def restart(self, worker: str, killed: bool) -> None:
        """A new process under the same id; the old one is gone with all it had in hand, or hangs and wakes up later."""
        kit = self.kit(worker)
        if kit._databases["default"] is self.database:
            return  # what this test itself asks goes over that one
        del self.kits[worker]
        if killed:
            self.holds = [h for h in self.holds if h.kit is not kit]

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def sweep(self, worker: str) -> None:
        swept = self.run(self.kit(worker).sweep())
        assert {s.id: s.poison for s in swept} == self.oracle.swept()

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def abandon(self, worker: str) -> None:
        """A worker that dies with all it took: often enough, and its rows are poison."""
        self.claim(worker, 3)
        self.advance(6)
        self.sweep("w1")

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def fail(self, worker: str) -> None:
        """Runs that fail, up to the limit."""
        self.claim(worker, 2)
        for hold in [h for h in self.holds[-2:] if self.oracle.holds(h.id, h.number)]:
            self._settle(hold.kit, [hold], [ENDS["error"]])
        self.advance(2)

    @precondition(lambda self: self.setup.expires)
    @rule(worker=st.sampled_from(["w1", "w2"]), n=st.integers(0, 3))
    def expire(self, worker: str, n: int) -> None:
        if n:
            self.advance(n)
        assert set(self.run(self.kit(worker).expire())) == self.oracle.expired()

    # -- rows that wait

    @precondition(lambda self: not self.setup.own and self.oracle.rows)
    @rule(picks=picked(3))
    def approve(self, picks: list[int]) -> None:
        """Somebody's UPDATE makes true, or untrue, what rows wait for."""
        for id in {sorted(self.oracle.rows)[pick % len(self.oracle.rows)] for pick in picks}:
            text = f"update pages set approved = 1 - approved where id = {id} returning 1"
            self.run(self.database.write(lambda run, text=text: run(text, ())))  # type: ignore[misc]
            self.oracle.rows[id].approved = not self.oracle.rows[id].approved

    @precondition(lambda self: not self.setup.own)
    @rule(worker=st.sampled_from(["w1", "w2"]), forget=st.booleans())
    def look(self, worker: str, forget: bool) -> None:
        waits = self.run(self.kit(worker).store()).waits
        ended = self.run(waits.look())
        assert not ended.refused
        assert (set(ended.woken), set(ended.timed_out)) == self.oracle.looked()
        if forget:
            self.run(waits.forget())
            self.oracle.forgotten()

    @precondition(lambda self: not self.setup.own and self.holds)
    @rule(picks=picked(4), then=st.sampled_from(["wait", "wait, then run"]), n=st.integers(0, 3))
    def wait(self, picks: list[int], then: str, n: int) -> None:
        """Rows begin to wait, some are approved, and time goes on."""
        kit = self._hold(picks[0]).kit
        chosen = list({id(h): h for h in map(self._hold, picks) if h.kit is kit}.values())
        self._settle(kit, chosen, [ENDS[then]] * len(chosen))
        self.approve(picks[:1])
        if n:
            self.advance(n)
        self.look("w1", False)

    # -- time, and the clock of the process, which is not it

    @rule(n=st.integers(1, 7))
    def advance(self, n: int) -> None:
        self.kit("w1").advance(hours(n))
        self.oracle.now += n

    @rule(days=st.integers(-9000, 9000))
    def skew(self, days: int) -> None:
        WrongClock.skew = td(days=days)

    # -- operators

    def _operate(self, verb: str, states: tuple[str, ...], id: int, *more: Any) -> bool:
        view = self.run(view_lane(self.mill.lanes["work"], "default", self.database, self.mill.clock))
        steps = getattr(Operator(view), verb)(Selection(states, ((id,),)), *more)
        return bool(self.run(all_of(steps)))

    @precondition(lambda self: self.oracle.rows)
    @rule(pick=st.integers(0, 30), verb=st.sampled_from(["cancel", "release", "retry"]))
    def operate(self, pick: int, verb: str) -> None:
        id = sorted(self.oracle.rows)[pick % len(self.oracle.rows)]
        match verb:
            case "cancel":
                did = self._operate("cancel", ("ready", "waiting", "running"), id, "by hand")
                assert did is self.oracle.cancel(id, "by hand")
            case "release":
                assert self._operate("release", ("running",), id) is self.oracle.release(id)
            case "retry":
                key = self.oracle.rows[id].site if self.setup.own else None
                taken = key and any(r.site == key and r.state not in FINAL for r in self.oracle.rows.values())
                if not taken:
                    assert self._operate("retry", ("dead",), id) is self.oracle.retry(id)

    def _target(self, what: str) -> tuple[str | None, Target]:
        if what == "environment":
            return "", Target()
        by_site = self.setup.gates.any and what != "lane"
        return (what, Target("work", "domain", what)) if by_site else (None, Target("work"))

    @rule(what=st.sampled_from(["lane", "environment", "a", "b"]), n=st.sampled_from([0.5, 2.5, 400.5]))
    def pause(self, what: str, n: float) -> None:
        name, target = self._target(what)
        self.run(pause(self.database, self.mill.clock, target, "for a test", hours(n)))
        self.oracle.paused[name] = self.oracle.now + n

    @rule(what=st.sampled_from(["lane", "environment", "a", "b"]))
    def resume(self, what: str) -> None:
        name, target = self._target(what)
        stood = self.run(resume(self.database, self.mill.clock, target))
        assert (stood is not None) is self.oracle.is_paused(name)
        self.oracle.paused.pop(name, None)

    # -- what must hold

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        super().check_invariants(*args, **kwargs)
        if hasattr(self, "base"):
            self.compare()

    def compare(self) -> None:
        """Every column of every row, the gates, and what handlers wrote."""
        found = {row[0]: row for row in self.read(self.ground.rows())}
        assert found.keys() == self.oracle.rows.keys(), "rows lost or doubled"
        for id, row in found.items():
            wanted = self.oracle.rows[id]
            plain = (wanted.site, wanted.state, wanted.worker, wanted.attempts, wanted.error, wanted.finished)
            assert (row[1], row[3], row[4], row[5], row[10], bool(row[12])) == plain, (row, wanted)
            if self.oracle.counts:
                assert (row[6], row[7]) == (wanted.failures, wanted.reclaims), (row, wanted)
            assert row[11] == wanted.result, (row, wanted)
            assert (row[13], row[14]) == (wanted.body, wanted.stale), (row, wanted)
            expires = None if wanted.expires == math.inf else wanted.expires
            times = ((row[2], wanted.due), (row[8], wanted.claimed), (row[9], wanted.beat), (row[15], expires))
            for at, hour in times:
                assert (at is None) is (hour is None), (row, wanted)
                told = at is None or abs(at - self.base - hour) < NEAR
                assert told, (row, wanted, "a time that is not the database's")
        effects = {row[0]: row[1] for row in self.read("select page, count(*) from effects group by page")}
        assert effects == self.effects, "what finish blocks wrote, once for each outcome that stands"
        if self.setup.gates.any:
            self.compare_gates()
        if self.setup.shards:
            assert self.read(self.ground.untouched())[0][0] == 1, "a row of another shard was written"

    def compare_gates(self) -> None:
        gates, oracle = self.setup.gates, self.oracle
        text = f"select key, streak, {self.ground.at('open_until')} from rowmill_gates where dim = 'domain'"
        found = {row[0]: row[1:] for row in self.read(text)}
        for site in {"a", "b", "c"} & {r.site for r in oracle.rows.values()}:
            if gates.concurrency is not None:
                assert oracle.running(site) <= gates.concurrency, "a key over its limit"
            streak, until = found.get(site, (0, None))
            gate = oracle.gate(site)
            assert streak == gate.streak
            opened = until is not None and until - self.base > oracle.now
            assert opened is (gate.open_until > oracle.now), "a breaker opened early, or late"
        if gates.whole is not None:
            assert oracle.running() <= gates.whole

    def teardown(self) -> None:
        try:
            if hasattr(self, "base") and sys.exc_info()[0] is None:
                self.drain()
        finally:
            for kit in self.all_kits:
                self.run(kit.__aexit__(None, None, None))
            self.run(self.mill.close())
            self.runner.close()

    def drain(self) -> None:
        """Whatever was done, every row reaches a final state."""
        for what in ("lane", "environment", "a", "b"):
            self.resume(what)
        for _ in range(40):
            if self.oracle.over:
                break
            self.advance(7)
            self.sweep("w2")
            if not self.setup.own:
                self.look("w2", True)
            if self.setup.expires:
                self.expire("w2", 0)
            self.claim("w2", 50)
            for hold in [h for h in self.holds if self.oracle.holds(h.id, h.number)]:
                self._settle(hold.kit, [hold], [ENDS["done"]])
            self.compare()
        assert self.oracle.over, "some row never ends"
        self.compare()


@pytest.mark.timeout(120 + 20 * EXAMPLES)
@pytest.mark.parametrize("setup", SETUPS)
def test_rows_claims_and_gates_are_always_as_the_model_says(db: Db, setup: str) -> None:
    """X1, X2: one live claim per row; no outcome without its claim; every row reaches a final state; attempts never
    drift; no key over its limit; no breaker opened early; time never from a worker.
    """
    ground = Ground(db, SETUPS[setup])
    run_state_machine_as_test(lambda: Machine(ground), settings=SETTINGS)  # type: ignore[arg-type]
