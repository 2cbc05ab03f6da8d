"""A frontend project after the agent's end: its files, and what its build makes of them."""

from __future__ import annotations

import base64
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

from glm5.errors import DataError
from glm5.sandbox.environment import RoomFileError
from glm5.sandbox.programs import Room
from glm5.tasks.cc_bench.kinds import Kind

APP = "/srv/app"  # beside /srv/node_modules, where Node looks for packages
MOST_FILES = 500
MOST_BYTES, MOST_PACKED = 8 << 20, 600 << 10
"""Bytes of all files, and of the packed project, which a record holds."""
BUILD_S = 180.0
MOST_LOG = 3000
LEFT_OUT = re.compile(r"(^|/)(node_modules|\.next|\.git|\.cache)/")
ENV = {"NEXT_TELEMETRY_DISABLED": "1", "CI": "1", "npm_config_update_notifier": "false"}
_BLOCK = re.compile(r"^```(?:[\w+-]+[ \t]+)?([\w@()\[\]./-]+\.\w+)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Project:
    """`source` are the project's files, `site` those that a browser opens, "index.html" first; both by relative path.
    `site` is empty if the build failed, and `log` says why."""

    source: Mapping[str, bytes]
    site: Mapping[str, bytes]
    log: str = ""

    @property
    def built(self) -> bool:
        return bool(self.site.get("index.html", b"").strip())

    @classmethod
    def of_html(cls, html: str) -> Project:
        """A page without other files and without a build."""
        files = {"index.html": html.encode()}
        return cls(files, files)

    def packed(self) -> str:
        """Text for a record."""
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for part, files in (("source", self.source), ("site", self.site)):
                for name, content in files.items():
                    archive.writestr(zipfile.ZipInfo(f"{part}/{name}"), content, zipfile.ZIP_DEFLATED)
        return base64.b64encode(data.getvalue()).decode()

    @classmethod
    def unpacked(cls, text: str) -> Project:
        """Raises DataError for a text that is no packed project."""
        parts: dict[str, dict[str, bytes]] = {"source": {}, "site": {}}
        try:
            with zipfile.ZipFile(io.BytesIO(base64.b64decode(text, validate=True))) as archive:
                if sum(one.file_size for one in archive.infolist()) > 2 * MOST_BYTES:
                    raise DataError("the project of a record is too large.")
                for one in archive.infolist():
                    part, _, name = one.filename.partition("/")
                    parts[part][name] = archive.read(one)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"the project of a record cannot be read: {error}.") from None
        return cls(parts["source"], parts["site"])


def files_of_answer(text: str) -> dict[str, str]:
    """Files that an answer holds in fenced blocks that begin with their path."""
    found = _BLOCK.findall(text)
    return {path: content for path, content in found if not path.startswith("/") and ".." not in path.split("/")}


def build_project(room: Room, kind: Kind, workdir: str = APP) -> Project:
    """Build what lies in the room's working folder; all programs of the agent are ended before. Raises GradingError if
    the machine fails; a build that fails has no site."""
    room.clear()
    log = ""
    try:
        source = _files(room, workdir)
        if kind.build:
            room.exec(["/bin/rm", "-rf", f"{workdir}/{kind.output}"])
            done = room.exec(kind.build, cwd=workdir, env=ENV, timeout_s=BUILD_S)
            log = (done.stdout + done.stderr).decode("utf-8", "replace")[-MOST_LOG:]
            if done.exit_code or done.stopped:
                return Project(source, {}, log or f"the build ended with {done.stopped or done.exit_code}")
        site = source if kind.output == "." else _files(room, f"{workdir}/{kind.output}")
    except RoomFileError as error:
        return Project({}, {}, f"the project cannot be read: {error}")
    if "index.html" not in site:
        return Project(source, {}, f"{log}\nthere is no index.html".strip())
    own = {name: data for name, data in source.items() if not name.startswith(f"{kind.output}/")}
    made = Project(own, site, log)
    if len(made.packed()) > MOST_PACKED:
        return Project({}, {}, f"the project has more than {MOST_PACKED >> 10} KiB")
    return made


def _files(room: Room, folder: str) -> dict[str, bytes]:
    found = {
        name: data for name, data in room.download_tree(folder, 4 * MOST_BYTES).items() if not LEFT_OUT.search(name)
    }
    if len(found) > MOST_FILES or sum(map(len, found.values())) > MOST_BYTES:
        raise RoomFileError(f"more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB")
    if bad := [name for name in found if name.encode("utf-8", "ignore").decode() != name]:
        raise RoomFileError(f"the name {bad[0]!a:.200} is not UTF-8")
    return found
