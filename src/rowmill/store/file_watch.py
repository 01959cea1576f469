"""Notice at once that a SQLite file was written to, by any process of this machine. Linux tells it, through inotify."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import sys

# <sys/inotify.h>; the numbers are the same on every architecture that Python runs on.
_MODIFY, _MOVED, _CREATE, _DELETE = 0x2, 0xC0, 0x100, 0x200
_FOLDER_GONE = 0x8000 | 0x2000 | 0x800  # its watch ended, it was unmounted, it was moved away
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0
_EVENT = struct.Struct("iIII")  # watch, what happened, cookie, length of the name that follows


class FileWatch:
    """Tells that a SQLite file, or its write-ahead log, was written to.

    A hint, no more: frames are in the log before their commit counts, and a checkpoint commits nothing. Writes through
    another kernel are not seen (a network file system). ``works`` is False where there is no inotify, or none is left.
    """

    def __init__(self, path: str) -> None:
        path = os.path.realpath(path)  # the log stands beside the file that a symbolic link leads to
        self._folder, self._files = os.path.dirname(path), (path, f"{path}-wal")
        self._inotify, self._folder_watch = -1, -1
        if sys.platform != "linux":
            return
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._inotify = self._call("inotify_init1", _FLAGS)
            self._folder_watch = self._watch(self._folder, _CREATE | _DELETE | _MOVED | _FOLDER_GONE)
            self._watch_files()
        except (OSError, AttributeError):  # the system's limit of them is reached; or a libc without it
            self.close()

    @property
    def works(self) -> bool:
        return self._inotify >= 0

    def _call(self, name: str, *arguments: object) -> int:
        answer: int = getattr(self._libc, name)(*arguments)
        if answer < 0:
            raise OSError(ctypes.get_errno(), name)
        return answer

    def _watch(self, path: str, what: int) -> int:
        return self._call("inotify_add_watch", self._inotify, os.fsencode(path), ctypes.c_uint32(what))

    def _watch_files(self) -> None:
        """The log comes and goes with connections, and a restored file takes the place of another."""
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):
                self._watch(path, _MODIFY)

    def told(self) -> bool:
        """Whether there was a write since the last call."""
        try:
            events = os.read(self._inotify, 65536) if self.works else b""
        except BlockingIOError:
            return False
        at, folder = 0, 0
        while at < len(events):
            watch, what, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            folder |= what if watch == self._folder_watch else 0
        try:
            if folder & _FOLDER_GONE:
                raise FileNotFoundError(self._folder)
            if folder:
                self._watch_files()
        except OSError:
            self.close()
        return bool(events)

    async def wait(self, seconds: float) -> None:
        """Until there is a write, at most so long; where nobody tells: that long."""
        if not self.works:
            await asyncio.sleep(seconds)
            return
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._inotify, readable.set)
        try:
            async with asyncio.timeout(seconds):
                await readable.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(self._inotify)

    def close(self) -> None:
        if self.works:
            os.close(self._inotify)
            self._inotify = -1
