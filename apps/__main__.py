"""What is the same for all five applications: their set-up, their SQL migrations, and stand-ins for the world outside.

python -m apps setup NAME    makes the tables in the application's databases, or adds what is missing; again at any time
python -m apps sql NAME      prints the same as numbered SQL migrations, for PostgreSQL
python -m apps standin NAME  serves what the application talks to until stopped, and prints the settings for it
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from apps.migrations import Migration, listing, of_tables
from apps.standins.ending import stoppable
from rowmill import RowmillError
from rowmill.config import find_app

HERE = Path(__file__).parent
#: What a set-up puts into a script; a new database has these keys.
PLACES = {":intake_key": "bigint", ":source_key": "bigint"}


def _script(name: str, **places: str) -> list[Migration]:
    text = (HERE / name / "schema.sql").read_text(encoding="utf-8")
    for place, value in {**PLACES, **places}.items():
        text = text.replace(place, value)
    return [Migration("tables, indexes and views; one transaction", f"begin;\n{text.strip()}\ncommit;")]


def _prices() -> list[Migration]:
    from apps.prices.settings import Settings

    lock = f"{Settings.read().job_lock_timeout_seconds} seconds"
    command = "rowmill sql apps.prices:mill scrape --functions --name claim=claim_next_pending_job"
    functions = Migration("functions for other languages", f"-- After 001, printed by:\n--   {command}")
    return [*_script("prices", **{":lock_timeout seconds": lock}), functions]


def _analysis() -> list[Migration]:
    from apps.analysis.tables import metadata

    return of_tables(metadata)


def _registre() -> list[Migration]:
    from apps.registre.tables import OCR_VIEW, metadata

    view = OCR_VIEW.replace("create view", "create or replace view", 1)
    return [*of_tables(metadata), Migration("the view of the active OCR workers", f"{view};")]


MIGRATIONS: dict[str, Callable[[], list[Migration]]] = {
    "analysis": _analysis,
    "enrichment": lambda: _script("enrichment"),
    "ocr": _registre,  # one database for both
    "prices": _prices,
    "registre": _registre,
}


@contextmanager
def _sites_of_prices() -> Iterator[list[str]]:
    from apps.prices.standin import serving

    with serving() as sites:
        values = ", ".join(
            f"('{name}', '{name}', '{sites.address(name)}', 240)" for name in ("listing", "api", "auction")
        )
        yield [
            f"insert into sources (name, kind, base_url, rate_limit_per_minute) values {values}",
            "  on conflict (name) do update set kind = excluded.kind, base_url = excluded.base_url;",
        ]


@contextmanager
def _web_of_analysis() -> Iterator[list[str]]:
    from apps.standins import sites
    from apps.standins.internet import Internet
    from apps.standins.model import Model

    with Internet(default=sites.page()) as net, Model() as model:
        settings = {"INTERNET": net.address, "MODEL_URL": f"{model.url}/v1", "MODEL_KEY": "none-needed"}
        yield [f"export ANALYSIS_{name}={value}" for name, value in settings.items()]


@contextmanager
def _web_of_enrichment() -> Iterator[list[str]]:
    from apps.standins import sites
    from apps.standins.internet import Internet

    with Internet(default=sites.page()) as net:
        yield [f"export ENRICHMENT_INTERNET={net.address}"]


@contextmanager
def _model_of_ocr() -> Iterator[list[str]]:
    from apps.ocr.standin import Standin

    with Standin() as standin:
        yield [f"export GEMINI_BASE_URL={standin.url}", "export GEMINI_API_KEY=none-needed"]


@contextmanager
def _registers() -> Iterator[list[str]]:
    from apps.registre.standin.server import Standin

    with Standin() as standin:
        yield [f"export {name}={value}" for name, value in standin.variables().items()]


STANDINS = {
    "analysis": _web_of_analysis,
    "enrichment": _web_of_enrichment,
    "ocr": _model_of_ocr,
    "prices": _sites_of_prices,
    "registre": _registers,
}


async def _setup(name: str) -> list[str]:
    """Set up an application's databases; what to tell about it."""
    if name == "prices":
        from apps.prices.schema import setup

        return await setup() or []
    mill = find_app(f"apps.{name}:mill")
    if name == "enrichment":
        from apps.enrichment.mill import create_tables

        (url,) = mill.environments.values()
        return await create_tables(url) or []
    if name == "analysis":
        from apps.analysis.tables import create_all

        made = await create_all(mill)
    else:
        from apps.registre.tables import migrate_all

        made = await migrate_all(mill)
    return [f"{environment}: {', '.join(done) or 'nothing to do'}" for environment, done in made.items()]


def _serve(name: str) -> int:
    with ExitStack() as stack:
        for line in stack.enter_context(STANDINS[name]()):
            print(line)
        print(f"# The stand-in of {name} is there until Ctrl-C.", flush=True)
        threading.Event().wait()
    return 0


def main(words: list[str] | None = None) -> int:
    """What the command line asks for; its exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m apps", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, what in (
        ("setup", "make or complete the tables"),
        ("sql", "print the SQL migrations"),
        ("standin", "serve the world outside"),
    ):
        commands.add_parser(command, help=what).add_argument("name", choices=sorted(MIGRATIONS))
    given = parser.parse_args(words)
    if given.command == "sql":
        print(listing(given.name, MIGRATIONS[given.name]()))
        return 0
    if given.command == "standin":
        return stoppable(lambda: _serve(given.name))
    try:
        for line in asyncio.run(_setup(given.name)):
            print(line)
    except RowmillError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{given.name} is set up.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
