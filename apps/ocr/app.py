"""The application: its Mill, as the environment variables say. ``rowmill run apps.ocr:mill`` finds it."""

from __future__ import annotations

from apps.ocr.lane import declare
from apps.ocr.settings import Settings
from apps.registre.settings import Environments
from rowmill import Mill

settings = Settings.from_environment()
mill = Mill(Environments())
ocr = declare(mill, settings)
