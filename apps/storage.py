"""Object storage: a directory, or anything fsspec knows by URL, such as the S3 of Supabase.

An object is there whole or not at all: in a directory it is written under another name and then renamed, elsewhere
it is one PUT. To put the same bytes under the same name again changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rowmill.errors import RowmillError

#: Uploads under way in a directory; what a killed process leaves there is no object, and is removed after a while.
_UPLOADS = ".uploads"
_ABANDONED = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK = 1 << 20


class StorageError(RowmillError):
    """The object storage would not do what was asked; the hint says what an operator can do."""


class Unusable(StorageError):
    """Nothing can be stored there, whatever it is."""


class NotThere(StorageError):
    """There is no object under that name."""


class Damaged(StorageError):
    """An object is not what was put there: its checksum differs."""


@dataclass(frozen=True)
class Stored:
    """An object as it stands in the storage. ``written`` is False where the same bytes were there already."""

    path: str
    size: int
    checksum: str
    written: bool


class Storage:
    """Objects by path, under one URL: ``file:///var/lib/documents``, a bare directory, or ``s3://bucket/prefix``."""

    def __init__(self, url: str, **options: Any) -> None:
        if not url:
            raise StorageError(
                "the storage has no address", hint="STORAGE_URL=/var/lib/documents or s3://bucket/prefix"
            )
        self.url = url
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:
            raise StorageError(
                f"cannot use the storage {url!r}: {error}", hint="a directory, or s3://bucket/prefix"
            ) from error
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local:
            self._remove_abandoned()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """By STORAGE_URL; for S3 also STORAGE_ENDPOINT, STORAGE_KEY, STORAGE_SECRET, STORAGE_REGION."""
        url = environ.get("STORAGE_URL", "documents")
        if not url.startswith("s3:"):
            return cls(url)
        options: dict[str, Any] = {"use_listings_cache": False, "default_fill_cache": False}
        if endpoint := environ.get("STORAGE_ENDPOINT"):
            options["endpoint_url"] = endpoint
        if key := environ.get("STORAGE_KEY"):
            options |= {"key": key, "secret": environ.get("STORAGE_SECRET", "")}
        if region := environ.get("STORAGE_REGION"):
            options["client_kwargs"] = {"region_name": region}
        return cls(url, **options)

    # -- objects

    def put(self, path: str, source: bytes | Path) -> Stored:
        """Store bytes, or a file, under a path, whole or not at all."""
        full = self._full(path)
        with self._told(f"store {path!r}"):
            data = source if isinstance(source, bytes) else source.read_bytes()
            checksum = hashlib.sha256(data).hexdigest()
            if self._has(full, len(data), checksum):
                return Stored(path, len(data), checksum, written=False)
            if self._local:
                self._put_file(full, data)
            else:
                self._fs.pipe_file(full, data)
            if (size := self._fs.info(full)["size"]) != len(data):
                raise Damaged(f"{path!r} has {size} bytes in {self.url}, not {len(data)}", hint="upload it again")
        return Stored(path, len(data), checksum, written=True)

    def check(self) -> None:
        """Raises Unusable where nothing can be stored: writes a few bytes beside the objects."""
        try:
            with self._told("store anything"):
                if self._local:
                    self._put_file(probe := f"{self._root}/{_UPLOADS}/{uuid.uuid4().hex}", b"check")
                    Path(probe).unlink()
                else:
                    self._fs.pipe_file(f"{self._root}/{_UPLOADS}/check", b"check")
        except StorageError as error:
            raise Unusable(error.message, hint=error.hint) from error

    def get(self, path: str, to: Path, checksum: str | None = None) -> Path:
        """Fetch an object into a file; where its checksum is known, it has to be that."""
        full = self._full(path)
        with self._told(f"fetch {path!r}"):
            if self._fs.isdir(full):
                raise IsADirectoryError
            self._fs.get_file(full, str(to))
            if checksum is not None and (found := _checksum(to)) != checksum:
                raise Damaged(
                    f"{path!r} in {self.url} is damaged: its SHA-256 is {found}, not {checksum}",
                    hint="put the document back to status 1, so that it is downloaded again",
                )
        return to

    def exists(self, path: str) -> bool:
        """Whether there is an object under that path."""
        with self._told(f"look for {path!r}"):
            return bool(self._fs.exists(self._full(path)))

    def paths(self) -> list[str]:
        """The paths of all objects, sorted; uploads under way are none."""
        with self._told("list what there is"):
            try:
                found = self._fs.find(self._root)
            except FileNotFoundError:
                return []
        inside = (str(name)[len(self._root) :].lstrip("/") for name in found)
        return sorted(name for name in inside if not name.startswith(f"{_UPLOADS}/"))

    # -- how

    def _full(self, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or parts[0] == _UPLOADS or "\0" in path:
            raise NotThere(f"{path!r} cannot be an object's path", hint="a relative one, such as prod/actes/1.pdf")
        return f"{self._root}/{PurePosixPath(path)}"

    def _has(self, full: str, size: int, checksum: str) -> bool:
        try:
            if self._fs.info(full)["size"] != size:
                return False
            return hashlib.sha256(self._fs.cat_file(full)).hexdigest() == checksum
        except FileNotFoundError:
            return False

    def _put_file(self, full: str, data: bytes) -> None:
        """On the disk before it has its name: after a power cut there is no name without its bytes."""
        part = Path(self._root, _UPLOADS, f"{os.getpid()}-{uuid.uuid4().hex}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        Path(full).parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                for start in range(0, len(data), _CHUNK):
                    file.write(data[start : start + _CHUNK])
                file.flush()
                os.fsync(file.fileno())
            part.replace(full)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _remove_abandoned(self) -> None:
        for part in Path(self._root, _UPLOADS).glob("*.part"):
            with contextlib.suppress(OSError):
                if part.stat().st_mtime < time.time() - _ABANDONED:
                    part.unlink()

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Whatever a file system raises, as a sentence for the operator."""
        try:
            yield
        except RowmillError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotThere(
                f"could not {what} in {self.url}: there is no such object or bucket",
                hint="check STORAGE_URL, and make the bucket",
            ) from error
        except PermissionError as error:
            raise StorageError(
                f"could not {what} in {self.url}: the storage refuses ({_words(error)})",
                hint="check the rights of the directory, or STORAGE_KEY and STORAGE_SECRET and the bucket's policy",
            ) from error
        except OSError as error:
            if error.errno in _FULL:
                raise Unusable(
                    f"could not {what} in {self.url}: no space is left ({_words(error)})",
                    hint="free some space there",
                ) from error
            raise StorageError(f"could not {what} in {self.url}: {_words(error)}", hint=_REACH) from error
        except Exception as error:  # botocore's, aiohttp's: they share no base with OSError
            raise StorageError(f"could not {what} in {self.url}: {_words(error)}", hint=_REACH) from error


_REACH = "check STORAGE_URL and STORAGE_ENDPOINT, and that the storage can be reached from here"


def _words(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
