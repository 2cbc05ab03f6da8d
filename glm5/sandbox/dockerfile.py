"""Reads a Dockerfile into a plan for a room, without Docker: FROM, RUN, COPY, ADD, WORKDIR, ENV, ARG, USER, SHELL.

A plan has no image layers: the base is a named tree of this machine (`BASES`), and RUN commands run in a room without
network. What cannot be done there is a `Blocker` with a kind, found before anything runs:

    base          FROM names an image that no tree stands for
    multi-stage   several FROM, or COPY --from
    network       a command downloads
    apt-get       a package that is not installed here; installing a present one does nothing
    read-only     COPY to a folder that rooms show read-only
    copy          the source of a COPY is not in the context, or its target cannot be written
    instruction   an instruction or an option outside the subset
    syntax        not a Dockerfile
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from glm5.sandbox.dockerfile_run import Blocked, check_run

MOST_CHARS = 1 << 18
MOST_STEPS = 500
BASES: Mapping[str, tuple[str, ...]] = {
    "ubuntu": (), "debian": (), "buildpack-deps": ("gcc", "make", "git"), "python": ("python3",), "gcc": ("gcc",),
    "node": ("node",), "openjdk": ("java",), "eclipse-temurin": ("java",), "rust": ("cargo",), "golang": ("go",),
    "ruby": ("ruby",), "php": ("php",), "perl": ("perl",),
}  # fmt: skip
"""Images for which this machine's /usr stands, with the programs that it must have for that."""
READ_ONLY = re.compile(r"/(?:bin|dev|lib|lib32|lib64|proc|sbin|sys|usr(?!/local(?:/|$)))(?:/.*)?")
RESERVED = re.compile(r"/(?:logs|solution|tests)(?:/.*)?")
"""Folders that belong to a trial, so that no image can fill them."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IGNORED = {"LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL", "MAINTAINER", "HEALTHCHECK", "CMD", "ENTRYPOINT"}
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)(?::([-+])([^}]*))?\}|([A-Za-z_]\w*))", re.DOTALL)
_HEREDOC = re.compile(r"<<(-?)([\"']?)([A-Za-z_]\w*)\2")
_WILD = re.compile(r"(\*|\?|\[[^]/]+\])")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s*")


@dataclass(frozen=True)
class Blocker:
    """Why a Dockerfile cannot be carried out here."""

    kind: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message} ({self.kind})"


@dataclass(frozen=True)
class Run:
    """A command for bash."""

    line: int
    command: str
    workdir: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Copy:
    """Files or folders of the context, or inline text, for the folder or the file `target`. `into` says that it is a
    folder; None: look. With `unpack`, archives are unpacked. `mode` 0: 755 for executable files, 644 for others."""

    line: int
    sources: tuple[str, ...]
    target: str
    into: bool | None
    unpack: bool = False
    mode: int = 0
    inline: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What a Dockerfile asks for. `blockers` is empty if it can be tried; `notes` say what is done differently."""

    base: str
    steps: tuple[Run | Copy, ...]
    env: Mapping[str, str]
    workdir: str
    blockers: tuple[Blocker, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Base:
    """What a base tree has: for the question whether an install has nothing to do."""

    packages: Collection[str] = frozenset()
    """Debian packages."""
    python: Collection[str] = frozenset()
    """Python distributions, with normalised names."""
    programs: Collection[str] = frozenset()


def base_name(image: str) -> str:
    """The key of `BASES` for an image: `docker.io/library/python:3.13-slim` and `ghcr.io/x/python-3-13:2` are
    `python`."""
    last = image.partition("@")[0].rsplit("/", 1)[-1].partition(":")[0]
    return re.sub(r"(-\d+)+$", "", last)


def read_dockerfile(
    text: str,
    context: Collection[str],
    base: Base,
    *,
    bases: Collection[str] = (),
    args: Mapping[str, str] | None = None,
    present: Collection[str] = (),
) -> Plan:
    """The plan of a Dockerfile. `context` are the paths of the files beside it (with a slash at the end: of an
    empty folder), `bases` names of further base trees,
    `args` values for ARG, `present` folders that the room has before the build: what comes after `test -d FOLDER ||`
    is not looked at, for it does not run."""
    reader = _Reader(context, base, bases, args or {}, present)
    try:
        if len(text) > MOST_CHARS:
            raise Blocked("syntax", f"more than {MOST_CHARS:,} characters")
        for line, keyword, rest, documents in _instructions(text):
            reader.line = line
            reader.take(keyword, rest, documents)
        if not reader.base:
            raise Blocked("syntax", "there is no FROM")
    except Blocked as error:
        reader.block(error)
    return Plan(
        reader.base, tuple(reader.steps), reader.env, reader.workdir, tuple(reader.blockers), tuple(reader.notes)
    )


class _Reader:
    def __init__(
        self,
        context: Collection[str],
        base: Base,
        bases: Collection[str],
        args: Mapping[str, str],
        present: Collection[str],
    ) -> None:
        self.context, self.installed, self.bases, self.given, self.present = context, base, bases, args, present
        self.line, self.base, self.workdir = 1, "", "/"
        self.env, self.args = dict[str, str](), dict[str, str]()
        self.steps, self.blockers, self.notes = list[Run | Copy](), list[Blocker](), list[str]()

    def take(self, keyword: str, rest: str, documents: Mapping[str, str]) -> None:
        handler: Callable[[str, Mapping[str, str]], None] | None = getattr(self, f"_{keyword.lower()}", None)
        if len(self.steps) >= MOST_STEPS:
            raise Blocked("instruction", f"more than {MOST_STEPS} steps")
        if keyword in _IGNORED:
            self.notes.append(f"line {self.line}: {keyword} is ignored.")
            return
        if handler is None:
            raise Blocked("syntax" if not keyword.isalpha() else "instruction", f"{keyword[:20]} is not supported")
        if not self.base and keyword not in ("FROM", "ARG"):
            raise Blocked("syntax", f"{keyword} comes before FROM")
        try:
            handler(rest, documents)
        except Blocked as error:
            if error.kind in ("syntax", "base", "multi-stage"):
                raise
            self.block(error)

    def block(self, error: Blocked) -> None:
        self.blockers.append(Blocker(error.kind, self.line, str(error)))

    def expand(self, text: str) -> str:
        values = {"PATH": PATH, **self.args, **self.env}

        def value(match: re.Match[str]) -> str:
            if match[1] is not None:
                return match[1] if match[1] == "$" else match[0]
            name = match[2] or match[5]
            if match[3] == "-":
                return values.get(name) or match[4]
            if match[3] == "+":
                return match[4] if values.get(name) else ""
            return values.get(name, "")

        return _VARIABLE.sub(value, text)

    def place(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir, path)).replace("//", "/")

    def _from(self, rest: str, _: Mapping[str, str]) -> None:
        if self.base:
            raise Blocked("multi-stage", "a second FROM: several stages are not supported")
        flags, rest = _flags(self.expand(rest))
        if flags.get("platform", "linux/amd64") not in ("linux/amd64", "linux/x86_64"):
            self.notes.append(f"line {self.line}: --platform is ignored.")
        image = rest.split()[0] if rest.split() else ""
        name = image if image in self.bases else base_name(image)
        if name not in self.bases and name not in BASES:
            raise Blocked("base", f"no base tree for {image[:80] or 'an image without a name'}")
        missing = [] if name in self.bases else [p for p in BASES[name] if p not in self.installed.programs]
        if missing:
            raise Blocked("base", f"{image[:80]} needs {', '.join(missing)}, which this machine lacks")
        self.base, self.args = name, {}
        if name in BASES and name not in self.bases:
            self.notes.append(f"line {self.line}: {image[:80]} is this machine's /usr.")

    def _arg(self, rest: str, _: Mapping[str, str]) -> None:
        for word in _words(rest):
            name, equals, value = word.partition("=")
            if name in self.given:
                self.args[name] = self.given[name]
            elif equals:
                self.args[name] = self.expand(value)

    def _env(self, rest: str, _: Mapping[str, str]) -> None:
        first = rest.split(None, 1)
        if first and "=" not in first[0]:  # the older form: ENV NAME the rest is the value
            self.env[first[0]] = self.expand(first[1] if len(first) > 1 else "")
            return
        for word in _words(rest):
            name, equals, value = word.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise Blocked("syntax", f"ENV {word[:40]} is not NAME=VALUE")
            self.env[name] = self.expand(value)

    def _workdir(self, rest: str, _: Mapping[str, str]) -> None:
        self.workdir = self.place(self.expand(_unquoted(rest)))
        if RESERVED.fullmatch(self.workdir):
            raise Blocked("read-only", f"WORKDIR {self.workdir[:80]} is reserved for the trial")
        self.steps.append(Run(self.line, f"mkdir -p {shlex.quote(self.workdir)}", "/", {}))

    def _user(self, rest: str, _: Mapping[str, str]) -> None:
        self.notes.append(f"line {self.line}: USER {rest[:40]} is ignored: a room has one ordinary user.")

    def _shell(self, rest: str, _: Mapping[str, str]) -> None:
        words = _json_list(rest) or []
        if not words or posixpath.basename(words[0]) not in ("sh", "bash"):
            raise Blocked("instruction", f"SHELL {rest[:40]}: RUN commands are for bash")

    def _run(self, rest: str, documents: Mapping[str, str]) -> None:
        flags, rest = _flags(rest)
        mount = flags.get("mount", "type=cache")
        if "type=cache" not in mount and "type=tmpfs" not in mount:
            raise Blocked("instruction", f"RUN --mount={mount[:40]}")
        words = _json_list(rest)
        command = shlex.join(words) if words else rest
        if documents and not words:  # RUN <<EOF: the document is the script, or the command's standard input
            alone = _HEREDOC.fullmatch(rest.strip())
            script = "\n".join(documents.values())
            command = script if alone else f"{rest}\n" + "".join(f"{d}{name}\n" for name, d in documents.items())
        guard = re.match(r"test -d (\S+) \|\| ", command)
        if guard is None or guard[1] not in self.present:
            check_run(command, self.installed, self.expand, self.notes.append)
        self.steps.append(Run(self.line, command, self.workdir, {**self.args, **self.env}))

    def _add(self, rest: str, documents: Mapping[str, str]) -> None:
        self._copy(rest, documents, unpack=True)

    def _copy(self, rest: str, documents: Mapping[str, str], unpack: bool = False) -> None:
        flags, rest = _flags(rest)
        if "from" in flags:
            raise Blocked("multi-stage", f"COPY --from={str(flags['from'])[:40]}")
        unknown = set(flags) - {"chown", "chmod", "link"}
        if unknown:
            raise Blocked("instruction", f"COPY --{min(unknown)}")
        words = [self.expand(word) for word in _json_list(rest) or _words(rest)]
        if len(words) < 2:
            raise Blocked("syntax", "COPY needs a source and a target")
        *named, target = words
        named = [name for name in named if not _HEREDOC.fullmatch(name)]
        if any(re.match(r"[a-z+]+://|git@", name) for name in named):
            raise Blocked("network", f"ADD {named[0][:80]}")
        place = self.place(target)
        if READ_ONLY.fullmatch(place) or RESERVED.fullmatch(place):
            raise Blocked("read-only", f"COPY to {place[:80]}, which cannot be filled")
        sources = [source for name in named for source in self._sources(name)]
        folder = target.endswith("/") or target in (".", "..") or place in ("/", self.workdir)
        folders = [source for source in sources if source not in self.context]
        into = True if folder or folders or len(sources) + len(documents) > 1 else None
        self.steps.append(
            Copy(self.line, tuple(sources), place, into, unpack, _mode(flags.get("chmod", "")), documents)
        )

    def _sources(self, name: str) -> list[str]:
        """Files and folders (with a slash at the end; "" is everything) of the context that match `name`."""
        clean = posixpath.normpath(name.lstrip("/") or ".")
        if clean == ".":
            return [""]
        if clean.startswith(".."):
            raise Blocked("copy", f"{name[:80]} is outside the context")
        try:
            pattern = re.compile(_pattern(clean))
        except re.error:
            raise Blocked("syntax", f"{name[:80]} is no pattern of files") from None
        files = [file for file in self.context if pattern.fullmatch(file)]
        parents = {str(folder) for file in self.context for folder in PurePosixPath(file).parents}
        parents |= {file.rstrip("/") for file in self.context if file.endswith("/")}
        folders = sorted(f"{folder}/" for folder in parents if pattern.fullmatch(folder))
        if not files and not folders:
            raise Blocked("copy", f"{name[:80]} is not in the context")
        return sorted(files) + folders


