"""Lists of environments that are read while workers run: a table of tenants, or a function."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, TypeVar
from urllib.parse import quote

from ..errors import DeclarationError
from .database import Database
from .postgres_database import rows_of

T = TypeVar("T")
#: What lists environments, name to URL: a function, plain or async.
Lister = Callable[[], Mapping[str, str] | Awaitable[Mapping[str, str]]]


@dataclass(frozen=True)
class EnvironmentsTable:
    """A table with a row for each environment. Made by ``from_table``."""

    database_url: str
    table: str
    name: str
    url: str
    weight: str | None
    where: str | None

    @property
    def _fields(self) -> list[str]:
        """The columns that a template of URLs names; none where ``url`` is a column itself."""
        return [field for _, field, _, _ in Formatter().parse(self.url) if field] if "://" in self.url else []

    async def read(self) -> tuple[dict[str, str], dict[str, float]]:
        """Name to URL, in the order of names; and the weights."""
        database = Database.open(self.database_url, pool=1)
        quoted = database.dialect.identifier_preparer.quote
        columns = [self.name, *(self._fields or [self.url]), *([self.weight] if self.weight else [])]
        table = ".".join(map(quoted, self.table.split(".")))
        text = f"select {', '.join(map(quoted, columns))} from {table}"
        text += f" where {self.where}" if self.where else ""
        try:
            rows = await database.read(rows_of(f"{text} order by 1"))
        finally:
            await database.close()
        urls: dict[str, str] = {}
        weights: dict[str, float] = {}
        for row in rows:
            known = dict(zip(columns, row, strict=True))
            name = str(known[self.name])
            escaped = {field: quote(str(known[field]), safe="") for field in self._fields}
            urls[name] = self.url.format_map(escaped) if escaped else known[self.url]
            if self.weight and known[self.weight] is not None:
                weights[name] = float(known[self.weight])
        return urls, weights


def from_table(
    database_url: str,
    table: str,
    *,
    name: str = "name",
    url: str = "url",
    weight: str | None = None,
    where: str | None = None,
) -> EnvironmentsTable:
    """List environments in a table: ``Mill(environments=from_table(control_url, "tenants", url="database_url"))``.

    ``name`` and ``weight`` are columns; ``url`` is a column, or a template that names columns in braces:
    ``url="postgresql://app@db/app?search_path={schema}"``. ``where`` is SQL, such as ``"active"``.
    """
    for option, value in (("database_url", database_url), ("table", table), ("name", name), ("url", url)):
        if not isinstance(value, str) or not value:
            raise DeclarationError(f"from_table: {option} is text, not {value!r}")
    return EnvironmentsTable(database_url, table, name, url, weight, where)


class EnvironmentList:
    """A list of environments, as it was when it was last read."""

    def __init__(self, source: EnvironmentsTable | Lister) -> None:
        self._source = source
        self._known: dict[str, str] | None = None
        self.weights: dict[str, float] = {}

    def known(self) -> dict[str, str]:
        """Name to URL; read now, if it was not read yet."""
        return dict(self._known if self._known is not None else self.reread())

    def reread(self) -> dict[str, str]:
        """Read it now, for code that does not await."""
        return dict(_apart(self.read()))

    async def read(self) -> Mapping[str, str]:
        """Read it now. An answer that cannot be used is refused as a whole."""
        if isinstance(self._source, EnvironmentsTable):
            listed, self.weights = await self._source.read()
        else:
            awaited = inspect.iscoroutinefunction(self._source)
            answer = self._source() if awaited else await asyncio.to_thread(self._source)
            listed = dict(await answer if inspect.isawaitable(answer) else answer)
        for name, url in listed.items():
            if not isinstance(name, str) or not name or not isinstance(url, str) or not url:
                raise DeclarationError(
                    f"environment {name!r} is listed with the URL {url!r}",
                    hint="a list of environments is a mapping of names to URLs, both text",
                )
        self._known = listed
        return listed


def _apart(work: Any) -> Any:
    """Run a coroutine to its end in a thread of its own, whether or not an event loop runs here."""
    answer: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rowmill-environments")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answer[0]
