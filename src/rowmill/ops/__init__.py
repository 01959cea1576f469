"""What operators ask and do: lanes of all environments, checks, and rows made ready, canceled or released.

``cli`` and ``web`` parse, call this and render.
May import ``mill`` and everything below it; never ``cli`` or ``web``.
"""
