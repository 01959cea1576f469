"""``rowmill_jobs``, the table behind tasks: enqueue, bulk copy, flows, cron ticks, and its lane on PostgreSQL.

May import ``lane`` and ``gates`` below it; never ``inspect``.
"""
