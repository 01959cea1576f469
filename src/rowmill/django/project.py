"""The project's Mill, by its settings: ``rowmill.django.project:mill`` is an application that any command takes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import django
from django.apps import apps
from django.conf import settings

from ..config import find_app
from ..errors import AppError
from ..mill import Mill


def _find() -> Mill:
    if not apps.ready:
        django.setup()
    tasks = _tasks()
    reference = getattr(settings, "ROWMILL_APP", None)
    if reference:
        mill = find_app(reference)
    elif tasks is not None:
        from .mill import Mill as DjangoMill

        # Nothing but Django's own tasks: all that has to be known are their databases.
        aliases = (backend.options.get("database", "default") for backend in tasks.backends())
        mill = DjangoMill(*dict.fromkeys(aliases))
    else:
        raise AppError("settings.ROWMILL_APP is not set", hint='ROWMILL_APP = "shop.jobs:mill": where your Mill is')
    if mill.schema is not None:
        from .models import QueuedJob

        QueuedJob._meta.db_table = f'"{mill.schema}"."rowmill_jobs"'
    if tasks is not None and hasattr(mill, "aliases"):
        tasks.install(mill)
    return mill


def _tasks() -> Any:
    """The module of the backend for ``settings.TASKS``, if a backend there is ours."""
    name = "rowmill.django.task_backend"
    if not getattr(settings, "TASKS", None):
        return None
    known = import_module("django.tasks" if django.VERSION >= (6, 0) else "django_tasks").task_backends
    return sys.modules[name] if any(type(known[alias]).__module__ == name for alias in known) else None


mill = _find()
