"""Proof by trial: the engine's own statements, on a real database, in orders that a seed decides.

``points`` decides who goes on, ``stepped`` stops before every statement and every commit, ``script`` says what a worker
does, ``watch`` looks at every commit, and ``interleave`` puts them together: one seed, one schedule.
"""
