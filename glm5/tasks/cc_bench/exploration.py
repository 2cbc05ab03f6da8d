"""The family `exploration`: find the file of a large repository that does what a question describes (§6.2, App. B.4).

Questions are made from installed packages. A target is a function with a unique name that no `__init__.py` mentions, in
a file at least three folders deep. The question is the first sentence of its docstring. It names neither file, class
nor function, has no word of the file's name, and at most half of the function's. The model sees the repository without
that docstring, so the sentence cannot be searched for. A question is solved if the model's tools read the target file.
"""

from __future__ import annotations

import ast
import hashlib
import os
import posixpath
import re
import stat
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm5.errors import ConfigError, DataError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import EvaluationProblem, Family, ToolSpec, function_tool
from glm5.tasks.tools.python_tool import cut

LEAST_DEPTH = 3
"""Folders between the repository's top and the file."""
WORDS = (9, 40)
"""Of a question."""
NO_VERB = frozenset(
    "the a an this that these it its if given abstract internal private default some note we same all".split()
)
"""First words of sentences that do not say what a function does."""
LEAST_LINES = 5
"""Of a function's body, without its docstring."""
MOST_FILE = 1 << 20
MOST_LINES, MOST_MATCHES, MOST_LISTED = 400, 60, 400
SEARCH_S = 20.0
MOST_CALLS, MOST_MALFORMED, MOST_ARGUMENT = 4, 3, 1000
TOOLS: tuple[ToolSpec, ...] = (
    function_tool("list", "path"), function_tool("search", "pattern", "path"), function_tool("read", "path", "start"),
)  # fmt: skip
PROMPT = """\
Somewhere in a repository with {files:,} files of Python there is code with this purpose:

{question}

Find the file that does it, and read it. Tools: list(path) shows a folder, "." is the top. search(pattern, path) finds
an extended regular expression below a path. read(path, start) shows {lines} lines of a file from line `start` on. When
you are done, answer with the path of the file."""
_DEFINED = re.compile(r"^[ \t]*(?:async )?def (\w+)|^[ \t]*class (\w+)", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z]+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;'/-]*\.")
_STEM = 5
"""Letters by which two words count as the same."""


@dataclass(frozen=True)
class Target:
    """A function to find: its file by relative path, the question, and the file's text without the docstring."""

    path: str
    name: str
    question: str
    shown: str


@dataclass(frozen=True)
class ExplorationProblem(EvaluationProblem):
    """One question on the repository below `root`."""

    id: str
    key: str
    root: Path
    target: Target
    packages: tuple[str, ...]
    prompt: str
    max_turns: int
    most_output: int
    thinking: bool
    domain: str = "exploration"
    tools: Sequence[ToolSpec] = TOOLS

    def env(self) -> Env:
        return ExplorationEnv(self)


