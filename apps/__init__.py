"""Five working systems on rowmill, each a folder of its own with a README. Their settings may stand in a ``.env``."""

from .environment import load

load()
