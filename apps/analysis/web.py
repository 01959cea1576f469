"""The web application that hosts the workers: they start and stop with it. ``uvicorn apps.analysis.web:app``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, HttpUrl

from apps.markup import storable
from rowmill import Mill

from . import mill as configured
from . import tables
from .settings import Settings
from .statistics import Statistics

PAGE = Path(__file__).with_name("statistics.html")


class Wanted(BaseModel):
    """A site to be analysed."""

    url: HttpUrl


def create_app(mill: Mill, settings: Settings, **options: Any) -> FastAPI:
    """The application over a Mill; ``options`` are those of ``mill.lifespan``."""
    statistics = Statistics(mill, settings)
    jobs = tables.jobs

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        nonlocal jobs
        await tables.create(statistics.database)
        jobs = await tables.read_jobs(statistics.database)
        try:
            yield
        finally:
            await statistics.close()

    lifespan = mill.lifespan(worker=settings.worker, lifespan=own, **(options if settings.worker else {}))
    app = FastAPI(title="Website analysis", lifespan=lifespan)

    @app.post("/analyses", status_code=202)
    async def order(wanted: Wanted) -> dict[str, str]:
        """Create a job: a row of ``"AnalysisJob"``, as any other program could."""
        async with statistics.database.begin() as connection:
            made = await connection.execute(sa.insert(jobs).values(tables.new_job(jobs, str(wanted.url))))
        return {"id": str(made.inserted_primary_key[0])}

    @app.get("/analyses/{key}")
    async def look(key: str) -> dict[str, Any]:
        """A job as it stands, with its result."""
        wanted = sa.select(jobs).where(jobs.c.id == tables.key_of(jobs, storable(key)))
        async with statistics.database.begin() as connection:
            row = (await connection.execute(wanted)).one_or_none()
        if row is None:
            raise HTTPException(404, f"there is no analysis {key}")
        shown = ("id", "url", "status", "currentStep", "inProgress", "retryCount", "error", "createdAt", "updatedAt")
        return {name: row._mapping[name] for name in shown} | {
            "analysis": (row.extractedInfo or {}).get("analysis"),
            "website": (row.extractedInfo or {}).get("website"),
        }

    @app.get("/statistics")
    async def tell() -> dict[str, Any]:
        """Queue sizes, processor states, system health: what the page shows."""
        return await statistics.gather()

    @app.get("/health")
    async def check(response: Response) -> dict[str, Any]:
        """The worker in this process."""
        told = lifespan.health()
        response.status_code = 200 if told["ok"] else 503
        return told

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    return app


app = create_app(configured, Settings.from_environ())
