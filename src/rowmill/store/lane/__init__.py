"""One lane on one table: the binding, the verbs (claim, settle, renew, sweep) and their SQL on both databases.

``lane_store`` has the verbs, ``statements`` the SQL that both dialects share, ``postgres`` and ``sqlite`` the rest.
May import ``gates`` beside it, and ``own`` and the database layer below it.
"""
