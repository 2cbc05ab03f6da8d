"""Starts Python programs by forking a process that has imported what they need: `fork_server.py DESCRIPTOR`.

Importing torch takes seconds, a small program's work does not. What a program gets is a fresh copy of what every
program begins with: no threads, no open files, the signals as they are in a new process. `forks.Forks` asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

real_start = asyncio.create_subprocess_exec


class Engine:
    """An engine process that was forked, as its router sees it: what `asyncio.subprocess.Process` has."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._end.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: int) -> None:
        if self._end.done():
            raise ProcessLookupError
        os.kill(self.pid, number)


def fork_engines(after: int = 0) -> None:
    """Let the router of this process fork its engines: all but the first `after`, which are started as ever."""
    left = after

    async def start(*command: str, env: dict[str, str], **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return await real_start(*command, env=env, **options)
        module = command[command.index("-m") + 1]
        theirs, to_engine = os.pipe()
        from_engine, ours = os.pipe()
        pid = os.fork()
        if pid == 0:
            be_new(theirs, ours, 2, env)
            run_and_end(importlib.import_module(module).main)
        os.close(theirs)
        os.close(ours)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_engine, "rb"))
        flow = asyncio.streams.FlowControlMixin()
        transport, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(to_engine, "wb"))
        return Engine(pid, asyncio.StreamWriter(transport, flow, None, loop), reader)

    asyncio.create_subprocess_exec = start  # type: ignore[assignment]


def be_new(stdin: int, stdout: int, stderr: int, env: dict[str, str]) -> None:
    """In a fork: a session, an environment and standard streams of its own, and nothing else that was open."""
    gc.freeze()  # what the other process had open is not to be closed here, where its numbers mean other things
    gc.enable()
    os.setsid()
    for place, descriptor in enumerate([os.dup(one) for one in (stdin, stdout, stderr)]):
        os.dup2(descriptor, place)
    os.closerange(3, 1 << 16)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # asked for anew
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio._set_running_loop(None)  # type: ignore[attr-defined]
    faulthandler.enable(sys.stderr)  # a crash in compiled code names its line


def run_and_end(main: Callable[[], None]) -> None:
    """Never returns, for the caller's frames belong to another process."""
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(asked: socket.socket) -> None:
    """Fork for each request: a line of JSON with four descriptors, the streams and where to tell the end."""
    while True:
        data, descriptors, *_ = socket.recv_fds(asked, 1 << 16, 4)
        if not data:
            os._exit(0)  # taking torch down module by module takes half a second
        wish = json.loads(data)
        for name in wish["load"]:
            importlib.import_module(name)
        *streams, news = descriptors
        if os.fork() == 0:  # waits for the program; this process has others to look after
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pid = os.fork()
            if pid == 0:
                be_new(*streams, {**os.environ, **wish["env"]})
                os.chdir(wish["cwd"])
                sys.argv[:] = wish["argv"]
                space = {"__name__": "__main__", "fork_engines": fork_engines}
                run_and_end(functools.partial(exec, compile(wish["code"], "<test>", "exec"), space))
            for descriptor in streams:
                os.close(descriptor)
            os.write(news, b"%d\n" % pid)
            os.write(news, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    gc.disable()  # what is imported stays
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for scripts that import `tests`
    signal.signal(signal.SIGCHLD, reap)
    serve(socket.socket(fileno=int(sys.argv[1])))
