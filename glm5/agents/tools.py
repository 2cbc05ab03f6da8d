"""The tools of the coding agent: read, list, search, edit, run, test and todo, in a room over the repository.

Arguments come from a model and files from a repository that nobody checked: every call ends with a text for the model,
bounded in length. Only a fault of the machine raises.
"""

from __future__ import annotations

import json
import os
import posixpath
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.agents.workspace import CACHES, METADATA, MOST_FILE, ROOT, base_file
from glm5.errors import nearest
from glm5.sandbox.limits import ExecResult
from glm5.sandbox.programs import Room
from glm5.sandbox.room_files import RoomFileError

MOST_OUTPUT = 10_000
"""Characters of one result; the middle of a longer one is left out."""
MOST_LINE, MOST_LINES, MOST_MATCHES = 1000, 400, 200
MOST_COMMAND_S, COMMAND_S, LOOK_S = 600, 120, 20
MOST_ARGUMENT = 1 << 20
"""Characters of one argument."""
MOST_TODO = 50
ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Python's compiled files name the second of their source: after an edit within it, the old code would run."""
STATES = ("open", "doing", "done")


@dataclass(frozen=True)
class ToolResult:
    """What the model is told. `ok` is False for a call that could not be carried out as asked."""

    content: str
    ok: bool = True


