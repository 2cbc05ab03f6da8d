"""Repositories in languages other than Python: npm packages and Debian source packages, with their test dependencies.

The list of packages of a language is `languages/packages/LANGUAGE.toml`, one table per package:

```
[package.NAME]
source = "npm"                # or "debian": a source package of one of the releases in debian.SUITES;
                              # or "deb": a binary package that has the source and its tests, such as a Rust crate;
                              # or "git": the versions are commits of the repository `origin`
origin = "libname"            # the package's name there, if it is not NAME; of git the URL
git = "https://a.b/c@COMMIT"  # its repository and the newest commit for the source `commits`, if `source` is another
licence = "MIT"               # of the repository; default: the first line of its licence
folder = "a/b"                # folder of the package (a glob) that is the repository; default: all
version = "1.2.3"
previous = ["1.2.2", "1.2.1"] # older versions, newest first, for the source `versions`; "ruby-x=1.2.1-1" is a
                              # Debian binary package, which serves as the older of two versions only
framework = "mocha"           # see in_room/suite.py
tests = ["test/*.js"]         # globs of the test files
sources = ["lib/**/*.js"]     # globs of the files that may be changed; default: all that are no tests
requires = ["mocha@10.2.0"]   # npm packages, or Debian packages of the language
protected = []                # further files, folders and name patterns that belong to the tests
paths = ["lib"]               # import roots; of Go the import path, if neither go.mod nor Debian's control file has it;
                              # of vitest NAME=PATH: what an import of NAME means, longer names first
args = []                     # further arguments of the test program
keep = ["src"]                # globs of what belongs to the repository at all; default: everything. npm packages often
                              # have what was built from the sources beside them, so that every fix stands there too
```
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.errors import DataError
from glm5.files import sha256_file
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.commits import Files, commit_tree
from glm5.tasks.swe.debian import Patch, SourceTree, binary_tree, download, run, source_tree
from glm5.tasks.swe.driver import fill_cache
from glm5.tasks.swe.git import clone
from glm5.tasks.swe.languages import compiled, crates
from glm5.tasks.swe.languages.table import SYNTAX
from glm5.tasks.swe.patches import below
from glm5.tasks.swe.repositories import unpack

LISTS = Path(__file__).parent / "packages"
NOT_SOURCE = set(
    "docs doc examples example scripts benchmarks benchmark bench tools bin build debian .pc node_modules vendor "
    "testdata dist cmd fixtures gen third_party".split()
)
NO_SOURCE_FILE = re.compile(
    r"(_test\.go|\.d\.ts|\.min\.js|\.(test|spec)\.\w+|(^|/)(Gruntfile|gulpfile|Rakefile|.*\.config)\.\w+)$"
)
PROTECTED = {
    "javascript": ("package.json",), "typescript": ("package.json", "tsconfig.json"), "go": ("*_test.go", "go.mod"),
    "php": ("composer.json",), "ruby": (), **compiled.PROTECTED,
}  # fmt: skip
SYSTEM = {
    "javascript": "nodejs npm", "typescript": "nodejs npm", "go": "golang-go", "php": "php-cli phpunit",
    "ruby": "ruby ruby-rspec ruby-minitest ruby-test-unit", **compiled.SYSTEM,
}  # fmt: skip
LIBRARIES = {
    "ruby": "usr/lib/ruby/vendor_ruby usr/lib/ruby/vendor_ruby/concurrent-ruby "
    "usr/share/rubygems-integration/*/gems/*/lib",
    "php": "usr/share/php",
    "go": "usr/share/gocode",
}
BINARY = {
    "ruby": dict.fromkeys(("usr/lib/ruby/vendor_ruby", "usr/share/rubygems-integration/*/gems/*/lib"), "lib"),
    "rust": {"usr/share/cargo/registry/*": "."},
}  # binary packages: folder with source files, its place in the repository


@dataclass(frozen=True)
class Package:
    """An entry of a language's list."""

    name: str
    source: str
    framework: str
    tests: tuple[str, ...]
    version: str
    previous: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    paths: tuple[str, ...] = (".",)
    args: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    origin: str = ""
    build: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    keep: tuple[str, ...] = ()
    licence: str = ""
    git: str = ""

    @property
    def history(self) -> Package | None:
        """This package in its git repository, if one is named."""
        if self.source == "git":
            return self
        origin, _, commit = self.git.rpartition("@")
        return replace(self, source="git", origin=origin, version=commit, git="", previous=()) if origin else None


