"""Repositories from source distributions: download, unpack, find modules and tests, install the test dependencies."""

from __future__ import annotations

import email
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.files import sha256_file
from glm5.tasks.swe import sdist_backend
from glm5.tasks.swe.candidate import Repository

PACKAGES, CONSTRAINTS = (Path(__file__).parent / name for name in ("packages.toml", "constraints.txt"))
MOST_UNPACKED = 200 << 20  # bytes
MOST_FILES = 20_000
PIP_S = 600.0
TEST_FOLDERS = {"test", "tests"}
NOT_SOURCE = {"docs", "doc", "examples", "example", "scripts", "benchmarks", "bench", "tools", "bin", "build", ".git"}
TEST_FILE = re.compile(r"(test_.*|.*_tests?|tests?)\.py")


@dataclass(frozen=True)
class Package:
    """An entry of the list of packages."""

    name: str
    version: str
    previous: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    licence: str = ""


def packages(path: Path = PACKAGES) -> tuple[list[Package], tuple[str, ...]]:
    """The list and the requirements that all have. Raises DataError if it is malformed."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        common = tuple(data["pytest"]["requires"])
        entries = [_package(name, entry) for name, entry in data["package"].items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a list of packages: {error!r:.200}") from None
    return entries, common


def _package(name: str, entry: dict[str, Any]) -> Package:
    previous, requires, tests = (tuple(entry.get(key, ())) for key in ("previous", "requires", "tests"))
    unknown = set(entry) - {"version", "previous", "requires", "tests", "licence"}
    if unknown:
        raise ValueError(f"{name}: unknown keys {sorted(unknown)}")
    return Package(name, entry["version"], previous, requires, tests, entry.get("licence", ""))


def pip(*arguments: str, modules: Path | None = None) -> None:
    """Run pip, with more `modules` that it can import. Raises DataError with its last line."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    env = None if modules is None else {**os.environ, "PYTHONPATH": str(modules)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PIP_S, env=env)
    except subprocess.TimeoutExpired:
        raise DataError(f"pip {' '.join(arguments[:4])} took longer than {PIP_S:.0f} s.") from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise DataError(f"pip {' '.join(arguments[:4])} failed: {''.join(last)[:300]}")


def download(name: str, version: str, folder: Path) -> Path:
    """The source distribution of one version, downloaded if it is not in `folder`. pip asks the package's build backend
    for metadata while it downloads. `sdist_backend` answers; the package's own code runs only if its backend is another
    one. Raises DataError."""
    folder.mkdir(parents=True, exist_ok=True)
    found = _sdist(name, version, folder)
    if found is None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wanted = ("download", "--no-binary", ":all:", "--no-deps", "-d", scratch, f"{name}=={version}")
            try:
                modules = sdist_backend.lay_out(Path(scratch, "backends"))
                pip(*wanted, "--no-build-isolation", "--use-pep517", modules=modules)
            except DataError:
                pip(*wanted)
            for file in Path(scratch).glob("*.*"):
                file.replace(folder / file.name)
        found = _sdist(name, version, folder)
    if found is None:
        raise DataError(f"{name} {version} has no source distribution as .tar.gz.")
    return found


def _sdist(name: str, version: str, folder: Path) -> Path | None:
    wanted = re.sub(r"[-_.]+", "-", f"{name}-{version}".lower())
    for file in sorted(folder.glob("*.tar.gz")):
        if re.sub(r"[-_.]+", "-", file.name[: -len(".tar.gz")].lower()) == wanted:
            return file
    return None


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack into `folder`, which then holds the repository itself; kept if it is there. Links are left out. Raises
    DataError for hostile archives."""
    if folder.is_dir():
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    size = 0
    try:
        with tarfile.open(archive) as tar:
            for number, member in enumerate(tar):
                inner = member.name.split("/", 1)[1:]
                if not member.isfile() or not inner:
                    continue
                size += member.size
                path = os.path.normpath(inner[0])
                if path.startswith(("/", "..")) or size > MOST_UNPACKED or number > MOST_FILES:
                    raise DataError(f"{archive} is too large or reaches outside of its folder.")
                target = part / path
                target.parent.mkdir(parents=True, exist_ok=True)
                file = tar.extractfile(member)
                assert file is not None
                target.write_bytes(file.read())
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{archive} cannot be unpacked: {error!r:.200}") from None
    part.replace(folder)
    return folder


def install(requirements: tuple[str, ...], folder: Path, constraints: Path | None = None) -> Path:
    """`folder/DIGEST/opt/site` with the requirements, installed from wheels once, in the versions of the file
    `constraints`. `folder/DIGEST` serves as the base tree of `FROM` in the tasks' Dockerfiles."""
    digest = hashlib.sha256("\n".join([sys.version, *sorted(requirements)]).encode()).hexdigest()[:16]
    base = folder / digest
    if not base.is_dir():
        part = folder / f"{digest}.part{os.getpid()}.{threading.get_ident()}"
        pinned = () if constraints is None else ("-c", str(constraints))
        pip("install", "--only-binary", ":all:", "--target", str(part / "opt/site"), *pinned, *requirements)
        try:
            part.replace(base)
        except OSError:  # another one was faster
            shutil.rmtree(part)
    return base / "opt/site"


