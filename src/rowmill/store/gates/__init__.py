"""Gates in the database: the rules, the rows of ``rowmill_gates``, the claims that respect them, pauses and budgets.

``rules`` is arithmetic on values; ``rules_sql`` says the same in SQL. ``claim_by_key`` is the claim where all
gates look at one key on PostgreSQL, ``locking_claim`` the one for everything else.
May import ``lane`` beside it, and ``own`` and the database layer below it.
"""