def packages(language: str, path: Path | None = None) -> list[Package]:
    """A language's list. Raises DataError if there is none or it is malformed."""
    path = path or LISTS / f"{language}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return [_entry(name, {**data.get("all", {}), **row}) for name, row in data["package"].items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a list of packages: {error!r:.200}") from None


def _entry(name: str, row: dict[str, Any]) -> Package:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    made = Package(name, **values)
    if made.git and (made.source == "git" or not re.fullmatch(r"https://.+@\w+", made.git)):
        raise ValueError(f"{name}: git is https://...@COMMIT, if source is not git")
    if made.source == "git" and not (made.origin and made.version):
        raise ValueError(f"{name}: git needs an origin and a version")
    if made.history and made.folder:
        raise ValueError(f"{name}: a folder of a git repository cannot be a package")
    return made


def open_package(
    package: Package, language: str, work: Path, version: str = ""
) -> tuple[Repository, tuple[Patch, ...]]:
    """Download, unpack and equip a version of a package (default: the listed one); the repository and the patches that
    are applied to it. Raises DataError."""
    opened: dict[str, Callable[[str, str, Path], SourceTree]] = {
        "npm": _npm, "debian": source_tree, "deb": functools.partial(_binary, language),
        "git": functools.partial(_commit, package, language),
    }  # fmt: skip
    if package.source not in opened:
        raise DataError(f"{package.name}: unknown source {package.source!r}; there are {', '.join(opened)}.")
    if "=" in version:
        name, _, older = version.partition("=")
        tree = _binary(language, name, older, work)
        return Repository(package.name, tree.version, tree.licence, tree.origin, tree.root, (), (), ()), ()
    tree = opened[package.source](package.origin or package.name, version or package.version, work)
    if package.folder:
        root = next(iter(sorted(tree.root.glob(package.folder))), tree.root)
        if root == tree.root or not root.is_dir():
            raise DataError(f"{package.name} {tree.version} has no folder {package.folder}.")
        inside = root.relative_to(tree.root).as_posix()
        tree = replace(tree, root=root, patches=tuple(below(patch, inside) for patch in tree.patches))
    if package.keep:
        tree = replace(tree, root=kept(tree, package.keep, work))
    if package.framework == "cargo":
        crates.simplify(tree.root)
    site = () if language in compiled.LANGUAGES else (str(install(package.requires, language, work / "bases")),)
    found = from_tree(tree, package, language, site)
    copies = (path.parent for base in site for path in Path(base).rglob(f"node_modules/{package.name}/package.json"))
    found = replace(found, fixed_copy=str(next(copies, "")).removeprefix(site[0] + "/") if site else "")
    if package.framework == "cc":
        found = replace(found, site=(str(object_cache(found, work)),))
    return found, tree.patches


