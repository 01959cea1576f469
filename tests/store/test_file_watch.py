"""A watch over a SQLite file tells of writes to it and to its log, and gives up when its folder is gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowmill.store.file_watch import FileWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "jobs.db"
    file.write_bytes(b"")
    return file


@pytest.fixture
def watch(file: Path) -> Iterator[FileWatch]:
    watch = FileWatch(str(file))
    yield watch
    watch.close()


def test_a_write_is_told_once(file: Path, watch: FileWatch) -> None:
    assert watch.works
    assert not watch.told()
    file.write_bytes(b"new")
    assert watch.told()
    assert not watch.told()


def test_writes_to_other_files_of_the_folder_are_not_told(file: Path, watch: FileWatch) -> None:
    """A log file beside the database wakes nobody."""
    with (file.parent / "app.log").open("ab", buffering=0) as log:
        assert watch.told()  # a new file is told: it could have been the database's log
        log.write(b"line\n")
        assert not watch.told()


def test_the_log_is_watched_each_time_it_comes(file: Path, watch: FileWatch) -> None:
    """The last connection that closes takes it away, the next one creates another."""
    log = Path(f"{file}-wal")
    for _ in range(2):
        with log.open("wb", buffering=0) as opened:
            assert watch.told()
            opened.write(b"frame")
            assert watch.told()
        log.unlink()
        assert watch.told()


def test_a_file_that_takes_the_place_of_another_is_watched(file: Path, watch: FileWatch) -> None:
    other = file.with_name("restored.db")
    other.write_bytes(b"")
    other.rename(file)
    assert watch.told()
    with file.open("ab", buffering=0) as opened:
        assert not watch.told()
        opened.write(b"new")
        assert watch.told()


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_it_no_longer_works_when_its_folder_is_gone(file: Path, watch: FileWatch, how: str) -> None:
    if how == "moved":
        file.parent.rename(file.parent.with_name("elsewhere"))
    else:
        file.unlink()
        file.parent.rmdir()
    assert watch.told()
    assert not watch.works
    assert not watch.told()


def test_there_is_no_watch_without_a_folder(tmp_path: Path) -> None:
    assert not FileWatch(str(tmp_path / "nowhere" / "jobs.db")).works
