"""A small land registry, company register and movable-rights register, to run registre against."""

from .server import Standin

__all__ = ["Standin"]
