"""The part of a terminal task's tests that is the same in all of them. Its source is laid into `tests/check.py`.

It runs as `python3 -I -S`, so nothing that the agent left is imported. `run` and `start` may run what the agent wrote:
the files of the tests are erased before, and every process that it started is dead before the verdict is written.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from typing import Any

LOGS = "/logs/verifier"
MOST = 16 << 20
ENV = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC"}


class Failed(Exception):
    """A check does not hold; the message says which."""


class Done:
    """The end of a program: exit code, and what it wrote."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")


class Tests:
    """What checks use. `data` is the task's hidden data."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self._erased = False

    def fail(self, message: str) -> None:
        raise Failed(message)

    def true(self, condition: object, message: str) -> None:
        if not condition:
            raise Failed(message)

    def equal(self, found: object, wanted: object, what: str) -> None:
        """`wanted` is not shown: the output may reach the agent."""
        if found != wanted:
            raise Failed(f"{what} is not as asked: found {found!r:.200}")

    def read(self, path: str) -> bytes:
        """A regular file; neither it nor a folder above it may be a link."""
        if os.path.realpath(path) != os.path.normpath(path):
            raise Failed(f"{path} is a link, or below one")
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Failed(f"{path} is not a regular file")
                data = file.read(MOST + 1)
        except OSError as error:
            raise Failed(f"{path}: {error.strerror}") from None
        if len(data) > MOST:
            raise Failed(f"{path} is too large")
        return data

    def text(self, path: str) -> str:
        try:
            return self.read(path).decode("utf-8")
        except UnicodeDecodeError:
            raise Failed(f"{path} is not UTF-8") from None

    def lines(self, path: str) -> list[str]:
        """The lines without white space at their ends and without empty lines at the end."""
        return [line.rstrip() for line in self.text(path).rstrip().split("\n")]

    def json(self, path: str) -> Any:
        try:
            return json.loads(self.text(path))
        except (ValueError, RecursionError):
            raise Failed(f"{path} is not JSON") from None

    def csv(self, path: str) -> list[list[str]]:
        """The rows that are not empty."""
        try:
            return [row for row in csv.reader(io.StringIO(self.text(path))) if row]
        except csv.Error as error:
            raise Failed(f"{path}: {error}") from None

    def tree(self, root: str) -> dict[str, str]:
        """Kind of everything below a folder by relative path: "file", "folder", "link" or "other"."""
        found = dict[str, str]()
        for above, folders, files in os.walk(root):
            for name in [*folders, *files]:
                path = os.path.join(above, name)
                mode = os.lstat(path).st_mode
                kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
                found[os.path.relpath(path, root)] = kinds.get(stat.S_IFMT(mode), "other")
                if len(found) > 20_000:
                    raise Failed(f"{root} has too many files")
        return found

    def run(self, command: Any, stdin: bytes = b"", seconds: float = 20.0, cwd: str = "/app") -> Done:
        """Run a program of the agent, or one that reads what the agent left, to its end. A text is for bash."""
        self.erase()
        argv = ["/bin/bash", "--norc", "-c", command] if isinstance(command, str) else list(command)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            try:
                child = subprocess.Popen(
                    argv, stdin=given, stdout=out, stderr=err, cwd=cwd, env=ENV, start_new_session=True
                )
            except OSError as error:
                raise Failed(f"{argv[0]} cannot be started: {error.strerror}") from None
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                raise Failed(f"{command!r:.80} took longer than {seconds:g} s") from None
            finally:
                end_children()
            out.seek(0)
            err.seek(0)
            return Done(code, out.read(MOST), err.read(MOST))

    def start(self, command: str, port: int, seconds: float = 15.0, cwd: str = "/app") -> None:
        """Start a service of the agent and wait until it listens on the loopback port."""
        self.erase()
        child = subprocess.Popen(
            ["/bin/bash", "--norc", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, cwd=cwd, env=ENV, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            if child.poll() is not None and (child.returncode or not _children()):
                break
            time.sleep(0.05)
        raise Failed(f"{command} does not listen on port {port}")

    def talk(self, port: int, data: bytes, close: bool = True) -> bytes:
        """Send data to a port, close the sending side, which some servers take for the end, and read to the end."""
        try:
            with socket.create_connection(("127.0.0.1", port), 5.0) as made:
                made.settimeout(5.0)
                made.sendall(data)
                if close:
                    made.shutdown(socket.SHUT_WR)
                found = b""
                while len(found) < MOST and (chunk := made.recv(65536)):
                    found += chunk
                return found
        except OSError as error:
            raise Failed(f"port {port}: {error}") from None

    def http(self, port: int, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        reply = self.talk(port, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode(), close=False)
        head, _, body = reply.partition(b"\r\n\r\n")
        words = head.split(None, 2)
        if len(words) < 2 or not words[1].isdigit():
            raise Failed(f"GET {path}: this is not an HTTP answer: {reply!r:.80}")
        return int(words[1]), body

    def git(self, repository: str, *words: str) -> str:
        """The output of a git command that succeeds. The repository's own settings must not change what it says: use
        commands for scripts, such as cat-file."""
        plain = ["core.fsmonitor=false", "core.commitGraph=false", "core.hooksPath=/dev/null", "safe.directory=*",
                 "core.attributesFile=/dev/null", "log.showSignature=false", "core.quotePath=false"]  # fmt: skip
        settings = [word for setting in plain for word in ("-c", setting)]
        command = ["git", "--no-replace-objects", "--no-pager", *settings, "-C", repository, *words]
        away = ["GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_GRAFT_FILE=/dev/null"]
        done = self.run(["/usr/bin/env", *away, *command], cwd="/")
        if done.code:
            raise Failed(f"git {' '.join(words)} fails: {done.err.decode(errors='replace').strip()[-200:]}")
        return done.text

    def erase(self) -> None:
        """Remove the files of the tests, once. What cannot be removed must not be shown to the agent's programs."""
        if self._erased:
            return
        for name in os.listdir("/tests"):
            path = os.path.join("/tests", name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        self._erased = True


def outputs(t: Tests) -> None:
    """The check of tasks whose data are the contents of files by path: rows of .csv, a value of .json, else lines; for
    a path that ends in a slash the texts of all that is in the folder, by name."""
    for path, wanted in t.data.items():
        if path.endswith("/"):
            t.equal(sorted(t.tree(path)), sorted(wanted), path)
            for name, text in wanted.items():
                t.equal(t.text(path + name), text, name)
        else:
            read = {".csv": t.csv, ".json": t.json}.get(os.path.splitext(path)[1], t.lines)
            t.equal(read(path), wanted, path)


def _children() -> list[int]:
    """Every living process below this one."""
    parents = dict[int, int]()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents[int(name)] = int(parent)
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found - {os.getpid()})


def end_children() -> None:
    """Kill every process below this one, also those that left their session. Raises Failed if that takes too long."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not _children():
            return
        time.sleep(0.005)
    raise Failed("processes cannot be ended")


def _guard() -> None:
    """Orphans become children of this process, and no process may look into its memory."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def main(check: Any, data_file: str = "/tests/data.json") -> None:
    """Run the check and write the reward: 1 if it holds."""
    with open(data_file, encoding="utf-8") as file:
        tests = Tests(json.load(file))
    _guard()
    reward, message = 0, ""
    try:
        check(tests)
        reward = 1
    except Failed as error:
        message = str(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    try:
        end_children()
    except Failed as error:
        reward, message = 0, str(error)
    for name in ("reward.json", "reward.txt"):
        path = os.path.join(LOGS, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(os.path.join(LOGS, "reward.json"), flags, 0o644), "w") as file:
        json.dump({"reward": reward}, file)
    print(message or "all checks hold")
    sys.stdout.flush()
    os._exit(0)
