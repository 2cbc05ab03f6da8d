"""Programs in processes of their own, without the seconds that importing torch takes each: see `fork_server`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

SERVING = ("glm5.cli", "glm5.serve.app", "glm5.serve.router.app", "glm5.serve.router.process")
TRAINING = ("glm5.model.glm5", "glm5.train.loop", "glm5.train.losses")
FSDP = (*TRAINING, "glm5.parallel.mesh", "torch._dynamo")  # which FSDP imports when it is first used
COMMAND_LINE = "from glm5.cli import main; main()"
SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


class Program:
    """A program that the fork server started; what is used of `subprocess.Popen`."""

    def __init__(self, news: int, stdout: int | None, stderr: int | None) -> None:
        self._news, self._told = news, b""
        self.stdout: IO[str] | None = None if stdout is None else os.fdopen(stdout, encoding="utf-8")
        self.stderr: IO[str] | None = None if stderr is None else os.fdopen(stderr, encoding="utf-8")
        self.pid = self._number(0, 120.0)

    def _number(self, place: int, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while self._told.count(b"\n") <= place:
            if not select.select([self._news], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("a forked program", seconds)
            told = os.read(self._news, 100)
            assert told, "the fork server is gone"
            self._told += told
        return int(self._told.split()[place])

    def wait(self, timeout: float) -> int:
        return self._number(1, timeout)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What a program of few words said on both streams, once it has ended."""
        self.wait(timeout)
        assert self.stdout is not None and self.stderr is not None
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Behind its end."""
        os.close(self._news)
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


@dataclass(frozen=True)
class Fork:
    """A script that was started. Its stdout and stderr go to files, `name`.out and `name`.err."""

    process: Program
    name: Path

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended. A process that takes too long is an error; `kill` it then."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {timeout:.0f} s: {self.err[-2000:]}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    @property
    def out(self) -> str:
        return self._said(".out")

    @property
    def err(self) -> str:
        return self._said(".err")

    def _said(self, suffix: str) -> str:
        path = self.name.with_suffix(suffix)
        return path.read_text(encoding="utf-8") if path.exists() else ""


class Forks:
    """Starts Python code and scripts; `load` names modules that the server imports before. Its process computes nothing
    itself, and ends with the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asking, theirs = socket.socketpair()
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(theirs.fileno())]
        self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._programs: list[Program] = []

    def __call__(
        self,
        code: str,
        *argv: object,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int | None = None,
        load: Sequence[str] = SERVING,
    ) -> Program:
        """Start `code`; the streams are descriptors, or PIPE for the program's attribute of that name."""
        ours: dict[str, int] = {}
        passed = []
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr), ("news", subprocess.PIPE)):
            if stream == subprocess.PIPE:
                ours[name], write = os.pipe()
                passed.append(write)
            elif stream == subprocess.DEVNULL:
                passed.append(os.open(os.devnull, os.O_RDWR))
            else:
                passed.append(os.dup(2 if stream is None else stream))
        wish = {"code": code, "argv": ["glm5", *map(str, argv)], "env": env or {}, "load": load}
        wish["cwd"] = str(cwd or Path.cwd())
        socket.send_fds(self._asking, [json.dumps(wish).encode()], passed)
        for descriptor in passed:
            os.close(descriptor)
        self._programs.append(Program(ours["news"], ours.get("stdout"), ours.get("stderr")))
        return self._programs[-1]

    def start(
        self,
        script: str | Path,
        *arguments: object,
        out: int | None = None,
        cwd: Path | None = None,
        load: Sequence[str] = TRAINING,
        **environment: str,
    ) -> Fork:
        """A script by its path or its text; keywords are environment variables. `out` takes its stdout."""
        place = self.folder / f"{len(self._programs)}.py"
        if isinstance(script, str):
            place.write_text(script, encoding="utf-8")
            script = place
        with place.with_suffix(".out").open("w") as said, place.with_suffix(".err").open("w") as errors:
            streams = {"stdout": said.fileno() if out is None else out, "stderr": errors.fileno()}
            process = self(SCRIPT, script, *arguments, env=environment, cwd=cwd, load=load, **streams)
        return Fork(process, place)

    def run(self, script: str | Path, *arguments: object, timeout: float = 120, **options: Any) -> str:
        """What a script that must end well says on stdout; `options` are those of `start`."""
        fork = self.start(script, *arguments, **options)
        try:
            assert fork.wait(timeout) == 0, fork.err[-2000:]
        finally:
            fork.kill()
        return fork.out

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait(60)
            program.close()
        self._asking.close()
        assert self._server.wait(60) == 0