def _mode(text: str) -> int:
    if text in ("+x", "a+x", "ugo+x"):
        return 0o755
    if text and not re.fullmatch(r"0?[0-7]{3}", text):
        raise Blocked("instruction", f"--chmod={text[:20]}")
    return int(text or "0", 8)


def _pattern(name: str) -> str:
    """A regular expression for Docker's file patterns: `*` and `?` match within a folder, `[...]` a set."""
    pieces = [""]  # between the stars
    for number, part in enumerate(_WILD.split(name)):
        if part == "*":
            pieces.append("")
        else:  # every second part is one that _WILD has found
            pieces[-1] += "[^/]" if part == "?" else part if number % 2 else re.escape(part)
    first, *others = pieces
    if not others:
        return first
    # Atomic groups: each piece matches at its first place only. Otherwise many stars would backtrack without end.
    return first + "".join(f"(?>[^/]*?{piece})" for piece in others[:-1]) + f"[^/]*{others[-1]}"


def _instructions(text: str) -> Iterator[tuple[int, str, str, dict[str, str]]]:
    """(line, keyword, rest, documents by name) of every instruction."""
    lines = text.replace("\r\n", "\n").split("\n")
    directive = re.match(r"#\s*escape\s*=\s*(\S)", lines[0], re.IGNORECASE)
    escape = directive[1] if directive else "\\"
    at = 0
    while at < len(lines):
        start, joined = at, ""
        while at < len(lines):
            part = lines[at]
            at += 1
            if part.lstrip().startswith("#") or (joined and not part.strip()):
                continue
            stripped = part.rstrip()
            if not stripped.endswith(escape):
                joined += part
                break
            joined += stripped[:-1] + " "
        keyword, _, rest = joined.strip().partition(" ")
        if not keyword:
            continue
        documents = dict[str, str]()
        if keyword.upper() in ("RUN", "COPY", "ADD"):
            for dash, _, name in _HEREDOC.findall(rest):
                body = list[str]()
                while at < len(lines) and (lines[at].lstrip("\t") if dash else lines[at]) != name:
                    body.append(lines[at].lstrip("\t") if dash else lines[at])
                    at += 1
                if at >= len(lines):
                    raise Blocked("syntax", f"the document {name[:40]} has no end")
                at += 1
                documents[name] = "\n".join(body) + "\n"
        yield start + 1, keyword.upper(), rest.strip(), documents


def _flags(rest: str) -> tuple[dict[str, str], str]:
    flags = dict[str, str]()
    while match := _FLAG.match(rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    return flags, rest


def _json_list(rest: str) -> list[str] | None:
    if not rest.startswith("["):
        return None
    try:
        words = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _words(rest: str) -> list[str]:
    try:
        lexer = shlex.shlex(rest, posix=True)
        lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
        return list(lexer)
    except ValueError:
        raise Blocked("syntax", f"quotes do not match in {rest[:40]}") from None


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
