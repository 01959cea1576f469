"""The HTTP API: routes and checks from the table of endpoints; every answer is JSON, every error a problem."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema_rs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.templating import Jinja2Templates

from ..errors import RowmillError, did_you_mean
from ..ops.documents import DEPTH, too_deep
from . import audit
from .access import require
from .endpoints import ENDPOINTS, CheckedRequest, Endpoint
from .openapi import document
from .problem import Problem
from .schemas import Schema

BASE = "/api/v1"
#: Seconds a request may take.
PATIENCE = 40.0
_MOST_ERRORS = 5
_INTEGER = re.compile(r"-?\d{1,18}")


class JsonAnswer(JSONResponse):
    """A response in JSON, for any column value."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, default=str, allow_nan=False).encode()
        except ValueError:
            return json.dumps(_finite(content), default=str).encode()


def _finite(value: Any) -> Any:
    """Write NaN and infinite numbers as text, because JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


class ServedEndpoint:
    """One endpoint, with checks against its schemas."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        names = re.findall(r"{(\w+)}", endpoint.path)
        self.path = jsonschema_rs.validator_for(_object({name: endpoint.place(name) for name in names}))
        self.query = jsonschema_rs.validator_for(_object(endpoint.query))
        self.body = jsonschema_rs.validator_for(endpoint.body) if endpoint.body is not None else None

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._serve(request)
        except Problem as problem:
            # Who tries what he may not is written down, also where it did not come to an action.
            if self.endpoint.method != "GET" and problem.status_code == 403 and not problem.audited:
                where = {name: request.path_params.get(name) for name in ("environment", "lane")}
                await audit.record(
                    request, self.endpoint.name, **where, outcome="refused", detail=str(problem.detail),
                    target=f"task={request.path_params['task']}" if "task" in request.path_params else None,
                )  # fmt: skip
            raise

    async def _serve(self, request: Request) -> Response:
        endpoint = self.endpoint
        identity = require(request, endpoint.scope, some=True) if endpoint.scope else request.state.who
        path = dict(request.path_params)
        _check(self.path, path, "path")
        query = self._query(request)
        body = await _body(request) if self.body is not None else {}
        if self.body is not None:
            _check(self.body, body, "body")
        async with asyncio.timeout(PATIENCE):
            answer = await endpoint.run(CheckedRequest(request, identity, path, query, body))
        return JsonAnswer(answer, endpoint.status)

    def _query(self, request: Request) -> dict[str, Any]:
        given: dict[str, list[str]] = {}
        for name, value in request.query_params.multi_items():
            given.setdefault(name, []).append(value)
        values: dict[str, Any] = {}
        for name, parts in given.items():
            schema = self.endpoint.query.get(name)
            if schema is None:
                raise Problem(422, f"there is no parameter {name!r}", hint=did_you_mean(name, self.endpoint.query))
            values[name] = (
                parts if schema["type"] == "array" else _typed(parts[0], schema) if len(parts) == 1 else parts
            )
        _check(self.query, values, "query")
        return values


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _typed(value: str, schema: Schema) -> Any:
    """A parameter in the type of its schema; a value that does not fit stays text, and validation refuses it."""
    if schema["type"] == "integer" and _INTEGER.fullmatch(value):
        return int(value)
    if schema["type"] == "boolean" and value in ("true", "false"):
        return value == "true"
    return value


def _check(validator: Any, given: Any, where: str) -> None:
    """Validate; raises a problem that says what is wrong, and where."""
    wrong = []
    try:
        for error in validator.iter_errors(given):
            field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
            wrong.append({"at": f"{where}{field}", "error": error.message[:300]})
            if len(wrong) == _MOST_ERRORS:
                break
    except (ValueError, RecursionError) as error:
        raise Problem(422, f"the {where} cannot be read: {error}") from None
    if not wrong and (bad := _unstorable(given)) is not None:
        wrong.append({"at": where, "error": bad})
    if wrong:
        raise Problem(422, f"{wrong[0]['at']}: {wrong[0]['error']}", errors=wrong)


def _unstorable(value: Any) -> str | None:
    """Refuse what no database stores: NUL characters, surrogates, and infinite numbers."""
    if isinstance(value, str):
        broken = "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value)
        return "text with a NUL or a half of a letter" if broken else None
    if isinstance(value, float):
        return None if math.isfinite(value) else "a number that is too large"
    parts: Iterable[Any] = ()  # no deeper than _body lets through
    if isinstance(value, dict):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, list):
        parts = value
    return next((bad for part in parts if (bad := _unstorable(part)) is not None), None)


async def _body(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "the body must be application/json", hint="Content-Type: application/json")
    try:
        body = json.loads(await request.body(), parse_constant=_no_such_number)
        deep = too_deep(body)
    except RecursionError:
        deep = True
    except ValueError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    if deep:
        raise Problem(400, f"the body is nested more than {DEPTH} levels deep", hint="send the inner part as text")
    return body


def _no_such_number(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


# -- what needs no token: it tells nothing


async def healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """The database of the first environment, which has the tokens, answers."""
    try:
        async with asyncio.timeout(5):
            await request.app.state.directory.first.read(lambda run: run("select 1", ()))
    except (RowmillError, TimeoutError):
        return JSONResponse({"status": "not ready"}, 503)
    return JSONResponse({"status": "ready"})


async def metrics(request: Request) -> Response:
    require(request, "read")
    state = request.app.state
    try:
        from .. import prometheus
    except RowmillError as error:
        raise Problem(501, error.message, hint=error.hint) from None
    if not hasattr(state, "standing"):
        state.standing = prometheus.Standing(state.mill)
    return Response(await state.standing.exposition(), media_type=prometheus.CONTENT_TYPE)


def routes(templates: Jinja2Templates) -> list[BaseRoute]:
    described = document(ENDPOINTS, BASE)

    async def openapi(request: Request) -> Response:
        return JsonAnswer(described)

    by_path: dict[str, dict[str, ServedEndpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = ServedEndpoint(endpoint)
    routes: list[BaseRoute] = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route(f"{BASE}/openapi.json", openapi),
        *(_route(path, served) for path, served in by_path.items()),
    ]
    return routes


def _route(path: str, served: Mapping[str, ServedEndpoint]) -> Route:
    async def dispatch(request: Request) -> Response:
        return await served["GET" if request.method == "HEAD" else request.method](request)

    # A row's key may have a slash in it.
    return Route(BASE + path.replace("/rows/{id}", "/rows/{id:path}"), dispatch, methods=list(served))
