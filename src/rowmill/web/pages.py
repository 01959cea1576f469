"""The dashboard's pages. What they show comes from ``ops``; what may change on them is sent again by ``live``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.templating import Jinja2Templates

from ..declare.states import SEEN
from ..errors import RowmillError
from ..ops import overview, questions
from ..ops.questions import OPERATORS, Filter, Wanted
from . import charts, formatting, forms
from .access import Identity, cache_of, directory_of, require
from .forms import notices_of
from .live import respond
from .problem import Problem

#: Hours that the charts offer, and the page of failures.
HOURS, ERROR_HOURS = (1, 6, 24, 168), (1, 24, 168, 720)
_LONGEST_QUERY, _MOST_FILTERS = 500, 10


def routes(templates: Jinja2Templates) -> list[Route]:
    templates.env.filters |= formatting.FILTERS
    templates.env.globals |= {
        "diagram": charts.diagram, "throughput": charts.throughput, "latency": charts.latency, "spark": charts.spark,
        "bars": charts.bars,
        "address": formatting.address, "with_query": formatting.with_query, "STATES": SEEN, "HOURS": HOURS,
    }  # fmt: skip
    # A global, not an import: blocks are also rendered one by one, without what stands around them.
    templates.env.globals["parts"] = templates.env.get_template("parts.html").module
    pages = Pages(templates)
    return [
        Route("/", pages.overview),
        Route("/lane", pages.lane),
        Route("/row", pages.row),
        Route("/errors", pages.errors),
        Route("/error", pages.error),
        Route("/workers", pages.workers),
        Route("/tasks", pages.tasks),
        Route("/health", pages.health),
        *forms.routes(templates),
    ]


class Pages:
    """One method for each page."""

    def __init__(self, templates: Jinja2Templates) -> None:
        self.templates = templates

    def _common(self, request: Request, page: str) -> dict[str, Any]:
        """The values that every page needs. Refuses a sender who may not read."""
        identity, directory = require(request, "read", some=True), directory_of(request)
        return {
            "page": page,
            "who": identity,
            "csrf": identity.csrf,
            "environments": list(directory.databases),
            "lanes": [lane.name for lane in directory.lanes],
            "tasks": bool(directory.mill.tasks),
            "notice": notices_of(request).take(request.query_params.get("said")),
            "here": formatting.with_query(request),
        }

    async def overview(self, request: Request) -> Response:
        """Every table as its state diagram."""
        common, hours = self._common(request, "overview"), _hours(request)

        async def gather() -> dict[str, Any]:
            shown = await overview.overview(directory_of(request), cache_of(request), hours)
            return {**common, "hours": hours, **shown}

        return await respond(request, self.templates, "overview.html", gather)

    async def lane(self, request: Request) -> Response:
        (identity, environment, name), cache = _place(request), cache_of(request)
        common, hours, directory = self._common(request, "lane"), _hours(request), directory_of(request)
        wanted, wrong = _wanted(request), ""
        counted: dict[str, Any] = {}
        if (state := request.query_params.get("exact")) in SEEN:
            counted = {"state": state, **await overview.exact(directory, cache, environment, name, state)}

        async def gather() -> dict[str, Any]:
            nonlocal wrong
            try:
                shown = await overview.lane(directory, cache, environment, name, wanted, hours)
            except RowmillError as error:  # a filter that the database cannot read: the page stays, and says so
                if not (wanted.filters or wanted.search or wanted.after):
                    raise
                wrong = error.message + (f". Try: {error.hint}" if error.hint else "")
                shown = await overview.lane(directory, cache, environment, name, Wanted(wanted.state, size=1), hours)
                shown["page"] = {"rows": [], "after": None, "ranges": False, "looked_at": None}
            return {**common, "hours": hours, "lane": shown, "wanted": wanted, "wrong": wrong, "exact": counted,
                    "operate": identity.may("operate", name)}  # fmt: skip

        return await respond(request, self.templates, "lane.html", gather)

    async def row(self, request: Request) -> Response:
        identity, environment, name = _place(request)
        common, key = self._common(request, "row"), request.query_params.get("id", "")

        async def gather() -> dict[str, Any]:
            shown = await overview.row(directory_of(request), environment, name, key)
            return {**common, "row": shown, "operate": identity.may("operate", name)}

        return await respond(request, self.templates, "row.html", gather)

    async def errors(self, request: Request) -> Response:
        common, hours = self._common(request, "errors"), _hours(request, ERROR_HOURS, 24.0)

        async def gather() -> dict[str, Any]:
            shown = await overview.errors(directory_of(request), cache_of(request), hours)
            return {**common, "hours": hours, "found": shown}

        return await respond(request, self.templates, "errors.html", gather)

    async def error(self, request: Request) -> Response:
        identity, environment, name = _place(request)
        common, hours = self._common(request, "errors"), _hours(request, ERROR_HOURS, 24.0)
        mark = request.query_params.get("error", "")

        async def gather() -> dict[str, Any]:
            shown = await overview.errors(directory_of(request), cache_of(request), hours)
            for one in (family for part in shown["environments"] for family in part["families"]):
                if (one["environment"], one["lane"], one["fingerprint"]) == (environment, name, mark):
                    return {**common, "hours": hours, "family": one, "operate": identity.may("operate", name)}
            raise Problem(404, f"no failure of {mark!r} in this period", hint="choose a longer period")

        return await respond(request, self.templates, "error.html", gather)

    async def tasks(self, request: Request) -> Response:
        """Tasks, crons and flows."""
        common = self._common(request, "tasks")

        async def gather() -> dict[str, Any]:
            return {**common, "found": await overview.tasks(directory_of(request))}

        return await respond(request, self.templates, "tasks.html", gather)

    async def workers(self, request: Request) -> Response:
        common, everyone = self._common(request, "workers"), request.query_params.get("all") == "1"

        async def gather() -> dict[str, Any]:
            shown = await questions.workers(directory_of(request), everyone=everyone)
            return {**common, **shown, "everyone": everyone}

        return await respond(request, self.templates, "workers.html", gather)

    async def health(self, request: Request) -> Response:
        """What slows the queues down."""
        common = self._common(request, "health")

        async def gather() -> dict[str, Any]:
            return {**common, "health": await overview.health(directory_of(request), cache_of(request))}

        return await respond(request, self.templates, "health.html", gather)


def _place(request: Request) -> tuple[Identity, str, str]:
    """Who may see the lane that a page is about, the environment and the lane. Who may not is not told whether there
    is such a lane.
    """
    name = request.query_params.get("lane", "")
    identity, directory = require(request, "read", name), directory_of(request)
    environment = request.query_params.get("env") or next(iter(directory.databases))
    if name not in directory.mill.lanes:
        raise Problem(404, f"there is no lane {name!r}")
    directory.database(environment)
    return identity, environment, name


def _hours(request: Request, offered: tuple[int, ...] = HOURS, default: float = 1.0) -> float:
    given = request.query_params.get("hours", "")
    return float(given) if given in {str(hours) for hours in offered} else default


def _wanted(request: Request) -> Wanted:
    """Which rows a lane's page is to show, by its address."""
    query = request.query_params
    state = query.get("state") or None
    if state is not None and state not in (*SEEN, "stuck"):
        raise Problem(404, f"there is no state {state!r}")
    given = zip(query.getlist("col"), query.getlist("op"), query.getlist("val"), strict=False)
    filters = [Filter(column, op if op in OPERATORS else "eq", value[:_LONGEST_QUERY]) for column, op, value in given]
    return Wanted(
        state=state,
        filters=tuple(f for f in filters if f.column)[:_MOST_FILTERS],
        search=query.get("q", "").strip()[:_LONGEST_QUERY],
        after=query.get("after") or None,
        oldest_first=query.get("order") == "oldest",
        ranges=query.get("ranges") == "1",
    )
