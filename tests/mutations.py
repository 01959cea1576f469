"""What the suite is worth: each promise's code is taken out of a copy of the source, and the tests must go red.

``make mutations`` runs them all, and ends with 1 if one survives; ARGS="fence" and the like choose by name.
``--write`` puts the table into docs/explanation/guarantees.md. A mutation that does not fit its source exactly once is
an error, told by tests/tooling/test_mutations.py as well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "rowmill"
PAGE = ROOT / "docs" / "explanation" / "guarantees.md"
MARKS = ("<!-- mutations: made by make mutations -->\n", "<!-- /mutations -->\n")
#: No run of a few tests takes longer, and each has its own time limit: a run that does shows nothing, and says so.
PATIENCE = 1200
MODEL = "tests/prove/test_model.py::test_rows_claims_and_gates_are_always_as_the_model_says"


@dataclass(frozen=True)
class Mutation:
    """Something taken out: in which file, what stands there and what instead, and which tests are to see it."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def apply(self, source: Path) -> None:
        """Change a copy of the package; raises where the text is not there exactly once."""
        path = source / self.file
        text = path.read_text()
        for old, new in self.edits:
            if (times := text.count(old)) != 1:
                raise SystemExit(f"mutation {self.name!r}: its text stands {times} times in {self.file}:\n{old}")
            text = text.replace(old, new)
        compile(text, str(path), "exec")
        path.write_text(text)


def one(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, ((old, new),), tests)


