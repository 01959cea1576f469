"""Every operator verb once: what operators ask (``questions``) and do (``actions``), as documents.

``cli`` prints these documents and ``web`` sends them, so that a command and an endpoint say the same.
May import ``mill`` and everything below it; never ``cli`` or ``web``.
"""
