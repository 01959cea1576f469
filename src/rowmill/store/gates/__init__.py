"""Gates in the database: the rules, the rows of ``rowmill_gates``, the claims that respect them, pauses and budgets.

``rules`` is arithmetic on values; the three claims (``locking_claim``, ``claim_by_key``, ``claim_by_range``) go by it.
May import ``lane`` beside it, and ``own`` and the database layer below it.
"""
