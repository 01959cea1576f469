"""The command: install the peers, start a server, run the rounds, write the report."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import install, parts, report
from .parts.part import Context, Part
from .peers import PEERS, Peer
from .server import Server

DOCS = install.ROOT / "docs" / "explanation" / "performance"


def sizes(text: str) -> list[int]:
    return [int(word.replace("_", "")) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    say: Callable[..., object] = parser.add_argument
    say("--quick", action="store_true", help="small sizes and fewer parts: under three minutes, for a first look")
    say("--rounds", type=int, help="how often everything is measured, in turn (3; quick: 1)")
    say("--parts", help=f"of {', '.join(parts.PARTS)}; growth and recovery mean all of their own")
    say("--peers", help=f"only these, of {', '.join(PEERS)}")
    say(
        "--out", type=Path, help="folder for report, figures and plots (docs/explanation/performance; quick: bench/out)"
    )
    say("--kills", type=int, help="how often recovery kills rowmill's processes (5; quick: 1)")
    say("--scratch", help="folder for the databases (/tmp)")
    growth = parser.add_argument_group("growth").add_argument
    growth("--finished", type=sizes, default=sizes("0,1_000_000,10_000_000"))
    growth("--backlog", type=sizes, default=sizes("10_000,1_000_000,5_000_000"))
    growth("--processes", type=sizes, default=sizes("1,4,16,32"))
    growth("--lanes", type=sizes, default=sizes("1,50"))
    growth("--partitions", type=int, default=8)
    growth("--hold", type=float, default=180.0, help="seconds that a transaction is held open")
    growth("--window", type=float, default=15.0, help="seconds of a window")
    growth("--feed", type=float, help="jobs/s that come meanwhile (half of the peak)")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.kills = given.kills or (1 if given.quick else 5)
    given.out = given.out or (install.HERE / "out" if given.quick else DOCS)
    return given


def main() -> int:
    given = arguments()
    chosen = parts.chosen(given.parts, quick=given.quick)
    wanted = given.peers.split(",") if given.peers else list(PEERS)
    for name in wanted:
        if name not in PEERS:
            raise SystemExit(f"bench: there is no peer {name!r}; there are {', '.join(PEERS)}")
    began = time.monotonic()
    install.install()
    installed = install.there([name for name in PEERS if name in wanted])
    with Server(given.scratch) as server:
        context = Context(server, given)
        for round_ in range(1, given.rounds + 1):
            for part in chosen if round_ == 1 else (part for part in chosen if not part.once):
                for peer in installed:
                    if peer.name in part.peers:
                        _measure(context, part, peer, round_)
        written = report.write(context, chosen, server.version(), time.monotonic() - began)
    print(written.read_text())
    _draw(given.out)
    return 1 if report.faults(context.results) else 0


def _measure(context: Context, part: Part, peer: Peer, round_: int) -> None:
    began = time.monotonic()
    try:
        figures = part.measure(context, peer)
    except Exception as error:  # whatever goes wrong with one peer, the others are measured
        words = f"failed: {type(error).__name__}: {error}"
        context.failures.append((part.name, peer.name, words))
    else:
        context.results.setdefault(part.name, {}).setdefault(peer.name, []).append(figures)
        words = ", ".join(f"{key} {value:,.5g}" for key, value in figures.items())
    seconds = time.monotonic() - began
    print(f"round {round_} {part.name:8} {peer.name:14} {seconds:5.1f} s  {words}", file=sys.stderr, flush=True)


def _draw(folder: Path) -> None:
    """The plots, by the environment that has the library for them."""
    command = [install.PYTHON, "-m", "bench.plots", folder]
    if not install.PYTHON.exists() or subprocess.run(command, cwd=install.ROOT).returncode:
        print("bench: the plots could not be drawn", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
