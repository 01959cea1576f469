"""The API's description, OpenAPI 3.1, from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from .endpoints import Endpoint
from .schemas import PROBLEM, Schema

_PROBLEMS = {
    400: "the body is not JSON", 401: "the token is missing or not valid", 403: "the token does not allow this",
    404: "not found", 409: "the row is in the wrong state for this, or the key is taken",
    413: "the request is too large", 415: "the body is not application/json",
    421: "the Host header does not name this server",
    422: "a parameter or field is not valid", 429: "too many failed logins", 500: "internal error",
    503: "the database is unreachable or busy",
}  # fmt: skip
#: What may go wrong only where a body is sent.
_WITH_BODY = (400, 409, 413, 415)


def document(endpoints: Sequence[Endpoint], base: str) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rowmill",
            "version": version("rowmill"),
            "description": "Lanes, rows, tasks, workers and gates of a Mill. Errors are application/problem+json.",
        },
        "servers": [{"url": base}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "from `rowmill token create`; not needed on loopback until the first token exists",
                }
            },
            "schemas": {"Problem": PROBLEM},
            "responses": {str(status): _problem(about) for status, about in _PROBLEMS.items()},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    parameters = [_parameter("path", name, endpoint.place(name)) for name in re.findall(r"{(\w+)}", endpoint.path)]
    parameters += [_parameter("query", name, schema) for name, schema in endpoint.query.items()]
    problems = [status for status in _PROBLEMS if endpoint.body is not None or status not in _WITH_BODY]
    answer = {"description": endpoint.about, "content": {"application/json": {"schema": endpoint.answer}}}
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.about,
        "description": f"Needs the scope {endpoint.scope}.",
        "parameters": parameters,
        "responses": {
            str(endpoint.status): answer,
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in problems},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": endpoint.body}}}
    return operation


def _parameter(where: str, name: str, schema: Schema) -> dict[str, Any]:
    parameter: dict[str, Any] = {"name": name, "in": where, "required": where == "path", "schema": schema}
    if schema.get("description"):
        parameter["description"] = schema["description"]
    return parameter


def _problem(about: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": about, "content": {"application/problem+json": {"schema": schema}}}
