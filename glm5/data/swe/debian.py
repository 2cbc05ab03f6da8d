"""Changes from Debian source packages: the patches of `debian/patches`, in the order of their series.

The header of a patch (DEP-3) is the issue, with the Debian bugs that it names; `debian/changelog` says how the patch
came in ("Closes: #n"). The files are those of the original tarball with all earlier patches applied. Archives are read
in memory, within limits; nothing is unpacked.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, cast

from glm5.config.corpus import LimitConfig
from glm5.data.corpus.kinds import COMPRESSIONS
from glm5.data.corpus.licenses import of_copyright
from glm5.data.corpus.streams import Bounded, Refused, decompressed, opened, room_of
from glm5.data.corpus.text import decode
from glm5.data.swe.change import VENDORED, Change, Report, Tree, text_type
from glm5.data.swe.issues import Issues, without_trailers
from glm5.data.swe.patching import FileDiff, PatchError, applied, parse_diff
from glm5.files import sha256_file

_MOST_DSC, _MOST_PATCHES = 1 << 20, 2000
_FILE = re.compile(r"^ ([0-9a-f]{64}) (\d+) ([A-Za-z0-9][A-Za-z0-9.+~_:-]*)$", re.MULTILINE)
_FIELD = re.compile(r"^(\w[\w-]*):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)
_DESCRIBED = ("description", "subject")
_BUG = re.compile(r"bugs\.debian\.org/(?:cgi-bin/bugreport\.cgi\?bug=)?(\d{3,8})\b|#(\d{3,8})\b")
_CLOSES = re.compile(r"closes:\s*((?:bug)?#?\s*\d{1,9}\b(?:,\s*(?:bug)?#?\s*\d{1,9}\b)*)", re.IGNORECASE)
_MOST_TREE = 512 << 20
"""Bytes of the text files of a package, which are in memory at once."""


@dataclass(frozen=True)
class Archives:
    """The files of a source package: the original tarball and the packaging, and their SHA-256. `missing` says why
    there are none."""

    original: Path | None = None
    packaging: Path | None = None
    sums: tuple[str, ...] = ()
    missing: str = ""


def archives(dsc: Path) -> Archives:
    """The archives that a `.dsc` names and that stand beside it, whole. Only the format 3.0 (quilt) has patches of its
    own; packages of several original tarballs are left out."""
    try:
        with opened(dsc, _MOST_DSC) as file:
            text = file.read().decode("utf-8", "replace")
    except Refused as refusal:
        return Archives(missing=str(refusal))
    if not re.search(r"^Format: 3\.0 \(quilt\)\s*$", text, re.MULTILINE):
        return Archives(missing="dsc_format")
    _, _, listed = text.partition("Checksums-Sha256:")
    sums = {name: digest for digest, _, name in _FILE.findall(listed.split("\nFiles:")[0])}
    packaging = [name for name in sums if ".debian.tar" in name]
    original = [name for name in sums if ".orig" in name and ".tar" in name and not name.endswith(".asc")]
    if len(packaging) != 1 or len(original) != 1:
        return Archives(missing="dsc_format")
    for name in (*packaging, *original):
        if (dsc.parent / name).is_symlink() or not (dsc.parent / name).is_file():
            return Archives(missing="dsc_incomplete")
    places = dsc.parent / original[0], dsc.parent / packaging[0]
    return Archives(*places, (sums[original[0]], sums[packaging[0]]))


def package_changes(dsc: Path, name: str, limits: LimitConfig, issues: Issues) -> Iterator[Change | tuple[str, str]]:
    """The patches of a source package as changes; of one that cannot be used its name and the reason. The files of a
    change can be read until the next one is asked for. Raises Refused."""
    found = archives(dsc)
    if found.original is None or found.packaging is None:
        raise Refused(found.missing)
    for archive, digest in zip((found.original, found.packaging), found.sums, strict=True):
        if sha256_file(archive) != digest:
            raise Refused("damaged")
    files = _texts(_stripped(_members(found.original, limits, lambda path: text_type(path) is not None)))
    texts = _texts(_members(found.packaging, limits, lambda path: path.startswith("debian/")))
    repository, _, version = dsc.name.removesuffix(".dsc").partition("_")
    license = of_copyright(texts.get("debian/copyright", ""))
    changelog = texts.get("debian/changelog", "")
    keys = {path: _key(text) for path, text in files.items()}
    contents = {keys[path]: text for path, text in files.items()}
    del files
    tree, left_out = Tree(keys, contents.get), ""
    for patch in _series(texts.get("debian/patches/series", ""))[:_MOST_PATCHES]:
        place, text = f"{name}/{patch}", texts.get(f"debian/patches/{patch}")
        if text is None:
            left_out = " that apply"
            yield place, "patch_missing"
            continue
        try:
            diffs = parse_diff(text)
            updates = _updates(tree, diffs)
        except PatchError:
            left_out = " that apply"
            yield place, "patch_does_not_apply"
            continue
        shown = [diff for diff in diffs if text_type(diff.path) and not VENDORED.search(diff.path)]
        if shown:
            issue, request = described(text, patch, changelog, issues)
            yield Change(
                place, repository, f"{version}, with the patches before {patch}{left_out}",
                Tree(dict(keys), contents.get),
                "".join(f"diff --git a/{diff.old or diff.path} b/{diff.path}\n{diff.text}" for diff in shown),
                {diff.path: sum(_changed_lines(diff)) for diff in shown}, issue, request, more={"license": license},
            )  # fmt: skip
        else:
            yield place, "no_text_changed"
        gone = {keys.pop(path) for path in updates if path in keys}
        for path, after in updates.items():
            if after is not None:
                keys[path] = _key(after)
                contents[keys[path]] = after
        for key in gone.difference(keys.values()):
            del contents[key]


def described(patch: str, name: str, changelog: str, issues: Issues) -> tuple[tuple[Report, ...], Report]:
    """The issues that a patch answers, and the patch as a request: its header, and what the changelog says of it."""
    head = re.split(r"^(?:diff |Index: |--- \S)", patch, maxsplit=1, flags=re.MULTILINE)[0].split("\n---\n")[0]
    fields: dict[str, list[str]] = {}
    for key, value in _FIELD.findall(head):
        fields.setdefault(key.lower(), []).append(value.strip())
    text = next((fields[key][0] for key in _DESCRIBED if key in fields), "")
    lines = [re.sub(r"^ ?\.?$", "", line.removeprefix(" ")) for line in text.split("\n")]
    title, body = lines[0].strip(), "\n".join(lines[1:])
    title = re.sub(r"^\[PATCH[^]]*\]\s*", "", title)
    free = _FIELD.sub("", head)
    body = without_trailers("\n\n".join(part for part in (body.strip(), free.strip()) if part))
    links = " ".join(value for key, values in fields.items() if key.startswith("bug") for value in values)
    bugs = list(dict.fromkeys(int(a or b) for a, b in _BUG.findall(links)))
    named = re.compile("|".join([rf"(?<![\w.-]){re.escape(name)}(?![\w-])", *(rf"#{bug}\b" for bug in bugs)]))
    noted = [item for item in _items(changelog) if named.search(item)]
    for item in noted:
        for closed in _CLOSES.findall(item):
            bugs += [int(number) for number in re.findall(r"\d+", closed) if int(number) not in bugs]
    known = [found for bug in bugs if (found := issues.get(bug)) is not None]
    kind = "Debian bug " + ", ".join(f"#{bug}" for bug in bugs) if bugs else "Description"
    issue = tuple(known) or (Report(kind, title or name, body),)
    return issue, Report(f"Patch {name}", title or name, "\n".join(dict.fromkeys(noted)) or (body if known else ""))


def _items(changelog: str) -> list[str]:
    """Items of a changelog, each on one line."""
    parts = re.split(r"^ {2,4}[*+-] ", changelog, flags=re.MULTILINE)[1:]
    return [" ".join(re.split(r"\n\n| -- ", part, maxsplit=1)[0].split()) for part in parts]


def _series(text: str) -> list[str]:
    return [line.split()[0] for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]


def _updates(tree: Tree, diffs: list[FileDiff]) -> dict[str, str | None]:
    """The files that a patch changes, after it; None for one that it deletes. Files that we do not read, such as build
    scripts, are passed over. Raises PatchError."""
    found: dict[str, str | None] = {}
    for diff in diffs:
        if text_type(diff.path) is None:
            continue
        before = {path: found[path] if path in found else tree.read(path) for path in (diff.old, diff.new) if path}
        place = next((path for path, text in before.items() if text is not None), diff.path)
        after = applied(before[place], diff)
        found[place] = None
        found[diff.path] = after
    return found


def _changed_lines(diff: FileDiff) -> Iterator[int]:
    return (line[:1] in "+-" for line in diff.text.split("\n")[2:] if line)


def _key(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _texts(members: dict[str, bytes]) -> dict[str, str]:
    """The files that are text; takes them out of `members`, so that both are never in memory whole."""
    found: dict[str, str] = {}
    for path in list(members):
        with suppress(Refused):
            found[path] = decode(members.pop(path))
    return found


def _stripped(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Without the folder that all files are in."""
    tops = {path.partition("/")[0] for path in members}
    if len(tops) != 1 or not all("/" in path for path in members):
        return dict(members)
    return {path.partition("/")[2]: raw for path, raw in members.items()}


def _members(path: Path, limits: LimitConfig, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Regular files of a tar archive that are wanted and not too large. Raises Refused."""
    compression = next((end for end in COMPRESSIONS if path.name.endswith(end)), "")
    found: dict[str, bytes] = {}
    room = _MOST_TREE
    try:
        with opened(path, limits.input_bytes) as file:
            stream = Bounded(decompressed(file, compression), room_of(file, limits), limits.document_bytes)
            with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r:") as archive:
                for count, entry in enumerate(archive):
                    if count >= limits.members:
                        raise Refused("too_many_members")
                    archive.members.clear()  # type: ignore[attr-defined]  # it would remember every entry
                    name = entry.name.removeprefix("./")
                    if not entry.isreg() or not wanted(name) or entry.size > limits.document_bytes:
                        continue
                    inner = archive.extractfile(entry)
                    found[name] = inner.read() if inner is not None else b""
                    room -= len(found[name])
                    if room < 0:
                        raise Refused("too_large")
    except Refused:
        raise
    except Exception:  # parsers of hostile archives raise almost anything
        raise Refused("damaged") from None
    return found
