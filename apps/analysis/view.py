"""What ``python -m apps.analysis`` shows: the three phases at work, and in the end what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from apps.standins.model import Model

from .settings import Settings

_SHOWN = ("ready", "waiting", "running", "dead")
_MARKS = {"idle": ("·", "dim"), "busy": ("■", "blue"), "error": ("x", "red")}


def screen(told: dict[str, Any], model: Model, killed: str) -> RenderableType:
    """Queues and processors as they stand."""
    table = Table("phase", *(Column(word, justify="right") for word in _SHOWN), "processors")
    for queue in told["queues"]:
        pools = Text("  ").join(
            Text.assemble(*(_MARKS[p["state"]] for p in told["processors"] if _is(p, worker, queue)))
            for worker in told["workers"]
        )
        table.add_row(queue["phase"], *(str(queue[word]) for word in _SHOWN), pools)
    calls, minute = model.statuses(), told["tokens"]["minute"]
    health = (
        Text("all is well", "green") if told["health"]["ok"] else Text("; ".join(told["health"]["problems"]), "red")
    )
    lines: list[RenderableType] = [
        table,
        Text(
            f"completed {told['completed']}; the model answered {calls[200]} calls and refused {calls[429]};"
            f" {minute['used']} of {minute['limit']} tokens in this period"
        ),
        Text.assemble("health: ", health),
    ]
    if killed:
        lines.append(Text(killed, "yellow"))
    return Group(*lines)


def line(told: dict[str, Any], killed: str) -> str:
    """The same in one line, where there is no terminal."""
    parts = [f"{q['phase']}: {q['ready'] + q['waiting']} queued, {q['running']} running" for q in told["queues"]]
    return "; ".join([*parts, f"completed: {told['completed']}", *([killed] if killed else [])])


def _is(processor: dict[str, Any], worker: dict[str, Any], queue: dict[str, Any]) -> bool:
    return processor["worker"] == worker["worker"] and processor["phase"] == queue["phase"]


def summary(
    rows: Sequence[Any], answers: Sequence[Any], model: Model, settings: Settings, seconds: float
) -> RenderableType:
    """What became of every row, and what it cost by the model's own log."""
    failed = [row for row in rows if row.status != "completed"]
    example = next(row for row in rows if row.status == "completed")
    calls, most = model.statuses(), model.most_within(settings.minute_seconds)
    twice = sum(count - 1 for count in model.answered().values())
    stored = {answer.jobId: answer.createdAt.timestamp() for answer in answers}
    after = sum(call.at > stored.get(call.key.rpartition("-")[0], call.at) for call in model.calls)
    lines = [
        f"{len(rows)} sites in {seconds:.0f} s: {len(rows) - len(failed)} completed, {len(failed)} failed by rule.",
        *(f"  {row.url}  stays in {row.status} with retryCount {row.retryCount}: {row.error}" for row in failed),
        f"Retries by row: {_counts(Counter(row.retryCount for row in rows))}.",
        f"Model: {calls[200]} calls answered, {calls[429]} throttled, {model.tokens} tokens;"
        f" at most {most} of {settings.tokens_per_minute} in {settings.minute_seconds:g} s.",
        f"Asked again because a worker was killed before it could store an answer: {twice}."
        f" For an answer that was stored: {after}.",
        f"For example {example.url}: {example.extractedInfo['analysis']['summary']}"
        f" Made with {', '.join(example.extractedInfo['website']['technologies'])}.",
    ]
    return Text("\n".join(lines))


def _counts(counter: Counter[int]) -> str:
    return ", ".join(f"{count} had {retries}" for retries, count in sorted(counter.items()))
