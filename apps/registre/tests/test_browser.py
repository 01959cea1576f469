"""The browser and the sessions: started late, kept, shared, renewed, and replaced when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.registre import browser
from apps.registre.browser import BrowserError, Chromium
from apps.registre.lanes import mill
from apps.registre.standin import Standin
from databases import Db

from .at_work import at_work, until
from .conftest import Start, environments
from .rows import documents, searches


def children(of: int) -> Iterator[int]:
    """The processes below one, on Linux."""
    for task in Path(f"/proc/{of}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield child
            yield from children(child)


def browsers() -> list[int]:
    """The main processes of the browsers that this process has started."""
    found = []
    for child in children(os.getpid()):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--remote-debugging-pipe" in words and not any(word.startswith(b"--type=") for word in words):
            found.append(child)
    return found


def statuses(db: Db) -> list[int]:
    return [row["status_id"] for row in db.query("select status_id from extraction_queue order by id")]


async def test_the_browser_starts_with_the_first_job_and_is_kept(
    standin: Standin, place: Path, fresh, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """A8: an idle worker has no browser; three jobs have one, which is logged in once; it is gone with the worker."""
    dbs = await environments(fresh, monkeypatch, prod="postgresql")
    opened: list[Chromium] = []
    real = Chromium.__init__
    monkeypatch.setattr(Chromium, "__init__", lambda self: (real(self), opened.append(self))[0])
    before = len(browsers())
    async with at_work(lanes=["extraction"]):
        assert (opened, len(browsers())) == ([], before)
        documents(dbs["prod"], 3)
        await mill.wake()
        await until(lambda: statuses(dbs["prod"]) == [3, 3, 3])
        (chromium,) = opened
        assert (chromium.generation, len(browsers())) == (1, before + 1)
        assert standin.conduct.counts["logins"] == 1
    assert len(browsers()) == before


async def test_slots_share_one_browser_and_one_login(
    start: Start, standin: Standin, chromium: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3, A8: three at once, in one browser, after one login."""
    monkeypatch.setattr(mill.lanes["extraction"], "concurrency", 3)
    generation = (await chromium.running(), chromium.generation)[1]
    at_once: list[int] = []
    kit, dbs = await start(prod="sqlite")
    running = "select count(*) from extraction_queue where status_id = 2"
    standin.conduct.watch = lambda path: at_once.append(dbs["prod"].value(running)) if "document" in path else None
    documents(dbs["prod"], 6)
    await kit.drain("extraction")
    assert statuses(dbs["prod"]) == [3] * 6
    assert max(at_once) > 1
    assert (standin.conduct.counts["logins"], chromium.generation) == (1, generation)


async def test_a_session_that_expires_is_renewed_and_the_job_goes_on(start: Start, standin: Standin) -> None:
    """A8: between two jobs, and in the middle of one; each counts as one extraction and no failure."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 3)
    await kit.step("extraction")
    standin.conduct.expire()
    await kit.step("extraction")
    assert standin.conduct.counts["logins"] == 2

    def at_the_download(path: str) -> None:
        if path.startswith("/foncier/document"):
            standin.conduct.watch = None
            standin.conduct.expire()

    standin.conduct.watch = at_the_download
    await kit.step("extraction")
    assert statuses(dbs["prod"]) == [3, 3, 3]
    assert standin.conduct.counts["logins"] == 3


async def test_slots_whose_session_expires_under_all_of_them_log_in_once_and_go_on(
    start: Start, standin: Standin, chromium: Chromium, place: Path
) -> None:
    """A8: four jobs in one browser, the session gone at every one's download; one login for each time it went."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 5)
    await kit.step("extraction")
    claims = await kit.claim("extraction", 4)
    generation, expired = chromium.generation, 0

    def expire(path: str) -> None:
        nonlocal expired
        if path.startswith("/foncier/document") and len(standin.conduct.asked) >= 5 and expired < 2:
            expired += 1
            standin.conduct.expire()

    standin.conduct.watch = expire
    await asyncio.gather(*(kit.run(claim) for claim in claims))
    assert statuses(dbs["prod"]) == [3] * 5
    assert expired == 2
    assert 2 <= standin.conduct.counts["logins"] <= 1 + expired
    assert len(list((place / "documents").rglob("*.pdf"))) == 5
    assert chromium.generation == generation


