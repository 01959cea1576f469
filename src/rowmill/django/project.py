"""The project's Mill, by its settings: ``rowmill.django.project:mill`` is an application that any command takes."""

from __future__ import annotations

import django
from django.apps import apps
from django.conf import settings

from ..config import find_app
from ..errors import AppError
from ..mill import Mill


def _find() -> Mill:
    if not apps.ready:
        django.setup()
    reference = getattr(settings, "ROWMILL_APP", None)
    if not reference:
        raise AppError("settings.ROWMILL_APP is not set", hint='ROWMILL_APP = "shop.jobs:mill": where your Mill is')
    return find_app(reference)


mill = _find()
