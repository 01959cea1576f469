"""``make registre``: stand-in, three environments, workers as processes, a burst of jobs, and the tables filling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apps.standins.ending import run
from apps.standins.postgres import server
from apps.storage import Storage
from rowmill import Mill
from rowmill.errors import RowmillError
from rowmill.store import Database

from . import browser, tables
from .settings import ENVIRONMENTS
from .show_view import Counts, View
from .standin import Standin

#: Every fifth document has a number that the registry refuses.
_REFUSED = 5
_AT_MOST, _TICK = 900.0, 0.5
_COUNTS = """
select 'documents', cast(status_id as text), count(*) from extraction_queue group by 2
union all select 'companies', status, count(*) from search_sessions where company_name <> 'de la recherche' group by 2
union all select 'rights', status, count(*) from rdprm_searches group by 2"""
_KINDS = ("actes", "plans_cadastraux", "index", None)


def show(documents: int, workers: int) -> int:
    """Run it all. The exit code: 0 where every job ended as it should."""
    browser.find()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="registre-", dir="/tmp")))
        standin = stack.enter_context(Standin(session_seconds=15.0, slow=2.0))
        urls = stack.enter_context(_databases(folder))
        variables = {
            **{ENVIRONMENTS[name]: url for name, url in urls.items()},
            **standin.variables(),
            "STORAGE_URL": str(folder / "documents"),
            "EVIDENCE_DIR": str(folder / "evidence"),
            "WORKER_COUNT": str(workers),
            "OCR_WORKER_COUNT": "1",
            "OCR_TEMP": str(folder / "ocr"),
        }
        expected = run(_burst(Mill(urls), documents))
        commands = ["apps.registre", "apps.ocr"]
        processes = [stack.enter_context(_process(name, variables, folder / f"{name}.log")) for name in commands]
        view = View(standin.url, commands, expected)
        stack.enter_context(view)
        ended = run(_watch(Mill(urls), view, processes, folder))
    stored = {"objects": len(view.stored), "logins": standin.conduct.counts["logins"]}
    return view.summary(ended, stored)


@contextlib.contextmanager
def _databases(folder: Path) -> Iterator[dict[str, str]]:
    """prod and staging on one embedded PostgreSQL, dev in a SQLite file."""
    with server(folder / "pg") as postgres:
        for name in ("prod", "staging"):
            postgres.psql(f"create database {name};")
        yield {
            "prod": postgres.get_uri(database="prod"),
            "staging": postgres.get_uri(database="staging"),
            "dev": f"sqlite:///{folder / 'dev.db'}",
        }


async def _burst(mill: Mill, documents: int) -> dict[str, dict[str, Counts]]:
    """Jobs of all kinds in all environments; how they are to end."""
    await tables.migrate_all(mill)
    for _, database in mill.databases():
        async with database.begin() as tx:
            for n in range(1, documents + 1):
                number = f"{9 if n % _REFUSED == 0 else 1 + n % 6} {n:03d} 450"
                values = {"document_number": number, "document_type": _KINDS[n % 4], "circonscription": "Québec"}
                await tx.execute(tables.extraction_queue.insert().values(values))
            await tx.execute(tables.search_sessions.insert().values(company_name="Boulangerie"))
            past = {"company_name": "de la recherche", "status": "pending_name_selection", "req_completed": True}
            insert = tables.search_sessions.insert().values(past).returning(tables.search_sessions.c.id)
            session = (await tx.execute(insert)).scalar_one()
            of = {"search_session_id": session, "search_name": "Menuiserie Bélanger"}
            await tx.execute(tables.rdprm_searches.insert().values(of))
        await database.close()
    refused = documents // _REFUSED
    ends = {
        "documents": Counts({"5": documents - refused, "4": refused}),
        "companies": Counts(pending_name_selection=1),
    }
    return {name: {**ends, "rights": Counts(completed=1)} for name in mill.environments}


@contextlib.contextmanager
def _process(name: str, variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Workers, in a session of their own: Ctrl-C reaches us alone, and we stop them."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", name, "run"],
            env={**os.environ, **variables}, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _watch(mill: Mill, view: View, processes: list[subprocess.Popen[bytes]], folder: Path) -> bool:
    """Show the tables until every row has ended, or it takes too long."""
    databases = mill.databases()
    storage = Storage(str(folder / "documents"))
    deadline = time.monotonic() + _AT_MOST
    try:
        while time.monotonic() < deadline:
            view.show({name: await _counted(database) for name, database in databases})
            view.stored = storage.paths()
            if view.ended:
                return True
            if any(process.poll() is not None for process in processes):
                raise RowmillError(
                    f"workers ended before their work did:\n{_last_words(folder)}", hint="see their words above"
                )
            await asyncio.sleep(_TICK)
        return False
    finally:
        for _, database in databases:
            await database.close()


def _last_words(folder: Path) -> str:
    return "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))


async def _counted(database: Database) -> dict[str, Counts]:
    rows: Any = await database.read(lambda run: run(_COUNTS, ()))
    found: dict[str, Counts] = {"documents": Counts(), "companies": Counts(), "rights": Counts()}
    for kind, state, count in rows:
        found[kind][state] += count
    return found
