"""The file ``.env``: settings of all five applications, read before the first of them is imported.

It is taken from the working directory; ``ENV_FILE`` names another, and an empty ``ENV_FILE`` none. A variable that is
set in the real environment wins over the file: what a container, a unit or a shell says counts.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from dotenv import dotenv_values


def load(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set what the file says and the environment does not; the names that were set."""
    path = environ.get("ENV_FILE", ".env")
    if not path or not os.path.isfile(path):
        return []
    # As they stand there: a password may have a $ in it.
    given = dotenv_values(path, interpolate=False, encoding="utf-8")
    new = {name: value for name, value in given.items() if value is not None and name not in environ}
    environ.update(new)
    return list(new)