def kept(tree: SourceTree, patterns: Sequence[str], work: Path) -> Path:
    """A copy of a tree with the files and folders that fit one of the patterns, made once."""
    key = hashlib.sha256("\0".join([tree.origin, *patterns]).encode()).hexdigest()[:16]
    folder = work / "trees" / f"kept-{key}"
    if not folder.is_dir():
        part = folder.with_name(f"part{os.getpid()}.{threading.get_ident()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for path in {path for pattern in patterns for path in tree.root.glob(pattern)}:
            target = part / path.relative_to(tree.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy(path, target, follow_symlinks=False)
        part.replace(folder)
    return folder


def object_cache(repository: Repository, work: Path) -> Path:
    """A folder `ccache` with the objects of the fixed state, made once; empty if this machine has no ccache."""
    key = json.dumps([repository.origin, repository.test_files, dict(repository.build)], sort_keys=True)
    folder = work / "objects" / hashlib.sha256(key.encode()).hexdigest()[:16] / "ccache"
    if not folder.is_dir():
        part = folder.with_name(f"part{os.getpid()}.{threading.get_ident()}")
        part.mkdir(parents=True)
        for path, data in fill_cache(repository).items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_bytes(data)
        part.replace(folder)
    return folder


def from_tree(tree: SourceTree, package: Package, language: str, site: tuple[str, ...] = ()) -> Repository:
    """Find test files and sources in a tree. Raises DataError if it has no tests."""
    root = tree.root
    excluded = {path for pattern in package.exclude for path in root.glob(pattern)}
    tests = _matching(root, package.tests, excluded)
    if not tests:
        raise DataError(f"{package.name} {tree.version}: no file fits {', '.join(package.tests)}.")
    tops = {file.split("/", 1)[0] for file in tests if "/" in file and file.split("/", 1)[0] in TEST_TOPS}
    protected = {*tops, *(f for f in tests if f.split("/", 1)[0] not in tops), *PROTECTED[language], *package.protected}
    found = _matching(root, package.sources or ("**/*",), excluded)
    sources = tuple(f for f in found if f not in tests and _is_source(f, language))
    args = package.args
    if language == "go":
        args = (package.paths[0] if package.paths != (".",) else _import_path(tree), *args)
    return Repository(
        package.name, tree.version, tree.licence, tree.origin, root, package.paths, tuple(tests),
        tuple(sorted(protected)), framework=package.framework, site=site, packages=package.requires, sources=sources,
        language=language, args=args, build=package.build,
    )  # fmt: skip


def files_of(package: Package, language: str) -> Files:
    """Which paths in the history of a package are its sources and tests."""
    globs = (package.tests, package.exclude, package.sources or ("**/*",))
    tests, excluded, sources = (_pattern(patterns) for patterns in globs)

    def is_test(path: str) -> bool:
        return tests.fullmatch(path) is not None and not excluded.fullmatch(path)

    return Files(lambda p: not is_test(p) and _is_source(p, language) and sources.fullmatch(p) is not None, is_test)


def _is_source(path: str, language: str) -> bool:
    return (
        path.endswith(tuple(SYNTAX[language].grammars))
        and not set(path.split("/")[:-1]) & (NOT_SOURCE | TEST_TOPS)
        and not NO_SOURCE_FILE.search(path)
    )


def _pattern(globs: Sequence[str]) -> re.Pattern[str]:
    """What `Path.glob` finds for one of `globs`. Raises DataError for what only `glob` understands."""
    for glob in globs:
        if "[" in glob or glob.endswith("**") or "." in glob.split("/"):
            raise DataError(f"A glob of a package in git has no [, no ** at its end and no folder '.': {glob}.")
    parts = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    found = ("".join(parts.get(t, re.escape(t)) for t in re.split(r"(\*\*/|\*|\?)", glob)) for glob in globs)
    return re.compile("|".join(found), re.DOTALL)


TEST_TOPS = {"test", "tests", "spec", "Tests", "Test", "__tests__"}


def _matching(root: Path, patterns: Sequence[str], excluded: set[Path]) -> list[str]:
    found = {p for pattern in patterns for p in root.glob(pattern) if p.is_file() and not p.is_symlink()}
    return sorted(p.relative_to(root).as_posix() for p in found - excluded)


def _import_path(tree: SourceTree) -> str:
    """A Go repository's import path, from Debian's control file or go.mod. Raises DataError."""
    module = tree.root / "go.mod"
    found = re.search(r"^XS-Go-Import-Path:\s*([^\s,]+)", tree.control, re.MULTILINE)
    if found is None and module.is_file():
        found = re.search(r"^module\s+(\S+)", module.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise DataError(f"{tree.root}: neither go.mod nor debian/control names the import path.")
    return found[1].strip('"')


def _binary(language: str, name: str, version: str, work: Path) -> SourceTree:
    if language not in BINARY:
        raise DataError(f"{name}: binary packages of {language} have no source files.")
    return binary_tree(name, version, BINARY[language], work)


def _commit(package: Package, language: str, origin: str, version: str, work: Path) -> SourceTree:
    repo = clone(origin, package.name, version, work)
    tree = commit_tree(repo, package.name, version, work, files_of(package, language))
    return replace(tree, licence=package.licence or tree.licence)


def _npm(name: str, version: str, work: Path) -> SourceTree:
    folder = work / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.lstrip('@').replace('/', '-')}-{version}"
    archive = folder / f"{stem}.tgz"
    if not archive.is_file():
        run("npm", "pack", "--silent", f"{name}@{version}", "--pack-destination", str(folder))
    root = unpack(archive, work / "trees" / f"npm-{stem}")
    licence = json.loads((root / "package.json").read_text(encoding="utf-8")).get("license", "unknown")
    return SourceTree(root, version, str(licence), "sha256:" + sha256_file(archive))


def install(requirements: Sequence[str], language: str, folder: Path) -> Path:
    """`folder/DIGEST/opt/site` with the test dependencies, installed once: `node_modules`, or `ruby`, `php`, `gocode`
    from Debian packages. No package's install script runs."""
    digest = hashlib.sha256("\n".join([language, *sorted(requirements)]).encode()).hexdigest()[:16]
    base = folder / digest
    if not base.is_dir():
        part = folder / f"{digest}.part{os.getpid()}.{threading.get_ident()}"
        shutil.rmtree(part, ignore_errors=True)
        site = part / "opt/site"
        site.mkdir(parents=True)
        if requirements and language in ("javascript", "typescript"):
            options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--no-bin-links", "--loglevel=error"]
            (site / "package.json").write_text("{}\n", encoding="utf-8")
            run("npm", "install", "--prefix", str(site), *options, *sorted(requirements))
        elif requirements:
            _debs(requirements, site, language, folder.parent)
        try:
            part.replace(base)
        except OSError:  # another one was faster
            shutil.rmtree(part)
    return base / "opt/site"


def _debs(requirements: Sequence[str], site: Path, language: str, work: Path) -> None:
    with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
        download(requirements, Path(scratch), work)
        for library in LIBRARIES[language].split():
            for folder in sorted(Path(scratch).glob(f"all/{library}")):
                shutil.copytree(folder, site / language, symlinks=True, dirs_exist_ok=True)


def docker(repository: Repository) -> str:
    """The Dockerfile of a task. A base image that has the test dependencies at /opt/site already needs no network."""
    needs = " ".join(f"'{package}'" for package in repository.packages)
    install = ""
    if needs and repository.language in ("javascript", "typescript"):
        install = f"RUN test -d /opt/site || npm install --ignore-scripts --prefix /opt/site {needs}\n"
    elif needs:
        folders = " ".join(f"/{library}/." for library in LIBRARIES[repository.language].split())
        install = (
            f"RUN test -d /opt/site || (apt-get update && apt-get install -y --no-install-recommends {needs} && "
            f"mkdir -p /opt/site/{repository.language} && cp -r {folders} /opt/site/{repository.language})\n"
        )
    link = "RUN ln -s /opt/site/node_modules node_modules\n" if "npm" in install else ""
    return (
        f"FROM debian:bookworm-slim\nRUN apt-get update && apt-get install -y --no-install-recommends python3 patch "
        f"{SYSTEM[repository.language]}\n{install}COPY repo /app\nWORKDIR /app\n{link}"
    )
