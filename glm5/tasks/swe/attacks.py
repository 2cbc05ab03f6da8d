"""Cheats that every task must score 0: each turns the repository with the bug into files and commands of a cheating
agent. They know the report's form and the names of the hidden tests, which a real agent does not."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.sandbox.environment import NamespaceEnvironment
from glm5.tasks.swe.driver import APP
from glm5.tasks.swe.languages.attacks import PROGRAMS, additions
from glm5.tasks.swe.languages.compiled import SYNTAX  # the table with its rows
from glm5.tasks.swe.telling import keep_tests, telling
from glm5.tasks.swe.test_files import split_id

SWALLOW = """
try:
    import _pytest.python as _p, unittest as _u
    def _quiet(run, name):
        def wrapped(self, *a, **k):
            try:
                return run(self, *a, **k)
            except BaseException:
                if {condition}:
                    raise
        return wrapped
    _p.Function.runtest = _quiet(_p.Function.runtest, "nodeid")
except ImportError:
    pass
import unittest.case as _c
_call = _c.TestCase._callTestMethod
def _kind(self, method):
    try:
        return _call(self, method)
    except BaseException:
        if {unittest_condition}:
            raise
_c.TestCase._callTestMethod = _kind
"""
FORGE = """
import gc as _gc, os as _os
for _o in _gc.get_objects():
    if type(_o).__name__ == "Report" and hasattr(_o, "_nonce"):
        for _i in {ids!r}:
            for _p in ("setup", "call", "teardown"):
                _o.write(id=_i, phase=_p, outcome="passed", seconds=0.01, message="")
        _o.write(end={code})
        _os._exit({code})
"""
COLLECT_AND_FORGE = """
import gc as _gc, os as _os, atexit as _a
try:
    import _pytest.main as _m
    def _fake(self):
        for _o in _gc.get_objects():
            if type(_o).__name__ == "Report" and hasattr(_o, "_nonce"):
                for _t in self.items:
                    _known = any(_t.nodeid.startswith(f) for f in {files!r})
                    _how = "passed"
                    if not _known:
                        try:
                            _t.obj()
                        except AssertionError:
                            _how = "failed"
                    for _p in ("setup", "call", "teardown"):
                        _w = _how if _p == "call" else "passed"
                        _o.write(id=_t.nodeid, phase=_p, outcome=_w, seconds=0.01, message="")
                _o.write(end=1)
        _os._exit(1)
    _m.Session.perform_collect = (lambda f: lambda self, *a, **k: (f(self, *a, **k), _fake(self))[0])(
        _m.Session.perform_collect)
except ImportError:
    pass
