"""``manage.py rowmill COMMAND``: rowmill's command line, on the project's Mill."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from rowmill.cli import main


class Command(BaseCommand):
    """Any of rowmill's commands, without the APP: that is ``settings.ROWMILL_APP``."""

    help = "rowmill's commands on settings.ROWMILL_APP: manage.py rowmill run, status, jobs, retry, ... (--help)"
    requires_system_checks: list[str] = []  # noqa: RUF012 (as Django has it)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Everything from the command on is rowmill's."""
        parser.add_argument(
            "args", metavar="command ...", nargs=argparse.REMAINDER, help="as on rowmill's command line"
        )

    def handle(self, *args: str, **options: Any) -> None:
        """Run it here. The processes that ``run`` starts find what this one finds."""
        variables = {
            "ROWMILL_APP": "rowmill.django.project:mill",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            main(list(args) or ["--help"], "manage.py rowmill")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
            if code and getattr(self, "_called_from_command_line", False):
                raise
            if code:
                raise CommandError(f"rowmill {' '.join(args)}: exit code {code}", returncode=code) from None
        finally:
            for name in variables:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    del os.environ[name]
