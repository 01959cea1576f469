"""``rowmill mcp``: an assistant's tools over standard input and output."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys

from ..errors import RowmillError
from .app import app, run_async
from .options import App, load


@app.command()
def mcp(reference: App = None) -> None:
    """Let an AI assistant operate your lanes, over the Model Context Protocol (MCP) on stdio.

    Tools that read: status, jobs, job, why, errors, gates, workers, health. Tools that act (retry, cancel, pause,
    resume) need a token with the scope *operate* in `ROWMILL_TOKEN`. The audit log records what they do.

    Example: `rowmill mcp app:mill`
    """
    if importlib.util.find_spec("mcp") is None:
        raise RowmillError("mcp needs the MCP SDK", hint="pip install 'rowmill[mcp]'")
    from ..integrations.mcp import serve

    with contextlib.redirect_stdout(sys.stderr):  # standard output is the protocol's, whatever the application prints
        mill = load(reference)
    run_async(serve(mill, os.environ.get("ROWMILL_TOKEN") or None))
