"""Read-only queries: counts, pages of rows, why a row waits, health, gates as an operator sees them, query plans.

Every query is bounded in rows and in time. Nothing here writes. May import every other folder of ``store``; none of
them imports this one.
"""
