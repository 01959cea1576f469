"""Default worker ids: what a person reads in a worker column, in logs and in ``rowmill workers``."""

from __future__ import annotations

import os
import re
import secrets
import socket
import uuid

from ..errors import DeclarationError

DEFAULT = "{host}-{pid}-{random}"
#: Shorter than what is scrubbed from reports as a secret, and than any worker column that is taken.
_LONGEST = 31
#: Without letters and digits that look alike.
_LETTERS = "23456789abcdefghjkmnpqrstvwxyz"


def new(form: str = DEFAULT) -> str:
    """An id that no other process has: ``mill-3-4711-k7xq``."""
    pid, random = str(os.getpid()), "".join(secrets.choice(_LETTERS) for _ in range(4))
    # The first label of a domain name; of a long one its end, where generated host names differ.
    host = re.sub(r"[^A-Za-z0-9_]+", "-", socket.gethostname().partition(".")[0])
    host = host[-(_LONGEST - len(pid) - len(random) - 2) :].strip("-_") or "worker"
    return form.format(host=host, pid=pid, random=random, uuid=uuid.uuid4())


def validate(form: str) -> None:
    """Refuse a form that cannot be filled in, or gives two processes the same id."""
    try:
        new(form)
        told_apart = "{random" in form or "{uuid" in form
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        told_apart = False
    if not told_apart:
        raise DeclarationError(
            f"worker_id={form!r} gives several processes the same id",
            hint=f'worker_id="{DEFAULT}": {{random}} or {{uuid}} must be in it, {{host}} and {{pid}} may be',
        )
