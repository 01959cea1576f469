"""The report: Markdown, the figures it was made from, and what the plots are to show."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sqlite3
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import install
from .parts import PARTS
from .parts.part import Column, Context, Figures, Part, Results
from .peers import PEERS, Peer
from .server import SETTINGS
from .targets import targets

FIGURES, REPORT = "figures.json", "report.md"
_SHOWN = ("machine", "PostgreSQL", "Python", "SQLite", "load")


def faults(results: Results) -> list[str]:
    """Jobs that ran twice, or never ended: there must be none."""
    return [
        f"{part}, {peer}: {key} {sum(figures.get(key, 0) for figures in rounds):g}"
        for part, peers in results.items()
        for peer, rounds in peers.items()
        for key in ("left", "twice")
        if any(figures.get(key) for figures in rounds)
    ]


def write(context: Context, measured: Sequence[Part], server: str, seconds: float) -> Path:
    """Into the run's folder. Parts that were measured earlier, and not now, stay in the report."""
    folder: Path = context.arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FIGURES
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    setting = _setting(context, server, seconds)
    for part in measured:
        if part.name in context.results:
            known[part.name] = {"setting": setting, "peers": context.results[part.name]}
    known = {name: known[name] for name in PARTS if name in known}
    file.write_text(json.dumps(known, indent=1) + "\n")
    (folder / "plots.json").write_text(json.dumps(_plots(known)))
    (folder / REPORT).write_text("\n".join(_lines(known, context.failures)) + "\n")
    return folder / REPORT


def _setting(context: Context, server: str, seconds: float) -> dict[str, Any]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "rounds": context.arguments.rounds,
        "quick": context.quick,
        "minutes": round(seconds / 60, 1),
        "machine": f"{os.cpu_count()} cores, {_memory()}, {platform.system()} {platform.machine()}",
        "PostgreSQL": server,
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        "load": round(os.getloadavg()[0], 1),
    }


def _memory() -> str:
    return f"{round(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30)} GB"


def _lines(known: dict[str, Any], failures: Sequence[tuple[str, str, str]]) -> list[str]:
    results: Results = {name: entry["peers"] for name, entry in known.items()}
    lines = ["<!-- Written by `make bench`. -->", "# Measurements", "", *_settings(known), ""]
    if wrong := faults(results):
        lines += ["**Jobs that ran twice or never ended:** " + "; ".join(wrong) + ".", ""]
    if ratios := targets(results):
        lines += ["## Ratios", "", "Medians of one run.", "", "| rowmill | ratio | wanted | met |", "|---|---|---|---|"]
        lines += [*(target.row() for target in ratios), ""]
    for name, entry in known.items():
        lines += _section(PARTS[name], entry)
    for part, peer, words in failures:
        lines.append(f"- {part}, {peer}: {words}")
    return [*lines, "", *_versions(results)]


def _settings(known: dict[str, Any]) -> list[str]:
    """One row for all parts that were measured together."""
    together: dict[str, list[str]] = {}
    for name, entry in known.items():
        together.setdefault(json.dumps(entry["setting"]), []).append(name)
    lines = ["| parts | date | rounds | machine | PostgreSQL | Python | SQLite | load at the end |", "|" + "---|" * 8]
    for text, names in together.items():
        s = json.loads(text)
        rounds = f"{s['rounds']}{', quick' if s['quick'] else ''}"
        cells = (", ".join(names), s["date"], rounds, *(s[key] for key in _SHOWN))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    chosen = ", ".join(f"`{name} = {value}`" for name, value in SETTINGS.items() if name != "log_line_prefix")
    return [
        *lines,
        "",
        f"PostgreSQL's settings: {chosen}, the rest default; Unix socket; server and workers share the cores.",
        "Cells: median (least to most of the rounds). `twice` and `left` come from the handlers' own records.",
    ]


def _section(part: Part, entry: dict[str, Any]) -> list[str]:
    peers: dict[str, list[Figures]] = entry["peers"]
    columns = _columns(part, peers)
    lines = [f"## {part.title}", "", part.method, ""]
    if _is_drawn(part):
        lines += [f"![{part.title}]({part.name}.svg)", ""]
    if part.columns:
        lines += ["| | " + " | ".join(column.head for column in columns) + " |", "|---|" + "---:|" * len(columns)]
        for name, rounds in peers.items():
            lines.append(f"| {name} | " + " | ".join(_cell(rounds, column) for column in columns) + " |")
    else:
        lines += ["| | " + " | ".join(peers) + " |", "|---|" + "---:|" * len(peers)]
        for column in columns:
            lines.append(f"| {column.head} | " + " | ".join(_cell(rounds, column) for rounds in peers.values()) + " |")
    return [*lines, ""]


def _columns(part: Part, peers: dict[str, list[Figures]]) -> Sequence[Column]:
    if part.columns:
        return part.columns
    names = dict.fromkeys(key for rounds in peers.values() for figures in rounds for key in figures)
    return [Column(name, name, 2 if "ms" in name or "/s" in name else 0) for name in names]


def _cell(rounds: list[Figures], column: Column) -> str:
    found = [figures[column.key] for figures in rounds if column.key in figures]
    if not found:
        return "–"
    if column.key in ("left", "twice"):
        return f"{sum(found):g}"
    bound = rounds[0].get("bound", math.inf) if column.digits else math.inf
    if statistics.median(found) >= bound:
        return f"> {bound:g}"
    words = f"{statistics.median(found):,.{column.digits}f}"
    return words if len(found) == 1 else f"{words} ({min(found):,.{column.digits}f}–{max(found):,.{column.digits}f})"


def _is_drawn(part: Part) -> bool:
    return part.line or any(column.plot for column in part.columns)


def _plots(known: dict[str, Any]) -> list[dict[str, Any]]:
    """For each part that is drawn: its series, each with median, least and most per name."""
    plots = []
    for part in (PARTS[name] for name in known if _is_drawn(PARTS[name])):
        peers: dict[str, list[Figures]] = known[part.name]["peers"]
        series: dict[str, dict[str, tuple[float, float, float]]] = {}
        for name, rounds in peers.items():
            for column in _columns(part, peers):
                values = [figures[column.key] for figures in rounds if column.key in figures]
                if values and (column.plot or (part.line and any(map(str.isdigit, column.key)))):
                    label, place = (name, column.key) if part.line else (str(column.plot), name)
                    series.setdefault(label, {})[place] = (statistics.median(values), min(values), max(values))
        plots.append(
            {
                "file": part.name,
                "title": part.title,
                "unit": part.unit,
                "line": part.line,
                "series": series,
            }
        )
    return plots


def _versions(results: Results) -> list[str]:
    lines = ["## Versions and settings", "", "| | version | finished jobs | settings |", "|---|---|---|---|"]
    names = dict.fromkeys(name for peers in results.values() for name in peers)
    lines += [
        f"| {peer.name} | {_version(peer)} | {peer.finished} | `{json.dumps(dict(peer.options))}` |"
        for peer in (PEERS[name] for name in PEERS if name in names)
    ]
    return lines


def _version(peer: Peer) -> str:
    if peer.package:
        return f"{peer.package} {install.version(peer.package)}"
    return (
        f"SQLite {sqlite3.sqlite_version}" if peer.runner.startswith("bare") else importlib.metadata.version("rowmill")
    )
