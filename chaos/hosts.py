"""Hosts on one machine: network namespaces on a bridge, each with a cable that can be pulled.

All names carry the number of the process that made them. They are removed when it is done, also after an error or
Ctrl-C; what one that was itself killed has left is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "rmchaos"


@dataclass(frozen=True)
class Host:
    """A namespace with an address of its own."""

    number: int
    namespace: str
    cable: str
    bridge: str

    @property
    def inside(self) -> Sequence[str]:
        """What stands before a command that is to run there."""
        return ("nsenter", f"--net=/run/netns/{self.namespace}")

    def cut(self) -> None:
        """The cable is pulled out of the switch: what is sent is lost without a word, and the link still seems up."""
        _ip("link", "set", self.cable, "nomaster")

    def mend(self) -> None:
        _ip("link", "set", self.cable, "master", self.bridge)


@dataclass(frozen=True)
class Network:
    """Hosts, and the address at which they see this machine."""

    address: str
    hosts: Sequence[Host]


def unable() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("nsenter")):
        return "the commands ip and nsenter are missing: apt-get install iproute2 util-linux"
    probe = f"{_PREFIX}-{os.getpid()}-p"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """That many hosts on one bridge, and nothing of them left afterwards."""
    _remove_orphans()
    me = os.getpid()
    bridge, net = f"rmb{me}", f"10.{200 + me // 256 % 50}.{me % 256}"
    hosts = [Host(n, f"{_PREFIX}-{me}-{n}", f"rmc{me}-{n}", bridge) for n in range(1, count + 1)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            host.mend()
            _ip("link", "set", host.cable, "up")
            _ip("-n", host.namespace, "addr", "add", f"{net}.{host.number + 1}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield Network(f"{net}.1", hosts)
    finally:
        for host in hosts:
            _ip("link", "del", host.cable, check=False)
            _ip("netns", "del", host.namespace, check=False)
        _ip("link", "del", bridge, check=False)


def _remove_orphans() -> None:
    """What a suite that was killed has left: its process is gone."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        pid = path.name.split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            _ip("netns", "del", path.name, check=False)
            _ip("link", "del", f"rmb{pid}", check=False)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20)
