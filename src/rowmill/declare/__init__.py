"""What a user writes: lanes, states, roles, retry policies, gates, budgets, tasks, crons and outcomes.

Plain values, checked when they are made. No I/O and no SQL.
Imports only ``errors``.
"""
