"""What programs of a verifier room must not take from the agent: files that languages load by themselves or before
their own libraries, below /usr/local and at the top of the room, where agents may write.

The verifier room itself has the machine's links and loader again (`NamespaceEnvironment.verifier`). `restore_startup`
puts right what would run inside of Python, Ruby, Perl, Node, a compiler or pytest before the verifier's own first line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from glm5.sandbox.agent_request import SHOWN
from glm5.sandbox.environment import Room, RoomFileError
from glm5.sandbox.programs import environment_of
from glm5.sandbox.room import interpreter

PYTHON = r"/usr/local/lib/(.*/)?((sitecustomize|usercustomize|apport_python_hook)\b.*|[^/]*\.pth)"
LIBRARIES = r"/etc/perl/.*|/usr/local/(lib|share)/(.*/)?(site_ruby|site_perl|perl|perl5|lua)(/.*)?"
PACKAGES = r"/usr/local/lib/python[^/]*/(?:dist|site)-packages/([^/.]+)(?:[/.].*)?"
SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"
"""Where Debian's Python looks for packages after those of PACKAGES."""
PLACES = (
    "/usr/local/lib", "/usr/local/share/perl", "/usr/local/share/lua", "/usr/local/include", "/usr/pyvenv.cfg",
    "/usr/local/bin/python", "/usr/local/bin/python3", "/etc/perl",
)  # fmt: skip
TOP = (
    "/pytest.ini", "/.pytest.ini", "/pyproject.toml", "/tox.ini", "/setup.cfg", "/conftest.py", "/__init__.py",
    "/package.json", "/node_modules", "/.npmrc", "/.cargo", "/.rspec", "/phpunit.xml",
)  # fmt: skip
"""Settings for tests in any folder: tools look for them in the folders above."""
LOOK_S = 60.0

# Prints what of these files there is, as JSON of path to a stamp that no program can choose. With "known", removes what
# differs from it; "left" is what could not be removed. Links to folders count, for what lies behind them is not seen.
# A folder of /usr that neither the machine nor the image has counts with all files in it: compilers look there for
# programs and headers, such as /usr/x86_64-linux-gnu/bin/as.
LOOK = r"""
import json, os, re, stat, sys
order = json.load(sys.stdin)
ours = [re.compile(pattern, re.DOTALL) for pattern in order["patterns"]]
local, system = "/usr/local/include/", ["/usr/include/"]
if os.path.isdir(system[0]):
    system += [f"/usr/include/{name}/" for name in os.listdir(system[0]) if "-linux-" in name]
names = os.listdir(order["packages"][1]) if os.path.isdir(order["packages"][1]) else []
package, names = re.compile(order["packages"][0], re.DOTALL), {name.split(".")[0] for name in names}
own = [f"/usr/{name}" for name in os.listdir("/usr") if name not in order["usr"]]
before = own if order["known"] is None else order["known"]
whole = [*order["top"], *(path for path in own if path not in before)]

def counts(path, mode):
    if path in order["places"] or any(f"{path}/".startswith(f"{top}/") for top in whole):
        return True
    found = package.fullmatch(path)  # what stands for a package of the machine, or extends pytest, counts
    if found is not None and (found[1] in names or path.endswith("/entry_points.txt") and plugs_in(path, mode)):
        return True
    if stat.S_ISLNK(mode) and os.path.isdir(path):
        return True
    if path.startswith(local):  # a header, or one that gcc takes compiled
        header = re.sub(r"\.gch(/.*)?$", "", path[len(local):], flags=re.DOTALL)
        return any(os.path.lexists(folder + header) for folder in system)
    return any(pattern.fullmatch(path) for pattern in ours)

def plugs_in(path, mode):
    if not stat.S_ISREG(mode):
        return True
    with open(path, "rb") as file:
        return b"pytest11" in file.read(1 << 20)

def look():
    found = dict.fromkeys((path for path in own if path not in whole), "a folder of the image")
    todo = [*order["places"], *whole]
    while todo:
        path = todo.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                todo += [entry.path for entry in os.scandir(path)]
            elif counts(path, status.st_mode):
                found[path] = f"{status.st_mode:o} {status.st_ctime_ns} {status.st_size}"
        except OSError:  # missing, closed, or with too long a path: programs cannot load it either
            pass
    return found

found, left = look(), []
if order["known"] is not None:
    for path in [path for path, stamp in found.items() if stamp != order["known"].get(path)]:
        try:
            os.unlink(path)
            del found[path]
        except OSError:
            left.append(path)
print(json.dumps({"found": found, "left": left}))
"""


@dataclass(frozen=True)
class StartupFile:
    """A file as it was before the agent came. `data` is None if it is no regular file."""

    stamp: str
    data: bytes | None


def verifier_path(image: str = "") -> str:
    """PATH of verifiers: the machine's read-only folders before those of `image`, a PATH, and before /usr/local, for
    agents may write there."""
    folders = environment_of(None)["PATH"].split(":")
    ours = [folder for folder in folders if not folder.startswith("/usr/local")]
    return ":".join(dict.fromkeys([*ours, *filter(None, image.split(":")), *folders]))


def startup_files(room: Room, workdir: str = "/app") -> dict[str, StartupFile]:
    """The files that matter, before the agent comes. Those at the top of the room are left out if it is the working
    folder."""
    found = _look(room, workdir, None)
    files = dict[str, StartupFile]()
    for path, stamp in found.items():
        try:
            files[path] = StartupFile(stamp, room.download(path))
        except RoomFileError:
            files[path] = StartupFile(stamp, None)
    return files


def restore_startup(room: Room, startup: Mapping[str, StartupFile], workdir: str = "/app") -> None:
    """Remove what the agent added or changed, and restore what it removed; `startup` is `startup_files` of the room
    before the agent came. Raises RoomFileError if what the agent left does not allow it."""
    found = _look(room, workdir, {path: file.stamp for path, file in startup.items()})
    room.upload({p: file.data for p, file in startup.items() if p not in found and file.data is not None})


def _look(room: Room, workdir: str, known: Mapping[str, str] | None) -> dict[str, str]:
    top = [] if workdir.rstrip("/") == "" else [path for path in TOP if not f"{workdir}/".startswith(f"{path}/")]
    usr = {path.split("/")[2] for path in SHOWN if path.startswith("/usr/") and os.path.lexists(path)}
    order = {
        "places": PLACES, "top": top, "patterns": [PYTHON, LIBRARIES], "known": known,
        "packages": [PACKAGES, SYSTEM_PACKAGES], "usr": sorted(usr | {"local", "src"}),
    }  # fmt: skip
    command = [interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", LOOK]
    run = room.exec(command, stdin=json.dumps(order).encode(), timeout_s=LOOK_S)
    try:
        answer = json.loads(run.stdout)
        if not answer["left"]:
            return dict(answer["found"])
        why = f"{answer['left'][0]!r:.200} cannot be removed"
    except (ValueError, LookupError, TypeError):
        why = f"they cannot be listed ({run.stopped or run.exit_code})"
    raise RoomFileError(f"start-up files of the room: {why}.")
