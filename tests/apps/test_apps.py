"""What the five applications have in common: settings in a file, set-up, migrations, stand-ins, and screens."""

from __future__ import annotations

import ast
import asyncio
import io
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from apps import __main__ as commands
from apps import environment
from apps.registre.settings import Environments
from databases import Db
from rowmill import DeclarationError, Mill, RowmillError

ROOT = Path(__file__).parents[2]
APPS = sorted(commands.MIGRATIONS)


def test_the_file_fills_in_what_the_environment_does_not_say(tmp_path: Path) -> None:
    """X3: the real environment wins; values are taken as they stand; there need not be a file."""
    path = tmp_path / "settings"
    path.write_text("# ours\nSET=file\nexport NEW='a b'\nPASSWORD=x$y\nEMPTY=\n\n")
    environ = {"ENV_FILE": str(path), "SET": "real"}
    assert environment.load(environ) == ["NEW", "PASSWORD", "EMPTY"]
    assert environ == {"ENV_FILE": str(path), "SET": "real", "NEW": "a b", "PASSWORD": "x$y", "EMPTY": ""}
    assert environment.load({"ENV_FILE": ""}) == []
    assert environment.load({"ENV_FILE": str(tmp_path / "none")}) == []


def test_all_five_read_the_file_in_the_working_directory(tmp_path: Path) -> None:
    """X3: by whatever way their module is imported."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    (tmp_path / ".env").write_text(f"ROWMILL_DATABASE_URL={url}\nENVIRONMENTS=dev\nDEV_DATABASE_URL={url}\n")
    code = (
        "from rowmill.config import find_app\n"
        f"for name in {APPS}: print(name, list(find_app(f'apps.{{name}}:mill').environments.values()))"
    )
    names = ("ENV_FILE", "ROWMILL_DATABASE_URL", "ENVIRONMENTS", "DEV_DATABASE_URL")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
    assert told.stdout.splitlines() == [f"{name} ['{url}']" for name in APPS], told.stderr


def test_environments_and_their_order_are_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A2: any names, in any order; one without a database is told."""
    for name in ("PROD", "STAGING", "DEV"):
        monkeypatch.delenv(f"{name}_DATABASE_URL", raising=False)
    monkeypatch.setenv("PROD_DATABASE_URL", "sqlite:///p.db")
    monkeypatch.setenv("NORTH_EAST_DATABASE_URL", "sqlite:///n.db")
    assert list(Environments()) == ["prod"]
    monkeypatch.setenv("ENVIRONMENTS", "north-east, prod")
    assert dict(Environments()) == {"north-east": "sqlite:///n.db", "prod": "sqlite:///p.db"}
    assert list(Environments()) == ["north-east", "prod"]
    monkeypatch.setenv("ENVIRONMENTS", "prod,stagin")
    with pytest.raises(DeclarationError, match="names 'stagin', and STAGIN_DATABASE_URL is not set"):
        list(Environments())


@pytest.mark.parametrize("name", APPS)
def test_the_migrations_are_numbered_and_may_be_run_again(
    name: str, pg: Db, capsys: pytest.CaptureFixture[str]
) -> None:
    """X2: as printed, on an empty database, twice."""
    assert commands.main(["sql", name]) == 0
    text = capsys.readouterr().out
    numbers = re.findall(rf"^-- {name} (\d{{3}}): ", text, re.MULTILINE)
    assert numbers == [f"{n:03}" for n in range(1, len(numbers) + 1)]
    tables = "select count(*) from information_schema.tables where table_schema = 'public'"
    pg.execute(text)
    made = pg.value(tables)
    assert made > 2
    pg.execute(text)
    assert pg.value(tables) == made


