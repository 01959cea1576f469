"""The command line: one file per group of commands."""

from . import act as act
from . import demo as demo
from . import gates as gates
from . import look as look
from . import pause as pause
from . import run as run
from . import why as why
from .app import app, main

__all__ = ["app", "main"]