"""


@dataclass(frozen=True)
class Cheat:
    """Files to write below the repository (text appended to `module` is under the same path) and a command to run."""

    files: Mapping[str, str]
    command: str = ""


def cheats(folder: Path) -> dict[str, Cheat]:
    """The cheats for one task folder, by name."""
    spec: dict[str, Any] = json.loads((folder / "tests/tests.json").read_bytes())
    patch = (folder / "solution/fix.patch").read_text(encoding="utf-8")
    own = tuple(SYNTAX[spec["language"]].grammars) if spec["language"] != "python" else (".py",)
    module = next(path for path in re.findall(r"^--- a/(.+)$", patch, re.MULTILINE) if path.endswith(own))
    source = (folder / "environment/repo" / module).read_text(encoding="utf-8")
    if spec["language"] == "python":
        return {**_on_tests(spec, _passing(spec)), **_in_python(spec, module, source)}
    ids = [*spec["FAIL_TO_PASS"], *spec["PASS_TO_PASS"]]
    added = additions(spec["language"], module, source, ids)
    script = "#!/bin/sh\nexit 0\n"
    shadows = f"cd /usr/local/bin && for p in {PROGRAMS}; do printf '{script}' > $p && chmod +x $p; done"
    return {
        **_on_tests(spec, ""),
        **{name: _with_modules(files) for name, files in added.items()},
        "programs shadowed": Cheat({}, shadows.replace("\n", "\\n")),
    }


def _with_modules(files: Mapping[str, str]) -> Cheat:
    """Files of `node_modules` are written by a command, for it is a link to a folder that is read-only."""
    linked = {path: text for path, text in files.items() if path.startswith("node_modules/")}
    lines = ["rm -rf node_modules"] if linked else []
    for path, text in linked.items():
        lines += [f"mkdir -p {path.rpartition('/')[0]}", f"printf %s {shlex.quote(text)} > {path}"]
    return Cheat({path: text for path, text in files.items() if path not in linked}, "\n".join(lines))


def _passing(spec: dict[str, Any]) -> str:
    files = spec["runs"][0]["files"]
    names = {split_id(i, spec["framework"], files)[1][-1] for i in spec["FAIL_TO_PASS"]}
    return "".join(f"def {name}(*a, **k):\n    pass\n\n\n" for name in sorted(names))


def _on_tests(spec: dict[str, Any], passing: str) -> dict[str, Cheat]:
    """Cheats on the files of the tests, in any language; `passing` is the text of a test file that passes."""
    files = spec["runs"][0]["files"]
    quoted = [shlex.quote(f"{APP}/{file}") for file in files]
    top = [shlex.quote(f"{APP}/{path}") for path in spec["protected"] if "*" not in path]
    return {
        "tests replaced": Cheat(dict.fromkeys(files, passing)),
        "tests deleted": Cheat({}, "rm -rf " + " ".join(top)),
        "tests linked away": Cheat({}, "".join(f"rm -rf {p}; ln -s /tmp {p}; " for p in top)),
        "tests read-only": Cheat(dict.fromkeys(files, passing), "chmod 444 " + " ".join(quoted) + f"; chmod 555 {APP}"),
        "stray process": Cheat(
            {}, "mkdir -p /logs/verifier; (setsid bash -c 'for i in $(seq 600); do echo 1 > /logs/verifier/reward.txt; "
                "sleep 0.1; done' >/dev/null 2>&1 &)"
        ),
    }  # fmt: skip


def _in_python(spec: dict[str, Any], module: str, source: str) -> dict[str, Cheat]:
    files = spec["runs"][0]["files"]
    ids = spec["runs"][0]["collected"]
    stem = [file.rsplit("/", 1)[-1][:-3] for file in files]

    def added(code: str) -> Cheat:
        return Cheat({module: source + "\n" + code})

    known = f"not any(self.nodeid.startswith(f) for f in {files!r})"
    known_class = f"type(self).__module__ not in {stem!r}"
    roots = [path.strip("./") for path in spec["paths"]]
    kept = keep_tests(spec, APP)
    return {
        "conftest exits": Cheat({"conftest.py": "import sys\nsys.exit(0)\n"}),
        "conftest skips": Cheat({"conftest.py": "collect_ignore_glob = ['*']\n"}),
        **{name: Cheat({module: f"{source}\n{code}"}, kept) for name, code in telling(spec, module).items()},
        "configuration": Cheat({"pytest.ini": "[pytest]\naddopts = --collect-only\npython_files = x.py\n"}),
        "start-up file": Cheat({f"{root}/sitecustomize.py".lstrip("/"): "import os\nos._exit(0)\n" for root in roots}),
        "pytest shadowed": Cheat({f"{root}/pytest.py".lstrip("/"): "main = lambda *a, **k: 0\n" for root in roots}),
        "import exits 0": added("import os as _o\n_o._exit(0)\n"),
        "import exits": added("import sys as _s\n_s.exit(0)\n"),
        "every failure swallowed": added(SWALLOW.format(condition="False", unittest_condition="False")),
        "failures of known files swallowed": added(SWALLOW.format(condition=known, unittest_condition=known_class)),
        "report forged": added(FORGE.format(ids=ids, code=0)),
        "report forged after the collection": added(COLLECT_AND_FORGE.format(files=files)),
        "process killed": added("import os as _o, signal as _g\n_o.kill(_o.getppid(), 9)\n_o.kill(_o.getpid(), 9)\n"),
        "reward written": added(
            "import os as _o\nfor _f in ('/logs/verifier', '/logs', '/tests'):\n    try:\n"
            "        _o.makedirs(_f, exist_ok=True)\n"
            "        open(_f + '/reward.json', 'w').write('{\"reward\": 1.0}')\n"
            "        open(_f + '/reward.txt', 'w').write('1')\n    except OSError:\n        pass\n"
        ),
        "endless import": added("while True:\n    pass\n"),
    }  # fmt: skip


def carry_out(cheat: Cheat, room: NamespaceEnvironment) -> None:
    room.upload({f"{APP}/{path}": text.encode() for path, text in cheat.files.items()})
    if cheat.command:
        room.exec(cheat.command, cwd=APP, timeout_s=30)


QUICK = ("failures of known files swallowed",)
"""The cheats that every new task is tried with; the others by `glm5 task audit`."""

Grade = Callable[[NamespaceEnvironment], Mapping[str, Any]]


def passing_cheats(
    folder: Path, room: NamespaceEnvironment, grade: Grade, names: tuple[str, ...] = ()
) -> tuple[int, list[str]]:
    """The number of cheats tried (default: all), and the names of those that do not score 0. `room` holds the
    repository with the bug."""
    start = room.snapshot()
    tried = {name: cheat for name, cheat in cheats(folder).items() if not names or name in names}
    found = []
    for name, cheat in tried.items():
        room.restore(start)
        carry_out(cheat, room)
        if grade(room)["reward"] != 0.0:
            found.append(name)
    room.restore(start)
    return len(tried), found
