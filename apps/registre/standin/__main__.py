"""``python -m apps.registre.standin``: the three registers until Ctrl-C, for a look in your own browser."""

from __future__ import annotations

import threading

from .server import Standin

with Standin() as standin:
    for name, value in standin.variables().items():
        print(f"export {name}={value}")
    print(f"# {standin.url}/foncier/accueil  {standin.url}/req/recherche  {standin.url}/rdprm/recherche", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