_FORMS = "tests/store/lane/test_statement_forms.py::"
_PROFILE = "tests/processes/test_distributed.py::test_what_tests_send_is_taken_by_a_distributed_planner"
_INPUTS = "tests/store/lane/test_inputs.py::"
_SHARDS = "tests/store/lane/test_shards.py::"
_BESIDE = f"{_SHARDS}test_the_shard_stands_beside_every_mention_of_the_table"
_LOGS = "tests/engine/test_run_logs.py::"
MUTATIONS = (
    one(
        "the shard stands beside the claim's update", "store/lane/postgres_statements.py",
        "and ({one} or {pairs}){self.shard()}", "and ({one} or {pairs})",
        "tests/store/lane/test_golden.py",
    ),
    one(
        "the shard stands beside the update of a partitioned table", "store/lane/postgres_statements.py",
        "in (select {keys} from {step}){self.shard()}", "in (select {keys} from {step})", _BESIDE,
    ),
    one(
        "a row is looked up by its key in the lane's shard alone", "store/lane/row_keys.py",
        "(values {listed}){statements.shard()}", "(values {listed})", _BESIDE,
    ),
    one(
        "a limit counts running rows of all shards", "store/gates/claim_by_key_sql.py",
        "{statements.beyond.running()}", "{statements.running()}",
        f"{_SHARDS}test_a_limit_by_key_counts_rows_of_all_shards",
    ),
    one(
        "a claim goes on to shards that have rows", "store/lane/shards.py",
        "await self._ask(ready[:MOST], count, claims)", "pass",
        f"{_SHARDS}test_a_claim_goes_on_to_shards_that_have_rows",
    ),
    one(
        "a reply that is lost in a later shard", "store/lane/shards.py",
        "if not claims or unanswered:", "if not claims:",
        f"{_SHARDS}test_a_reply_that_is_lost_in_a_later_shard_is_told_at_once",
    ),
    one(
        "room of logs that were dropped", "engine/records/run_log.py",
        "        super()._drop(entries)\n        self._held -= _characters(entries)", "        super()._drop(entries)",
        f"{_LOGS}test_logs_that_are_dropped_after_a_failed_write_leave_their_room_to_others",
    ),
    one(
        "check asks about every statement", "ops/check_statements.py",
        "    for name, text in texts.items():", "    for name, text in list(texts.items())[:1]:",
        "tests/ops/test_check_statements.py",
    ),
    one(
        "on Citus a write of several tasks is refused", "store/inspect/distribution.py",
        'if "Distributed Subplan" in plan:', "if False:", "tests/ops/test_check_statements.py",
    ),
    one(
        "a run's log is written after its outcome", "engine/worker.py",
        "            await lane_state.begin_settle(claims)\n            report",
        "            for claim in claims:\n                lane_state._log_run(claim, 'done')\n"
        "            await lane_state.begin_settle(claims)\n            report",
        f"{_LOGS}test_no_log_is_written_before_its_outcome_stands",
    ),
    one(
        "a log that cannot be written costs no outcome", "engine/records/background_writer.py",
        "except Refused as error:\n                self._off",
        "except ZeroDivisionError as error:\n                self._off",
        f"{_LOGS}test_where_the_log_cannot_be_written_the_outcome_stands_and_one_event_says_so",
    ),
    one(
        "a run's lines are bounded in memory", "engine/records/run_log.py",
        "while len(self._lines) > LINES or self._size > _RUN:", "while False:",
        f"{_LOGS}test_a_run_that_logs_without_end_holds_no_more_memory_than_its_bound",
    ),
    one(
        "a run's log is bounded in bytes", "store/own/run_logs.py",
        "if room < 0 or len(kept) == LINES:", "if len(kept) == LINES:",
        f"{_LOGS}test_of_a_run_the_last_lines_are_kept_within_bounds",
    ),
    one(
        "a line of a log is bounded in bytes", "store/own/run_logs.py",
        "if len(raw) <= most:", "if True:",
        f"{_LOGS}test_of_a_run_the_last_lines_are_kept_within_bounds",
    ),
    one(
        "only the last runs of a row keep their logs", "store/own/run_logs.py",
        "where n > {RUNS}", "where n > 1000 * {RUNS}",
        f"{_LOGS}test_only_the_last_runs_of_a_row_are_kept",
    ),
    one(
        "old logs are deleted", "store/own/run_logs.py",
        'f"kept_until < {self.sql.now}"', '"false"',
        f"{_LOGS}test_old_logs_are_deleted_in_small_batches_also_where_nothing_is_logged_any_more",
    ),
    one(
        "a long line is cut after its secrets were replaced", "engine/records/run_log.py",
        "return cut(scrubbed(text), LINE_BYTES), True", "return cut(text, LINE_BYTES), False",
        f"{_LOGS}test_secrets_are_taken_out_also_where_a_long_line_is_cut",
    ),
    one(
        "a run that logged nothing writes nothing", "engine/records/run_log.py",
        "        if not lines:\n", "        if False:\n",
        f"{_LOGS}test_a_chunk_that_logs_nothing_costs_no_statement",
    ),
    one(
        "an end is compared with the row's inputs", "store/lane/statements.py",
        "return bool(self.lane.inputs) and kind in FINAL", "return False",
        f"{_INPUTS}test_an_end_computed_from_old_inputs_is_not_final_and_costs_no_attempt",
    ),
    one(
        "an end that is no success is compared, too", "store/lane/statements.py",
        "return bool(self.lane.inputs) and kind in FINAL", 'return bool(self.lane.inputs) and kind == "done"',
        f"{_INPUTS}test_the_last_attempt_that_fails_with_old_inputs_is_not_the_rows_end",
    ),
    one(
        "the inputs of the plain end", "store/lane/postgres_statements.py",
        """fence += f" and {self.fingerprint('t.')} = s._inputs" if compared else \"\"""", 'fence += ""',
        f"{_INPUTS}test_an_end_computed_from_old_inputs_is_not_final_and_costs_no_attempt",
    ),
    one(
        "the inputs of an end with columns", "store/lane/postgres_statements.py",
        """fence = f"{self._fence()} and {self.fingerprint('t.')} = s._inputs" if compared else None""", "fence = None",
        f"{_INPUTS}test_an_end_computed_from_old_inputs_is_not_final_and_costs_no_attempt",
    ),
    one(
        "inputs are compared in their binary form", "store/lane/postgres_statements.py",
        "encode(sha256(record_send(row({self.names(self.lane.inputs, prefix)}))), 'hex')",
        "md5(row({self.names(self.lane.inputs, prefix)})::text)",
        f"{_INPUTS}test_columns_of_every_type_are_compared",
    ),
    one(
        "inputs are compared whatever their collation", "store/lane/sqlite.py",
        "case typeof({name}) when 'text' then {kept} else {name} is :_i{i} end", "{name} is :_i{i}",
        f"{_INPUTS}test_any_change_of_a_text_counts",
    ),
    one(
        "a row whose inputs keep changing is settled at last", "store/lane/lane_store.py",
        "return None if same else bool(kept_changing)", "return None if same else False",
        f"{_INPUTS}test_after_so_many_runs_in_a_row_the_outcome_is_final",
        f"{_INPUTS}test_after_so_long_the_outcome_is_final",
    ),
    one(
        "a final outcome forgets the stale runs before it", "store/lane/postgres_statements.py",
        "using {ids} where {self.noted('h._id')}", "using {ids} where false and {self.noted('h._id')}",
        f"{_INPUTS}test_an_outcome_that_is_final_begins_the_count_again",
    ),
    one(
        "a stale run gives its attempt back", "store/lane/statements.py",
        'if kind in ("snooze", "wait", "release", "stale") and (column := r.get("attempts")):',
        'if kind in ("snooze", "wait", "release") and (column := r.get("attempts")):',
        f"{_INPUTS}test_an_end_computed_from_old_inputs_is_not_final_and_costs_no_attempt",
    ),
    one(
        "what a stale run returned is dropped", "store/lane/claim.py",
        'if not (write and self.kind == "done"):', "if False:",
        f"{_INPUTS}test_an_end_computed_from_old_inputs_is_not_final_and_costs_no_attempt",
    ),
    one(
        "a stale finish rolls back", "engine/job.py",
        "if (too_long := await store.changed_in(inside, claim)) is not False:", "if (too_long := True):",
        f"{_INPUTS}test_a_stale_finish_rolls_back_and_the_row_is_ready_again",
    ),
    one(
        "functions compare the inputs", "functions/bodies.py",
        'changed = f"not ({self.fingerprint()}{self.equals}${len(self.ended)})"', 'changed = "false"',
        "tests/functions/test_functions_inputs.py::test_complete_is_final_only_with_the_inputs_that_were_claimed",
        "tests/functions/test_functions_inputs.py::test_a_death_is_not_final_and_a_retry_goes_its_own_way",
    ),
    one(
        "a chunk's mapping answers by id", "declare/chunk.py",
        'by_id[name] if times[name] == 1 else',
        'list(by_id.values())[names.index(name)] if times[name] == 1 else',
        "tests/engine/test_chunks.py::test_a_mapping_answers_by_id_in_any_order",
        "tests/prove/test_interleave.py::test_no_order_of_statements_loses_or_doubles_a_row",
    ),
    one(
        "a row of a chunk without an answer fails", "declare/chunk.py",
        '_unanswered(id, times[name], unknown)\n',
        'None\n',
        "tests/engine/test_chunks.py::test_a_row_without_an_answer_fails_alone",
        "tests/engine/test_chunks.py::test_ids_as_text_are_not_the_ids_of_the_rows",
    ),
    one(
        "a row of a chunk has one answer", "declare/chunk.py",
        'by_id[name] if times[name] == 1 else',
        'by_id[name] if times[name] else',
        "tests/engine/test_chunks.py::test_a_row_that_is_answered_twice_fails",
    ),
    one(
        "a chunk's list has an answer for each row", "declare/chunk.py",
        'if len(returned) != len(jobs):',
        'if len(returned) < len(jobs):',
        "tests/engine/test_chunks.py::test_a_list_of_the_wrong_length_settles_no_row_by_it",
    ),
    one(
        "a chunk's list is in the order of its jobs", "declare/chunk.py",
        'if same or not isinstance',
        'if True or not isinstance',
        "tests/engine/test_chunks.py::test_a_list_in_the_order_of_a_list_that_the_handler_changed_settles_no_row",
        "tests/client/test_chunk_tasks.py::test_a_list_of_arguments_that_the_handler_changed_settles_no_job",
    ),
    one(
        "a poisoned row is divided from its chunk", "engine/chunks.py",
        'if len(jobs) > 1:',
        'if len(jobs) > 10_000:',
        "tests/engine/test_chunks.py::test_a_poisoned_row_costs_the_others_nothing",
        "tests/engine/test_chunks.py::test_one_poisoned_row_in_10_000_costs_no_other_row_an_attempt",
    ),
    one(
        "a chunk is not divided for an error that is everybody's", "engine/chunks.py",
        'self._alone >= _ALONE and not',
        'self._alone >= 10**9 and not',
        "tests/engine/test_chunks.py::test_an_error_that_is_everybodys_is_found_out_with_a_few_calls",
    ),
    one(
        "no row dies by a call that it shared", "engine/chunks.py",
        ' and not self._last_attempts():',
        ':',
        "tests/engine/test_chunks.py::test_no_row_dies_by_a_call_that_it_shared",
    ),
    one(
        "an error of the connection takes a chunk along once", "engine/chunks.py",
        'job.attempt > 1 or job.attempt >= ',
        'job.attempt >= 10**9 + ',
        "tests/engine/test_chunks.py::test_an_error_of_the_connection_is_not_everybodys_the_second_time",
        "tests/engine/test_chunks.py::test_an_error_of_the_connection_does_not_use_up_the_last_attempt_of_others",
    ),
    one(
        "a lost row does not fail its chunk", "engine/chunks.py",
        'isinstance(error, LostClaim) and lost:',
        'isinstance(error, LostClaim) and False:',
        "tests/engine/test_chunks.py::test_a_finish_block_of_a_lost_row_does_not_fail_the_others",
    ),
    one(
        "a stale row does not fail its chunk", "engine/chunks.py",
        'self._wait([job for job in jobs if not job.inputs_changed])', 'changed = jobs',
        "tests/engine/test_chunks.py::test_a_finish_block_of_a_row_whose_inputs_changed_does_not_fail_the_others",
    ),
    one(
        "a call goes on while one of its rows is held", "engine/chunks.py",
        'if mine and all(job._claim.lost for job in jobs) and',
        'if mine and',
        "tests/engine/test_chunks.py::test_a_lost_row_does_not_disturb_the_others",
    ),
    one(
        "only the rows of the call under way are marked", "engine/chunks.py",
        'self._mark(slot, lane_state, jobs)',
        'self._mark(slot, lane_state, [*jobs, *[execution.job(plan, c, worker.id, slot.name) for c in run.waiting()]])',
        "tests/engine/test_chunks.py::test_marks_tell_the_rows_of_the_call_under_way",
    ),
    one(
        "a chunk of rows that go back is not counted", "engine/chunks.py",
        'if run.begun and (worker.stopping or self._closing):',
        'if False:',
        "tests/engine/test_chunks.py::test_a_stop_gives_back_what_waits_for_its_call",
    ),
    one(
        "a wait ends with the due time that began it", "store/lane/statements.py",
        " and _w.due = {self.due_text(prefix)}", "",
        "tests/store/lane/test_waits.py::test_a_row_that_is_given_another_time_waits_no_more",
    ),
    one(
        "a condition is asked of waiting rows alone", "store/lane/statements.py",
        "  limit {_ALL} offset 0\n) {name}", ") {name}",
        "tests/store/lane/test_waits.py::test_a_condition_that_fails_for_one_row_later_is_told_and_wakes_the_others",
    ),
    one(
        "a waiting row is not due", "store/lane/statements.py",
        "else {self.later(column, delay)} end", "else {self.now(column)} end",
        "tests/store/lane/test_waits.py::test_a_waiting_row_is_claimed_when_its_condition_is_true_and_not_before",
    ),
    one(
        "a wait is over for the rows of its time alone", "store/lane/waits.py",
        """also = f"_w.on_timeout = 'dead' and _w.until_at <= {statements.plain_now()}\"""", """also = "1 = 1\"""",
        "tests/store/lane/test_waits.py::test_rows_time_out_each_at_its_own_time",
    ),
    one(
        "a tick of a row asks the row again", "store/jobs/cron_ticks.py",
        """{f' and {one.still}' if one.still else ''}""", "",
        "tests/store/jobs/test_schedules.py::"
        "test_of_two_that_read_the_same_row_one_enqueues_and_none_after_a_change",
    ),
    one(
        "a schedule that is off is forgotten", "engine/cron_scheduler.py",
        "await self._ticks.forget(gone, table.on())", "pass",
        "tests/store/jobs/test_schedules.py::test_what_a_row_says_now_counts",
        "tests/store/jobs/test_schedules.py::test_a_row_with_the_id_of_a_deleted_one_counts_from_its_insert",
    ),
    one(
        "the claim leaves expired rows", "store/lane/statements.py",
        'parts["expires_at"] = f"({self.past_expiry()}) is not true"', 'parts["expires_at"] = "1 = 1"',
        "tests/store/lane/test_expiry.py::"
        "test_a_row_past_its_time_is_not_claimed_and_is_canceled_with_the_reason",
    ),
    one(
        "only ready and waiting rows expire", "store/lane/statements.py",
        'return " and ".join([*parts, f"({self.past_expiry()})"]) + self.not_passed()',
        'return f"({self.past_expiry()})" + self.not_passed()',
        "tests/store/lane/test_expiry.py::test_a_running_row_is_not_affected",
        "tests/store/lane/test_expiry.py::test_rows_that_where_excludes_are_left_alone",
    ),
    one(
        "a dead worker must still be called dead", "store/lane/sweep.py",
        "        mine += (\n            f\" and exists", "        _ = (\n            f\" and exists",
        "tests/engine/test_liveness.py::test_rows_that_a_successor_of_the_same_id_holds_are_not_given_back",
        "tests/prove/test_interleave.py::test_a_worker_that_is_presumed_dead_and_lives_breaks_nothing",
    ),
    one(
        "a worker that has not missed a heartbeat lives", "engine/recovery/liveness.py",
        "left := max(lock_left, silence_left)", "left := lock_left",
        "tests/engine/test_liveness.py::test_a_worker_without_its_lock_lives_until_it_has_missed_a_heartbeat",
    ),
    one(
        "a suspect is looked at when its time is over", "engine/recovery/liveness.py",
        "self._presumed_at = min(self._presumed_at, now + left)", "pass",
        "tests/engine/test_liveness.py::test_the_next_look_is_when_a_suspect_may_be_presumed_dead",
    ),
    one(
        "a worker says at once that it holds its lock", "engine/heartbeat.py",
        "or (locked and not reported_locked) ", "",
        "tests/engine/test_liveness.py::test_a_worker_says_that_it_holds_its_lock_as_soon_as_it_does",
    ),
    one(
        "a heartbeat that failed is sent again soon", "engine/heartbeat.py",
        "                    sent = time.monotonic()\n                    if not await",
        "                    reported, at = me.state, (sent := time.monotonic())\n                    if not await",
        "tests/engine/test_liveness.py::test_a_heartbeat_that_failed_is_sent_again_soon",
    ),
    one(
        "a worker without an old session suspects nobody", "engine/recovery/liveness.py",
        "if self.suspicion is None or session_age is None or session_age < self.suspicion:",
        "if self.suspicion is None:",
        "tests/engine/test_liveness.py::test_who_has_no_old_session_suspects_nobody",
    ),
    one(
        "a process is told by its start, not by its pid alone", "store/own/process_identity.py",
        "return _started(int(pid)) != started", "return _started(int(pid)) is None",
        "tests/engine/test_liveness.py::test_a_process_is_gone_when_it_has_ended_and_not_before",
    ),
    one(
        "a pid means nothing on another host", "store/own/process_identity.py",
        'or not identity.startswith(f"{kernel} ")', "",
        "tests/engine/test_liveness.py::test_nothing_is_known_of_another_host_or_namespace",
    ),
    one(
        "a process that cannot be looked at lives", "store/own/process_identity.py",
        "    except OSError:  # no file can be opened any more, or not this one\n        return False",
        "    except OSError:\n        return True",
        "tests/engine/test_liveness.py::test_a_process_that_cannot_be_looked_at_lives",
    ),
    one(
        "a process that is hidden lives", "store/own/process_identity.py",
        "return not _exists(int(pid))", "return True",
        "tests/engine/test_liveness.py::test_a_process_that_is_hidden_lives",
    ),
    one(
        "a process of another container keeps its worker id", "engine/environment.py",
        "    if holder[\"process\"] is None or me.process is None:\n        return", "    if True:\n        return",
        "tests/engine/test_liveness.py::test_a_container_of_the_same_host_name_takes_no_id_from_a_live_one",
    ),
    one(
        "only one gives a dead worker's rows back", "store/own/workers.py",
        "and state not in ('stopped', 'dead'){silent} returning id", "{silent} returning id",
        "tests/engine/test_liveness.py::test_only_one_of_those_who_find_a_worker_dead_is_told_so",
    ),
    one(
        "a sign of life comes before a death", "store/own/workers.py",
        'cast(seen_at as text) = {marks[2]}"', 'cast(seen_at as text) <> {marks[2]} || {marks[2]}"',
        "tests/engine/test_liveness.py::test_only_one_of_those_who_find_a_worker_dead_is_told_so",
    ),
    one(
        "a lock must be missing for the suspicion time", "engine/recovery/liveness.py",
        "left := max(lock_left, silence_left)", "left := silence_left",
        "tests/engine/test_liveness.py::test_a_missing_lock_is_a_suspicion_and_silence_makes_it_a_death",
    ),
    one(
        "a process must be gone at two looks", "engine/recovery/liveness.py",
        "for key, peer in gone.items() if key in self._gone]", "for key, peer in gone.items()]",
        "tests/engine/test_liveness.py::test_a_process_must_be_gone_at_two_looks",
    ),
    one(
        "rows come back if the worker that found the death fails", "engine/heartbeat.py",
        "self._take_over(self._peers.find_unfinished(peers))", "pass",
        "tests/engine/test_liveness.py"
        "::test_rows_of_a_dead_worker_come_back_when_the_worker_that_found_it_dead_fails",
    ),
    one(
        "a second look at what a dead worker held", "engine/environment.py",
        "if dead.declared and done:", "if True:",
        "tests/engine/test_liveness.py::test_a_row_that_somebody_had_locked_comes_back_when_it_is_free",
        "tests/engine/test_liveness.py::test_a_claim_that_was_under_way_at_the_death_comes_back_too",
    ),
    one(
        "a worker started again under its id looks after what it held", "engine/environment.py",
        "return DeadWorker(worker.id, previous[\"incarnation\"]) if dead else None", "return None",
        "tests/engine/test_liveness.py"
        "::test_a_worker_that_is_started_again_under_its_id_gives_back_what_it_held",
    ),
    one(
        "a successor leaves its own rows", "store/lane/sweep.py",
        "    elif claims and at:", "    elif False:",
        "tests/engine/test_liveness.py"
        "::test_a_successor_leaves_its_own_rows_and_gives_back_what_was_locked_before",
    ),
    one(
        "rows of lanes that the finder does not serve come back", "store/own/workers.py",
        "if left := [lane for lane in json.loads(served) if lane not in lanes]:", "if left := []:",
        "tests/engine/test_liveness.py::test_rows_of_a_lane_that_the_finder_does_not_serve_come_back_too",
    ),
    one(
        "the worker that found the death has a heartbeat's time", "engine/recovery/liveness.py",
        "            if peer.incarnation in self._unfinished\n", "",
        "tests/engine/test_liveness.py::test_the_worker_that_found_a_death_has_until_the_second_look",
    ),
    one(
        "a worker that lives after all can be found dead again", "store/own/workers.py",
        "process = (me.process, json", "process = (None, json",
        "tests/engine/test_liveness.py::test_a_worker_that_was_presumed_dead_and_lives_can_be_found_dead_again",
    ),
    one(
        "late word of a death changes nothing for a worker that lives", "store/own/workers.py",
        "and incarnation = {marks[1]} and state = 'dead'\"", "and incarnation = {marks[1]}\"",
        "tests/engine/test_liveness.py::test_a_worker_that_was_presumed_dead_and_lives_can_be_found_dead_again",
    ),
    one(
        "reclaims back off", "store/lane/row_watch.py",
        "if not at_once or column is None or not counts:", "if True:",
        "tests/store/lane/test_leases.py::test_a_row_that_is_taken_back_again_waits_longer_each_time",
    ),
    one(
        "a session that ended unnoticed is opened again", "engine/heartbeat.py",
        "if workers_table.lock_lost:  #", "if False:  #",
        "tests/engine/test_liveness.py::test_a_session_that_ended_unnoticed_is_opened_again",
    ),
    one(
        "a worker that has lost its own lock suspects nobody", "engine/heartbeat.py",
        "age = None if workers_table.lock_lost else session.age", "age = session.age",
        "tests/engine/test_liveness.py::test_a_session_that_ended_unnoticed_is_opened_again",
    ),
    one(
        "a role that may not see locks finds none missing", "store/own/workers.py",
        "if seen else \"false\"", "",
        "tests/engine/test_liveness.py::test_a_role_that_may_not_see_locks_finds_no_lock_missing",
    ),
    one(
        "a handler's process that dies is noticed, whatever it left running", "engine/isolate.py",
        "            if not self._process.is_alive() and not pipe.poll():\n                raise EOFError\n",
        "            pass\n",
        "tests/engine/test_resources.py::test_a_process_that_dies_is_noticed_at_once_whatever_it_left_running",
    ),
    one(
        "reclaims of a lane without a time to wait for are left to the lease", "store/lane/sweep.py",
        "if counts.get(tuple(row[2:]), 0) < BACKS_OFF - 1]", "]",
        "tests/engine/test_take_over.py"
        "::test_a_row_without_a_time_to_wait_for_is_left_to_its_lease_the_third_time",
    ),
    one(
        "a row that may not go back holds up no other of a dead worker", "store/lane/sweep.py",
        "            if len(chunk) == 1:\n                (holder",
        "            raise\n            if True:\n                (holder",
        "tests/engine/test_take_over.py::test_a_row_that_may_not_go_back_holds_up_no_other",
    ),
    one(
        "the fence", "store/lane/statements.py",
        'parts = [self.condition(self.binding.running, f"{row}.")]',
        'return self.condition(self.binding.running, f"{row}.")',
        "tests/store/lane/test_fence.py::test_nothing_a_zombie_does_reaches_the_row_that_another_took_over",
    ),
    one(
        "the claim's time in the fence", "store/lane/statements.py",
        'if at := self.binding.fence_time:\n            parts.append(f"{row}.',
        'if False:\n            parts.append(f"{row}.',
        "tests/store/lane/test_fence.py::test_a_row_swept_from_a_worker_and_taken_again_by_it_has_one_live_claim",
    ),
    one(
        "the look at what settling wrote", "store/lane/lane_store.py",
        "        report.written += [s for i, s in enumerate(group) if i in written]\n"
        "        changed = await self._explain([s for i, s in enumerate(group) if i not in written], report)",
        "        report.written += group\n        changed = Changed([], [])",
        "tests/store/lane/test_fence.py::test_a_lost_outcome_does_not_cost_its_batch_anything",
    ),
    one(
        "the row read again after a lost reply", "store/lane/lane_store.py",
        "elif settlement.reply_lost and row and self._shows(row, settlement):", "elif False:",
        "tests/store/lane/test_settle.py::test_an_outcome_that_stood_already_when_it_was_sent_again_is_not_called_lost",
    ),
    one(
        "the state in the sweep (PostgreSQL)", "store/lane/postgres_statements.py",
        "{self.running('t.')} and {self.stale(lease, 't.')}{self.not", "{self.stale(lease, 't.')}{self.not",
        f"{MODEL}[postgresql-plain]",
    ),
    one(
        "the re-check in the sweep (PostgreSQL)", "store/lane/postgres_statements.py",
        "  where {stale}\n  limit $1::bigint\n  for no key update skip locked\n)",
        "  where {stale}\n  limit $1::bigint\n)",
        "tests/store/lane/test_sweep_recheck.py",
        "tests/store/lane/test_settle.py::test_a_locked_row_is_passed_over_by_the_claim_and_by_the_sweep",
    ),
    Mutation(
        "the re-check in the sweep (SQLite)", "store/lane/sqlite.py",
        (
            ('where {self.same_key()} and {self.running()}"""', 'where {self.same_key()}"""'),
            ('for worker, poison, *key in run(find, {"most": most}):', "for worker, poison, *key in found:"),
            (
                "return await sweep(self, verb, lease, most, look=True)",
                'found = await self.database.read(lambda run: run(find, {"most": most}))\n'
                "        return await sweep(self, verb, lease, most, look=True)",
            ),
        ),
        ("tests/store/lane/test_sweep_recheck.py",),
    ),
    one(
        "the lock on a gate (one key)", "store/gates/claim_by_key_sql.py",
        " and _g.version = _i.version[_s._rm_range]", "",
        "tests/store/gates/test_claim_by_range.py::test_who_was_held_up_takes_nothing_beyond_the_limit",
    ),
    one(
        "the lock on a gate (several keys)", "store/gates/locking_claim.py",
        "states = self.gate_rows.lock(self.run, spots, wait=wait)",
        "self.gate_rows.make(self.run, spots)\n        states = self.gate_rows.read(self.run, spots)",
        "tests/store/gates/test_contention.py::test_the_limit_holds_under_a_hammer[walk]",
    ),
    one(
        "the one probe of a breaker (PostgreSQL)", "store/gates/rules_sql.py",
        "else 1 - {running} end", "else 9 end",
        "tests/store/gates/test_gates.py::test_a_breaker_opens_at_its_streak_and_lets_one_probe_through",
    ),
    one(
        "the one probe of a breaker (SQLite)", "store/gates/rules.py",
        'Allowed(max(1 - running, 0), "breaker\'s probe")', 'Allowed(9, "breaker\'s probe")',
        "tests/store/gates/test_gates.py::test_a_breaker_opens_at_its_streak_and_lets_one_probe_through",
    ),
    one(
        "the streak of a breaker", "store/gates/rules.py",
        "if streak >= breaker.failures and not", "if streak >= breaker.failures - 1 and not",
        "tests/store/gates/test_gate_rules.py", f"{MODEL}[sqlite-breaker]",
    ),
    one(
        "the heartbeat's own thread", "engine/heartbeat.py",
        "self._running, self._loop = self._worker.heartbeats.add(self)",
        "self._worker.heartbeats._beats.append(self)\n"
        "        self._task = asyncio.get_running_loop().create_task(self.main())",
        "tests/processes/test_killed_workers.py::test_a_handler_that_blocks_the_event_loop_keeps_its_lease",
    ),
    one(
        "the outcome that is asked for before a beat calls its claim lost", "engine/worker.py",
        "        lane_state.ending.update(map(id, claims))\n", "",
        "tests/engine/test_lost_replies.py"
        "::test_a_heartbeat_leaves_an_outcome_whose_reply_was_lost_to_the_settling",
    ),
    one(
        "no claim without a heartbeat", "engine/worker.py",
        "        if not lane_state.beats:\n            return 0", "        if False:\n            return 0",
        "tests/engine/test_no_heartbeat.py::test_a_worker_that_cannot_renew_claims_nothing_more",
    ),
    one(
        "too many connections told apart from down", "store/driver_errors.py",
        'if state == "53300" or any(words in text for words in _POOLER_FULL):', "if False:",
        "tests/engine/test_no_heartbeat.py::test_too_many_connections_are_told_apart_from_a_server_that_is_down",
    ),
    one(
        "the short way back after an outage", "engine/environment.py",
        "_RETURN = (0.5, 1.8)", "_RETURN = (0.5, 30.0)",
        "tests/engine/test_no_heartbeat.py"
        "::test_a_server_that_is_back_is_noticed_within_three_seconds_by_few_at_a_time",
    ),
    one(
        "prefetched rows that go back with the stop", "engine/worker.py",
        "            self._loop.call_soon_threadsafe(self.shutdown.give_back_prefetched)", "            pass",
        "tests/engine/test_quick_stop.py"
        "::test_prefetched_rows_go_back_at_once_while_a_handler_and_a_claim_go_on",
    ),
    one(
        "rows that a claim brings after the stop", "engine/worker.py",
        "            if self.stopping:  # they came too late to be started", "            if False:",
        "tests/engine/test_quick_stop.py"
        "::test_prefetched_rows_go_back_at_once_while_a_handler_and_a_claim_go_on",
    ),
    one(
        "the attempt limit", "engine/execute.py",
        "if claim.attempt >= store.limit(claim):", "if False:",
        "tests/store/lane/test_systems_facts.py::test_the_limit_of_ocr_attempts_is_each_rows_own",
        f"{MODEL}[sqlite-plain]",
    ),
    one(
        "the limit of reclaims", "store/lane/statements.py",
        'allowed = f"{self.limit()} + {self.lane.max_reclaims}"', 'allowed = "99"',
        "tests/store/lane/test_any_columns.py::test_an_error_is_cut_to_what_its_column_holds", f"{MODEL}[sqlite-plain]",
    ),
    one(
        "the attempt that a snooze gives back", "store/lane/statements.py",
        'if kind in ("snooze", "wait", "release", "stale") and (column := r.get("attempts")):', "if False:",
        "tests/engine/test_run_outcomes.py::test_a_snoozed_row_may_be_snoozed_for_ever",
    ),
    one(
        "the lock on a claimed row", "store/lane/postgres_statements.py",
        "    limit {most}\n    for no key update skip locked\n",
        "    limit {most}\n",
        "tests/store/lane/test_fence.py::test_eight_claimers_at_once_take_every_row_once",
        "tests/store/lane/test_settle.py::test_a_locked_row_is_passed_over_by_the_claim_and_by_the_sweep",
    ),
    one(
        "the database's time (PostgreSQL)", "store/lane/postgres_statements.py",
        "        return f\"(now() + interval '{shift} seconds')\" if shift else \"now()\"",
        "        return f\"timestamptz '{(datetime.now(UTC) + self.clock.shift).isoformat()}'\"",
        f"{MODEL}[postgresql-plain]",
    ),
    one(
        "the database's time (SQLite)", "store/lane/sqlite.py",
        "return \", \".join([\"'now'\", *moved, *modifiers])",
        "return \", \".join([f\"'{datetime.now(UTC):%Y-%m-%d %H:%M:%S}'\", *moved, *modifiers])",
        f"{MODEL}[sqlite-plain]",
    ),
    one(
        "the lane's pause", "store/lane/statements.py",
        'if self.gates is None:\n            return "1 = 1"', 'if True:\n            return "1 = 1"',
        f"{MODEL}[sqlite-limit by key]",
    ),
    one(
        "a replaced job's steps are forgotten", "store/jobs/enqueue.py",
        'yield statements.forget_steps(), {"id": id}', "pass",
        "tests/client/test_debounce.py::test_a_job_that_waits_for_its_retry_begins_again_with_the_new_call",
    ),
    one(
        "one transaction at a time adds a key on SQLite", "store/jobs/enqueue.py",
        'return f"update {self.table} set id = id where 1 = 0", {}', 'return "select 1", {}',
        "tests/client/test_debounce.py::test_of_two_transactions_on_sqlite_the_second_waits_for_the_first",
    ),
    one(
        "the key of an enqueued job", "store/jobs/enqueue.py",
        '"only_one": unique is None or unique.strict,', '"only_one": False,',
        f"{MODEL}[sqlite-rowmill's own table]",
    ),
    one(
        "the outcome inside the finish block", "engine/job.py",
        "raise LostClaim(f\"lane {self._claim.lane!r}: row {self._claim.id!r} is no longer claimed by this run\")",
        "return settlement",
        "tests/store/lane/test_fence.py::test_nothing_a_zombie_does_reaches_the_row_that_another_took_over",
    ),
    one(
        "strict priority", "engine/worker.py",
        "return any(lane_state.more and self._ask(lane_state) > 0 for lane_state in environment.above)", "return False",
        "tests/engine/test_worker.py::test_a_lane_above_that_has_come_free_meanwhile_goes_first",
    ),
    one(
        "turns by slot time and weight", "engine/turns.py",
        "worker, order.weight\n", "worker, lambda name: 1.0\n",
        "tests/engine/test_many_databases.py::test_slots_are_shared_by_weight",
    ),
    one(
        "a slow claim keeps no slots from other environments", "engine/turns.py",
        "_SLOW = 0.5", "_SLOW = 3600.0",
        "tests/engine/test_many_databases.py::test_one_that_is_slow_costs_the_others_nothing",
    ),
    one(
        "a slice of a shared rate is leased once", "store/gates/shared_rate.py",
        "            window.note(count, now + self.valid_for)\n", "            pass\n",
        "tests/store/gates/test_shared_rate.py::test_a_slice_is_leased_once",
    ),
    one(
        "a slice that is not told of counts until it is over", "store/gates/shared_rate.py",
        "window.note(count, now + self.valid_for)", "window.note(count, now)",
        "tests/store/gates/test_shared_rate.py::test_a_slice_is_leased_once",
    ),
    one(
        "starts without a slice", "engine/slots.py",
        "return here if self.shared_rate is None else min(here, self.shared_rate.at_hand)", "return here",
        "tests/store/gates/test_shared_rate.py::test_a_row_whose_slice_is_over_starts_with_the_next_one",
    ),
    one(
        "a start uses up a part of its slice", "engine/shared_rate.py",
        "        one.left -= 1\n", "",
        "tests/store/gates/test_shared_rate.py::test_one_rate_holds_over_all_environments",
    ),
    one(
        "what is said while a worker goes to rest", "engine/environment.py",
        "await self.database.rest()", "self.look = False\n        await self.database.rest()",
        "tests/engine/test_idle_at_zero.py::test_a_row_that_comes_while_it_goes_to_rest_is_not_missed",
    ),
    one(
        "a worker at rest listens", "engine/environment.py",
        "listening=self._unpolled", "listening=False",
        "tests/engine/test_idle_at_zero.py::test_an_idle_worker_sends_nothing_and_a_notification_wakes_it",
    ),
    one(
        "no rest while rows are running or ready", "engine/environment.py",
        "if any([await lane_state.store.unfinished() for lane_state in self.lane_states]):", "if False:",
        "tests/engine/test_idle_at_zero.py::test_rows_of_a_dead_worker_come_back_after_the_next_wake",
    ),
    one(
        "an environment at rest is opened for rows that a dead worker left", "engine/environment.py",
        "any([await store.unfinished() or", "any([False or",
        "tests/engine/test_many_databases.py"
        "::test_rows_that_a_dead_worker_left_in_a_closed_environment_come_back",
    ),
    one(
        "the bound on connections", "store/connection_limit.py",
        "        if self.open < self.most:\n", "        if True:\n",
        "tests/engine/test_many_databases.py::test_connections_stay_within_the_bound",
    ),
    one(
        "unnamed statements behind a pooler", "store/postgres_database.py",
        '{"statement_cache_size": 0}', "{}",
        "tests/processes/test_pooler.py::test_no_statement_outlives_its_round_trip_behind_a_pooler",
    ),
    one(
        "replies read again with values that Python cannot hold", "store/lane/lane_store.py",
        "            self.tolerate()\n            if self.claims", "            if self.claims",
        "tests/store/test_unreadable_values.py::test_whatever_the_claim",
    ),
    one(
        "the rows of a refused claim tried one by one", "store/lane/lane_store.py",
        "        except Refused:\n            return await self._claim_carefully(claim, count)",
        "        except Busy:\n            raise",
        "tests/store/lane/test_refused_rows.py::test_a_row_that_may_not_run_is_set_aside",
    ),
    one(
        "no row set aside while every claim is refused", "store/lane/refused_rows.py",
        "if refused and not store.claims_work:", "if False:",
        "tests/store/lane/test_refused_rows.py::test_a_state_that_no_row_may_have_ends_no_row",
    ),
    one(
        "bounded tries of a refused outcome", "engine/worker.py",
        "given_up = self.shutdown.settling_last or settlement.refusals >= len(self.stuck_pauses)",
        "given_up = False\n        settlement.refusals = 0",
        "tests/store/lane/test_refused_rows.py::test_an_outcome_that_is_refused_for_good_is_given_up_and_told",
    ),
    one(
        "outcomes that wait for a missing right", "store/driver_errors.py",
        "        if _of_no_row(state, text):", "        if False:",
        "tests/store/lane/test_altered_tables.py::test_a_missing_right_ends_no_row",
    ),
    one(
        "the second look at an altered table", "engine/worker.py",
        "            if lane_state.altered and lane_state.paused_until",
        "            if False and lane_state.paused_until",
        "tests/store/lane/test_altered_tables.py::test_a_dropped_column_that_nobody_uses_stops_nothing",
    ),
    one(
        "connections to a standby thrown away", "store/handler_connections.py",
        "if from_standby(error):", "if False:",
        "tests/store/lane/test_altered_tables.py::test_a_connection_to_a_server_that_became_a_standby_is_not_used_again",
    ),
    one(
        "the table of a row in the claim", "store/lane/postgres_statements.py",
        "and ({one} or {pairs}){self.shard()}", "{self.shard()}",
        "tests/store/lane/test_child_tables.py::test_finished_rows_of_a_child_are_not_run_again",
    ),
    one(
        "the kernel's word of a write (SQLite)", "store/file_watch.py",
        "loop.add_reader(self._inotify, readable.set)", "pass",
        "tests/engine/test_wake.py::test_every_commit_rings",
    ),
    one(
        "the looks after a write, until its commit is visible (SQLite)", "engine/wake.py",
        "pause = _SOON if first_write else min(", "pause = min(",
        "tests/engine/test_wake.py::test_a_commit_that_becomes_visible_late_still_rings",
    ),
    one(
        "the log watched again when it is created again (SQLite)", "store/file_watch.py",
        "            if folder:\n                self._watch_files()\n", "",
        "tests/store/test_file_watch.py::test_the_log_is_watched_each_time_it_comes",
    ),
    one(
        "the poll after a missed commit (SQLite)", "engine/wake.py",
        "                if not written:\n                    watch.close()\n", "",
        "tests/engine/test_wake.py::test_a_watch_that_missed_a_commit_is_not_relied_on_again",
    ),
    one(
        "the second look at writers that did not notify", "engine/wake.py",
        "if committed and began - last >=", "if began - last >=",
        "tests/engine/test_second_look.py::test_a_writer_whose_notification_was_left_out_is_seen_when_it_commits_later",
    ),
    one(
        "the lock of a writer that does not notify", "store/lane/postgres_wake_trigger.py",
        "    if pg_try_advisory_xact_lock_shared(1919906669, 0) then\n", "    if true then\n",
        "tests/engine/test_second_look.py::test_a_writer_whose_notification_was_left_out_is_seen_when_it_commits_later",
    ),
    one(
        "the limit on notifications", "store/lane/postgres_wake_trigger.py",
        "      if {_AHEAD} then\n        return null;", "      if false then\n        return null;",
        "tests/migrate/test_wake_trigger.py::test_many_writers_notify_so_many_times_a_second",
    ),
    one(
        "only ready rows notify", "store/lane/postgres_wake_trigger.py",
        "where {{condition}} limit 1;", "limit 1;",
        "tests/migrate/test_wake_trigger.py::test_a_worker_that_drains_a_table_does_not_notify",
    ),
    one(
        "a wake trigger that fails no write", "store/lane/postgres_wake_trigger.py",
        "exception when others then\n", "exception when division_by_zero then\n",
        "tests/migrate/test_wake_trigger.py::test_no_write_fails_or_waits_because_of_the_lanes_own_condition",
    ),
    one(
        "the claim's time comes from a step", "store/lane/postgres_statements.py",
        'return self._time(column, f"{_MOMENT}._rm_at")',
        'return self._time(column, self._now().replace("now()", "clock_timestamp()"))',
        f"{_FORMS}test_the_golden_statements_are_taken_by_a_distributed_planner",
    ),
    one(
        "a settle's due time comes from the step that holds the row", "store/lane/postgres_statements.py",
        '''written[column], computed = "held._due", f", {self.later(column, 's._delay')} as _due"''',
        'written[column] = self.later(column, "held._delay")',
        f"{_FORMS}test_the_golden_statements_are_taken_by_a_distributed_planner",
    ),
    one(
        "a sweep has no clock in a CASE", "store/lane/postgres_statements.py",
        'self._time(column, "held._now") if end == now else end', "end",
        f"{_FORMS}test_the_golden_statements_are_taken_by_a_distributed_planner",
    ),
    one(
        "a worker takes its id with a condition over the two rows alone", "store/own/workers.py",
        'self.database.sql.seconds("excluded.seen_at", f"{self.table}.seen_at")',
        'self.database.sql.seconds(self._now, f"{self.table}.seen_at")',
        _PROFILE,
    ),
    Mutation(
        "a rate creates its keys' rows in a statement of their own", "store/gates/claim_by_key_sql.py",
        ((
            """  update {self.table} _g set version = _g.version + 1, touched_at = _p.now, tokens = _p.tokens,
    refilled_at = _p.refilled
  from (""",
            """  insert into {self.table} as _g (lane, dim, key, version, touched_at, tokens, refilled_at)
  select {as_text(self.statements.lane.name)}, {as_text(self.dim.label)}, _p._key, 1, _p.now, _p.tokens, _p.refilled
  from (""",
        ), (
            "  where {self.where} and _g.key = _p._key\n)",
            "  on conflict (lane, dim, key) do update set tokens = excluded.tokens\n)",
        )),
        ("tests/functions/test_function_forms.py::test_the_functions_of_a_lane_are_taken_by_a_distributed_planner",),
    ),
    one(
        "a gate's times come from a step", "store/gates/gate_rows.py",
        """written = self._assigned(names, [f"s.v{i}" for i in range(len(names))], "g.version")""",
        """written = self._assigned(names, [self._value(name, "0") for name in names], "g.version")""",
        _PROFILE,
    ),
    one(
        "a word to those who listen has a type", "store/dialect.py",
        "  select pg_notify('{channel}', '')::text{f", "  select pg_notify('{channel}', ''){f",
        _PROFILE,
    ),
    one(
        "rowmill's tables are made without settings that distributed tables refuse", "store/own/schema.py",
        '''"do $$ begin alter table own.rowmill_jobs alter column state set statistics 1000;"
        " exception when feature_not_supported then null; end $$",''',
        '''"alter table own.rowmill_jobs alter column state set statistics 1000",''',
        f"{_FORMS}test_rowmills_own_tables_are_made_as_a_distributed_schema_takes_them",
    ),
)  # fmt: skip


