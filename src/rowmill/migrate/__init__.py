"""DDL on the user's tables: what would help, how it is applied beside live traffic, how it is removed again.

May import ``adopt`` (the survey of a table), ``store`` and ``declare``; never ``engine``.
"""
