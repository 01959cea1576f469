"""The release as it would be published: built, installed into an empty environment, used by the README's example."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORT = (ROOT / "docs/reference/support.md").read_text()


def build(source: Path, target: Path, *kinds: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    subprocess.run([*command, *(word for kind in kinds for word in ("-t", kind))], cwd=source, check=True, timeout=120)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make dist`` makes."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


def wheel_of(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def needed(*roots: Requirement) -> dict[str, importlib.metadata.Distribution]:
    """The installed packages that requirements lead to, and no others."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(roots)
    while left:
        asked = left.pop()
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        if name in found and not asked.extras:
            continue
        found[name] = importlib.metadata.distribution(asked.name)
        for text in found[name].requires or ():
            further = Requirement(text)
            if further.marker is None or any(further.marker.evaluate({"extra": e}) for e in ("", *asked.extras)):
                left.append(further)
    return found


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its declared dependencies, and nothing else. These are linked from here, not
    downloaded: the test also runs without a network.
    """
    home = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(home, symlinks=True)
    packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for package in needed(*map(Requirement, PROJECT["dependencies"])).values():
        for top in {Path(str(file)).parts[0] for file in package.files or () if not str(file).startswith("..")}:
            source = Path(str(package.locate_file(top)))
            if source.exists() and not (packages / top).exists() and top != "__pycache__":
                (packages / top).symlink_to(source)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel_of(dist))], check=True, timeout=120)
    subprocess.run([*pip, "check"], check=True, timeout=120)
    return home


def run(home: Path, folder: Path, command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ROWMILL", "VIRTUAL_ENV"))}
    environment |= {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}
    ended = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return " ".join(ended.stdout.split())


def test_the_wheel_alone_runs_the_readmes_first_example(installed: Path, tmp_path: Path) -> None:
    """Issue 25, point 6: an undeclared import, a file left out of the wheel, a broken script show here."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    for kind, text in blocks:
        if kind == "python":
            (tmp_path / text.split()[1]).write_text(text)
    (console,) = (text for kind, text in blocks if kind == "console")
    assert run(installed, tmp_path, "rowmill --version") == f"rowmill {PROJECT['version']}"
    for step in console.removeprefix("$ ").split("\n$ "):
        command, *lines = step.strip().splitlines()
        shown = run(installed, tmp_path, command)
        assert all(" ".join(line.split()) in shown for line in lines), f"{command}: {shown}"
    where = run(installed, tmp_path, "python -c 'import rowmill; print(rowmill.__file__)'")
    assert where.startswith(str(installed))


def test_what_an_extra_is_needed_for_says_so(installed: Path, tmp_path: Path) -> None:
    """Without its extra a command names it; nothing ends in an ImportError."""
    (tmp_path / "app.py").write_text("from rowmill import Mill\nmill = Mill('sqlite:///a.db')\n")
    shown = run(installed, tmp_path, "rowmill serve app:mill 2>&1; test $? = 1")
    assert "pip install 'rowmill[web]'" in shown


def test_the_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    """It has the sources, the licence and the changelog, and neither tests nor pictures."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {each.name for each in source.iterdir()} == {
        "src", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore",
    }  # fmt: skip
    build(source, tmp_path / "again", "wheel")
    assert wheel_of(tmp_path / "again").read_bytes() == wheel_of(dist).read_bytes()


def test_the_metadata_is_whole(dist: Path) -> None:
    """What an index and its readers look at."""
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
        told = message_from_bytes(wheel.read(name))
        assert {"rowmill/py.typed", "rowmill/web/templates/base.html"} <= set(wheel.namelist())
    assert told["Name"] == "rowmill"
    assert told["License-Expression"] == "MIT"
    assert told["License-File"] == "LICENSE"
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert told["Summary"]
    assert told["Author"]
    assert "Typing :: Typed" in told.get_all("Classifier", [])
    assert f"# {told['Name']}" in str(told.get_payload())


def test_every_extra_stands_in_the_table() -> None:
    """docs/reference/support.md has one line for each extra, and none for what there is not."""
    assert set(re.findall(r"^\| `(\w+)` \|", SUPPORT, re.MULTILINE)) == set(PROJECT["optional-dependencies"])


def test_the_changelog_has_an_entry_for_the_version() -> None:
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
