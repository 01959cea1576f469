"""Draws what the report asks for, as SVG and PNG. Runs in bench/.venv: ``python -m bench.plots FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "rowmill",  # the same figures give the same file
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.constrained_layout.use": True,
    }
)

from matplotlib import pyplot  # noqa: E402

_OURS = ("#c2410c", "#f59e0b", "#fcd34d", "#fde68a")
_THEIRS = ("#334155", "#94a3b8", "#cbd5e1", "#e2e8f0")


def bars(axes: Any, plot: dict[str, Any]) -> None:
    """A group of bars per name, with least and most as whiskers; rowmill's own in another colour."""
    series = plot["series"]
    names = list(dict.fromkeys(name for found in series.values() for name in found))
    height = 0.8 / len(series)
    for k, (label, found) in enumerate(series.items()):
        for place, name in enumerate(names):
            if name not in found:
                continue
            median, least, most = found[name]
            colour = (_OURS if name.startswith("rowmill") else _THEIRS)[k % 4]
            at = place + (k - (len(series) - 1) / 2) * height
            spread = [[median - least], [most - median]]
            axes.barh(at, median, height * 0.9, color=colour, xerr=spread, error_kw={"lw": 0.8})
            axes.annotate(f" {_short(median)}", (most, at), va="center", fontsize=7)
        axes.barh(0, 0, color=_THEIRS[k % 4], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(plot["unit"])
    axes.margins(x=0.12)
    if len(series) > 1:
        axes.legend(fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series))


def line(axes: Any, plot: dict[str, Any]) -> None:
    for label, found in plot["series"].items():
        medians = [value[0] for value in found.values()]
        spread = list(zip(*((m - least, most - m) for m, least, most in found.values()), strict=True))
        axes.errorbar(list(found), medians, yerr=spread, color=_OURS[0], marker="o", capsize=2, label=label)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(plot["unit"])
    axes.tick_params(axis="x", rotation=60 if len(axes.get_xticks()) > 6 else 0)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(folder: Path) -> None:
    wanted = folder / "plots.json"
    for plot in json.loads(wanted.read_text()):
        groups = max(len(found) for found in plot["series"].values())
        size = (7.5, 3.2) if plot["line"] else (7.5, 0.8 + 0.22 * groups * len(plot["series"]))
        figure, axes = pyplot.subplots(figsize=size)
        (line if plot["line"] else bars)(axes, plot)
        axes.set_title(plot["title"], loc="left", fontsize=10)
        figure.savefig(folder / f"{plot['file']}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{plot['file']}.png", dpi=150)
        pyplot.close(figure)
    wanted.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
