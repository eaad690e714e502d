"""Programs that begin where their imports end.

Torch and transformers take four seconds of a processor to import, and tests start hundreds of programs. In
pytest's processes ``subprocess.Popen`` is this module's: a process that has imported what the programs need
forks for each of them. What it forks is a process like others, with its own environment, folder, files,
process id and exit status. Programs that are started in another way than usual (options of Python, variables
that libraries read when they are imported, more files) are executed as ever; all are with TEST_PREPARED=no,
as in ``make release``.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = str(Path(__file__).parents[1])
PROGRAMS = {"provider.cli", "tenant_sdk.command_line.main", "security.cli"}
# Not tenant_sdk.tuning.finetuning: pyarrow, which it needs, starts a thread, and a fork loses threads.
_IMPORTED = (
    "peft",
    "transformers.models.llama.modeling_llama",
    "provider.serve.provider",
    "provider.workers.batch",
    "tenant_sdk.session.opening",
    "tenant_sdk.tuning.generation",
    "tenant_sdk.tuning.local_model",
)
_READ_BY_LIBRARIES = re.compile("GOMP|HF_|LANG|LC_|LD_|MKL|NUMEXPR|OMP|ONEDNN|PYTHON|TORCH|TRANSFORMERS")
_LONGEST = 1 << 20  # bytes of a request


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, which has a prepared process fork if it can."""

    _status: int | None = None  # a descriptor, which tells how a fork ended

    def _execute_child(self, *given: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(start).bind(*given).arguments
        request = _request(asked)
        if request is None or (home := _Home.get()) is None:
            start(*given)
            return
        parent = (0, 1, 2)
        inner = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        files = [mine if theirs == -1 else theirs for mine, theirs in zip(parent, inner, strict=True)]
        self._status = home.fork(request, files)
        if not (told := os.read(self._status, 4)):
            raise RuntimeError("the prepared process ended; TEST_PREPARED=no does without it")
        (self.pid,) = struct.unpack("i", told)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*given, **more)  # type: ignore[misc, no-any-return]
        self._look(0.0)
        return self.returncode  # type: ignore[no-any-return]

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        self._look(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode  # type: ignore[no-any-return]

    def _look(self, timeout: float | None) -> None:
        """Learn how it ended, if that is known in time; other threads may ask as well."""
        if self.returncode is not None:
            return
        assert self._status is not None
        ended = select.poll()  # select() knows no descriptors above 1023
        ended.register(self._status, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * 1000):
            return
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                told = os.read(self._status, 4)
                self.returncode = struct.unpack("i", told)[0] if told else -signal.SIGKILL
                os.close(self._status)


def _request(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What to ask the prepared process for, or None: this start is not a usual one."""
    words = asked["args"]
    if not isinstance(words, list) or os.environ.get("TEST_PREPARED") == "no":
        return None
    python, *words = map(os.fsdecode, words)
    safe = words[:1] == ["-P"]
    option, module, *arguments = (*words[safe:], "", "")
    if (python, option) != (sys.executable, "-m") or module not in PROGRAMS:
        return None
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    unusual = asked["shell"] or asked["executable"] or asked["pass_fds"] or asked["preexec_fn"]
    if unusual or _for_libraries(environment) != _for_libraries(dict(os.environ)):
        return None
    return {
        "module": module,
        "arguments": arguments[:-2],
        "safe": safe,
        "environment": environment,
        "folder": os.fspath(asked["cwd"] or os.getcwd()),
        "session": bool(asked["start_new_session"]),
    }


def _for_libraries(environment: dict[str, str]) -> dict[str, str]:
    usual = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **environment}
    return {name: value for name, value in usual.items() if _READ_BY_LIBRARIES.match(name)}


class _Home:
    """The prepared process, from the side of those that ask it."""

    _only: _Home | None = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        with theirs:
            # Not one of these: it is executed.
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
            )

    @classmethod
    def get(cls) -> _Home | None:
        """The one of this process; None in a fork of it, which has no right to the socket."""
        if cls._only is None:
            cls._only = cls()
        return cls._only if cls._only._pid == os.getpid() else None

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Fork; the pipe that tells the process id, and then how it ended."""
        status, told = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [told, *files])
        finally:
            os.close(told)
        return status


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns in the forks, with their request."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, _LONGEST, 4)
        if not message:
            sys.exit()  # the tests are over
        if os.fork():
            for file in files:
                os.close(file)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child = os.fork()
        if child:
            _mind(child, files)
        os.close(files[0])
        return {**json.loads(message), "files": files[1:]}


def _mind(child: int, files: list[int]) -> NoReturn:
    """Wait for a program, and tell the test how it ended: only a parent learns that."""
    os.write(files[0], struct.pack("i", child))
    for file in (0, 1, 2, *files[1:]):
        os.close(file)
    _, ended = os.waitpid(child, 0)
    os.write(files[0], struct.pack("i", os.waitstatus_to_exitcode(ended)))
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Take the place that ``exec`` would give: files, folder, variables, words."""
    for place, file in enumerate(request["files"]):
        os.dup2(file, place)
    for file in request["files"]:
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    for name, file, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw: Any = open(file, mode + "b", closefd=False)  # noqa: SIM115 - for as long as the program
        old = getattr(sys, name)
        lines = name == "stderr" or os.isatty(file)
        through = "PYTHONUNBUFFERED" in os.environ
        stream = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=lines, write_through=through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [request["module"], *request["arguments"]]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    if not request["safe"] and "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, request["folder"])


def main() -> None:
    """Be the prepared process, and what it forks."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    from shared import imports

    with imports.without_gc():
        for name in _IMPORTED:
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for programs
    assert len(os.listdir("/proc/self/task")) == 1, "threads are lost by a fork"
    request = _serve(requests)
    _become(request)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