async def test_a_browser_that_is_killed_in_mid_job_is_replaced_and_the_job_done(
    start: Start, standin: Standin, chromium: Chromium, place: Path
) -> None:
    """A8, X2: the browser's death is no failure of the document; it is uploaded once, and the session is kept."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 2)
    await kit.step("extraction")
    before, known = chromium.generation, set(browsers())

    def kill(path: str) -> None:
        if path.startswith("/foncier/document"):
            standin.conduct.watch = None
            for process in known:
                os.kill(process, signal.SIGKILL)

    standin.conduct.watch = kill
    stepped = await kit.step("extraction")
    assert stepped is not None
    assert (statuses(dbs["prod"]), stepped.error) == ([3, 3], None)
    assert chromium.generation == before + 1
    assert standin.conduct.counts["logins"] == 1, "the cookies outlive the browser"
    assert len(list((place / "documents").rglob("*.pdf"))) == 2


async def test_a_browser_that_is_killed_in_mid_download_is_replaced_and_the_job_done(
    start: Start, standin: Standin, chromium: Chromium, place: Path
) -> None:
    """A8, X2: half of the document was there; it is asked for again, and stored whole and once."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"])
    standin.conduct.half_way = "stalls"
    step = asyncio.create_task(kit.step("extraction"))
    await until(lambda: begun(chromium))
    standin.conduct.half_way = ""
    for process in browsers():
        os.kill(process, signal.SIGKILL)
    stepped = await step
    assert stepped is not None
    assert (statuses(dbs["prod"]), stepped.error) == ([3], None)
    (stored,) = (place / "documents").rglob("*.pdf")
    assert stored.read_bytes().endswith(b"%%EOF")
    assert standin.conduct.counts["downloads"] == 2


def begun(chromium: Chromium) -> list[Path]:
    """Downloads under way in the browser's own directory."""
    scratch = chromium._scratch
    return [] if scratch is None else [file for file in scratch.path.glob("*artifacts*/*") if file.stat().st_size]


async def test_slots_that_lose_their_browser_together_all_go_on_with_another(
    start: Start, standin: Standin, chromium: Chromium, place: Path
) -> None:
    """A8, X2: three jobs in one browser that is killed under all of them; none fails, and one browser is started."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], 4)
    claims = await kit.claim("extraction", 3)
    before, known = (await chromium.running(), chromium.generation)[1], set(browsers())

    def kill(path: str) -> None:
        if path.startswith("/foncier/document") and len(standin.conduct.asked) >= 3:
            standin.conduct.watch = None
            for process in known:
                os.kill(process, signal.SIGKILL)

    standin.conduct.watch = kill
    await asyncio.gather(*(kit.run(claim) for claim in claims))
    await kit.step("extraction")
    assert statuses(dbs["prod"]) == [3] * 4
    assert chromium.generation == before + 1
    assert (standin.conduct.counts["logins"], len(list((place / "documents").rglob("*.pdf")))) == (1, 4)


async def test_a_page_that_kills_every_browser_takes_no_other_job_with_it(start: Start, standin: Standin) -> None:
    """A8: of three jobs in one browser, the one whose document is poison fails, and the others do not."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"], document_number="666")
    documents(dbs["prod"], 2, document_number="8 000", document_type="index")
    claims = await kit.claim("extraction", 3)
    standin.conduct.slow = 1.0  # they are always there when it dies

    def kill(path: str) -> None:
        if path == "/foncier/document/actes":
            for process in browsers():
                os.kill(process, signal.SIGKILL)

    standin.conduct.watch = kill
    await asyncio.gather(*(kit.run(claim) for claim in claims))
    assert statuses(dbs["prod"]) == [4, 3, 3]


async def test_a_job_that_kills_every_browser_ends(
    start: Start, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A8: a page that is poison for the browser does not keep a worker for ever."""
    kit, dbs = await start(prod="sqlite")
    documents(dbs["prod"])

    def kill(path: str) -> None:
        if path.startswith("/foncier/connexion"):
            for process in browsers():
                os.kill(process, signal.SIGKILL)

    standin.conduct.watch = kill
    stepped = await kit.step("extraction")
    assert stepped is not None
    assert "the browser died 3 times" in (stepped.error or "")
    assert "out of memory" in (stepped.error or "")


async def test_searches_log_in_to_their_own_site(start: Start, standin: Standin) -> None:
    """A10: the movable-rights register has a session of its own, kept from search to search."""
    kit, dbs = await start(dev="sqlite")
    searches(dbs["dev"], 2)
    await kit.step("rdprm")
    await kit.step("rdprm")
    assert {row["status"] for row in dbs["dev"].query("select status from rdprm_searches")} == {"completed"}
    assert standin.conduct.counts["logins"] == 1


def test_a_machine_without_a_browser_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A8: the install command, not a traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM_PATH", raising=False)
    with pytest.raises(BrowserError, match=r"(?s)no browser on this machine.*Try: sudo apt-get install chromium"):
        browser.find()
    monkeypatch.setenv("CHROMIUM_PATH", str(tmp_path / "none"))
    with pytest.raises(BrowserError, match="is no program"):
        browser.find()


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """X2: profiles and downloads of dead workers do not fill the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used, left = browser.Scratch(), tmp_path / "registre-browser-left"
    left.mkdir()
    (left / "in-use").touch()
    (left / "profile").write_text("x")
    other = browser.Scratch()
    assert not left.exists()
    assert used.path.exists()
    used.close()
    other.close()
    assert list(tmp_path.iterdir()) == []
