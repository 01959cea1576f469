"""The columns of ``rowmill_minutes``: what is counted of each lane in each minute."""

from __future__ import annotations

#: Outcomes that are counted, in the order of the columns.
COUNTS = ("started", "done", "retried", "dead", "snoozed", "canceled", "lost", "swept")
#: Upper ends of the run times that are told apart, in seconds; the last column takes what is longer.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
#: The columns of the run times' histogram.
TIMES = tuple(f"t{n}" for n in range(len(BOUNDS) + 1))
#: Every number of a row; ``run_us`` is the sum of the run times in microseconds.
NUMBERS = (*COUNTS, "run_us", *TIMES)