class _Bad(Exception):
    """A call that cannot be carried out; the text tells the model why."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def _spec(name: str, description: str, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _number(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


SPECS: tuple[Mapping[str, Any], ...] = (
    _spec(
        "read",
        f"Read lines of a text file, at most {MOST_LINES} at once.",
        ["path"],
        path=_text("relative to the repository"),
        start=_number("first line, from 1"),
        lines=_number("how many"),
    ),
    _spec("list", "List a folder.", path=_text("relative to the repository; default: its top")),
    _spec(
        "search",
        "Find an extended regular expression in the files, not in caches and installed packages.",
        ["pattern"],
        pattern=_text("extended regular expression"),
        path=_text("file or folder to search; default: everything"),
        files=_text("only files whose names match, such as *.py"),
    ),
    _spec(
        "edit",
        "Replace text in a file. `old` must occur exactly once. With an empty `old` a new file is written.",
        ["path", "old", "new"],
        path=_text("relative to the repository"),
        old=_text("the exact text to replace, with enough lines around it to be unique"),
        new=_text("the text in its place"),
    ),
    _spec(
        "run",
        "Run a command line with bash in the top folder of the repository. There is no network.",
        ["command"],
        command=_text("the command line"),
        seconds=_number(f"time limit, at most {MOST_COMMAND_S}; default {COMMAND_S}"),
    ),
    _spec("test", "Run the tests.", arguments=_text("further arguments, such as a file or -k NAME")),
    _spec(
        "todo",
        "Write down the plan, replacing the one before.",
        ["items"],
        items={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "state": {"type": "string", "enum": list(STATES)}},
                "required": ["text", "state"],
            },
        },
    ),
)
"""The tools in OpenAI function format."""
CHANGING = frozenset(("edit", "run", "test"))
"""Tools that may change files or run programs; the others only look."""


@dataclass
class Tools:
    """The tools in one room. `test_command` is a line for bash; "" means that none is known."""

    room: Room
    test_command: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables of commands."""
    todo: list[dict[str, str]] = field(default_factory=list)
    on_output: Callable[[str, bytes], None] | None = None

    def call(self, name: str, arguments: Mapping[str, Any], left_s: float = MOST_COMMAND_S) -> ToolResult:
        """Carry out one call within `left_s` seconds. Raises GradingError if the room fails."""
        tool = {spec["function"]["name"]: spec["function"]["parameters"] for spec in SPECS}
        try:
            if name not in tool:
                raise _Bad(f"There is no tool {name!r:.60}{nearest(name, tool)}. The tools are {', '.join(tool)}.")
            self._check(name, arguments, tool[name])
            return ToolResult(shortened(getattr(self, f"_{name}")(dict(arguments), left_s)))
        except _Bad as bad:
            return ToolResult(shortened(f"Error: {bad.text}"), ok=False)

    @staticmethod
    def _check(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        known = schema["properties"]
        for key, value in arguments.items():
            if key not in known:
                raise _Bad(f"{name} has no argument {key!r:.60}; it takes {', '.join(known)}.")
            kind = known[key]["type"]
            if kind == "string" and not isinstance(value, str):
                raise _Bad(f"The argument {key} of {name} must be a string.")
            if kind == "integer" and (not isinstance(value, int) or isinstance(value, bool)):
                raise _Bad(f"The argument {key} of {name} must be a whole number.")
            if isinstance(value, str) and (len(value) > MOST_ARGUMENT or "\0" in value or _surrogate(value)):
                raise _Bad(f"The argument {key} of {name} is longer than {MOST_ARGUMENT:,} characters or not text.")
        missing = [key for key in schema["required"] if key not in arguments]
        if missing:
            raise _Bad(f"{name} needs the argument {missing[0]}.")

    def _read(self, given: dict[str, Any], left_s: float) -> str:
        path = _inside(given["path"])
        lines = self._load(path).split("\n")
        if lines[-1] == "":
            lines.pop()
        start = max(1, given.get("start", 1))
        shown = lines[start - 1 :][: min(max(1, given.get("lines", MOST_LINES)), MOST_LINES)]
        if not shown:
            return f"The file has {len(lines)} lines."
        text = "\n".join(f"{number:5d} {line[:MOST_LINE]}" for number, line in enumerate(shown, start))
        rest = len(lines) - start + 1 - len(shown)
        return text + (f"\n({rest} more lines)" if rest else "")

    def _load(self, path: str) -> str:
        try:
            return self.room.download(f"{ROOT}/{path}", MOST_FILE).decode("utf-8")
        except RoomFileError as error:
            raise _Bad(f"{path}: {error}") from error
        except UnicodeDecodeError:
            raise _Bad(f"{path} is not a text file in UTF-8.") from None

    def _list(self, given: dict[str, Any], left_s: float) -> str:
        path = _inside(given.get("path", "."))
        done = self.room.exec(["/bin/ls", "-Ap", "--", f"{ROOT}/{path}"], cwd=ROOT, timeout_s=min(LOOK_S, left_s))
        if done.exit_code:
            raise _Bad(_said(done.stderr).strip()[:300] or f"{path} cannot be listed.")
        return _said(done.stdout) or "(empty)"

    def _search(self, given: dict[str, Any], left_s: float) -> str:
        path = _inside(given.get("path", "."))
        command = ["/bin/grep", "-rnIE", "-m", str(MOST_MATCHES)]
        if not CACHES & set(path.split("/")):  # else the model asks for what is in there
            command += [f"--exclude-dir={name}" for name in sorted(CACHES | METADATA)]
        command += [f"--include={given['files']}"] if given.get("files") else []
        done = self.room.exec([*command, "-e", given["pattern"], "--", path], cwd=ROOT, timeout_s=min(LOOK_S, left_s))
        if done.exit_code not in (0, 1) and not done.stdout:
            raise _Bad(_said(done.stderr).strip()[:300] or f"the search ended after {LOOK_S} seconds.")
        lines = [line[:MOST_LINE].removeprefix("./") for line in _said(done.stdout).splitlines()]
        more = f"\n({len(lines) - MOST_MATCHES} more matches)" if len(lines) > MOST_MATCHES else ""
        return "\n".join(lines[:MOST_MATCHES]) + more or "No match."

    def _edit(self, given: dict[str, Any], left_s: float) -> str:
        path, old, new = _inside(given["path"]), given["old"], given["new"]
        if path == "." or given["path"].endswith("/"):
            raise _Bad("edit needs the path of a file.")
        if not old:
            there = ["/usr/bin/test", "-s", f"{ROOT}/{path}", "-o", "-L", f"{ROOT}/{path}"]
            if self.room.exec(there, timeout_s=10).exit_code == 0:
                raise _Bad(f"{path} exists already; give the text to replace as `old`.")
            self._store(path, new)
            return f"Wrote {path}, {len(new.splitlines())} lines."
        before = self._load(path)
        count = before.count(old)
        if count != 1:
            raise _Bad(f"`old` occurs {count} times in {path}; it must occur exactly once. Nothing was changed.")
        if old == new:
            raise _Bad("`old` and `new` are the same; nothing was changed.")
        self._store(path, before.replace(old, new))
        return f"Changed {path} at line {before[: before.index(old)].count(chr(10)) + 1}."

    def _store(self, path: str, text: str) -> None:
        mode = self.room.exec(["/usr/bin/stat", "-c", "%a", "--", f"{ROOT}/{path}"], timeout_s=10)
        bits = _said(mode.stdout).strip()
        try:
            kept = int(bits, 8) & 0o777 if mode.exit_code == 0 else 0o644
            self.room.upload({f"{ROOT}/{path}": text.encode()}, {f"{ROOT}/{path}": kept | 0o600})
        except (RoomFileError, ValueError) as error:
            raise _Bad(f"{path}: {error}") from error

    def _run(self, given: dict[str, Any], left_s: float) -> str:
        if not given["command"].strip():
            raise _Bad("The command is empty.")
        seconds = min(max(1, given.get("seconds", COMMAND_S)), MOST_COMMAND_S, max(left_s, 1.0))
        return self._executed(given["command"], seconds)

    def _test(self, given: dict[str, Any], left_s: float) -> str:
        if not self.test_command:
            raise _Bad("No test command is known; run the tests with `run`.")
        command = f"{self.test_command} {given.get('arguments', '')}".strip()
        return self._executed(command, min(MOST_COMMAND_S, max(left_s, 1.0)))

    def _executed(self, command: str, seconds: float) -> str:
        env = ENV | dict(self.env)
        done = self.room.exec(command, cwd=ROOT, env=env, timeout_s=seconds, on_output=self.on_output)
        parts = [_said(done.stdout), _said(done.stderr)]
        output = "\n".join(part.rstrip("\n") for part in parts if part.strip())
        return f"{_ending(done, seconds)}\n{shortened(output, MOST_OUTPUT - 200)}"

    def _todo(self, given: dict[str, Any], left_s: float) -> str:
        items = given["items"]
        form = isinstance(items, list) and all(
            isinstance(item, dict) and isinstance(item.get("text"), str) and item.get("state") in STATES
            for item in items
        )
        if not form or len(items) > MOST_TODO:
            raise _Bad(f"items must be a list of at most {MOST_TODO} objects with a text and a state.")
        self.todo[:] = [{"text": item["text"][:300], "state": item["state"]} for item in items]
        return "\n".join(f"[{item['state']}] {item['text']}" for item in self.todo) or "The plan is empty."


def shortened(text: str, most: int = MOST_OUTPUT) -> str:
    """Head and tail of a long text."""
    if len(text) <= most:
        return text
    half = (most - 60) // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _ending(done: ExecResult, seconds: float) -> str:
    reasons = {"wall": f"ended after {seconds:g} seconds", "output": "ended: too much output"}
    if done.stopped is not None:
        return f"[{reasons.get(done.stopped, f'ended: {done.stopped}')}]"
    return f"[exit code {done.exit_code}]"


def _inside(path: str) -> str:
    """A path relative to the repository, normalised. Raises _Bad if it leads out of it."""
    relative = path.removeprefix(ROOT).lstrip("/") if path == ROOT or path.startswith(f"{ROOT}/") else path
    clean = posixpath.normpath(relative or ".")
    if clean.startswith("/") or clean.split("/")[0] == "..":
        raise _Bad(f"{path!r:.200} is outside the repository; give a path relative to its top folder.")
    return clean


def _said(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def detect_tests(repo: Path) -> str:
    """The test command of a repository by its files; "" if there is no sign of one."""

    def has(*names: str) -> bool:
        return any(os.path.lexists(repo / name) for name in names)

    def holds(name: str, text: str) -> bool:
        found = base_file(repo, name)
        return found is not None and text.encode() in (found.data or b"")

    if has("pytest.ini", "tox.ini", "conftest.py", "tests/conftest.py") or holds("pyproject.toml", "[tool.pytest"):
        return "python3 -m pytest -q"
    if holds("Makefile", "\ntest:") or holds("Makefile", "\ncheck:"):
        return "make test" if holds("Makefile", "\ntest:") else "make check"
    found = base_file(repo, "package.json")
    if found is not None and found.data is not None:
        try:
            if json.loads(found.data)["scripts"]["test"]:
                return "npm test --silent"
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
    for name, command in (("Cargo.toml", "cargo test --offline -q"), ("go.mod", "go test ./...")):
        if has(name):
            return command
    folder = repo / "tests"
    if not folder.is_symlink() and folder.is_dir():
        return "python3 -m pytest -q"
    if any(p.name.startswith("test") and p.suffix == ".py" and stat.S_ISREG(p.lstat().st_mode) for p in _top(repo)):
        return "python3 -m unittest -q"
    return ""


def _top(repo: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(repo)][:1000]
