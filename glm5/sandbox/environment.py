"""Environments: a room with file trees of its own, in which programs run one after the other (§4.2).

A `NamespaceEnvironment` is to an agent what a container is, without images, daemons and root: the machine's programs
read-only, copy-on-write views of folders, a file system in memory for what is written, a loopback interface with no way
out, and limits. Mechanisms: namespaces as root, or inside a user namespace. Several programs may run at a time, and
services live on between them.

A verifier room judges the result: every process of the agent is dead before it opens; it has the agent's files as a
frozen layer, its own network, disk space, `/tmp` and user (as root), and the folders of the tests fresh.

The limits are of the room as a whole: to exceed them is the program's failure (`ExecResult.stopped`). A GradingError is
the machine's fault. Memory is measured four times a second; programs of the background that exceed it between calls are
killed. A single process cannot allocate more than the limit. What is written, `/tmp` and `/dev/shm` included, is memory
too, at most `disk_mb`.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import trial
from glm5.sandbox.agent_request import LINKS, SHOWN, TEXTS
from glm5.sandbox.clock import MECHANISMS, START_S
from glm5.sandbox.forward import Address
from glm5.sandbox.limits import LIMITS, ExecResult, RoomLimits
from glm5.sandbox.programs import Room
from glm5.sandbox.room import PACKAGE, PORT, inside, interpreter, last_capability
from glm5.sandbox.room_files import RoomFileError
from glm5.sandbox.starter import STARTER, Keeper

__all__ = ["ExecResult", "NamespaceEnvironment", "RoomFileError", "RoomLimits", "Snapshot"]

Trees = Mapping[str, Path | str | Sequence[Path | str]]
SETTINGS = (
    "/etc/java*", "/etc/maven", "/etc/php", "/etc/python3*", "/etc/perl", "/etc/ssl/openssl.cnf", "/etc/mime.types",
    "/etc/localtime", "/etc/timezone", "/etc/magic", "/etc/services", "/etc/protocols", "/etc/debian_version",
    "/etc/os-release",
)  # fmt: skip
FOLDERS = (
    "/tmp",
    "/home/agent",
    "/root",
    "/opt",
    "/srv",
    "/run",
    "/var/tmp",
    "/var/log",
    "/usr",
    "/proc",
    "/dev",
    "/etc",
)
PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:@UID@:@UID@:agent:/home/agent:/bin/bash\n"
MORE_TEXTS = {
    "/etc/passwd": PASSWD,
    "/etc/hosts": "127.0.0.1 localhost room\n::1 localhost\n",
    "/etc/gitconfig": "[safe]\n\tdirectory = *\n[user]\n\tname = agent\n\temail = agent@localhost\n",
    "/etc/inputrc": "set enable-bracketed-paste off\n",
}
LOCAL = ("bin", "etc", "include", "lib", "sbin", "share", "src")  # of /usr/local, where programs may be installed
MOST_LAYERS = 200  # mount options are a page
RESERVED = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/proc", "/dev", "/etc", "/sys")


class StartedTooLate(GradingError):
    """The room was not ready in time. The cause is the machine, not the program."""


@dataclass(frozen=True)
class Snapshot:
    """The files of an environment at one time: the layers of its trees, newest first."""

    layers: tuple[int, ...]


class NamespaceEnvironment(Room):
    """One room and its file trees; `with` starts and stops it. Use it from one thread at a time.

    Args:
        trees: Folders of the room, writable there, and what they show at first: a folder of the machine, or several,
            the first on top of the others. The machine's folders never change; they must not change meanwhile either.
        read_only: Files and folders of the machine to show at their own paths. Programs can read all of them.
        writable: More folders that programs may write, empty at first. `/tmp`, `/home/agent`, `/usr/local` and the top
            folder itself are always writable.
        hidden: Folders of the machine to show empty, in what else is shown.
        limits: See `RoomLimits`.
        gateway: Where connections to the room's 127.0.0.1:8100 lead: path of a Unix socket, or host and port.

    Raises GradingError if this machine has no namespaces, ConfigError for paths that are not allowed.
    """

    def __init__(
        self,
        trees: Trees | None = None,
        *,
        read_only: Sequence[str | Path] = (),
        writable: Sequence[str] = (),
        hidden: Sequence[str] = (),
        limits: RoomLimits = LIMITS,
        gateway: Address | None = None,
        mode: str | None = None,
    ) -> None:
        request = _request(dict(trees or {}), read_only, writable, hidden)
        self._set_up(request, limits, gateway, mode or environment_mechanism())

    def _set_up(self, request: dict[str, Any], limits: RoomLimits, gateway: Address | None, mode: str) -> None:
        super().__init__(limits, gateway)
        self._mode, self._request = mode, request
        self._keeper: Keeper | None = None
        self._below: tuple[int, ...] = ()
        self._layer = self._newest = 0
        self._kept = set[int]()

    def __enter__(self) -> NamespaceEnvironment:
        self.start()
        return self

    def start(self) -> None:
        """Build the room. Raises GradingError if this machine cannot."""
        if self._keeper is not None:
            raise GradingError("the environment runs already.")
        self._keeper = STARTER.start(self._mode, json.dumps(self._request).encode())
        self._orders = self._keeper.channel
        self._orders.settimeout(START_S)
        try:
            self._keeper.pid = int(self._hear("ready")[0][0])
            self._open(())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the room, wait until they are gone, and drop its files."""
        self._leave()
        if self._keeper is not None:
            self._keeper.end()
            self._keeper = None

    def _open(self, below: tuple[int, ...], fresh: Sequence[str] = (), judge: bool = False) -> None:
        """Open a room with a new layer over those of `below`."""
        self._newest += 1
        self._layer, self._below = self._newest, below
        order: dict[str, Any] = {"open": self._layer, "below": below, "fresh": fresh, "keep": sorted(self._kept)}
        order["judge"] = judge
        order["limits"] = asdict(self.limits)
        self._orders.send(json.dumps(order).encode())
        words, descriptors = self._hear("opened", 3)
        self._join(int(words[0]), int(words[1]) if self._mode == "root" else None, descriptors)

    def _close(self) -> tuple[int, ...]:
        """End the room's processes; returns its layers."""
        if self._keeper is None:
            raise GradingError("the environment has not been started, or has been stopped.")
        self._leave()
        self._orders.send(b"close")
        self._hear("closed")
        return (self._layer, *self._below)

    def _hear(self, expected: str, most: int = 0) -> tuple[list[str], list[int]]:
        try:
            text, descriptors, _, _ = socket.recv_fds(self._orders, 4096, most, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            raise StartedTooLate(f"{MECHANISMS[self._mode]}: a room was not ready in time.") from error
        except OSError as error:
            raise GradingError(f"{MECHANISMS[self._mode]}: the room does not answer: {error}.") from error
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # some versions of Python ignore the flag
        kind, *words = text.decode(errors="replace").split(" ")
        if kind != expected:
            for descriptor in descriptors:
                os.close(descriptor)
            why = " ".join(words) or "it was killed from outside; is the machine out of memory?"
            raise GradingError(f"{MECHANISMS[self._mode]}: a room cannot be built: {why}.")
        return words, descriptors

    def snapshot(self) -> Snapshot:
        """The files as they are now. Every process of the room ends. Raises GradingError for too many in a row."""
        if len(self._below) >= MOST_LAYERS:
            raise GradingError(f"a room cannot have more than {MOST_LAYERS} layers; restore an earlier snapshot first.")
        layers = self._close()
        self._kept.update(layers)
        self._open(layers)
        return Snapshot(layers)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to the files of a snapshot of this environment. Every process of the room ends."""
        if not self._kept.issuperset(snapshot.layers):
            raise GradingError("the snapshot is of another environment.")
        self._close()
        self._open(snapshot.layers)

    @contextlib.contextmanager
    def verifier(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        writable: Sequence[str] = (),
        limits: RoomLimits | None = None,
    ) -> Iterator[Room]:
        """A room to judge the result in: the agent's processes are dead, its files a frozen layer below a new one. The
        links of the top folder and what the machine has in /usr/local are its own again, and the loader preloads
        nothing.

        `writable` are folders that are empty whatever the agent left there, such as those of the tests and of the
        reward; `/tmp` is one of them. `files` (absolute path to data) are laid in. The space of `limits` is new,
        whatever the agent wrote. The environment's own room is gone afterwards; `restore` brings it back to a snapshot.
        """
        layers = self._close()
        agent, gateway = self.limits, self.gateway
        self.limits, self.gateway = limits or agent, None
        try:
            self._open(layers, ["/tmp", *writable], judge=True)
            self.upload(files or {})
            yield self
        finally:
            self.limits, self.gateway = agent, gateway
            self._close()


_Row = tuple[str, list[str], list[str]]


def _request(
    trees: dict[str, Path | str | Sequence[Path | str]],
    read_only: Sequence[str | Path],
    writable: Sequence[str],
    hidden: Sequence[str],
) -> dict[str, Any]:
    """The keeper's input; see `environment_launcher.Keeper`."""
    rows: list[_Row] = []
    local = "/usr/local"
    if os.path.isdir(local):
        rows.append((local, [local], [name for name in LOCAL if name != "src"]))
    for path, lower in [*trees.items(), *((path, []) for path in writable)]:
        lowers = [lower] if isinstance(lower, str | Path) else list(lower)
        if not path.startswith("/") or ".." in path.split("/") or "\0" in path or path.rstrip("/") in ("", *RESERVED):
            raise ConfigError(f"the folder {path!r} of an environment: use an absolute path without '..', not a folder "
                              "of the system.")  # fmt: skip
        real = [os.path.realpath(one) for one in lowers]
        for one in real:
            if not os.path.isdir(one):
                raise ConfigError(f"the folder {path} of an environment: {one} is not a folder.")
        rows.append((path.rstrip("/"), real, []))
    if len({path for path, _, _ in rows}) < len(rows):
        raise ConfigError("an environment names one folder twice.")
    shown = {path for path in (*SHOWN, sys.base_prefix, interpreter()) if os.path.exists(path)}
    shown |= {path for pattern in SETTINGS for path in glob.glob(pattern)}
    links = {path: os.readlink(path) for path in shown if os.path.islink(path) and not path.startswith(f"{local}/")}
    kept = sorted(path for path in shown if not os.path.islink(path) and path != local)
    for given in map(str, read_only):
        real_path = os.path.realpath(given)
        if not os.path.exists(real_path) or real_path == "/":
            raise ConfigError(f"the read-only path {given} of an environment does not exist, or is the root.")
        if real_path != os.path.abspath(given):
            links[os.path.abspath(given)] = real_path
        kept.append(real_path)
    secret = {str(PACKAGE if PACKAGE.parent.name.endswith("-packages") else PACKAGE.parent), *hidden}
    asked = {path for path in kept if inside(path, secret)}  # is shown though what is around it is not
    others = {path for path in kept if not inside(path, [*kept, local]) and not path.startswith("/dev/")}
    kept = sorted(others | asked)
    kept += python_files(interpreter(), sys.base_prefix, local)
    return {
        "trees": sorted(rows),
        "shown": kept,
        "hidden": sorted(path for path in secret if inside(path, [*kept, local]) and not inside(path, secret)),
        "links": [*links.items(), *(link for link in LINKS if link[0] not in ("/dev/random", "/dev/shm")),
                  ("/dev/ptmx", "pts/ptmx")],
        "folders": FOLDERS,
        "texts": list((TEXTS | MORE_TEXTS).items()),
        "port": PORT,
        "sealed": None,
        "plain": False,
        "given": [],
        "last_capability": last_capability(),
    }  # fmt: skip


def python_files(program: str, prefix: str, local: str) -> list[str]:
    """What an agent must not replace if the machine's Python lies in /usr/local, which agents may write: the program,
    its library and the standard library. Verifiers run it."""
    if not inside(program, [local]):
        return []
    return sorted(
        {program, *map(os.path.realpath, glob.glob(f"{prefix}/lib/libpython*")), os.path.dirname(os.__file__)}
    )


@functools.cache
def environment_mechanism() -> str:
    """The mechanism of this machine, if its trial finds every barrier in place. Raises GradingError otherwise."""
    if sys.platform != "linux":
        raise GradingError(f"environments need Linux namespaces; this is {sys.platform}.")
    mode = "root" if os.geteuid() == 0 else "user"
    with tempfile.TemporaryDirectory(prefix="glm5-trial-") as folder, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{folder}")
        abstract.listen()
        limits = RoomLimits(memory_mb=128, processes=8, disk_mb=4, cpu_s=10, output_kb=16)
        numbers = f"{limits.memory_mb} {limits.processes} {limits.disk_mb}"
        with NamespaceEnvironment(limits=limits, mode=mode) as room:
            run = room.exec([interpreter(), "-I", "-c", trial.ROOM, numbers, folder])
    if (run.exit_code, run.stdout) != (0, b"missing: \n"):
        found = (run.stdout or run.stderr[-300:]).decode(errors="replace").strip()
        raise GradingError(f"cannot build rooms here; {MECHANISMS[mode]}: {found}.")
    return mode
