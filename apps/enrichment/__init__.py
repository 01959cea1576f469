"""Bookmark import and link enrichment: ``rowmill run apps.enrichment:mill``. See README.md."""

from .enrich import enrich as enrich
from .imports import read as read
from .imports import withdraw as withdraw
from .mill import mill as mill
