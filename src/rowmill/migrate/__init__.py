"""DDL on the user's tables: propose it, apply it under live traffic, and remove it again.

May import ``adopt`` (the survey of a table), ``store`` and ``declare``; never ``engine``.
"""
