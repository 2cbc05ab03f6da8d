"""The request for an agent's room, and the tasks in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from glm5.errors import ConfigError
from glm5.sandbox.room import BOX, PACKAGE, PORT, inside, interpreter, last_capability

INODES = 65536  # files and folders in each writable folder
WORKER = "/etc/glm5/agent_worker.py"  # in the room
RESERVED = ("/box", "/tmp", "/proc", "/dev", "/etc")
SHOWN = (
    "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share", "/usr/local/bin",
    "/usr/local/lib", "/usr/local/libexec", "/usr/local/share", "/usr/include", "/usr/local/include", "/bin", "/sbin",
    "/lib", "/lib32", "/lib64",
    "/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/dev/null", "/dev/urandom",
)  # fmt: skip
LINKS = (
    ("/dev/random", "urandom"), ("/dev/fd", "/proc/self/fd"), ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"), ("/dev/stderr", "/proc/self/fd/2"), ("/dev/shm", "/tmp"),
)  # fmt: skip
TEXTS = {
    "/etc/passwd": "root:x:0:0:root:/:/bin/sh\nagent:x:@UID@:@UID@:agent:/tmp:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:@UID@:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


@dataclass(frozen=True)
class Task:
    """One rollout: the files of its working folder, its way to the gateway, and more environment variables.

    `base_path` is the path of the session's base URL, `/sessions/ID/v1`; without one there are no variables for the
    gateway. `argument` (JSON) is for Python callables. `executable` are names of `files`; `folders` exist even if no
    file lies in them."""

    base_path: str
    api_key: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    argument: object = None
    executable: Collection[str] = ()
    folders: Collection[str] = ()
    keep_files: bool = True


def environment_of(task: Task) -> dict[str, str]:
    """The variables of a task's agent. Raises ConfigError for what a task must not ask for."""
    if task.base_path and not task.base_path.startswith("/"):
        raise ConfigError(f"agent: base_path {task.base_path!r} must start with '/'.")
    for name in (*task.files, *task.folders):
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ConfigError(f"agent file {name!r}: use a relative path without '..'.")
    url = f"http://127.0.0.1:{PORT}{task.base_path.rstrip('/')}"
    gateway = {
        "OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "GLM5_BASE_URL": url,
        "OPENAI_API_KEY": task.api_key, "ANTHROPIC_API_KEY": task.api_key, "GLM5_API_KEY": task.api_key,
    }  # fmt: skip
    environment = base_environment() | (gateway if task.base_path else {}) | dict(task.env)
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"agent: the environment variable {name!r} is not valid.")
    return environment


def base_environment() -> dict[str, str]:
    """The environment variables that every agent has."""
    path = dict.fromkeys((f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"))
    return {"PATH": ":".join(path), "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "agent"}


def request_of(read_only: Sequence[str | Path], texts: Mapping[str, str]) -> dict[str, Any]:
    """The keeper's input (`environment_launcher.Keeper`): a room that is read-only but for two folders."""
    shown = {path for path in (*SHOWN, sys.base_prefix, interpreter()) if os.path.exists(path)}
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    folders = sorted(shown - set(links))
    aliases, given = dict[str, str](), list[str]()
    for path in (os.path.abspath(path) for path in read_only):
        real = os.path.realpath(path)
        if not os.path.exists(real):
            raise ConfigError(f"agent: the read-only path {path} does not exist.")
        if real == "/" or any(real == one or (one != "/tmp" and real.startswith(f"{one}/")) for one in RESERVED):
            raise ConfigError(f"agent: the path {path} cannot be shown; the room has its own.")
        if real != path and not inside(path, folders):
            aliases[path] = real
        given += [real] if not inside(real, [*folders, *given]) and real not in given else []
    visible = [*(path for path in folders if not inside(path, folders)), *given]
    hidden = str(PACKAGE if PACKAGE.parent.name.endswith("-packages") else PACKAGE.parent)
    return {
        "trees": [],
        "shown": visible,
        "hidden": [hidden] if inside(hidden, visible) else [],
        "links": [*links.items(), *LINKS, *aliases.items()],
        "folders": ["/proc", "/dev", "/etc"],
        "texts": list({**TEXTS, **texts}.items()),
        "port": PORT,
        "sealed": [BOX, "/tmp"],
        "inodes": INODES,
        "plain": False,
        "given": given,
        "last_capability": last_capability(),
    }
