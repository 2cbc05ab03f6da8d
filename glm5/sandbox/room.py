"""The room of one program of the judge (`glm5.sandbox.sandbox`): its limits and the visible paths of the machine."""

from __future__ import annotations

import fcntl
import functools
import glob
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from glm5.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
BOX = "/box"  # the writable folder
PORT = 8100  # of the gateway
LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run. `cpu_s` and `memory_mb` (address space) count per process. `file_mb` limits the whole
    home folder. `output_kb` limits stdout and stderr each; a program that writes more is killed. With `file_mb=0` there
    is no writable folder, and `files` must be empty."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_mb: int = 256
    processes: int = 8
    file_mb: int = 16
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 and not (name == "file_mb" and value == 0):
                raise ConfigError(f"sandbox limit {name} is {value}; it must be positive.")


@dataclass(frozen=True)
class Job:
    """One program for `Sandbox.run_many`, with the arguments of `Sandbox.run_python`."""

    source: str
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""


def interpreter() -> str:
    """Path of the base interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def view() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Paths to show read-only, symbolic links to recreate, and folders to hide inside the shown ones."""
    executable = interpreter()
    libraries = [*LIBRARY_FOLDERS, f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    libraries += ["/nix/store"] if executable.startswith("/nix/store/") else []
    links = tuple((path, os.readlink(path)) for path in libraries if os.path.islink(path))
    folders = sorted({path for path in libraries if os.path.isdir(path) and not os.path.islink(path)})
    shown = [path for path in folders if not inside(path, folders)]
    links += () if inside(executable, ["/tmp"]) or inside(sys.base_prefix, ["/tmp"]) else (("/tmp", "/box"),)
    files = [path for path in (executable, "/etc/ld.so.cache", "/dev/null", "/dev/urandom") if os.path.exists(path)]
    secret = {str(PACKAGE.parent), *(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))}
    standard = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
    secret |= {f"{standard[key]}/{name}" for key in ("stdlib", "platstdlib") for name in ("site-packages", "test")}
    secret |= {"/usr/lib/python3/dist-packages", f"{sys.base_prefix}/lib/python3/dist-packages"}
    hidden = sorted(path for path in secret if os.path.isdir(path) and inside(path, shown))
    outer = [path for path in hidden if not inside(path, hidden)]
    return tuple(shown + [path for path in files if not inside(path, shown)]), links, tuple(outer)


@functools.cache
def python_packages() -> tuple[str, ...]:
    """Folders of this machine with packages of its Pythons, such as `site-packages`, or with wheels of them."""
    above = ("/usr/lib", "/usr/local/lib", f"{sys.base_prefix}/lib")
    names = [f"{folder}/python3*/{name}" for folder in above for name in ("*-packages", "ensurepip/_bundled")]
    found = {path for name in (*names, "/usr/share/python-wheels") for path in glob.glob(name)}
    return tuple(sorted(path for path in found if os.path.isdir(path) and os.path.realpath(path) == path))


def inside(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as stream:
        return int(stream.read())


def files_of(limits: Limits, job: Job) -> dict[str, bytes]:
    """The files of a program by their paths in the room. Raises ConfigError if a file name is not allowed, or there are
    files but no folder."""
    if job.files and not limits.file_mb:
        raise ConfigError("sandbox: file_mb is 0, so the program gets no files; give it a folder or use stdin.")
    for name in job.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name or parts == ("main.py",):
            raise ConfigError(f"sandbox file {name!r}: use a relative path without '..' other than main.py.")
    files = {"main.py": job.source, **job.files} if limits.file_mb else {}
    return {f"{BOX}/{name}": text.encode("utf-8", "surrogateescape") for name, text in files.items()}


def request_of(limits: Limits) -> dict[str, Any]:
    """The keeper's input (`environment_launcher.Keeper`): a room for one program of the judge."""
    shown, links, hidden = view()
    return {
        "trees": [], "shown": shown, "hidden": hidden, "links": links, "folders": [BOX], "texts": [], "port": PORT,
        "sealed": [BOX] if limits.file_mb else [], "inodes": 4096, "plain": True, "given": [],
        "last_capability": last_capability(),
    }  # fmt: skip


def memory_file(*data: bytes) -> int:
    """A file descriptor to read the `data` from, one after the other; unlike a pipe it never blocks. It is sealed,
    otherwise the program could store data in it beyond its limits."""
    descriptor = os.memfd_create("glm5-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.writelines(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