@dataclass
class ExplorationEnv:
    """An episode. It only looks at files, and so needs no room. It ends as soon as the target was read."""

    source: ExplorationProblem
    reads: list[str] = field(default_factory=list)
    turns: int = 0
    malformed: int = 0

    def __post_init__(self) -> None:
        self.problem, self.domain = self.source.id, self.source.domain

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self.source.prompt),), self.source.tools, self.source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Carry out the calls of a message; one without calls is the answer."""
        self.turns += 1
        if message is not None and not message.tool_calls:
            return self._end(Outcome.FAILED, message.content[-MOST_ARGUMENT:])
        calls = () if message is None else message.tool_calls
        texts = [self._call(call) if i < MOST_CALLS else "error: too many calls" for i, call in enumerate(calls)]
        if self.source.target.path in self.reads:
            return self._end(Outcome.SOLVED)
        self.malformed += not calls or all(text.startswith("error: ") for text in texts)
        if self.malformed >= MOST_MALFORMED and message is None:
            return self._end(Outcome.MALFORMED)
        if self.turns >= self.source.max_turns:
            return self._end(Outcome.TRUNCATED)
        return StepResult(messages=tuple(Message("tool", text) for text in texts or ["error: bad call"]))

    def _end(self, outcome: Outcome, answer: str = "") -> StepResult:
        detail = {"reads": self.reads, "target": self.source.target.path, "answer": answer, "turns": self.turns}
        return StepResult(done=True, reward=float(outcome is Outcome.SOLVED), outcome=outcome, detail=detail)

    def _call(self, call: ToolCall) -> str:
        given = dict(call.arguments)
        tool = next((one["function"] for one in self.source.tools if one["function"]["name"] == call.name), None)
        if tool is None:
            return "error: no such tool"
        if not set(given) <= set(tool["parameters"]["properties"]) or "path" not in {"path": ".", **given}:
            return "error: bad arguments"
        if not all(
            isinstance(v, str | int) and len(str(v)) <= MOST_ARGUMENT and "\0" not in str(v) for v in given.values()
        ):
            return "error: arguments are short texts"
        path = self._inside(str(given.get("path", ".")))
        if path is None:
            return "error: there is no such path in the repository"
        if call.name == "search":
            text = self._search(str(given.get("pattern", "")), path)
        else:
            text = self._list(path) if call.name == "list" else self._read(path, str(given.get("start", 1)))
        return cut(text, self.source.most_output)

    def _inside(self, path: str) -> str | None:
        """A path relative to the root, if it is there, inside, and reached without links."""
        clean = posixpath.normpath(path.lstrip("/") or ".")
        place, root = self.source.root / clean, self.source.root
        if clean != "." and clean.split("/")[0] not in self.source.packages:
            return None
        try:
            return clean if place.exists() and place.resolve() == (root.resolve() / clean) else None
        except (OSError, ValueError):
            return None

    def _list(self, path: str) -> str:
        place = self.source.root / path
        if not place.is_dir():
            return "error: this is no folder"
        names = self.source.packages if path == "." else sorted(os.listdir(place))
        shown = [f"{name}/" if (place / name).is_dir() else name for name in names if name != "__pycache__"]
        return "\n".join(shown[:MOST_LISTED]) + (
            f"\n[{len(shown) - MOST_LISTED} more]" if len(shown) > MOST_LISTED else ""
        )

    def _read(self, path: str, start: str) -> str:
        place, target = self.source.root / path, self.source.target
        try:
            status = place.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_FILE:
                return "error: this is no file, or a very long one"
            text = target.shown if path == target.path else place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return "error: this is no text file"
        if not start.isdecimal() or len(start) > 7:
            return "error: start is the number of a line"
        lines, first = text.split("\n"), max(1, int(start))
        shown = lines[first - 1 : first - 1 + MOST_LINES]
        if not shown:
            return f"error: the file has {len(lines)} lines"
        self.reads.append(path)
        return "\n".join(f"{number} {line[:500]}" for number, line in enumerate(shown, first))

    def _search(self, pattern: str, path: str) -> str:
        """Lines of Python files; those of the target are of the text without the docstring."""
        if not pattern:
            return "error: a pattern is needed"
        target, root = self.source.target, self.source.root
        places = list(self.source.packages) if path == "." else [path]
        grep = ["/bin/grep", "-nIE", "-m", str(MOST_MATCHES), "--include=*.py", "-e", pattern]
        lines = _grep([*grep, "-rH", "--", *places], root, b"")
        if lines is None:
            return f"error: the search took over {SEARCH_S:g} s, or the pattern is wrong"
        lines = [line for line in lines if not line.startswith(f"{target.path}:")]
        if path in (".", target.path) or target.path.startswith(f"{path}/"):
            own = _grep([*grep, "-"], root, target.shown.encode()) or []
            lines = sorted([*lines, *(f"{target.path}:{line}" for line in own)])
        more = [f"[{len(lines) - MOST_MATCHES} more]"] if len(lines) > MOST_MATCHES else []
        return "\n".join([line[:300] for line in lines[:MOST_MATCHES]] + more) or "no match"


def _grep(command: Sequence[str], root: Path, text: bytes) -> list[str] | None:
    """The lines that match; None for a pattern of no form, or too little time."""
    try:
        done = subprocess.run(
            command, cwd=root, input=text, capture_output=True, timeout=SEARCH_S, env={"LC_ALL": "C.UTF-8"}
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode > 1 and not done.stdout:
        return None
    return done.stdout[:MOST_FILE].decode("utf-8", "replace").splitlines()


class ExplorationFamily(Family):
    """Questions on the packages below `root`, default: where this Python's packages are installed.

    `packages` are top folders of the repository, default: all that are Python packages. `count` is the number of
    questions; they depend on the versions of the packages, which `versions` of the manifest names. All are held out.
    """

    name = domain = "exploration"

    def __init__(
        self,
        seed: int = 0,
        *,
        root: str = "",
        packages: Sequence[str] = (),
        count: int = 60,
        max_turns: int = 40,
        most_output: int = 8000,
        thinking: bool = True,
    ) -> None:
        place = Path(root or sysconfig.get_path("purelib"))
        if isinstance(packages, str) or count < 1 or not place.is_dir():
            raise ConfigError("families: exploration: packages is a list, count at least 1, root a folder.")
        if unknown := [name for name in packages if not (place / name).is_dir() or "/" in name]:
            raise ConfigError(f"families: exploration: there is no package {unknown[0]!r:.80} in {place}.")
        chosen = tuple(sorted(packages or (p.parent.name for p in place.glob("*/__init__.py"))))
        repository = Repository(place, chosen)
        self._problems = list[ExplorationProblem]()
        for target in repository.targets(seed):
            prompt = PROMPT.format(files=len(repository.texts), question=target.question, lines=MOST_LINES)
            key = hashlib.sha256(f"{target.path}\0{target.name}\0{target.question}".encode()).hexdigest()[:16]
            self._problems.append(
                ExplorationProblem(
                    f"exploration/{key}", key, place, target, chosen, prompt, max_turns, most_output, thinking
                )
            )
            if len(self._problems) == count:
                break
        self.size = len(self._problems)
        if not self.size:
            raise DataError(f"exploration: {place} has no function that makes a question; name other packages.")

    def problem(self, split: str, index: int) -> ExplorationProblem:
        """Question `index`, modulo their number. Raises DataError for another split than "heldout"."""
        if split != "heldout":
            raise DataError("exploration: these questions are for evaluation; there are none for another split.")
        return self._problems[index % self.size]


class Repository:
    """The Python files of some packages, read once."""

    def __init__(self, root: Path, packages: Sequence[str]) -> None:
        self.root = root
        self.texts = {path.relative_to(root).as_posix(): text for path, text in _sources(root, packages)}
        self.defined = Counter(a or b for text in self.texts.values() for a, b in _DEFINED.findall(text))
        self._all = "\0".join(self.texts.values())
        starts = (text for path, text in self.texts.items() if path.endswith("__init__.py"))
        self.public = {word for text in starts for word in re.findall(r"\w+", text)}

    def targets(self, seed: int) -> Iterator[Target]:
        """Functions that make a question, in an order of the seed; at most one per file."""

        def place(path: str) -> str:
            return hashlib.sha256(f"exploration {seed} {path}".encode()).hexdigest()

        for path in sorted((one for one in self.texts if is_deep(one)), key=place):
            try:
                tree = ast.parse(self.texts[path])
            except (SyntaxError, ValueError, RecursionError):
                continue
            names = {one.name.lower() for one in ast.walk(tree) if isinstance(one, ast.ClassDef | ast.FunctionDef)}
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and (found := self._target(path, node, names)) is not None:
                    yield found
                    break

    def _target(self, path: str, node: ast.FunctionDef, names: set[str]) -> Target | None:
        document = ast.get_docstring(node, clean=True)
        if not document or self.defined[node.name] != 1 or node.name in self.public or node.name.startswith("__"):
            return None
        sentence = " ".join(re.split(r"(?<=\.)\s|\n\s*\n", document, maxsplit=1)[0].split())
        words = _WORD.findall(sentence.lower())
        first_line = document.split("\n")[0]
        if not WORDS[0] <= len(words) <= WORDS[1] or not _PLAIN.fullmatch(sentence):
            return None
        if words[0] in NO_VERB or words[1] in ("is", "are", "has"):
            return None
        stems = {_stem(word) for word in words}
        own, called = (
            {_stem(part) for part in _PART.findall(text) if len(part) > 2} for text in (Path(path).stem, node.name)
        )
        if own & stems or 2 * len(called & stems) > len(called) or names & set(words) or set(words) & self.shorts(path):
            return None
        if (node.end_lineno or 0) - node.body[0].lineno < LEAST_LINES or len(node.body) < 2:
            return None
        if self._all.count(first_line) != 1:
            return None
        lines = self.texts[path].split("\n")
        begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
        return Target(path, node.name, sentence, "\n".join(lines[: begin - 1] + lines[end:]))

    @staticmethod
    def shorts(path: str) -> set[str]:
        """Names of the file and its folders, as words of a question."""
        return {part.removesuffix(".py").lower() for part in path.split("/") if len(part) > 3}


def is_deep(path: str) -> bool:
    """Whether a file can be a target: deep enough, no test, not the face of a package."""
    *folders, name = path.split("/")
    hidden = any(re.fullmatch(r"_*tests?|testing|_?vendor(ed)?|examples?", part) for part in folders)
    return len(folders) >= LEAST_DEPTH and not hidden and not name.startswith(("test", "__", "conftest"))


def _sources(root: Path, packages: Sequence[str]) -> Iterator[tuple[Path, str]]:
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            try:
                if not path.is_symlink() and path.stat().st_size <= MOST_FILE:
                    yield path, path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _stem(word: str) -> str:
    return word.lower()[:_STEM]