@pytest.mark.parametrize("name", ["analysis", "enrichment", "registre"])
def test_the_set_up_may_be_run_again_and_after_the_migrations(
    name: str, pg: Db, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: the printed migrations leave nothing to do."""
    commands.main(["sql", name])
    pg.execute(capsys.readouterr().out)
    environ = {**os.environ, "ROWMILL_DATABASE_URL": pg.url, "ENVIRONMENTS": "dev", "DEV_DATABASE_URL": pg.url}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "apps", "setup", name]
    told = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1] == f"{name} is set up."
    assert all("nothing to do" in line for line in told.stdout.splitlines()[:-1])


def test_a_set_up_without_a_database_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: what is missing, and what to do."""
    monkeypatch.delenv("ROWMILL_DATABASE_URL", raising=False)
    monkeypatch.delenv("ENVIRONMENTS", raising=False)
    assert commands.main(["setup", "analysis"]) == 1
    assert "ROWMILL_DATABASE_URL is not set" in capsys.readouterr().err


@pytest.mark.parametrize("name", APPS)
def test_every_application_has_a_stand_in_that_tells_its_settings(name: str) -> None:
    """X3: as lines for a shell, or for psql."""
    with commands.STANDINS[name]() as lines:
        assert lines
        assert all("127.0.0.1:" in line or "=" in line for line in lines)
        assert "127.0.0.1:" in "".join(lines)
        assert all(line.startswith("export ") for line in lines) or "insert into sources" in lines[0]


# -- screens


def on_eighty_columns(*screens: RenderableType) -> str:
    """As a terminal of 80 columns shows it."""
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(*screens)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80, shown
    assert "…" not in shown, shown
    return shown


def test_the_screen_of_analysis_fits() -> None:
    """E8: with two workers of ten processors each."""
    from apps.analysis import view
    from apps.analysis.phases import PHASES

    sizes = {"ready": 1000, "waiting": 1000, "running": 20, "dead": 100}
    workers = [{"worker": "worker-1"}, {"worker": "worker-2"}]
    told = {
        "queues": [{"phase": phase.name, **sizes} for phase in PHASES],
        "workers": workers,
        "processors": [{**one, "phase": phase.name, "state": "busy"} for one in workers for phase in PHASES] * 10,
        "completed": 1000,
        "tokens": {"minute": {"used": 5990, "limit": 6000}},
        "health": {"ok": False, "problems": ["website-analysis: 12 in progress without a sign of life"]},
    }
    model: Any = SimpleNamespace(statuses=lambda: Counter({200: 1000, 429: 100}))
    shown = on_eighty_columns(view.screen(told, model, "worker-1 (process 1234567) was killed, with 12 jobs"))
    assert "│ ■■■■■■■■■■  ■■■■■■■■■■ │" in shown


def test_the_screen_of_enrichment_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: the bar, the counts and what is asked at this moment."""
    monkeypatch.setenv("ROWMILL_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    from apps.enrichment.__main__ import view

    counts = {"queued": 320, "running": 20, "succeeded": 300, "failed": 10, "dead": 20}
    item = {"status": "running", "total_items": 460, "processed_items": 450, "failed_items": 120}
    shown = on_eighty_columns(view(item, counts, [(f"site{n}.example", 2) for n in range(6)], 33))
    assert "450 of 460, 120 failed │" in re.sub(" +", " ", shown)
    assert "dead 20" in shown


def test_the_screens_of_registre_and_ocr_fit() -> None:
    """A14, B8: three environments with three kinds each; a document with long names."""
    from apps.ocr.show import _table
    from apps.registre.show_view import View

    view = View("http://127.0.0.1:45555", ["python -m apps.registre run"], {})
    counts = Counter({"1": 100, "2": 12, "3": 10, "4": 10, "5": 100, "6": 2})
    kinds = ("documents", "companies", "rights")
    view.found = {name: dict.fromkeys(kinds, counts) for name in ("prod", "staging", "dev")}
    assert "failed" in on_eighty_columns(view._table())
    parties = [{"name": "Marie-Claude Desrosiers-Tremblay", "role": "vendeur"}, {"name": "Jean", "role": "acquéreur"}]
    row: dict[str, object] = {"document_number": "24680001", "status_id": 5, "ocr_worker_id": "worker-1"}
    row |= {"ocr_error": None, "ocr_fields": {"number": "24 680 001", "date": "2021-03-04", "parties": parties}}
    assert "(acquéreur)" in on_eighty_columns(_table([row]))


async def test_the_screen_of_prices_fits() -> None:
    """D10: values of thousands, and the sources' health."""
    from apps.prices.demo import _view

    coin = ("1916-D Standing Liberty Quarter", 1234567, 987654, 2345678, 1000, 100, 3, 3)
    rows: Any = [[coin], [("auction", 5, 299.0)]]

    class Stored:
        async def read(self, work: Any) -> Any:
            return work(lambda text, values: rows.pop(0))

    shown = on_eighty_columns(await _view(Stored(), 33))  # type: ignore[arg-type]
    assert "Quarter" in shown
    assert "$23,456.78" in shown
    assert "asked" in shown


# -- what Windows lacks

POSIX_ONLY = {"fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "posix"}
#: Those that work there; registre and ocr lock files and directories as only POSIX can.
PORTABLE = ("src/rowmill", "apps/analysis", "apps/enrichment", "apps/prices", "apps/standins")


def test_nothing_that_should_import_on_windows_imports_what_windows_lacks() -> None:
    """X3: rowmill itself, and three of the applications with what they share."""
    shared = [path for path in (ROOT / "apps").glob("*.py") if path.name not in ("desk.py",)]
    files = [*shared, *(path for folder in PORTABLE for path in (ROOT / folder).rglob("*.py"))]
    for path in files:
        if "tests" in path.parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in names} & POSIX_ONLY, path


def test_a_worker_runs_where_the_event_loop_takes_no_signals(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X3: ``mill.run()``, as on Windows."""

    def refuse(*given: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", refuse)
    mill = Mill(lite.url)

    @mill.task
    async def double(n: int) -> int:
        return 2 * n

    double.enqueue_sync(2)
    assert mill.run(drain=True).completed == 1


def test_rowmill_run_says_that_it_needs_posix(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """X3: no traceback where processes cannot be handed what the supervisor hands them."""
    from typer.testing import CliRunner

    from rowmill.cli import app

    monkeypatch.delattr(os, "killpg")
    with pytest.raises(RowmillError, match=r"(?s)needs Linux, macOS.*mill\.run\(\)") as told:
        CliRunner().invoke(app, ["run", "apps.analysis:mill"], catch_exceptions=False)
    assert "WSL" in told.value.hint
