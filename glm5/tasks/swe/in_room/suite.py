"""Runs test files of languages other than Python inside a room and reports every test as `runner.py` does. Standard
library only; runs as `python -I -S -B suite.py` with the specification on stdin (see `runner.py`).

The tests run in child processes that may write only to the repository and to scratch folders, cannot signal or trace
this process, and never see the nonce: this process translates the framework's structured report. The code under test
can still forge that report, because it shares a process with the framework: it can write lines to the report file
(mocha, tape, RSpec, Minitest, test-unit, PHPUnit), print what the parent process reads (`go test`, node:test, vitest)
or exit after a report of its own. Pinned ids, exit status, canaries and twin runs are there to notice it.

A test's id is `FILE::TITLE > TITLE`; a title that stands twice in a file gets ` (2)` behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
REPORTERS = os.path.join(HERE, "reporters")
MOST_MESSAGE, MOST_OUTPUT = 2000, 64 << 20  # characters, bytes
CRASHED = 70
SEPARATOR = " > "
PATH = "/usr/bin:/bin"  # not /usr/local/bin, where an agent may have put programs of its own
Event = dict[str, Any]


class Suite:
    """One run: the specification, a scratch folder, and the report."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.root, self.files = spec, spec["root"], list(spec["files"])
        self.site = spec["site"][0] if spec["site"] else ""
        self.scratch = tempfile.mkdtemp()
        self.report = os.path.join(self.scratch, "report")
        self.events: list[Event] = []
        self.codes: list[int] = []
        self._seen: dict[str, int] = {}

    def launch(self, command: list[str], cwd: str = "", **environment: str) -> tuple[int, bytes, bytes]:
        """Run a program; (exit code, stdout, the report file's content)."""
        home = os.path.join(self.scratch, "home")
        os.makedirs(home, exist_ok=True)
        known = {key: os.environ[key] for key in ("LANG", "TZ", "TMPDIR") if key in os.environ}
        variables = {"PATH": PATH, **known, "HOME": home, "CI": "1", "NO_COLOR": "1", **environment}
        if os.path.lexists(self.report):
            os.unlink(self.report)
        with tempfile.TemporaryFile() as out:
            process = subprocess.Popen(
                [shutil.which(command[0], path=PATH) or command[0], *command[1:]],
                cwd=cwd or self.root, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=self._confine,
            )  # fmt: skip
            code = process.wait()
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            out.seek(0)
            printed = out.read(MOST_OUTPUT)
        self.codes.append(code)
        return code, printed, self._read()

    def _read(self) -> bytes:
        try:
            descriptor = os.open(self.report, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return b""
        with os.fdopen(descriptor, "rb") as file:
            return file.read(MOST_OUTPUT)

    def _confine(self) -> None:
        hidden = ""  # `grade.run_here` hides the tests, and then "/" cannot be listed here
        beside("confine").landlock(hidden, [self.root, tempfile.gettempdir(), "/dev/null", "/dev/shm"])

    def add(self, file: str, titles: list[str], outcome: str, seconds: float = 0.0, message: str = "") -> None:
        """One test's outcome. `file` is absolute or relative to the repository."""
        name = f"{self.relative(file)}::{SEPARATOR.join(titles)}"
        self._seen[name] = self._seen.get(name, 0) + 1
        if self._seen[name] > 1:
            name += f" ({self._seen[name]})"
        self.events.append(
            {"id": name, "phase": "call", "outcome": outcome, "seconds": seconds, "message": message[:MOST_MESSAGE]}
        )

    def broken(self, file: str, message: str) -> None:
        """A file whose tests could not be loaded."""
        said = message[-MOST_MESSAGE:]
        row = {"id": self.relative(file), "phase": "collect", "outcome": "error", "seconds": 0.0, "message": said}
        self.events.append(row)

    def relative(self, file: str) -> str:
        path = os.path.join(self.root, file)
        return os.path.relpath(path, self.root) if path.startswith(self.root + "/") else file

    def code(self) -> int:
        """1 if tests failed and the exit codes say so too, 0 if none failed, else CRASHED."""
        bad = any(event["outcome"] in ("failed", "error") for event in self.events)
        exited = any(self.codes)
        return CRASHED if bad != exited or not self.codes or min(self.codes) < 0 else int(bad)


def beside(name: str) -> Any:
    """The module of a file beside this one."""
    import importlib.util

    found = importlib.util.spec_from_file_location(name, os.path.join(HERE, name + ".py"))
    module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
    found.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def text(data: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", data.decode(errors="replace"))


def statement(suite: Suite, file: str, stack: str) -> str:
    """The statement of the test file that a stack trace names first, with an empty line behind it, or ""."""
    path = suite.relative(file)
    found = re.search(re.escape(path) + r":(\d+)", stack)
    if not found:
        return ""
    try:
        with open(os.path.join(suite.root, path), encoding="utf-8") as stream:
            lines = stream.read().split("\n")
    except (OSError, ValueError):
        return ""
    start = int(found[1]) - 1
    for end in range(start + 1, min(start + 9, len(lines) + 1)):
        told = "\n".join(lines[start:end])
        if told.count("(") <= told.count(")") and told.count("{") <= told.count("}"):
            return told + "\n\n" if told.strip() else ""
    return lines[start] + "\n\n" if start < len(lines) else ""


def own_report(suite: Suite, raw: bytes, printed: bytes) -> None:
    """Events of our own reporters: JSON lines {file, titles, outcome, seconds, message, stack}; an ended run has a last
    line {"end": true}."""
    ended = False
    for line in raw.split(b"\n"):
        try:
            row = json.loads(line)
            if row.get("end"):
                ended = True
            elif row.get("broken"):
                suite.broken(str(row["file"]), str(row["message"]))
            else:
                outcome = row["outcome"]
                told = statement(suite, row["file"], row.get("stack", "")) + row.get("message", "")
                told = told if outcome in ("failed", "error") else ""
                suite.add(row["file"], [str(t) for t in row["titles"]], outcome, float(row["seconds"]), told)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    if not ended:
        suite.broken(suite.files[0], text(printed))


def run_node(suite: Suite) -> None:
    """node's own test runner: one process per file; the reporter runs in the parent process."""
    link_modules(suite)
    command = ["node", *suite.spec["args"], "--test", f"--test-reporter={REPORTERS}/node.mjs"]
    destination = f"--test-reporter-destination={suite.report}"
    _, printed, raw = suite.launch([*command, destination, *suite.files], NODE_ENV="test")
    own_report(suite, raw, printed)


def run_mocha(suite: Suite) -> None:
    link_modules(suite)
    command = ["node", f"{suite.site}/node_modules/mocha/bin/mocha.js", "--no-config", "--no-package", "--exit"]
    reporter = ["--reporter", f"{REPORTERS}/mocha.cjs", "--reporter-option", f"out={suite.report}"]
    _, printed, raw = suite.launch([*command, *reporter, *suite.spec["args"], *suite.files], NODE_ENV="test")
    own_report(suite, raw, printed)
    suite.codes[-1] = min(suite.codes[-1], 1)  # mocha exits with the number of failures


def run_tape(suite: Suite) -> None:
    link_modules(suite)
    command = ["node", *suite.spec["args"], f"{REPORTERS}/tape.cjs", f"{suite.site}/node_modules", suite.report]
    _, printed, raw = suite.launch([*command, *suite.files], NODE_ENV="test")
    own_report(suite, raw, printed)


def run_vitest(suite: Suite) -> None:
    """vitest, also for jest's API (`vi` stands for `jest`); the report is written by the parent of the workers. Paths
    NAME=PATH say which file or folder of the repository an import of NAME means."""
    link_modules(suite)
    command = ["node", f"{suite.site}/node_modules/vitest/vitest.mjs", "run", "--globals", "--no-color"]
    for name in ("vitest.config.mjs", "vitest.setup.mjs"):  # vite writes beside its configuration
        shutil.copy(os.path.join(REPORTERS, name), suite.scratch)
    command += ["--config", f"{suite.scratch}/vitest.config.mjs", "--root", suite.root, "--reporter=json"]
    command += [f"--outputFile={suite.report}", *suite.spec["args"]]
    own = [path.removeprefix(suite.root + "/") for path in suite.spec["paths"]]  # the request has them below the root
    pairs = [path.split("=", 1) for path in own if "=" in path]
    aliases = [{"find": name, "replacement": os.path.join(suite.root, path)} for name, path in pairs]
    _, printed, raw = suite.launch([*command, *suite.files], NODE_ENV="test", VITEST_SCRATCH=suite.scratch,
                                   VITEST_ALIASES=json.dumps(aliases))  # fmt: skip
    try:
        results = json.loads(raw)["testResults"]
    except (ValueError, KeyError, TypeError):
        suite.broken(suite.files[0], text(printed))
        return
    for result in results:
        file = result["name"]
        if result["status"] == "failed" and not result["assertionResults"]:
            suite.broken(file, str(result.get("message")))
        for test in result["assertionResults"]:
            outcome = {"passed": "passed", "failed": "failed"}.get(test["status"], "skipped")
            stack = "\n".join(test.get("failureMessages") or [])
            message = re.split(r"\n\s+at ", stack)[0]
            told = statement(suite, file, stack) + text(message.encode()) if outcome == "failed" else ""
            titles = [t for t in (*test["ancestorTitles"], test["title"]) if t]
            suite.add(file, titles, outcome, (test.get("duration") or 0) / 1000, told)


def link_modules(suite: Suite) -> None:
    """`node_modules` of the repository is the folder of the test dependencies."""
    link, target = os.path.join(suite.root, "node_modules"), os.path.join(suite.site, "node_modules")
    if os.path.islink(link):
        os.unlink(link)
    elif os.path.isdir(link):
        shutil.rmtree(link)
    if os.path.isdir(target):
        os.symlink(target, link)


def run_go(suite: Suite) -> None:
    """`go test -json`: a package is built as a whole, and the tests of the given files are run. The first argument is
    the repository's import path: without modules, as in Debian, nothing is looked for in the network."""
    folders: dict[str, dict[str, str]] = {}
    for file in suite.files:
        with open(os.path.join(suite.root, file), encoding="utf-8", errors="replace") as stream:
            names = re.findall(r"^func ((?:Test|Example|Fuzz)\w*)\(", stream.read(), re.M)
        folders.setdefault(os.path.dirname(file), {}).update(dict.fromkeys(names, file))
    path, *arguments = suite.spec["args"]
    gopath = os.path.join(suite.scratch, "gopath")
    place = os.path.join(gopath, "src", path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    os.symlink(suite.root, place)
    variables = {
        "GOCACHE": os.path.join(suite.scratch, "gocache"), "GO111MODULE": "off", "GOENV": "off", "PWD": place,
        "GOPATH": os.pathsep.join([gopath, *([f"{suite.site}/go"] if suite.site else [])]), "GOPROXY": "off",
    }  # fmt: skip
    for folder, owners in folders.items():
        pattern = "^(" + "|".join(sorted(owners)) + ")$"
        command = ["go", "test", "-json", "-count=1", "-vet=off", *arguments, "-run", pattern, "./" + folder]
        _, printed, _ = suite.launch(command, place, **variables)
        outputs: dict[str, list[str]] = {}
        rows: list[tuple[str, str, float]] = []
        for line in printed.split(b"\n"):
            try:
                row = json.loads(line)
                name = row.get("Test", "")
                if row["Action"] == "output":
                    outputs.setdefault(name, []).append(row["Output"])
                elif row["Action"] in ("pass", "fail", "skip") and name.split("/")[0] in owners:
                    rows.append((name, row["Action"], float(row.get("Elapsed", 0.0))))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        if not rows:
            suite.broken(suite.files[0], text(printed))
        for name, action, seconds in rows:
            said = [o for o in outputs.get(name, []) if not re.match(r"\s*(=== |--- )", o)]
            told = "".join(said) if action == "fail" else ""
            outcome = {"pass": "passed", "fail": "failed", "skip": "skipped"}[action]
            suite.add(owners[name.split("/")[0]], [name], outcome, seconds, told)


def run_phpunit(suite: Suite) -> None:
    """PHPUnit with a configuration and an autoloader of our own; the report is JUnit XML."""
    files = "".join(f"<file>{os.path.join(suite.root, file)}</file>" for file in suite.files)
    configuration = os.path.join(suite.scratch, "phpunit.xml")
    with open(configuration, "w", encoding="utf-8") as stream:
        stream.write(
            f'<phpunit bootstrap="{REPORTERS}/bootstrap.php" cacheResult="false" backupGlobals="false">'
            f"<testsuites><testsuite name='all'>{files}</testsuite></testsuites></phpunit>"
        )
    command = ["phpunit", "-c", configuration, "--log-junit", suite.report, "--do-not-cache-result", "--no-interaction"]
    paths = os.pathsep.join(os.path.join(suite.root, path) for path in suite.spec["paths"])
    code, printed, raw = suite.launch([*command, *suite.spec["args"]], APP_ROOT=suite.root, APP_PATHS=paths,
                                      APP_SITE=suite.site)  # fmt: skip
    suite.codes[-1] = min(code, 1) if code in (0, 1, 2) else code
    try:
        tree = ElementTree.fromstring(raw)
    except ElementTree.ParseError:
        suite.broken(suite.files[0], text(printed))
        return
    for case in tree.iter("testcase"):
        bad = next((part for part in case if part.tag in ("failure", "error")), None)
        outcome = "passed" if bad is None else "failed"
        if case.find("skipped") is not None:
            outcome = "skipped"
        message = re.sub(r"^\S+::.*\n", "", (bad.text or "").strip()) if bad is not None else ""
        file = case.get("file", "")
        stack, message = message, re.sub(r"\n\s*\n?(/\S+:\d+\n?)+$", "", message)
        told = statement(suite, file, stack) + message if outcome == "failed" else ""
        suite.add(file, [case.get("name", "")], outcome, float(case.get("time") or 0), told)


def _ruby(suite: Suite) -> tuple[list[str], dict[str, str]]:
    paths = [os.path.join(REPORTERS, "ruby"), *(os.path.join(suite.root, path) for path in suite.spec["paths"])]
    paths += [path for path in (os.path.join(suite.site, "ruby"),) if suite.site and os.path.isdir(path)]
    command = ["ruby", "-W0", *(part for path in paths for part in ("-I", path))]
    return command, {"REPORT": suite.report, "APP_ROOT": suite.root, "SEED": "1"}


def run_rspec(suite: Suite) -> None:
    command, variables = _ruby(suite)
    command += ["-r", f"{REPORTERS}/rspec.rb", "-S", "rspec", "--options", os.devnull, "--order", "defined"]
    _, printed, raw = suite.launch([*command, "-f", "OwnReporter", *suite.spec["args"], *suite.files], **variables)
    own_report(suite, raw, printed)


def run_minitest(suite: Suite) -> None:
    _plain_ruby(suite, "minitest.rb")


def run_test_unit(suite: Suite) -> None:
    _plain_ruby(suite, "test_unit.rb")


def _plain_ruby(suite: Suite, reporter: str) -> None:
    command, variables = _ruby(suite)
    load = "ARGV.shift(ARGV.index('--') || 0).each { |f| require File.expand_path(f) }; ARGV.clear"
    command += ["-r", f"{REPORTERS}/{reporter}", *suite.spec["args"], "-e", load, *suite.files, "--"]
    _, printed, raw = suite.launch(command, **variables)
    own_report(suite, raw, printed)


FRAMEWORKS: dict[str, Callable[[Suite], None]] = {
    "node": run_node, "mocha": run_mocha, "tape": run_tape, "vitest": run_vitest, "go": run_go,
    "phpunit": run_phpunit, "rspec": run_rspec, "minitest": run_minitest, "test-unit": run_test_unit,
}  # fmt: skip


def close_memory() -> None:
    """No other process of this user may read this one's memory or descriptors."""
    import ctypes

    not_dumpable = 4
    ctypes.CDLL(None).prctl(not_dumpable, 0, 0, 0, 0)


def main() -> None:
    spec = json.loads(sys.stdin.buffer.read())
    close_memory()
    out = os.dup(1)
    os.set_inheritable(out, False)
    os.dup2(2, 1)
    suite = Suite(spec)
    known = FRAMEWORKS if spec["framework"] in FRAMEWORKS else beside("compiled").FRAMEWORKS
    known[spec["framework"]](suite)
    code = suite.code()
    collected = [event["id"] for event in suite.events if event["phase"] == "call"]
    with os.fdopen(out, "wb") as stream:
        for event in [{"collected": collected}, *suite.events, {"end": code}]:
            stream.write(f"{spec['nonce']} {json.dumps(event)}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    main()
