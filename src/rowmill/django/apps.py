"""The Django application: ``manage.py migrate`` makes rowmill's own tables, in test databases, too."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.db import router
from django.db.models.signals import post_migrate


class RowmillConfig(AppConfig):
    """``"rowmill.django"`` in INSTALLED_APPS."""

    name = "rowmill.django"
    label = "rowmill"

    def ready(self) -> None:
        """Tables come with every ``migrate``, so there is no migration of ours to be kept in step with."""
        post_migrate.connect(make_tables, sender=self)


def make_tables(app_config: AppConfig, using: str, **_: Any) -> None:
    """Make what is missing of rowmill's own tables in a database that was migrated."""
    from .mill import Mill

    if not (getattr(settings, "ROWMILL_APP", None) or _has_backend()) or not router.allow_migrate(
        using, app_config.label
    ):
        return
    from .project import mill

    if isinstance(mill, Mill) and using in mill.aliases:
        mill.make_tables(using)


def _has_backend() -> bool:
    """Whether Django's own tasks are to be rowmill's jobs."""
    given = getattr(settings, "TASKS", None) or {}
    return any("rowmill" in str(backend.get("BACKEND")) for backend in given.values())
