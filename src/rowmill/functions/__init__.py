"""A lane's verbs as PostgreSQL functions, for workers in other languages.

The bodies are made of the same SQL phrases as the statements of Python workers.
May import ``store`` and ``declare``; never ``engine``.
"""
