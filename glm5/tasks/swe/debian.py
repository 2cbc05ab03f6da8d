"""Repositories from Debian's source packages, by apt-get with lists of its own: the machine's settings and lists stay
as they are. The lists name the sources of several releases, so that a package is there in several versions."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5.errors import DataError
from glm5.files import sha256_file
from glm5.tasks.swe.repositories import unpack

CLIENT_S = 900.0
ENDS = {".c", ".h", ".cpp", ".cc", ".hpp", ".java", ".rs"}  # files whose lines shall end in one way
SUITES = ("bullseye", "bookworm", "trixie", "sid")
FORMAT = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Patch:
    """A patch of the package's series, in the order in which they are applied. `header` is what stands above the first
    diff line."""

    name: str
    header: str
    text: str


@dataclass(frozen=True)
class SourceTree:
    """An unpacked source package. Of Debian's packages the patches are applied and the folder `debian` is left out, but
    for the text of `debian/control`. `origin` names the archive's SHA-256."""

    root: Path
    version: str
    licence: str
    origin: str
    patches: tuple[Patch, ...] = ()
    control: str = ""


def source_tree(name: str, version: str, work: Path) -> SourceTree:
    """Download and unpack a source package below `work`; kept if it is there. Raises DataError."""
    folder = work / "debian" / f"{name}_{version.replace('/', '_')}"
    with _LOCK:
        if not folder.is_dir():
            _download(name, version, folder, work / "apt")
    licence, control = ((folder / name).read_text(encoding="utf-8") for name in ("licence", "control"))
    patches = tuple(_patch(path) for path in sorted((folder / "patches").iterdir()))
    archive = next(path for pattern in ("*.dsc", "*.tar.*") for path in sorted(folder.glob(pattern)))
    origin = "sha256:" + sha256_file(archive)
    return SourceTree(folder / "tree", version, licence, origin, patches, control)


def _download(name: str, version: str, folder: Path, apt: Path) -> None:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    client = ["apt-get", *apt_options(apt), "source", "--download-only"]
    tree, debian, names = part / "tree", part / "tree/debian", []
    try:
        run(*client, f"{name}={version}", cwd=part)
        run("dpkg-source", "--no-check", "-x", next(part.glob("*.dsc")).name, "tree", cwd=part)
        names = _series(debian)
    except DataError:  # not every mirror has all files; the .dsc is the one that is missing most often
        with contextlib.suppress(DataError):
            run(*client, "--tar-only", f"{name}={version}", cwd=part)
        names = _assemble(sorted(part.glob("*.tar.*")), tree)
    for file, text in (("licence", licence(tree)), ("control", _text(debian / "control"))):
        (part / file).write_text(text, encoding="utf-8")
    (part / "patches").mkdir()
    for number, patch in enumerate(names):
        shutil.copy(debian / "patches" / patch, part / "patches" / f"{number:03d}_{patch.replace('/', '_')}")
    _clean(tree)
    part.replace(folder)


def _series(debian: Path) -> list[str]:
    """The names of the package's patches, in the order in which they are applied."""
    lines = _text(debian / "patches/series").splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def _assemble(archives: Sequence[Path], tree: Path) -> list[str]:
    """Make the tree from the archives alone; the names of the patches that are applied. Without the packaging's archive
    there are none. Raises DataError if upstream's archive is missing or a patch cannot be applied."""
    packaging = [path for path in archives if ".debian.tar." in path.name]
    upstream = [path for path in archives if path not in packaging]
    if not upstream:
        raise DataError(f"{tree.parent.name.removesuffix('.part')}: the mirror lacks the archive of the source.")
    shutil.rmtree(tree, ignore_errors=True)
    unpack(upstream[0], tree)
    if not packaging:
        return []
    shutil.rmtree(tree / "debian", ignore_errors=True)
    unpack(packaging[0], tree / "debian")
    names = _series(tree / "debian")
    for name in names:
        run("patch", "-p1", "--batch", "--no-backup-if-mismatch", "-i", f"debian/patches/{name}", cwd=tree)
    return names


def _clean(tree: Path) -> None:
    """Without the folder `debian` and links; lines of source end in one way."""
    for name in ("debian", ".pc"):
        shutil.rmtree(tree / name, ignore_errors=True)
    for path in tree.rglob("*"):
        if path.is_symlink():
            path.unlink()
        elif path.suffix in ENDS and path.is_file() and b"\r\n" in (data := path.read_bytes()):
            path.write_bytes(data.replace(b"\r\n", b"\n"))


