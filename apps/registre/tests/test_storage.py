"""The object storage: a directory and S3, whole objects or none, and errors that say what to do."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.storage import Damaged, NotThere, Storage, StorageError

from .refusing import refusing_s3, variables
from .small_disk import small_disk

_S3 = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of a real HTTP S3, in a process of its own, with one bucket."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _S3],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/documents", method="PUT")).close()
    yield endpoint
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


@pytest.fixture(params=["directory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "directory":
        return Storage(str(tmp_path / "documents"))
    prefix = hashlib.md5(str(tmp_path).encode()).hexdigest()
    return Storage.from_environment(variables(request.getfixturevalue("s3"), f"s3://documents/{prefix}"))


def test_what_was_put_comes_back_with_its_checksum(storage: Storage, tmp_path: Path) -> None:
    """A8: the object, its size, its SHA-256; and a file as well as bytes."""
    data = os.urandom(100_000)
    (tmp_path / "acte.pdf").write_bytes(data)
    stored = storage.put("prod/actes/1.pdf", tmp_path / "acte.pdf")
    assert (stored.size, stored.checksum, stored.written) == (100_000, hashlib.sha256(data).hexdigest(), True)
    assert storage.get("prod/actes/1.pdf", tmp_path / "back.pdf", stored.checksum).read_bytes() == data
    assert storage.exists("prod/actes/1.pdf")
    assert not storage.exists("prod/actes/2.pdf")


def test_the_same_upload_again_is_one_object_and_writes_nothing(storage: Storage) -> None:
    """A8, A12: a document that was uploaded before its worker died is not uploaded twice."""
    first, second = storage.put("prod/1.pdf", b"%PDF one"), storage.put("prod/1.pdf", b"%PDF one")
    assert (first.written, second.written) == (True, False)
    assert storage.put("prod/1.pdf", b"%PDF two").written
    assert storage.paths() == ["prod/1.pdf"]


def test_a_damaged_object_is_not_taken_for_good(storage: Storage, tmp_path: Path) -> None:
    """B3: what comes back has to be what was stored."""
    storage.put("prod/1.pdf", b"%PDF one")
    with pytest.raises(Damaged, match=r"SHA-256.*\nTry: put the document back to status 1"):
        storage.get("prod/1.pdf", tmp_path / "back.pdf", hashlib.sha256(b"other").hexdigest())
    with pytest.raises(NotThere, match="there is no such object"):
        storage.get("prod/2.pdf", tmp_path / "back.pdf")


def test_a_bucket_that_is_not_there_is_named(s3: str) -> None:
    """A8: the operator reads which address was meant."""
    elsewhere = Storage.from_environment(variables(s3, "s3://nowhere/pdf"))
    with pytest.raises(StorageError, match=r"s3://nowhere/pdf(.|\n)*Try: check STORAGE_URL"):
        elsewhere.put("prod/1.pdf", b"%PDF")


def test_a_storage_that_refuses_says_so() -> None:
    """A8: 403."""
    with refusing_s3() as where, pytest.raises(StorageError, match=r"refuses(.|\n)*Try:.*STORAGE_KEY"):
        Storage.from_environment(where).put("prod/1.pdf", b"%PDF")


def test_a_full_disk_leaves_no_object_and_no_part(tmp_path: Path) -> None:
    """A8: ENOSPC."""
    with small_disk(tmp_path / "full") as disk:
        storage = Storage(str(disk))
        with pytest.raises(StorageError, match=r"no space is left(.|\n)*Try: free some space"):
            storage.put("prod/1.pdf", os.urandom(500_000))
        assert storage.paths() == []
        assert list(disk.rglob("*.part")) == []


def test_an_upload_that_is_killed_leaves_no_object(tmp_path: Path) -> None:
    """X2: SIGKILL in the middle of a write; what lies about is no object, and is cleared away in time."""
    code = """
import sys
from apps import storage
storage._CHUNK = 1
store = storage.Storage(sys.argv[1])
print("begun", flush=True)
store.put("prod/1.pdf", b"%PDF" * 50_000_000)
"""
    upload = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert upload.stdout is not None
    with upload.stdout:
        upload.stdout.readline()
        parts = tmp_path / ".uploads"
        deadline = time.monotonic() + 60
        while not any(part.stat().st_size for part in parts.glob("*.part")) and time.monotonic() < deadline:
            time.sleep(0.01)
        upload.send_signal(signal.SIGKILL)
        assert upload.wait(60) == -signal.SIGKILL
    (part,) = parts.glob("*.part")
    assert Storage(str(tmp_path)).paths() == []
    assert part.exists(), "it might be another process's upload that is under way"
    os.utime(part, (time.time() - 7200,) * 2)
    Storage(str(tmp_path))
    assert not part.exists()


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../out.pdf", "a/../../out.pdf", ".uploads/x"])
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(StorageError, match="cannot be an object's path"):
        Storage(str(tmp_path)).put(path, b"%PDF")


def test_an_address_that_nothing_understands_is_refused() -> None:
    with pytest.raises(StorageError, match=r"(?s)gopher.*Try: a directory, or s3://"):
        Storage("gopher://documents")
