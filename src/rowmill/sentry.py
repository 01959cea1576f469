"""Failures to Sentry, scrubbed: ``rowmill.sentry.report(mill, dsn="https://...")``. Needs the extra ``sentry``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .errors import DeclarationError
from .events import Event, logger, to_log
from .mill import Mill
from .scrub import SECRET, scrubbed_value
from .store.own.fingerprint import fingerprint

try:
    import sentry_sdk
    from sentry_sdk.integrations.dedupe import DedupeIntegration
    from sentry_sdk.integrations.logging import ignore_logger
    from sentry_sdk.scope import use_isolation_scope
except ImportError as error:  # pragma: no cover - the extra is there in the tests
    raise DeclarationError("rowmill.sentry needs the Sentry SDK", hint="pip install 'rowmill[sentry]'") from error

FLUSH = 5.0  # seconds that the last events may take to leave
#: What the SDK itself writes, and what no value of a row can stand in.
_SPARED = frozenset([
    "event_id", "timestamp", "start_timestamp", "platform", "level", "sdk", "modules", "release", "dist", "environment",
    "fingerprint", "type", "span_id", "trace_id", "parent_span_id", "filename", "abs_path", "function", "module",
    "lineno", "in_app", "debug_meta",
])  # fmt: skip
#: What a web request brings along: where it went is enough.
_REQUEST = ("url", "method")


def report(mill: Mill, *, dsn: str | None = None, flush: float = FLUSH, **options: Any) -> None:
    """Send every failure of this Mill's jobs to Sentry, and leave a breadcrumb at every move to dead.

    ``dsn`` and ``options`` are those of ``sentry_sdk.init``. Without them a client that the application has set up is
    used as it is, or SENTRY_DSN. Whatever leaves, from here on and from this client at all, is scrubbed: no query
    strings, e-mail addresses, secrets, IP addresses or local variables. What has not left yet when a worker stops is
    given ``flush`` seconds.
    """
    if dsn is not None or options or not sentry_sdk.get_client().options.get("dsn"):
        given = {"include_local_variables": False, "max_request_body_size": "never"}
        sentry_sdk.init(dsn=dsn, **{**given, **options})
    client = sentry_sdk.get_client()
    if not client.options.get("dsn"):
        to_log(Event("sentry_off", fields={"hint": "set SENTRY_DSN, or give report(mill, dsn=...)"}))
        return
    for name, scrub in (
        ("before_send", scrub_event),
        ("before_send_transaction", scrub_event),
        ("before_send_log", scrubbed_value),
    ):
        client.options[name] = _after(client.options.get(name), scrub)
    ignore_logger(logger.name)  # what is worth telling is told here, once
    mill.events.subscribe(_Reporter(flush), detailed=False)


def scrub_event(event: Any) -> Any:
    """An event of Sentry's with nothing in it that must not leave."""
    for frame in _frames(event):
        frame.pop("vars", None)
    if request := event.get("request"):
        event["request"] = {name: request[name] for name in _REQUEST if name in request}
    if user := event.get("user"):
        event["user"] = {"id": user["id"]} if "id" in user else {}
    clean: dict[str, Any] = scrubbed_value(event, _SPARED.__contains__)
    for frame in _frames(clean):
        for name in ("pre_context", "context_line", "post_context"):
            # A line of source is the program's own; one that names a secret may well hold it.
            if name in frame and SECRET in str(frame[name]):
                frame[name] = SECRET if isinstance(frame[name], str) else []
    return clean


def _frames(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every stack frame of an event: of its exceptions, of its threads, and of the message itself."""
    holders = [one for kind in ("exception", "threads") for one in _values(event.get(kind))]
    traces = [holder.get("stacktrace") for holder in (*holders, event)]
    return [frame for trace in traces for frame in ((trace or {}).get("frames") or ()) if frame]


def _values(given: Any) -> list[Any]:
    values = given.get("values") if isinstance(given, Mapping) else given
    return [one for one in values or () if one]


def _after(users: Callable[..., Any] | None, scrub: Callable[[Any], Any]) -> Callable[..., Any]:
    """Whatever the user's own function lets through is scrubbed after it."""

    def send(event: Any, hint: Any) -> Any:
        kept = event if users is None else users(event, hint)
        return None if kept is None else scrub(kept)

    return send


class _Reporter:
    """The subscriber. Breadcrumbs are kept in a scope of its own: every batch is settled by another asyncio task, and
    each would begin with none.
    """

    def __init__(self, flush: float) -> None:
        self._flush = flush
        self._scope = sentry_sdk.get_isolation_scope().fork()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        if event.name == "worker_stopped":
            sentry_sdk.flush(self._flush)
        elif event.name in ("job_failed", "row_poisoned"):
            self._failed(event)
        elif event.level >= logging.ERROR:
            self._send(event, [event.name, str(event.fields.get("environment"))], event.name)

    def _failed(self, event: Event) -> None:
        fields = event.fields
        poison = event.name == "row_poisoned"
        message = str(fields.get("error") or ("taken back too often: poison" if poison else "failed"))
        if poison or fields.get("outcome") in ("dead", "canceled"):
            self._breadcrumb(fields, message)
        self._send(event, [str(fields["lane"]), fingerprint(message)], message)

    def _breadcrumb(self, fields: Mapping[str, Any], message: str) -> None:
        data = {name: str(fields[name]) for name in ("lane", "environment", "id", "attempt") if name in fields}
        with self._lock, use_isolation_scope(self._scope):
            sentry_sdk.add_breadcrumb(
                category="rowmill.dead", type="error", level="error", data=data,
                message=f"{data['lane']} {data['id']} is dead: {message}",
            )  # fmt: skip

    def _send(self, event: Event, family: list[str], message: str) -> None:
        fields = event.fields
        with self._lock, use_isolation_scope(self._scope), sentry_sdk.new_scope() as scope:
            scope.fingerprint = family
            scope.set_level("error")
            classed = "poison" if event.name == "row_poisoned" else fields.get("class")
            for name in ("lane", "environment", "attempt", "outcome"):
                if name in fields:
                    scope.set_tag(name, str(fields[name]))
            if classed:
                scope.set_tag("class", classed)
            scope.set_context("rowmill", {name: _shown(value) for name, value in fields.items() if name != "traceback"})
            environment = fields.get("environment")
            if environment and environment != "default":
                scope.add_event_processor(lambda sent, hint: {**sent, "environment": environment})
            if event.cause is not None:
                # Two jobs may fail by one and the same exception: that is two failures.
                DedupeIntegration.reset_last_seen()
                sentry_sdk.capture_exception(event.cause)
            else:
                sentry_sdk.capture_message(message, level="error")


def _shown(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool)) or value is None else str(value)
