"""What the five applications have in common: settings in a file, set-up, migrations, stand-ins, and screens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from apps import __main__ as commands
from apps import environment
from apps.registre.settings import Environments
from databases import Db
from rowmill import DeclarationError

ROOT = Path(__file__).parent.parent
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
