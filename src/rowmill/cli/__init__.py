"""The command line: one file per group of commands. Each parses, calls ``ops`` and prints its document.

May import everything but ``store``, which it reaches through ``ops``, and ``django``.
"""

from . import act as act
from . import adopt as adopt
from . import check as check
from . import demo as demo
from . import errors as errors
from . import gates as gates
from . import logs as logs
from . import look as look
from . import mcp as mcp
from . import migrate as migrate
from . import prove as prove
from . import run as run
from . import serve as serve
from . import sql as sql
from . import token as token
from . import top as top
from . import try_rows as try_rows
from . import why as why
from .app import app, main

__all__ = ["app", "main"]