def binary_tree(name: str, version: str, roots: Mapping[str, str], work: Path) -> SourceTree:
    """The source files in a binary package of any release in SUITES, such as Ruby libraries and Rust crates: mirrors
    keep binary packages that they have no source of. `roots` are patterns of folders in the package, with the folder of
    the tree that their content goes to. Raises DataError if the package has none of them."""
    folder = work / "debian" / f"{name}={version.replace('/', '_')}"
    with _LOCK:
        if not folder.is_dir():
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            client = ["apt-get", *apt_options(work / "apt-releases", releases=True)]
            run(*client, "download", f"{name}={version}", cwd=part)
            run("dpkg-deb", "-x", next(part.glob("*.deb")).name, "all", cwd=part)
            found = [
                (path, target) for pattern, target in roots.items() for path in sorted(part.glob(f"all/{pattern}"))
            ]
            if not found:
                raise DataError(f"{name} {version} has no folder {', '.join(roots)}.")
            for path, target in found:
                shutil.copytree(path, part / "tree" / target, symlinks=True, dirs_exist_ok=True)
            _clean(part / "tree")
            copyright_ = next(iter(sorted((part / "all/usr/share/doc").glob("*/copyright"))), part / "none")
            (part / "licence").write_text(_licence(_text(copyright_)) or "unknown", encoding="utf-8")
            shutil.rmtree(part / "all")
            part.replace(folder)
    said = (folder / "licence").read_text(encoding="utf-8")
    return SourceTree(folder / "tree", version, said, "sha256:" + sha256_file(next(folder.glob("*.deb"))))


def download(names: Sequence[str], folder: Path, work: Path) -> None:
    """Unpack binary packages of this machine's release into one folder. Raises DataError."""
    with _LOCK:
        run("apt-get", *apt_options(work / "apt"), "download", *sorted(names), cwd=folder)
    for file in sorted(folder.glob("*.deb")):
        run("dpkg-deb", "-x", str(file), "all", cwd=folder)


def apt_options(folder: Path, releases: bool = False) -> list[str]:
    """Options of apt-get for lists of its own, made in `folder` from the repositories that the machine has: binary
    packages of its own release and the sources of SUITES, or with `releases` the binary packages of SUITES."""
    sources = folder / "sources.list"
    values = {
        "Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": os.devnull, "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache", "APT::Sandbox::User": "root",
    }  # fmt: skip
    options = ["-q", *(part for key, value in values.items() for part in ("-o", f"{key}={value}"))]
    if not (folder / "ready").exists():
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        rows = run("apt-get", "indextargets", "--format", FORMAT, "Created-By: Packages").splitlines()
        own = {(row[0], row[1], row[2]) for row in map(str.split, rows) if row[3:] == ["Debian"]}
        more = {(uri, suite, "main") for uri, _, _ in own if uri.rstrip("/").endswith("/debian") for suite in SUITES}
        kinds = [("deb", row) for row in own] + [("deb-src", row) for row in own | more]
        kinds = [("deb", row) for row in own | more] if releases else kinds
        kinds.sort(key=lambda kind: ("-security" in kind[1][0], kind))  # that archive lists sources which it lacks
        lines = [f"{kind} {' '.join(row)}" for kind, row in kinds]
        sources.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run("apt-get", *options, "update")
        (folder / "ready").touch()
    return options


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a package client; its standard output. Raises DataError with its last line."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=CLIENT_S,
                              stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{command[0]} did not run: {error}.") from None
    if done.returncode:
        said = [s for s in (done.stdout + done.stderr).splitlines() if s.strip() and "complete log" not in s]
        raise DataError(f"{command[0]} {command[-1]} failed: {' '.join(said[-2:])[:300]}")
    return done.stdout


def licence(root: Path) -> str:
    """The licence that `debian/copyright` gives to most files, or the first line of a file LICENSE or COPYING."""
    known = _licence(_text(root / "debian/copyright"))
    if known:
        return known
    files = sorted(path for pattern in ("LICEN[SC]E*", "COPYING*") for path in root.glob(pattern) if path.is_file())
    found = re.search(r"^\W*(\S.*)$", _text(files[0]) if files else "", re.MULTILINE)
    return found[1].strip()[:80] if found else "see debian/copyright"


def _licence(text: str) -> str:
    """The licence that a file `copyright` gives to most files, or ""."""
    found = re.search(r"^Files:\s*\*\s*\n(?:(?!License:).*\n)*License:[ \t]*(\S.*)$", text, re.MULTILINE)
    found = found or re.search(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)
    return found[1].strip()[:80] if found else ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _patch(path: Path) -> Patch:
    text = path.read_bytes().decode(errors="replace")
    start = re.search(r"^(?:diff |Index: |--- )", text, re.MULTILINE)
    return Patch(
        path.name.split("_", 1)[1], text[: start.start()] if start else text, text[start.start() if start else 0 :]
    )
