"""Python processes that start in milliseconds: forked from one that has imported rowmill and nothing else of theirs.

After ``install``, ``subprocess.Popen`` with a Python program does not execute an interpreter: a fork server starts a
process that becomes the program. It is a child of the caller, with a process id, files, signals and connections of
its own, and is waited for, listed, stopped and killed like any other. But imports, a second of CPU each time, are paid
once for each run of pytest. What such a process starts comes from a fork server of its own. ``real_processes`` is for
tests of what an interpreter loads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: Not ``rowmill.cli``: what it writes to is decided when it is imported.
_IMPORTS = (
    "aiosqlite", "asyncpg", "sqlalchemy.ext.asyncio", "sqlalchemy.dialects.sqlite.aiosqlite",
    "sqlalchemy.dialects.postgresql.asyncpg", "typer.rich_utils", "rich.live", "rich.table", "rich.progress",
    "rowmill", "rowmill.ops.questions", "rowmill.ops.actions", "rowmill.ops.adopt", "rowmill.ops.check",
    "rowmill.ops.sql", "rowmill.prove.trial", "rowmill.engine.processes.supervisor", "rowmill.engine.isolate",
    "multiprocessing.spawn", "multiprocessing.resource_tracker", "logging.config",
)  # fmt: skip
#: What the applications are made with, when the first of them is started. Nothing that starts threads.
_IMPORTS_OF_APPS = (
    "httpx", "h11", "starlette.applications", "starlette.templating", "uvicorn", "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.on", "fastapi", "jinja2", "playwright.async_api", "fsspec", "fsspec.implementations.local",
    "selectolax.lexbor", "protego", "charset_normalizer", "idna", "dotenv",
)  # fmt: skip
#: Room for the command line and the environment that ``ps`` shows, in bytes.
_ROOM = 16_000
_FLAGS = {"-u"}  # what is the same for a process that is forked
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE3, _GET_TID_ADDRESS = 435, 40
_execute_child, _spawnv_passfds = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_server: ForkServer | None = None
_real = False


# -- who asks


def install() -> None:
    """From now on this process starts Python programs by its fork server, where the system can do that."""
    if _thread_id_address():
        subprocess.Popen._execute_child = _execute_quickly  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = _spawn_quickly


@contextlib.contextmanager
def real_processes() -> Iterator[None]:
    """Within the block this process executes real interpreters."""
    global _real
    before, _real = _real, True
    try:
        yield
    finally:
        _real = before


class ForkServer:
    """The asking process's end of the line to its fork server."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._turn = line, threading.Lock()

    def start(self, program: dict[str, Any], files: Sequence[int], numbers: Sequence[int]) -> int:
        """A process that becomes the program, with these files under these numbers; its id."""
        order = json.dumps({**program, "numbers": list(numbers)}).encode()
        with self._turn:
            socket.send_fds(self._line, [order], list(files))
            return int(self._line.recv(64))


def _started_server() -> ForkServer:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        place = str(Path(__file__).parent)
        code = f"import sys; sys.path[0] = {place!r}; import quick_processes; quick_processes.serve({theirs.fileno()})"
        with theirs, real_processes():
            process = subprocess.Popen(
                [sys.executable, "-c", code, " " * _ROOM], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, cwd="/", env={**os.environ, "ROOM": " " * _ROOM},
            )  # fmt: skip
        atexit.register(process.wait)
        atexit.register(ours.close)
        _server = ForkServer(ours)
    return _server


