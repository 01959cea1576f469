"""Test a lane by trial: run the engine's own statements on a real database, in an order that a seed decides.

``schedules`` picks the next actor at every point. ``stepped`` stops before every statement and every commit.
``worker_script`` says what a worker does, ``commit_checks`` checks every commit, and ``interleave`` puts them together:
one seed, one schedule.
"""
