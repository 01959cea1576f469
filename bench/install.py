"""The peers' own environments: bench/.venv and bench/node_modules. What cannot be installed is left out."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .peers import PEERS, Peer

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = HERE / ".venv" / "bin" / "python"
MODULES = HERE / "node_modules"
VERBOSE = bool(os.environ.get("BENCH_VERBOSE"))


def install() -> None:
    """Install what is not there yet, or not as the lists say."""
    _once(HERE / "requirements.txt", PYTHON.parent.parent / ".installed", _python)
    _once(HERE / "package.json", MODULES / ".installed", _node)


def _once(wanted: Path, stamp: Path, work: Callable[[], None]) -> None:
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"bench: installing {wanted.name} …", file=sys.stderr, flush=True)
    work()
    if stamp.parent.exists():
        stamp.write_text(digest)


def _python() -> None:
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", HERE / ".venv"], check=True)
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    if _tried([*pip, "-r", HERE / "requirements.txt"]):
        return
    for line in (HERE / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#") and not _tried([*pip, line]):
            print(f"bench: {line} could not be installed", file=sys.stderr)


def _node() -> None:
    npm = shutil.which("npm")
    if npm is None:
        print("bench: there is no npm here", file=sys.stderr)
    elif not _tried([npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]):
        print("bench: npm could not install the peers on Node", file=sys.stderr)


def _tried(command: list[str | Path]) -> bool:
    return subprocess.run(command, cwd=HERE, stdout=subprocess.DEVNULL).returncode == 0


@functools.cache
def node() -> str | None:
    """Node 22 or later: the one from npm, else the system's."""
    for found in (str(MODULES / ".bin" / "node"), shutil.which("node")):
        if found and Path(found).exists():
            said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
            if said.startswith("v") and int(said[1:].split(".")[0]) >= 22:
                return found
    return None


def command(peer: Peer) -> list[str]:
    """How the peer's runner is started."""
    if peer.node:
        return [node() or "node", str(HERE / "runners" / peer.runner)]
    python = sys.executable if peer.own else str(PYTHON)
    return [python, "-m", f"bench.runners.{peer.runner}"]


@functools.cache
def version(package: str) -> str | None:
    """The version of an installed peer; None: it is not there."""
    manifest = MODULES / package / "package.json"
    if manifest.exists():
        return str(json.loads(manifest.read_text())["version"]) if node() else None
    if not PYTHON.exists():
        return None
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    said = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return said.stdout.strip() or None


def there(names: list[str]) -> list[Peer]:
    """The named peers as far as they are installed; a word about each that is not."""
    found = []
    for peer in (PEERS[name] for name in names):
        if peer.own or version(peer.package):
            found.append(peer)
        else:
            why = "there is no Node 22" if peer.node and not node() else f"{peer.package} could not be installed"
            print(f"bench: {peer.name} is left out: {why}", file=sys.stderr, flush=True)
    return found
