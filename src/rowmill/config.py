"""Finds the application: ``module:mill``, as with uvicorn, or ``ROWMILL_APP``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from .engine.counters import raised_at
from .errors import AppError, RowmillError, did_you_mean
from .mill import Mill


def find_app(reference: str | None) -> Mill:
    """The Mill behind ``module:name`` (or ``file.py:name``); the name may be left out where there is one Mill."""
    reference = reference or os.environ.get("ROWMILL_APP")
    if not reference:
        raise AppError("no application given", hint="rowmill run module:mill, or set ROWMILL_APP")
    module_name, _, name = reference.partition(":")
    module = _import(module_name, reference)
    if name:
        app = getattr(module, name, None)
        if isinstance(app, Mill):
            return app
        mills = [key for key, value in vars(module).items() if isinstance(value, Mill)]
        what = "is not a Mill" if app is not None else "does not exist"
        raise AppError(f"{reference!r}: {name!r} {what}", hint=did_you_mean(name, mills))
    mills = [key for key, value in vars(module).items() if isinstance(value, Mill)]
    if len(mills) == 1:
        only: Mill = getattr(module, mills[0])
        return only
    if not mills:
        raise AppError(f"module {module_name!r} has no Mill", hint='mill = Mill("sqlite:///jobs.db") at its top')
    raise AppError(f"module {module_name!r} has several Mills", hint=" or ".join(f"{module_name}:{m}" for m in mills))


def _import(name: str, reference: str) -> object:
    """Import the module, from the working directory too, and tell a missing module from one that fails."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.endswith(".py") or "/" in name:
        path = Path(name)
        if not path.exists():
            raise AppError(f"there is no file {name!r}", hint="rowmill run module:mill, from the folder that has it")
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        name = path.stem
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0] and error.name != name:
            raise AppError(f"importing {name!r} failed: {error}", hint="install the missing package") from error
        raise AppError(
            f"there is no module {name!r} (from {reference!r})",
            hint="rowmill run module:mill, from the folder that has module.py",
        ) from error
    except SyntaxError as error:
        raise AppError(
            f"importing {name!r} failed: {error.filename}, line {error.lineno}: {error.msg}",
            hint=f"correct line {error.lineno} of {error.filename}",
        ) from error
    except RowmillError:
        raise
    except (Exception, SystemExit) as error:
        raised = raised_at(error)
        raise AppError(
            f"importing {name!r} failed{f' at {raised}' if raised else ''}: {type(error).__name__}: {error}",
            hint=f'python -c "import {name}" shows the full traceback',
        ) from error
