"""PDFium is one library per process, and not made for several threads: every caller holds this lock."""

from __future__ import annotations

import threading

PDFIUM = threading.Lock()
