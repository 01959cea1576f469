"""Other people's software beside rowmill: the declarations of docs/how-to/foreign-tables.md, and scripts.

In processes of their own, because these packages keep global state (Django's settings, Procrastinate's apps).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from databases import Db

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "foreign-tables.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


class Place:
    """A folder with files of the page, and a database."""

    def __init__(self, folder: Path, db: Db, *files: str) -> None:
        self.folder, self.db = folder, db
        self.environment = {**os.environ, "DATABASE_URL": db.url, "PYTHONPATH": str(folder)}
        for name in files:
            self.write(name, FILES[name])

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *words: str, code: int = 0) -> str:
        """A command, in the folder; what it printed."""
        ended = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == code, f"{words} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def script(self, text: str) -> Any:
        """A script's last printed line, as JSON."""
        out = self.run("-W", "ignore", "-c", text)
        return json.loads(out.splitlines()[-1]) if out.strip() else None

    def drain(self, module: str) -> None:
        """Work the rows off with a real worker."""
        self.run("-c", f"import {module}; {module}.mill.run(drain=True)")
