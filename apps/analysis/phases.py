"""The three phases of an analysis: three lanes on one table, which together are its state diagram.

not-started --website-analysis--> prompt-forming --prompt-forming--> model-analysis --model-analysis--> completed
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from rowmill import Dead, Job, Mill, Snooze, exponential
from rowmill.store import Database

from . import content, models, prompts, tables
from .answers import Answers, open_answers
from .models import Model, Throttled, open_model
from .processors import Pools, Processors, telling
from .settings import Settings
from .website import Web, open_web

MOST_RETRIES = 3
#: All named, so that a table that lacks one is told by it.
ROLES = {
    "failures": "retryCount", "reclaims": "retryCount", "worker": "lockedBy", "heartbeat_at": "heartbeatAt",
    "run_after": "runAfter", "error": "error", "updated_at": "updatedAt",
}  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A phase takes rows from one status to the next; the order of the phases is their priority."""

    name: str
    takes: str
    gives: str


PHASES = (
    Phase("website-analysis", takes="not-started", gives="prompt-forming"),
    Phase("prompt-forming", takes="prompt-forming", gives="model-analysis"),
    Phase("model-analysis", takes="model-analysis", gives="completed"),
)


def _lane(mill: Mill, settings: Settings, phase: Phase) -> Callable[..., Any]:
    """A phase as a lane. It has no dead state: a row that is exhausted stays where it is, with its count at 3."""
    # The original's workers write no sign of life: with an old one of ours their next claim would look stuck.
    handed_on = {} if phase is PHASES[-1] else {"lockedBy": None, "heartbeatAt": None}
    return mill.lane(
        tables.jobs,
        name=phase.name,
        priority=PHASES.index(phase),
        ready={"status": phase.takes, "currentStep": phase.takes, "inProgress": False},
        running={"inProgress": True},
        done={"status": phase.gives, "currentStep": phase.gives, "inProgress": False} | handed_on,
        roles=ROLES,
        order_by=["createdAt"],
        untouched_for=settings.seconds("untouched"),
        poll=settings.seconds("poll"),
        batch=settings.batch,
        concurrency=settings.processors,
        slot_name="{lane}-processor-{n}",
        pace=(settings.pace_starts, settings.seconds("pace")),
        max_attempts=MOST_RETRIES,
        backoff=exponential(settings.seconds("backoff")),
        lease=settings.seconds("stuck"),
        timeout=settings.seconds("stuck"),
        sweep_every=settings.seconds("sweep"),
    )


def build(settings: Settings, url: str | None = None) -> Mill:
    """The application: a Mill with its three lanes. Without a URL: the one in ``ROWMILL_DATABASE_URL``."""
    mill = Mill(url)
    per_minute = (settings.tokens_per_minute, settings.seconds("minute"))
    mill.budget("model", tokens=[per_minute, (settings.tokens_per_day, timedelta(days=1))])
    template = prompts.load(settings.template)
    _resources(mill, settings)
    website_analysis, prompt_forming, model_analysis = (_lane(mill, settings, phase) for phase in PHASES)

    @website_analysis
    async def read_website(job: Job, web: Web, processors: Processors) -> dict[str, Any]:
        with processors.working(job):
            page = await web.fetch(address(job))
            website = content.read(page.source, page.headers)
            return {"extractedInfo": {**(job["extractedInfo"] or {}), "website": {"url": page.url} | website}}

    @prompt_forming
    async def form_prompt(job: Job, processors: Processors) -> dict[str, Any]:
        with processors.working(job):
            info = job["extractedInfo"]
            prompt = prompts.form(template, address(job), info["website"], settings.prompt_tokens)
            return {"extractedInfo": {**info, "prompt": prompt.value()}}

    @model_analysis
    async def ask_model(job: Job, model: Model, answers: Answers, processors: Processors) -> dict[str, Any]:
        with processors.working(job):
            info = job["extractedInfo"]
            prompt = prompts.Prompt(**info["prompt"])
            reply = await answers.find(job, prompt.hash)
            if reply is None:
                reply = await _ask(job, prompt, model, answers, settings)
            return {"extractedInfo": {**info, "analysis": models.read(reply.text), "model": reply.model}}

    return mill


def address(job: Job) -> str:
    """The website of a job. The original has no column for it: there it stands in ``extractedInfo``."""
    found = job.get("url") or (job["extractedInfo"] or {}).get("url")
    if not isinstance(found, str) or not found:
        raise Dead("the job has no address: set its url, or extractedInfo.url")
    return found


async def _ask(job: Job, prompt: prompts.Prompt, model: Model, answers: Answers, settings: Settings) -> models.Reply:
    """Ask within the budget: take the most that a call can use up, and give back what it did not.

    Who is killed in between has taken too much, never too little. A refusal costs the row no attempt.
    """
    if model.throttled_for:
        raise Snooze(model.throttled_for, "the model is throttled")
    most = prompt.tokens + settings.answer_tokens
    # Waiting holds a processor, and counts towards the limit of the run: not for long.
    await job.spend("model", wait=settings.seconds("stuck") / 5, tokens=most)
    try:
        reply = await model.ask(prompt.text, key=f"{job.id}-{prompt.hash[:16]}")
    except Throttled as throttled:
        await job.spend("model", tokens=-most)
        raise Snooze(throttled.after, str(throttled)) from None
    try:
        models.read(reply.text)  # what is no analysis is not kept: the next try asks again
        await answers.keep(job, prompt.hash, reply)
    finally:
        await job.spend("model", tokens=reply.tokens, instead=True)
    return reply


def _resources(mill: Mill, settings: Settings) -> None:
    """What the handlers of a process share."""

    @mill.resource
    async def web() -> AsyncIterator[Web]:
        async with open_web(settings) as opened:
            yield opened

    @mill.resource
    async def model() -> AsyncIterator[Model]:
        if not settings.model_key:  # nothing a row is to blame for, or should die of
            mill.events.emit("no_model_key", logging.WARNING, hint="ANALYSIS_MODEL_KEY=...; until then its rows wait")
            raise Snooze(timedelta(minutes=1), "there is no key for the model")
        async with open_model(settings) as opened:
            yield opened

    @mill.resource
    async def answers() -> AsyncIterator[Answers]:
        async with open_answers(mill) as opened:
            yield opened

    def pool(worker: str) -> Processors:
        return Processors(
            worker, [phase.name for phase in PHASES], settings.processors, stuck=settings.stuck_seconds,
            every=settings.health_seconds, events=mill.events,
        )  # fmt: skip

    pools = Pools(pool)
    mill.events.subscribe(pools.follow, detailed=False)

    @mill.resource
    async def processors() -> AsyncIterator[Processors]:
        async with _reporting(mill) as write, telling(pools.newest or pool(""), write) as told:
            yield told


@asynccontextmanager
async def _reporting(mill: Mill) -> AsyncIterator[Callable[..., Any]]:
    """Writes a worker's report to the first environment."""
    ((_, database),) = mill.databases(list(mill.environments)[:1])
    await tables.create(database)  # the lanes' own columns are there, or no worker had started

    async def write(worker: str, report: dict[str, Any]) -> None:
        await write_report(database, worker, report)

    try:
        yield write
    finally:
        await database.close()


async def write_report(database: Database, worker: str, report: dict[str, Any]) -> None:
    """One row per worker, the newest report."""
    table, values = tables.workers, {"report": report, "reportedAt": sa.func.now()}
    async with database.begin() as connection:
        changed = await connection.execute(sa.update(table).where(table.c.worker == worker).values(values))
        if not changed.rowcount:
            await connection.execute(sa.insert(table).values({"worker": worker, **values}))
