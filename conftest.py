"""Fixtures: ``db`` runs a test on both databases, ``pg`` and ``lite`` on one of them; ``mill`` is one over ``db``."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import distributed
import pooler
import quick_processes
from databases import Db, Server, prepared_file, quick_ground
from rowmill import Mill

os.environ["ENV_FILE"] = ""  # the applications' settings in tests are those of the tests
# The tests' files, SQLite's among them, wait for no disk.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", quick_ground())
quick_processes.install()
_numbers = itertools.count(1)
#: ``--fast`` leaves out these folders, files that use one of these modules, and on PostgreSQL all but the core.
_SLOW = {"processes", "browser", "docs", "apps", "integrations", "prove", "tooling"}
#: Whole commands over many cases: a quarter of the time for a twentieth of the tests.
_LONG = {"test_hostile_names", "test_secrets", "test_adopted_tables", "test_gate_columns", "test_gates_command"}
_PROCESSES = {"subprocess", "multiprocessing", "farm", "gate_farm", "quick_processes"}
_CORE = {"test_fence", "test_settle", "test_recover", "test_golden", "test_act", "test_gates"}
#: In these folders of tests a fresh database has rowmill's own tables already, unless a test is marked ``bare``.
_PREPARED = {"client", "engine", "store/gates", "store/inspect", "store/jobs", "store/lane", "web"}
# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("rowmill", deadline=None)
settings.load_profile("rowmill")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the edit loop: SQLite, a core on PostgreSQL, no processes")
    parser.addoption("--pooler", action="store_true", help="only tests on PostgreSQL, through PgBouncer")
    parser.addoption("--distributed", action="store_true", help="only tests on PostgreSQL, their statements judged")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What ``--fast`` leaves out is not even imported."""
    folder = collection_path.parent == config.rootpath / "tests" and collection_path.name in _SLOW
    return True if config.getoption("--fast") and (folder or collection_path.stem in _LONG) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Behind a pooler: what uses the session's PostgreSQL, less what is marked, which is skipped with its reason."""
    if config.getoption("--fast"):
        left_out = {item for item in items if _starts_processes(item) or (_on_postgres(item) and not _is_core(item))}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
        _deal(items, workers, config.rootpath)
    if not config.getoption("--pooler") and not config.getoption("--distributed"):
        return
    chosen = [item for item in items if _on_postgres(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
    for option, name, why in (("pooler", "no_pooler", "through a pooler"), ("distributed", "local", "distributed")):
        for item in chosen if config.getoption(option) else ():
            if (mark := item.get_closest_marker(name)) is not None:
                item.add_marker(pytest.mark.skip(reason=f"not {why}: {mark.args[0]}"))


def _deal(items: list[pytest.Item], hands: int, root: Path) -> None:
    """Each of xdist's workers begins with a share of the files that take long: the last minute has short tests only."""
    files: dict[Path, list[pytest.Item]] = {}
    short: list[pytest.Item] = []
    for item in items:
        long = _SLOW & set(item.path.relative_to(root).parts)
        (files.setdefault(item.path, []) if long else short).append(item)
    dealt: list[list[pytest.Item]] = [[] for _ in range(hands)]
    for file in files.values():
        min(dealt, key=len).extend(file)
    # xdist cuts the list into parts of the same length.
    whole = len(items) // hands
    for hand in dealt:
        missing = max(whole - len(hand), 0)
        hand += short[:missing]
        del short[:missing]
    items[:] = [item for hand in dealt for item in hand] + short


def _starts_processes(item: pytest.Item) -> bool:
    """A test whose file works with other processes: workers, browsers, servers of its own. Or whose handler has one."""
    if "isolated(" in inspect.getsource(getattr(item, "function", _starts_processes)):
        return True
    module = getattr(item, "module", None)
    homes = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()}
    return bool(_PROCESSES & {str(home).split(".")[0] for home in homes})


def _is_prepared(item: pytest.Item) -> bool:
    """Whether a test's databases have rowmill's own tables from the beginning."""
    folders = "/".join(item.path.relative_to(item.config.rootpath).parts[1:-1])
    return folders in _PREPARED and item.get_closest_marker("bare") is None


def _is_core(item: pytest.Item) -> bool:
    return item.path.stem in _CORE


def _on_postgres(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    given = callspec.params.values() if callspec is not None else ()
    # A dialect by name, or a case that says which one is its own.
    dialects = {value if isinstance(value, str) else getattr(value, "dialect", None) for value in given}
    used = set(getattr(item, "fixturenames", ()))
    if "sqlite" in dialects or "lite" in used:
        return False
    return "postgresql" in dialects or bool({"pg", "fresh", "server"} & used)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With the distributed profile on: how many statements were judged, and which could not be."""
    for line in distributed.session.report() if distributed.session is not None else ():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The session's PostgreSQL. Never stop this one: a test of outages makes a ``Server()`` of its own."""
    with Server() as server:
        if request.config.getoption("--distributed"):
            server.schema = distributed.SCHEMA
            with distributed.Profile() as distributed.session:
                yield server
            return
        if not request.config.getoption("--pooler"):
            yield server
            return
        with pooler.Pooler(server.url) as pooler.session:
            yield server
        pooler.session = None


@pytest.fixture
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Db]]:
    """Makes a fresh database of a dialect, as often as a test asks; for tests with several environments."""
    dropped_later: list[str] = []
    prepared = _is_prepared(request.node)

    def make(dialect: str) -> Db:
        name = f"test_{next(_numbers)}"
        if dialect == "sqlite":
            path = tmp_path / f"{name}.db"
            if prepared:
                path.write_bytes(prepared_file())
            return Db(f"sqlite:///{path}")
        # The server is asked for here, not as an argument: a run of SQLite tests alone starts none.
        server: Server = request.getfixturevalue("server")
        url = server.create_database(name, server.prepared if prepared else "template1")
        dropped_later.append(name)
        distributed.check_later(request, url)
        return Db(url)

    yield make
    for name in dropped_later:
        request.getfixturevalue("server").drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, fresh: Callable[[str], Db]) -> Db:
    """A fresh database, once of each kind."""
    return fresh(request.param)


@pytest.fixture
def pg(fresh: Callable[[str], Db]) -> Db:
    """A fresh PostgreSQL database."""
    return fresh("postgresql")


@pytest.fixture
def lite(fresh: Callable[[str], Db]) -> Db:
    """A fresh SQLite database."""
    return fresh("sqlite")


@pytest.fixture
async def mill(db: Db) -> AsyncIterator[Mill]:
    mill = Mill(db.url)
    yield mill
    await mill.close()
