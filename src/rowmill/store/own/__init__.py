"""rowmill's other tables: workers, failures, minutes, tokens, the DDL ledger, and the steps that create them.

May import only the database layer of ``store``.
"""
