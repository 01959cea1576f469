"""Notice at once when any process on this machine writes to a SQLite file. Linux only, through inotify."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import sys

# <sys/inotify.h>; the numbers are the same on every architecture that Python runs on.
_MODIFY, _MOVED, _CREATE, _DELETE = 0x2, 0xC0, 0x100, 0x200
_FOLDER_GONE = 0x8000 | 0x2000 | 0x800  # its watch ended, it was unmounted, or it was moved
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0
_EVENT = struct.Struct("iIII")  # watch, what happened, cookie, length of the name that follows


class FileWatch:
    """Reports writes to a SQLite file or its write-ahead log.

    This is only a hint: frames reach the log before their commit counts, and a checkpoint commits nothing. Writes
    through another kernel (a network file system) are not seen. ``works`` is False if inotify is missing, or its limit
    is reached.
    """

    def __init__(self, path: str) -> None:
        path = os.path.realpath(path)  # the log is beside the file that a symbolic link points to
        self._folder, self._files = os.path.dirname(path), (path, f"{path}-wal")
        self._inotify, self._folder_watch = -1, -1
        if sys.platform != "linux":
            return
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._inotify = self._call("inotify_init1", _FLAGS)
            self._folder_watch = self._watch(self._folder, _CREATE | _DELETE | _MOVED | _FOLDER_GONE)
            self._watch_files()
        except (OSError, AttributeError):  # the system's limit is reached, or libc has no inotify
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
        """Connections create and delete the log, and a restored file replaces another one."""
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
        """Wait for a write, but no longer than this; without inotify, wait this long."""
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
