"""The table of what each lane did in each minute: a step of ``schema``."""

from __future__ import annotations

#: Outcomes that are counted, in the order of the columns.
COUNTS = ("started", "done", "retried", "dead", "snoozed", "canceled", "lost", "swept")
#: Upper ends of the run times that are told apart, in seconds; the last column takes what is longer.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
#: The columns of the run times' histogram.
TIMES = tuple(f"t{n}" for n in range(len(BOUNDS) + 1))
#: Every number of a row; ``run_us`` is the sum of the run times in microseconds.
NUMBERS = (*COUNTS, "run_us", *TIMES)

WHAT = "rowmill_minutes: what each lane did in each minute, and how much memory each worker has"
_NUMBERS = ",\n".join(f"  {name} bigint not null default 0" for name in NUMBERS)
# Minutes are counted since 1970: both databases order them alike, and a chart steps through them by one.
STATEMENTS = (
    f"create table own.rowmill_minutes (\n  lane text not null,\n  minute bigint not null,\n{_NUMBERS},\n"
    "  primary key (lane, minute)\n)",
    "alter table own.rowmill_workers add column memory bigint not null default 0",
)
# The row of the present minute is written every few seconds by every worker: room for that on its page.
ON_POSTGRES = ("alter table own.rowmill_minutes set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05)",)
