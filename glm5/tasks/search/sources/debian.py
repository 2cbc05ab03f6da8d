"""Packages, maintainers and dependencies from the lists that `apt-get update` has stored on this machine."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from glm5.errors import DataError
from glm5.tasks.search.records import Record, Ref, Source, plain_name

PART = 4
"""One source package in this many is taken, by the hash of its name, with all its binary packages: enough of a graph,
and not more pages than all other sources have together."""
SECONDS = 120.0
LANGUAGES = {"c": "C", "c++": "C++", "go": "Go", "ml": "OCaml"}
"""Tags whose name is not the dictionary's."""


def _find(roots: list[Path]) -> list[Path] | None:
    for root in roots:
        if (listed := root / "debian-packages.txt").is_file():
            return [listed]
    lists = sorted(Path("/var/lib/apt/lists").glob("*_Packages*"))
    return lists if lists and shutil.which("apt-cache") else None


def _read(paths: list[Path]) -> Iterator[Record]:
    if paths[0].suffix == ".txt":
        text = paths[0].read_text(encoding="utf-8", errors="replace")
    else:
        try:
            done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, timeout=SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise DataError(f"apt-cache dumpavail failed: {error}.") from error
        text = done.stdout.decode("utf-8", "replace")
    seen: dict[str, set[str]] = {"name": set(), "maintainer": set(), "section": set(), "source": set()}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): ?(.*(?:\n[ \t].*)*)", paragraph, re.MULTILINE))
        name = fields.get("Package", "")
        source = str(fields.get("Source") or name).partition(" ")[0]
        taken = int(hashlib.sha256(source.encode()).hexdigest(), 16) % PART == 0
        if not name or not taken or name in seen["name"] or re.search(r"-(dbg|dbgsym|prof)$", name):
            continue
        seen["name"].add(name)
        yield from _package(name, source, fields, seen)


def _package(name: str, source: str, fields: dict[str, str], seen: dict[str, set[str]]) -> Iterator[Record]:
    record = Record("package", (f"deb:{name}",), name)
    section = fields.get("Section", "").rpartition("/")[2]
    maintainer = re.sub(r"\s*<[^>]*>", "", fields.get("Maintainer", "")).strip(' "')
    for kind, type, relation, shown in (
        ("maintainer", "maintainer", "maintained_by", maintainer), ("section", "section", "section", section),
        ("source", "source", "built_from", source),
    ):  # fmt: skip
        if not shown:
            continue
        key = f"{type}:{plain_name(shown) if type == 'maintainer' else shown}"
        record.claim(relation, Ref(type, key))
        if key not in seen[kind]:
            seen[kind].add(key)
            yield Record(type, (key,), shown)
    for field, relation in (("Depends", "depends"), ("Recommends", "recommends"), ("Suggests", "suggests")):
        for part in re.split(r"[,|]", fields.get(field, "")):
            target = part.strip().partition(" ")[0].partition(":")[0]
            record.claim(relation, Ref("package", f"deb:{target}") if target else None)
    for language in re.findall(r"implemented-in::([a-z0-9+#-]+)|\{([a-z0-9+#,-]+)\}", fields.get("Tag", "")):
        if language[0]:
            record.claim("written_in", Ref("term", f"name:{plain_name(LANGUAGES.get(language[0], language[0]))}"))
    record.claim("installed_size", fields.get("Installed-Size"))
    record.claim("homepage", re.sub(r"^https?://", "", fields.get("Homepage", "")).rstrip("/"))
    record.text = fields.get("Description", "").strip()
    yield record


DEBIAN = Source(
    "debian", "facts of Debian's package lists", "apt-get update on a Debian system", _find, _read
)  # fmt: skip
