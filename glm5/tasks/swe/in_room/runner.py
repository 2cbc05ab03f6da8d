"""Runs a repository's tests inside a room and reports every test id as JSON lines. Standard library only; runs as
`python -I -S -B runner.py` with the specification on stdin.

Specification: `nonce`, `framework` ("pytest" or "unittest"), `root`, `paths` (import roots of the code under test),
`site` (folders with pytest and the test dependencies), `files` (test files, relative to root), `args`, `reload`
(modules that must come from `paths` although the runner has loaded them), `select` (ids to run, null for all), `trace`
(whether to report which functions of the code under test each test file calls).

Report, each line behind the nonce: `{"collected": [...]}`, one `{"id", "phase", "outcome", "seconds", "message"}` per
phase, `{"calls": {test file: ["path:function"]}}` if asked, `{"end": exit code}`. The report goes to the process's
original stdout; the tests' own stdout goes to stderr.
pytest is imported before the code under test is importable, so that a module of that code cannot take its place.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import textwrap
import threading
import time
import traceback
from typing import Any

MOST_MESSAGE = 2000  # characters
PLAIN = (str, bytes, int, float, bool, type(None), tuple, list, dict, set)


class Report:
    """Writes the report. The code under test shares this process and can forge it: the grader does not trust it."""

    def __init__(self, nonce: str, descriptor: int) -> None:
        self._nonce, self._descriptor, self._owner = nonce, descriptor, os.getpid()

    def write(self, **event: Any) -> None:
        if os.getpid() != self._owner:  # a child that a test forked, and that ran on into the test runner
            return
        data = f"{self._nonce} {json.dumps(event)}\n".encode()
        while data:
            data = data[os.write(self._descriptor, data) :]


class Calls:
    """Records the outermost functions below `root` that are called, by the test file that is running; "" is import."""

    def __init__(self, root: str) -> None:
        self._root, self.file = os.path.join(os.path.realpath(root), ""), ""
        self._seen: set[Any] = set()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self._seen.add((self.file, frame.f_code))

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def found(self) -> dict[str, list[str]]:
        sys.setprofile(None)
        found: dict[str, set[str]] = {}
        for file, code in self._seen:
            path = os.path.realpath(code.co_filename)
            if path.startswith(self._root):
                name = code.co_qualname.split(".<locals>")[0]
                found.setdefault(file, set()).add(path[len(self._root) :] + ":" + name)
        return {file: sorted(names) for file, names in found.items()}


class PytestReporter:
    """A pytest plugin. `message` is the exception of a failure, with the failing line of the test file."""

    def __init__(self, report: Report, root: str, select: list[str] | None, calls: Calls | None) -> None:
        self._calls = calls
        self._report, self._root = report, os.path.join(os.path.realpath(root), "")
        self._select = None if select is None else set(select)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            message = str(report.longrepr)[-MOST_MESSAGE:]
            self._report.write(id=report.nodeid, phase="collect", outcome="error", seconds=0.0, message=message)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self._report.write(collected=[item.nodeid for item in items])
        if self._select is not None:
            items[:] = [item for item in items if item.nodeid in self._select]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        if self._calls is not None:
            self._calls.file = nodeid.split("::")[0]

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        outcome, message = "passed", ""
        if call.excinfo is not None:
            name = type(call.excinfo.value).__name__
            if name in ("Skipped", "SkipTest") or (item.get_closest_marker("xfail") and call.when == "call"):
                outcome = "skipped"
            else:
                outcome = "failed" if call.when == "call" else "error"
                message = failing_line(call.excinfo.tb, self._root) + call.excinfo.exconly()
        self._report.write(
            id=item.nodeid, phase=call.when, outcome=outcome, seconds=call.duration, message=message[:MOST_MESSAGE]
        )


def failing_line(tb: Any, root: str) -> str:
    """The statement of the outermost test function that failed, as source text with a newline, and the values of its
    plain variables as comments; or ""."""
    import ast
    import linecache

    for frame, line in traceback.walk_tb(tb):
        path = frame.f_code.co_filename
        if not os.path.realpath(path).startswith(root) or not frame.f_code.co_name.startswith("test"):
            continue
        if linecache.getline(path, line).lstrip().startswith(("def ", "@")):
            continue  # a wrapper that shows itself as the test
        spans = statements(path)
        if spans is None:
            return ""
        inside = [s for s in spans if s[0] <= line <= s[1]]
        start, end = max(inside, default=(line, line))
        text = textwrap.dedent("".join(linecache.getlines(path)[start - 1 : end]))
        try:
            used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
        except (SyntaxError, ValueError):
            used = set()
        values = [(name, frame.f_locals[name]) for name in sorted(used & set(frame.f_locals))]
        told = [f"# {name} = {value!r}\n" for name, value in values if type(value) in PLAIN and len(repr(value)) < 120]
        return "".join(told) + text.rstrip("\n") + "\n\n"
    return ""


@functools.cache
def statements(path: str) -> list[tuple[int, int]] | None:
    """(first, last line) of the assertions and expressions of a file, parsed once, for a bug may fail all of its tests.
    None if it does not parse."""
    import ast
    import linecache

    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None
    return [(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, (ast.Assert, ast.Expr))]


def run_pytest(spec: dict[str, Any], report: Report) -> int:
    import _pytest.assertion.rewrite
    import _pytest.doctest  # noqa: F401
    import pytest

    use(spec)
    steady_properties()
    arguments = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "--rootdir", spec["root"]]
    arguments += [
        "--tb=no",
        "-q",
        "--no-header",
        "--continue-on-collection-errors",
        "-o",
        "junit_family=xunit2",
        *spec["args"],
        "--",
        *spec["files"],
    ]
    calls = Calls(spec["root"]) if spec["trace"] else None
    if calls is not None:
        calls.start()
    code = pytest.main(arguments, plugins=[PytestReporter(report, spec["root"], spec["select"], calls)])
    if calls is not None:
        report.write(calls=calls.found())
    return int(code)


def run_unittest(spec: dict[str, Any], report: Report) -> int:
    import importlib.util
    import unittest

    class Result(unittest.TestResult):
        started = 0.0

        def startTest(self, test: Any) -> None:
            super().startTest(test)
            self.started, self.bad = time.perf_counter(), ("passed", "")

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            outcome, message = self.bad
            seconds = time.perf_counter() - self.started
            report.write(id=test.id(), phase="call", outcome=outcome, seconds=seconds, message=message[:MOST_MESSAGE])

        def _told(self, outcome: str, error: Any) -> tuple[str, str]:
            root = os.path.join(os.path.realpath(spec["root"]), "")
            exception = "".join(traceback.format_exception_only(error[0], error[1]))
            return outcome, failing_line(error[2], root) + exception

        def addError(self, test: Any, err: Any) -> None:
            super().addError(test, err)
            if isinstance(test, unittest.TestCase):
                self.bad = self._told("error", err)
            else:  # setUpModule, setUpClass: the tests below them are missing
                report.write(id=test.id(), phase="setup", outcome="error", seconds=0.0, message=str(err[1]))

        def addFailure(self, test: Any, err: Any) -> None:
            super().addFailure(test, err)
            self.bad = self._told("failed", err)

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                self.bad = self._told("failed", err)

        def addSkip(self, test: Any, reason: str) -> None:
            super().addSkip(test, reason)
            self.bad = ("skipped", "")

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            super().addExpectedFailure(test, err)
            self.bad = ("skipped", "")

        def addUnexpectedSuccess(self, test: Any) -> None:
            super().addUnexpectedSuccess(test)
            self.bad = ("failed", "unexpected success")

    use(spec)
    suites, result = [], Result()
    for file in spec["files"]:
        name = os.path.basename(file)[: -len(".py")]
        try:
            found = importlib.util.spec_from_file_location(name, os.path.join(spec["root"], file))
            module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
            sys.modules[name] = module
            found.loader.exec_module(module)  # type: ignore[union-attr]
        except BaseException as error:
            report.write(id=file, phase="collect", outcome="error", seconds=0.0, message=repr(error)[:MOST_MESSAGE])
            continue
        suites.append(unittest.defaultTestLoader.loadTestsFromModule(module))
    tests = [case for suite in suites for case in cases(suite)]
    report.write(collected=[case.id() for case in tests])
    unittest.TestSuite(t for t in tests if spec["select"] is None or t.id() in spec["select"]).run(result)
    return 0 if result.wasSuccessful() else 1


def cases(suite: Any) -> list[Any]:
    """The test cases of a nested suite."""
    return [suite] if not hasattr(suite, "__iter__") else [case for part in suite for case in cases(part)]


def use(spec: dict[str, Any]) -> None:
    """Make the code under test importable, also for the child processes of its tests."""
    os.chdir(spec["root"])
    for name in spec["reload"]:
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[loaded]
    sys.path[:0] = spec["paths"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*spec["paths"], *spec["site"]])


def steady_properties() -> None:
    """Property tests draw the same examples in every run, and do not look for a smaller one that fails, which may take
    minutes. A package's own settings go before these."""
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ImportError:
        return
    settings.register_profile(
        "steady",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("steady")


def main() -> None:
    spec = json.loads(sys.stdin.buffer.read())
    report = Report(spec["nonce"], os.dup(1))
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    import site  # not run because of -S, but `exit` and `help` are expected to exist

    site.setquit()
    site.sethelper()
    sys.path.extend(spec["site"])
    sys.argv = ["pytest"]
    code = 70
    try:
        code = {"pytest": run_pytest, "unittest": run_unittest}[spec["framework"]](spec, report)
    except SystemExit as stop:  # the code under test stopped the run
        code = stop.code if isinstance(stop.code, int) else 71
        code = code or 72
    report.write(end=code)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