def from_tree(
    root: Path,
    name: str,
    version: str,
    licence: str,
    origin: str,
    site: tuple[str, ...] = (),
    tests: tuple[str, ...] = (),
) -> Repository:
    """Look through a tree for import roots, modules and test files. Raises DataError if it has no tests."""
    paths = ("src", ".") if any((root / "src").glob("*/__init__.py")) or any((root / "src").glob("*.py")) else (".",)
    files = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py")) if path.is_file()]
    found = [f for f in files if TEST_FILE.fullmatch(f.rsplit("/", 1)[-1])] if not tests else list(tests)
    found = [f for f in found if not set(f.split("/")[:-1]) & NOT_SOURCE]
    if not found:
        raise DataError(f"{name} {version}: the tree has no test files.")
    parents = [path.split("/")[:-1] for path in files]
    folders = {"/".join(p[: i + 1]) for p in parents for i, name in enumerate(p) if name.lower() in TEST_FOLDERS}
    protected = tuple(sorted(folders | {f for f in found if not any(f.startswith(d + "/") for d in folders)}))
    sources = tuple(f for f in files if not _is_test(f, protected) and not set(f.split("/")) & NOT_SOURCE)
    sources = tuple(f for f in sources if f not in ("setup.py", "noxfile.py", "versioneer.py", "conftest.py"))
    return Repository(name, version, licence, origin, root, paths, tuple(found), protected, site=site, sources=sources)


def _is_test(path: str, protected: tuple[str, ...]) -> bool:
    return any(path == p or path.startswith(p + "/") for p in protected) or path.rsplit("/", 1)[-1] == "conftest.py"


def metadata(root: Path) -> tuple[str, str]:
    """(licence, summary) of an unpacked source distribution; "unknown" if it names none."""
    info = next((f for f in [root / "PKG-INFO", *root.glob("*.egg-info/PKG-INFO")] if f.is_file()), None)
    if info is None:
        return "unknown", ""
    head = email.message_from_string(info.read_bytes().decode("utf-8", "replace"))
    classifiers = [c.split(" :: ")[-1] for c in head.get_all("Classifier", []) if c.startswith("License :: ")]
    named = [head["License-Expression"], *classifiers, (head["License"] or "").splitlines()[:1]]
    texts = [n[0] if isinstance(n, list) and n else n for n in named]
    return next((str(t) for t in texts if t and t != "UNKNOWN" and t != "OSI Approved"), "unknown"), str(
        head["Summary"]
    )


def open_package(
    package: Package, common: tuple[str, ...], work: Path, version: str = "", constraints: Path | None = None
) -> Repository:
    """Download, unpack and equip one version of a package; see `install`. Raises DataError."""
    version = version or package.version
    archive = download(package.name, version, work / "sdists")
    root = unpack(archive, work / "trees" / archive.name[: -len(".tar.gz")])
    requirements = tuple(sorted({*common, *package.requires}))
    site = install(requirements, work / "bases", constraints)
    licence, _ = metadata(root)
    pinned = tuple(sorted(info.name[: -len(".dist-info")].replace("-", "==") for info in site.glob("*.dist-info")))
    found = from_tree(
        root, package.name, version, package.licence or licence, "sha256:" + sha256_file(archive),
        (str(site), str(_own_metadata(root, package.name, version, work))), package.tests,
    )  # fmt: skip
    return replace(found, packages=pinned)


def _own_metadata(root: Path, name: str, version: str, work: Path) -> Path:
    """A folder that tells `importlib.metadata` of the package itself."""
    folder = work / "metadata" / f"{name}-{version}"
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    source = root / "PKG-INFO"
    text = (
        source.read_bytes()
        if source.is_file()
        else f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    )
    (info / "METADATA").write_bytes(text)
    return folder
