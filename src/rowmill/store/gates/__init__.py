"""Gates in the database: the rules, the rows of ``rowmill_gates``, the claims that respect them, pauses and budgets.

``rules`` is arithmetic on values; ``rules_sql`` is the same in SQL. ``claim_by_key`` claims on PostgreSQL if all gates
use one key; ``locking_claim`` does it in every other case. May import ``lane`` beside it, and ``own`` and the database
layer below it.
"""
