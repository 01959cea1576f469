"""The API keeps to its own description, whatever it is sent: schemathesis makes up requests that fit it, and some that
do not, and holds the answers against it. The same requests in every run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import hypothesis
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

import web
from databases import Db
from rowmill.web.access import Limiter
from rowmill.web.endpoints import ENDPOINTS

EXAMPLES = {GenerationMode.POSITIVE: 6, GenerationMode.NEGATIVE: 4}
#: What is well formed, and still not to be had: a row that is not there, a value that its column refuses.
REFUSED = ["2xx", "403", "404", "409", "422"]
#: Names that there are: made up ones would only ever meet a 404, and arguments and columns that no table has a 422.
NAMES = {
    "environment": ["default"],
    "env": ["default"],
    "lane": ["fetch", "read", "default"],
    "task": ["report", "mail"],
}
ONE = {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z]+$"}
OBJECTS = {
    "args": {"type": "object", "properties": {"to": ONE}, "required": ["to"], "additionalProperties": False},
    "columns": {"type": "object", "properties": {"url": ONE}, "required": ["url"], "additionalProperties": False},
    "key": {"enum": ["d"]},
    "by": {"enum": ["domain"]},
}
CONFIG = {
    "checks": {"positive_data_acceptance": {"expected-statuses": REFUSED}},
    "generation": {"deterministic": True, "database": "none"},
}


def narrowed(described: dict[str, Any], mode: GenerationMode) -> dict[str, Any]:
    """The description with names that this Mill has, and ids that some rows have. What is to be refused breaks the
    description itself.
    """
    if mode is GenerationMode.NEGATIVE:
        return described
    found = copy.deepcopy(described)
    for operations in found["paths"].values():
        for operation in operations.values():
            for parameter in operation["parameters"]:
                parameter["schema"] = _narrow(parameter["name"], parameter["schema"])
            for sent in operation.get("requestBody", {}).get("content", {}).values():
                properties = sent["schema"]["properties"]
                properties |= {name: _narrow(name, schema) for name, schema in properties.items()}
    return found


def _narrow(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    if name in NAMES:
        one = {"type": "string", "enum": NAMES[name]}
        return {**schema, "items": one} if schema["type"] == "array" else one
    if name == "id":
        return {"type": "string", "pattern": "^[1-9]$"}
    return OBJECTS.get(name, schema)


class Fuzz:
    """Sends made-up requests, each to all servers, and counts what was asked and what was served."""

    def __init__(self) -> None:
        self.servers: list[tuple[str, dict[str, str]]] = []
        self.asked, self.served = (dict.fromkeys((e.name for e in ENDPOINTS), 0) for _ in range(2))

    def send(self, operation: Any, mode: GenerationMode) -> None:
        name = operation.definition.raw["operationId"]

        @hypothesis.settings(
            max_examples=EXAMPLES[mode], deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            for address, headers in self.servers:
                answer = case.call(base_url=address, headers=headers)
                self.asked[name] += 1
                self.served[name] += answer.status_code < 300
                case.validate_response(answer, headers=headers)

        try:
            each()
        except hypothesis.errors.Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE, name  # there is nothing that could be wrong


def test_no_answer_breaks_the_description_or_is_a_mistake_of_ours(fresh: Callable[[str], Db]) -> None:
    """Issue: schemathesis against the OpenAPI: no 5xx, no contract violation. On both databases."""
    fuzz = Fuzz()
    with ExitStack() as stack:
        for db in (fresh("sqlite"), fresh("postgresql")):
            web.create_pages(db)
            states = ("new", "fetching", "fetched", "given up")
            db.insert("pages", [{"url": "u", "domain": "d", "status": state} for state in states])
            secret = web.token(db, "read", "operate", "enqueue", name="fuzz")
            address, app = stack.enter_context(web.listening(web.make_mill(db), inserts=["fetch"]))
            app.state.authenticator.limiter = Limiter(10**9)  # wrong tokens are part of it
            fuzz.servers.append((f"{address}/api/v1", web.bearer(secret)))
        described = httpx.get(f"{fuzz.servers[0][0]}/openapi.json").json()
        for mode in GenerationMode:
            config = SchemathesisConfig.from_dict(CONFIG)
            schema = schemathesis.openapi.from_dict(narrowed(described, mode), config=config)
            for result in schema.get_all_operations():
                fuzz.send(result.ok(), mode)
    assert all(fuzz.asked.values()), fuzz.asked
    # Not only refusals: requests that fit are served, on most endpoints.
    never = [name for name, number in fuzz.served.items() if not number]
    assert len(never) <= 6, never