def chosen(names: list[str]) -> list[Mutation]:
    found = [m for m in MUTATIONS if not names or any(name in m.name for name in names)]
    if not found:
        raise SystemExit(f"no mutation is named so; there are: {', '.join(m.name for m in MUTATIONS)}")
    return found


def copied(folder: Path) -> Path:
    """A copy of the package, alone in a folder that can stand in PYTHONPATH."""
    shutil.copytree(SOURCE, folder / "rowmill", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "rowmill"


def run(folder: Path, tests: tuple[str, ...], *, stop: bool) -> tuple[list[str], str]:
    """Run tests against the package in a folder; those that were red, and what was said."""
    paths = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "tests" / "support")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    where = [sys.executable, "-c", "import rowmill; print(rowmill.__file__)"]
    found = subprocess.run(where, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if not found.startswith(str(folder)):
        raise SystemExit(f"the tests would not run against the copy, but against {found}")
    # Without -k and without the cache: by name, and nothing left behind.
    words = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *(["-x"] if stop else []), *tests]
    ended = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    red = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"pytest itself failed:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    return red, ended.stdout


def tried(mutation: Mutation) -> tuple[Mutation, list[str], float]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rowmill-mutation-") as name:
        mutation.apply(copied(Path(name)))
        red, _ = run(Path(name), mutation.tests, stop=True)
    return mutation, red, time.monotonic() - began


def shown(test: str) -> str:
    """A test by its name alone."""
    return test.rpartition("::")[2] if "::" in test else test


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of mutations' names; all without")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    asked = parser.parse_args(words)
    wanted = chosen(asked.names)
    tests = tuple(dict.fromkeys(test for mutation in wanted for test in mutation.tests))
    print(f"{len(wanted)} mutations. First their tests against the source as it is ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="rowmill-mutation-") as name:
        copied(Path(name))
        red, said = run(Path(name), tests, stop=False)
    if red:
        print(f"red without any mutation:\n{said[-5000:]}")
        return 1
    lines = ["| taken out | where | a test that goes red |", "|---|---|---|"]
    survived = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutation, red, seconds in pool.map(tried, wanted):
            caught = f"`{shown(red[0])}`" if red else "**none: it survives**"
            survived += [] if red else [mutation.name]
            lines.append(f"| {mutation.name} | {mutation.file} | {caught} |")
            print(f"{'caught  ' if red else 'SURVIVED'} {mutation.name} ({seconds:.0f} s): {caught}", flush=True)
    print("\n" + "\n".join(lines))
    if asked.write and not survived and not asked.names:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2])
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
