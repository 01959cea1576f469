"""``python -m apps.prices``: the demonstration. ``setup`` makes the tables, ``work`` is one worker."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from apps.standins.ending import stoppable
from rowmill import RowmillError, configure_logs


def main(words: Sequence[str] | None = None) -> int:
    """What the command line asks for; its exit code."""
    parser = argparse.ArgumentParser("python -m apps.prices", description="Price collection for coins.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser("demo", help="sites, database and workers on this machine (the default)")
    for each in (parser, demo):
        each.add_argument("--coins", type=int, default=12, help="how many coins (12)")
        each.add_argument("--processes", type=int, default=4, help="how many workers (4)")
    commands.add_parser("setup", help="tables, views and functions in ROWMILL_DATABASE_URL")
    work = commands.add_parser("work", help="one worker, called WORKER_ID")
    work.add_argument("--drain", action="store_true", help="end when nothing is left")
    work.add_argument("--log", choices=("console", "json"), default="console")
    given = parser.parse_args(words)
    for name in ("coins", "processes"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: at least 1")
    try:
        return _run(given)
    except RowmillError as error:
        print(
            f"Error: {error.message}\nTry: {error.hint}" if error.hint else f"Error: {error.message}", file=sys.stderr
        )
        return 1


def _run(given: argparse.Namespace) -> int:
    # Imported late, so that a wrong setting is told like any other mistake.
    if given.command == "setup":
        from .schema import setup

        left = asyncio.run(setup())
        print("Tables, views and functions are in place.")
        for line in left:
            print(f"Note: {line}")
    elif given.command == "work":
        from .worker import mill, settings

        configure_logs(given.log)
        tally = mill.run(worker_id=settings.worker_id, drain=given.drain)
        return 3 if given.drain and tally.died else 0  # as rowmill run --drain
    else:
        from .demo import demo

        return stoppable(lambda: demo(given.coins, given.processes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
