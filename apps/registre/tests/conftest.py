"""A stand-in and a browser for all tests of this folder, and a kit over fresh environments for each.

All async tests here share one event loop, so that they can share the browser.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from apps.registre import tables
from apps.registre.browser import Chromium
from apps.registre.lanes import mill
from apps.registre.settings import ENVIRONMENTS
from apps.registre.standin import Standin
from apps.registre.standin.site import Conduct
from databases import Db
from rowmill import Job
from rowmill.engine.resources import Resource
from rowmill.testing import Kit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents
        if own and inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def _standin() -> Iterator[Standin]:
    with Standin(slow=0.3) as standin:
        yield standin


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Chromium]:
    """The browser of all tests: a real one. Without it they fail; they are not skipped."""
    browser = Chromium()
    await browser.running()
    yield browser
    await browser.close()


@pytest.fixture
def standin(_standin: Standin, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """The registers as they are at their best, and the settings that lead there."""
    fresh = Conduct(slow=0.3)
    for name, value in vars(fresh).items():
        setattr(_standin.conduct, name, value)
    for name, value in _standin.variables().items():
        monkeypatch.setenv(name, value)
    return _standin


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for what registre keeps: documents and evidence."""
    for variable in ENVIRONMENTS.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("STORAGE_URL", str(tmp_path / "documents"))
    monkeypatch.setenv("EVIDENCE_DIR", str(tmp_path / "evidence"))
    monkeypatch.setenv("SITE_TIMEOUT_SECONDS", "15")
    return tmp_path


@pytest.fixture
def short(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience with the sites, for tests in which something is not there; enough for a busy machine."""
    monkeypatch.setenv("SITE_TIMEOUT_SECONDS", "5")


Start = Callable[..., Awaitable[tuple[Kit, dict[str, Db]]]]


@pytest_asyncio.fixture(loop_scope="session")
async def start(
    standin: Standin, chromium: Chromium, place: Path, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """``kit, dbs = await start(prod="postgresql", dev="sqlite")``: environments with their tables, and a kit that
    steps registre's own lanes over them, in the tests' browser, with sessions of its own.
    """
    share(chromium, monkeypatch)
    shift = mill.clock.shift
    async with AsyncExitStack() as stack:

        async def start(**dialects: str) -> tuple[Kit, dict[str, Db]]:
            made = await environments(fresh, monkeypatch, **dialects)
            return await stack.enter_async_context(Kit(mill)), made

        yield start
    mill.clock.shift = shift


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Handlers that take a note of their job, and are done: no browser."""
    jobs: list[Job] = []

    async def note(job: Job) -> None:
        jobs.append(job)

    for lane in mill.lanes.values():
        monkeypatch.setattr(lane, "handler", note)
    return jobs


async def environments(fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch, **dialects: str) -> dict[str, Db]:
    """Fresh databases with registre's tables, and the variables that name them."""
    made = {name: fresh(dialect) for name, dialect in dialects.items()}
    for name, db in made.items():
        monkeypatch.setenv(ENVIRONMENTS[name], db.url)
    await tables.migrate_all(mill)
    return made


def share(chromium: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give registre the tests' browser instead of one of its own."""
    monkeypatch.setitem(mill.resources, "chromium", Resource("chromium", lambda: chromium))