def _execute_quickly(self: subprocess.Popen[Any], *given: Any) -> None:
    """``Popen._execute_child`` by the fork server; as it was for all other programs."""
    of = inspect.signature(_execute_child).bind(self, *given).arguments
    plain = not (of["shell"] or of["executable"] or of["preexec_fn"]) and of["close_fds"]
    other = {of["gid"], of["uid"], of.get("process_group", -1)} - {None, -1} or of["gids"] or of["umask"] != -1
    program = _program(of["args"]) if plain and not other and not _real else None
    if program is None:
        _execute_child(self, *given)
        return
    environment = os.environ if of["env"] is None else of["env"]
    program |= {
        "shown": [os.fsdecode(word) for word in of["args"]],
        "folder": os.path.join(os.getcwd(), os.fsdecode(of["cwd"] or ".")),
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
        "session": of["start_new_session"],
    }
    if not os.path.isdir(program["folder"]):
        raise FileNotFoundError(2, os.strerror(2), program["folder"])
    standard = [
        number if number != -1 else own for own, number in enumerate((of["p2cread"], of["c2pwrite"], of["errwrite"]))
    ]
    passed = sorted(of["pass_fds"])
    self.pid = _started_server().start(program, [*standard, *passed], [0, 1, 2, *passed])
    self._child_created = True  # type: ignore[attr-defined]
    self._close_pipe_fds(*(of[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # type: ignore[attr-defined]


def _spawn_quickly(path: bytes, args: Sequence[bytes | str], passfds: Sequence[int]) -> int:
    """What ``multiprocessing`` starts its processes with."""
    program = None if _real else _program(args)
    if program is None:
        return int(_spawnv_passfds(path, args, passfds))
    program |= {"shown": list(map(os.fsdecode, args)), "folder": os.getcwd(), "environment": dict(os.environ)}
    program["session"] = False
    passed = sorted(passfds)
    return _started_server().start(program, [0, 1, 2, *passed], [0, 1, 2, *passed])


def _program(args: Any) -> dict[str, Any] | None:
    """A command as the fork server takes it; None if it is no Python program, or wants its interpreter otherwise."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    first, *words = map(os.fsdecode, args)
    if first == os.path.join(os.path.dirname(sys.executable), "rowmill"):
        return {"kind": "file", "words": [first, *words], "ignored": False}
    if first != sys.executable:
        return None
    ignored = False
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        if words[0] == "-W" and words[1:2] == ["ignore"]:
            ignored, words = True, words[2:]
        elif words[0] in _FLAGS:
            words = words[1:]
        else:
            return None
    if not words:
        return None
    if words[0] in ("-c", "-m"):
        kind = {"-c": "code", "-m": "module"}[words[0]]
        return {"kind": kind, "what": words[1], "words": [words[0], *words[2:]], "ignored": ignored}
    return {"kind": "file", "words": words, "ignored": ignored}


class QuickProcess(subprocess.Popen[bytes]):
    """A Python program by itself; what it prints goes to files."""

    def __init__(
        self,
        words: list[str],
        *,
        folder: Path,
        environment: dict[str, str],
        errors: Path,
        output: Path = Path(os.devnull),
        module: str | None = None,
    ) -> None:
        command = [sys.executable, "-m", module, *words[1:]] if module else [sys.executable, *words]
        with output.open("ab") as out, errors.open("ab") as err:
            super().__init__(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )  # fmt: skip


# -- the server


def serve(number: int) -> NoReturn:
    """Start what comes over the line, until the asking process is gone."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in sys.path[1:] if path not in own]
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    _listen(socket.socket(fileno=number), paths, apps=False)


def _listen(line: socket.socket, paths: list[str], apps: bool) -> NoReturn:
    """A forked process leaves by ``_become``, or listens itself as the server of one."""
    while True:
        try:
            message, files, _, _ = socket.recv_fds(line, 1 << 20, 64)
        except (KeyboardInterrupt, OSError):
            os._exit(0)
        if not message:
            os._exit(0)
        order = json.loads(message)
        if not apps and any("apps." in word for word in (order.get("what", ""), *order["words"])):
            apps = True
            for name in _IMPORTS_OF_APPS:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            gc.freeze()
        pid = _fork_sibling()
        if pid == 0:
            line.close()
            if order["session"]:
                os.setsid()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                ours.close()
                for file in files:
                    os.close(file)
                _listen(theirs, paths, apps)
            theirs.close()
            _become(order, files, ours, paths)
        for file in files:
            os.close(file)
        line.send(str(pid).encode())


@functools.cache
def _thread_id_address() -> int:
    """Where the C library keeps the main thread's id, which a forked process must be told; 0 where that is unknown."""
    address = ctypes.c_ulong()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return address.value


def _fork_sibling() -> int:
    """``os.fork``, but the new process is a child of this one's parent."""
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    arguments = (ctypes.c_uint64 * 8)(flags, 0, _thread_id_address())
    python, library = ctypes.pythonapi, ctypes.PyDLL(None)
    library.syscall.restype = ctypes.c_long
    python.PyOS_BeforeFork()
    pid = int(library.syscall(_CLONE3, arguments, ctypes.sizeof(arguments)))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


# -- the process


def _become(order: dict[str, Any], files: list[int], line: socket.socket, paths: list[str]) -> NoReturn:
    """Run the program as an interpreter would have, and end."""
    global _server, _real
    taken = {*order["numbers"], *files}
    spare = os.open(os.devnull, os.O_RDWR)
    above = max(*taken, line.fileno(), spare) + 1
    os.dup2(line.detach(), above, inheritable=False)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above + 1) for file in files]
    for file, number in zip(moved, order["numbers"], strict=True):
        os.dup2(file, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in order["numbers"] and number != above:
            with contextlib.suppress(OSError):
                os.close(number)
    _server, _real = ForkServer(socket.socket(fileno=above)), False
    install()
    _open_standard_files()
    os.chdir(order["folder"])
    multiprocessing.process.ORIGINAL_DIR = order["folder"]  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    _show(order["shown"], order["environment"])
    code = _run(order, paths)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code & 0xFF)


def _open_standard_files() -> None:
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # type: ignore[misc] # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = open(number, "wb", closefd=False)  # noqa: SIM115
        at_once = name == "stderr" or os.isatty(number)
        stream = io.TextIOWrapper(raw, errors=errors, line_buffering=at_once, write_through=False)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(words: list[str], environment: dict[str, str]) -> None:
    """In ``/proc``, and so in ``ps``: what this process is now."""
    facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    texts = words, [f"{name}={value}" for name, value in environment.items()]
    for text, start, end in zip(texts, map(int, facts[45:49:2]), map(int, facts[46:49:2]), strict=True):
        shown = "\0".join(text).encode()[: end - start - 1]
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _run(order: dict[str, Any], paths: list[str]) -> int:
    """The program as ``__main__``; its exit code, or the signal that ended it, negative."""
    words: list[str] = order["words"]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"code": "", "module": order["folder"], "file": os.path.dirname(os.path.realpath(words[0]))}[order["kind"]]
    sys.path[:] = [first, *given, *paths]
    sys.path_importer_cache.clear()
    sys.argv = words
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if order["ignored"]:
        warnings.simplefilter("ignore")
    try:
        if order["kind"] == "module":
            runpy._run_module_as_main(order["what"])  # type: ignore[attr-defined]
        elif order["kind"] == "code":
            exec(compile(order["what"], "<string>", "exec"), main.__dict__)
        else:
            main.__dict__["__file__"] = os.path.abspath(words[0])
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        of_the_program = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(error.with_traceback(of_the_program))
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
