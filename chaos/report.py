"""The report: what was done and what was found, all of it from the run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from .bout import Result
from .check import KINDS, totals
from .faults.short import LONG_LEASE
from .figures import Figures
from .fleet import MOST_A_MINUTE, MOST_GROWTH, Fleet
from .stage import LEASE

#: What the words mean, and how it is counted: the part of the page that no run changes.
_WORDS = (Path(__file__).parent / "words.md").read_text().replace("LEASE", f"{LEASE:g}")


def write(path: Path, figures: Figures, versions: str) -> None:
    """The Markdown page."""
    tried = [result for result in figures.all() if result.not_tried is None]
    sums = totals(result.verdict for result in tried)
    faults = sum(result.injected for result in tried)
    found = ", ".join(f"{kind} {sums[kind]}" for kind in KINDS)
    lines = [
        "# Chaos",
        "",
        *_origins(tried),
        f"{versions}, {os.cpu_count()} cores.",
        "",
        f"**{sums['rows']:,} rows, {faults:,} faults, {sums['runs']:,} runs: {found}.**",
        "",
        _WORDS,
        "## What was found",
        "",
        "| fault | injected | rows | lost | doubled | stale | stuck | recovery s, median | worst | outlived |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_row(result) for result in tried),
        "",
        *(_untried(figures)),
        "| fault | what is done |",
        "|---|---|",
        *(f"| {result.fault} | {result.says} |" for result in tried),
        "",
        *_spared([result for result in tried if result.spares]),
        *_found(tried),
        *(_fleet(figures.fleet) if figures.fleet is not None and figures.fleet.idle else []),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")


def versions(postgres: str) -> str:
    """Of all that takes part."""
    rowmill = importlib.metadata.version("rowmill")
    return (
        f"Python {platform.python_version()}, PostgreSQL {postgres}, SQLite {sqlite3.sqlite_version}, rowmill {rowmill}"
    )


def _origins(tried: Sequence[Result]) -> list[str]:
    """Which command found what, and when."""
    lines = []
    for origin in dict.fromkeys(result.origin for result in tried):
        theirs = [result for result in tried if result.origin == origin]
        minutes = sum(result.seconds for result in theirs) / 60
        lines.append(f"- {origin}: {sum(r.injected for r in theirs)} faults in {minutes:.0f} minutes")
    return ["Written by the runs themselves:", "", *lines, ""]


def _row(result: Result) -> str:
    counts = " | ".join(str(result.verdict.count(kind)) for kind in KINDS)
    return (
        f"| {result.fault} | {result.injected:,} | {result.verdict.rows:,} | {counts} | {result.median:.2f} |"
        f" {result.worst:.2f} | {result.verdict.outlived} |"
    )


def _untried(figures: Figures) -> list[str]:
    left = [result for result in figures.all() if result.not_tried is not None]
    return [*(f"Not tried: {result.fault}: {result.not_tried}." for result in left), *([""] if left else [])]


def _spared(results: Sequence[Result]) -> list[str]:
    """Workers that were away for less than the suspicion time."""
    if not results:
        return []
    return [
        "## Workers that come back in time",
        "",
        f"Here the lease is {LONG_LEASE:g} s, and the suspicion time is the default. A worker loses a row only if it is"
        " wrongly called dead. The run fails if one does.",
        "",
        "| fault | injected | rows running at that moment | rows taken from live workers |",
        "|---|---:|---:|---:|",
        *(
            f"| {result.fault} | {result.injected} | {result.running:,} | {result.verdict.from_living} |"
            for result in results
        ),
        "",
    ]


def _found(results: Sequence[Result]) -> list[str]:
    lines = [f"- {result.fault}: it was not felt: {result.unfelt}" for result in results if result.unfelt]
    lines += [
        f"- {result.fault}, {kind}: {words}"
        for result in results
        for kind in KINDS
        for words in result.verdict.found[kind][:10]
    ]
    return ["What was found, the first ten of each:", "", *lines, ""] if lines else []


def _fleet(fleet: Fleet) -> list[str]:
    return [
        "## Several hosts",
        "",
        f"{fleet.hosts} hosts (network namespaces on a bridge) share one database, and run `rowmill run`. The table"
        " above has the drain by all of them, with one host cut off. Runs by host: "
        + ", ".join(f"{name} {count:,}" for name, count in fleet.shares.items())
        + ".",
        "",
        "The next table shows what idle workers cost the database, by the server's own log, with a lane's default"
        f" times. The run fails if a worker sends more than {MOST_A_MINUTE:g} statements a minute, or"
        f" {MOST_GROWTH:g} times as many as one worker alone.",
        "",
        "| workers | statements a minute | for each | connections for each |",
        "|---:|---:|---:|---:|",
        *(
            f"| {idle.workers} | {idle.each_minute * idle.workers:.0f} | {idle.each_minute:.1f} |"
            f" {idle.connections / idle.workers:.1f} |"
            for idle in fleet.idle
        ),
    ]
