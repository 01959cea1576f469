"""The dashboard and the HTTP API: each request is checked, answered by ``ops`` and rendered. Needs the extra ``web``.

May import ``ops`` and what is below it, but not ``store``; never ``cli``.
"""
