"""A Mill over Django's databases. What does not await enqueues through Django's own connection, so that a job is there
if the surrounding ``transaction.atomic()`` commits, and only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

from django.db import connections, transaction

from .. import mill as mills
from ..client.client import Client as PlainClient
from ..declare.call import Call, Handle
from ..declare.cron import Cron
from ..declare.lane import LaneDecorator
from ..declare.task import Task
from ..engine import worker_id as worker_ids
from ..errors import WrongArguments, did_you_mean
from ..store import Database
from ..store.dialect import formatted
from ..store.own import schema
from .connections import guarded, url


class Mill(mills.Mill):
    """A Mill whose environments are databases of ``settings.DATABASES``: ``Mill()`` for the default one, or
    ``Mill("default", "reports")``, served in this order and named as they are there.

    Lanes take Django models as tables. Handlers have their Django connections looked after as requests have.
    """

    def __init__(
        self,
        *aliases: str,
        schema: str | None = None,
        connections: int = 3,
        notify: bool = True,
        worker_id: str = worker_ids.DEFAULT,
    ) -> None:
        super().__init__({}, schema=schema, connections=connections, notify=notify, worker_id=worker_id)
        self.aliases = aliases or ("default",)
        self._client = DjangoClient(lambda: self.environments, schema, self.clock, notify, self.events)
        self._client.aliases = self.aliases

    @property
    def environments(self) -> dict[str, str]:
        """Alias to URL; read each time, since Django's test runner moves the databases."""
        return {alias: url(alias) for alias in self.aliases}

    def lane(self, table: Any, **options: Any) -> LaneDecorator:
        declare = super().lane(table, **options)
        return cast(LaneDecorator, lambda handler: declare(guarded(handler, options)))

    def _task(self, handler: mills.Handler, given: Mapping[str, Any], cron: Cron | None = None) -> Task[..., Any]:
        return super()._task(guarded(handler, given), given, cron)

    def batch_sync(self, calls: Iterable[Call], then: Call) -> Handle[Any]:
        with _joined(self._client, [then]) as (last,):
            return _at_once(self._client.batch(list(calls), last))

    def chain_sync(self, *calls: Call) -> Handle[Any]:
        if not calls:
            raise WrongArguments(
                "a chain needs at least one call", hint="mill.chain_sync(first.call(...), second.call(...))"
            )
        with _joined(self._client, calls[-1:]) as (last,):
            return _at_once(self._client.chain([*calls[:-1], last]))

    def make_tables(self, alias: str) -> None:
        """rowmill's own tables, made through Django's connection: that is the one way into a database in memory."""
        connection = connections[alias]

        def run(sql: str, values: Any = ()) -> Sequence[Any]:
            with connection.cursor() as cursor:
                if isinstance(values, Mapping):
                    cursor.execute(*formatted(sql, values))
                elif values:
                    cursor.execute(re.sub(r"\$\d+", "%s", sql), values)
                else:
                    cursor.execute(sql)
                return cursor.fetchall() if cursor.description else []

        spelled = Database.open(f"{connection.vendor}:///any", schema=self.schema)  # never connected to
        with transaction.atomic(using=alias):
            schema.take(spelled, run)


class DjangoClient(PlainClient):
    """Takes calls that do not await through Django's connection, in the transaction that it is in."""

    aliases: Sequence[str] = ()

    def environment(self, name: str | None) -> str:
        """By its alias alone: what Django's connection reaches may be in memory, where no URL leads."""
        if name is None:
            return self.aliases[0]
        if name not in self.aliases:
            raise WrongArguments(f"there is no environment {name!r}", hint=did_you_mean(name, self.aliases))
        return name

    def enqueue_sync(self, calls: Sequence[Call]) -> list[Handle[Any]]:
        with _joined(self, calls) as joined:
            return super().enqueue_sync(joined)


@contextmanager
def _joined(client: PlainClient, calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls with Django's connection as their transaction; where it is in none, in one of their own."""
    joined = list(calls)
    with ExitStack() as stack:
        for (tx, environment), indexes in client._groups(calls).items():
            if tx is not None:
                continue
            connection = connections[environment]
            if not connection.in_atomic_block:
                stack.enter_context(transaction.atomic(using=environment))
            for index in indexes:
                options = replace(calls[index].options, tx=connection)
                joined[index] = replace(calls[index], options=options)
        yield joined


def _at_once(work: Any) -> Handle[Any]:
    """A coroutine that has nothing to await: all of it runs on the caller's connection, in the caller's thread."""
    try:
        work.send(None)
    except StopIteration as end:
        handle: Handle[Any] = end.value
        return handle
    raise AssertionError("it awaits something")
