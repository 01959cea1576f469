"""What tests send to PostgreSQL is in forms that a distributed planner takes.

Why a process: the profile is an option of pytest, so a part of the suite runs with it by a pytest of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import quick_processes

GATES, JOBS, LANE = "tests/store/gates", "tests/store/jobs", "tests/store/lane"
#: Lanes, tasks, gates, breakers, budgets, joins, flows, crons, waits, expiry, inputs, operators' actions and functions,
#: as a part of every run; ``make distributed`` runs all tests on PostgreSQL that way.
CORE = [
    f"{LANE}/test_settle.py::test_a_batch_of_all_kinds_and_different_columns_is_written_row_by_row_as_asked",
    f"{LANE}/test_waits.py::test_at_the_timeout_the_row_is_dead_with_the_reason",
    f"{LANE}/test_waits.py::test_a_waiting_row_is_claimed_when_its_condition_is_true_and_not_before",
    f"{LANE}/test_expiry.py::test_a_worker_expires_rows_counts_them_and_tells",
    f"{LANE}/test_inputs.py::test_an_outcome_that_is_final_begins_the_count_again",
    f"{GATES}/test_gates.py::test_a_rate_is_shared_and_refills",
    f"{GATES}/test_gates.py::test_a_breaker_opens_at_its_streak_and_lets_one_probe_through",
    f"{GATES}/test_gates.py::test_a_breaker_in_the_users_own_columns",
    f"{GATES}/test_gates.py::test_retry_after_closes_the_key_for_everybody",
    f"{GATES}/test_pauses.py::test_a_pause_has_an_end_and_is_over_then",
    f"{GATES}/test_budgets.py::test_what_is_given_back_makes_room_once_and_not_again_when_the_period_is_over",
    f"{JOBS}/test_flows.py::test_a_job_spawns_children_and_goes_on_when_all_have_ended",
    f"{JOBS}/test_flows.py::test_a_batch_calls_back_once_when_all_have_ended",
    f"{JOBS}/test_cron.py::test_of_two_that_saw_the_same_last_tick_one_enqueues",
    f"{JOBS}/test_bulk_enqueue.py::test_many_are_enqueued_at_once_in_order_with_their_ids",
    "tests/client/test_tasks.py::test_a_task_is_enqueued_run_and_its_result_given_back",
    "tests/client/test_tasks.py::test_a_key_keeps_a_second_job_out_while_the_first_is_unfinished",
    "tests/client/test_debounce.py::test_a_job_waits_for_the_last_call_and_gets_its_arguments",
    "tests/cli/test_act.py::test_retry_makes_a_dead_row_ready_at_once_and_keeps_its_error",
    "tests/cli/test_act.py::test_cancel_ends_rows_that_are_ready_or_waiting_in_the_lanes_own_state",
    "tests/store/own/test_minutes.py::test_each_outcome_is_counted_in_its_minute_once",
    "tests/engine/test_recover.py",
]


@pytest.mark.timeout(400)
@pytest.mark.local("it starts such a run itself")
def test_what_tests_send_is_taken_by_a_distributed_planner(server: object) -> None:
    """Issue 24: every statement that writes is judged by the server's own parse tree."""
    words = [sys.executable, "-m", "pytest", "--distributed", "-vv", "-p", "no:cacheprovider", "--timeout=300", *CORE]
    inner = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # A real interpreter: pytest warns of plugins that a fork server has imported before it, and warnings are errors.
    with (
        quick_processes.real_processes(),
        subprocess.Popen(words, cwd=Path(__file__).parents[2], env=inner, stdout=subprocess.PIPE, text=True) as started,
    ):
        try:
            said, _ = started.communicate(timeout=360)
        except subprocess.TimeoutExpired:
            started.send_signal(signal.SIGINT)  # so that it stops the server it has started
            said, _ = started.communicate()
    assert started.returncode == 0, said[-8000:]
    (judged,) = re.findall(r"(\d+) distinct statements judged, 0 could not be", said)
    assert int(judged) > 60, "and not nothing"
