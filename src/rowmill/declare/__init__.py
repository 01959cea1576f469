"""Everything that a user declares: lanes, states, roles, retry policies, gates, budgets, tasks, crons and outcomes.

Plain values, validated on construction. No I/O and no SQL. Imports only ``errors``.
"""
