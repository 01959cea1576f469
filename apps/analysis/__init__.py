"""Staged analysis of websites by a language model: ``rowmill run apps.analysis:mill``. See README.md beside this."""

from .phases import build
from .settings import Settings

mill = build(Settings.from_environ())
