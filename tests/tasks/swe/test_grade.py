"""What makes a report count, without rooms."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm5.tasks.swe.grading import laid_out
from glm5.tasks.swe.in_room import grade, runner

NONCE = "n"
CANARY = grade.canary_files({"framework": "pytest", "canary_folder": ""}, random.Random(0))
RUN = {"name": "tests", "overlay": "", "files": ["t.py"], "collected": ["t.py::a", "t.py::b"], "select": None}
TWIN = {**RUN, "name": "twins/0", "overlay": "twins/0", "must_fail": ["t.py::a"], "must_pass": ["t.py::b"]}
SPEC = {"FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b"], "runs": [RUN, TWIN]}


def call(name: str, outcome: str = "passed", phase: str = "call") -> dict[str, Any]:
    return {"id": name, "phase": phase, "outcome": outcome, "seconds": 0.1, "message": ""}


def report(a: str = "passed", b: str = "passed", extra: list[Any] | None = None, end: int = 1) -> list[Any]:
    names = ["t.py::a", "t.py::b", CANARY["good"], CANARY["bad"]]
    events = [{"collected": names}, call("t.py::a", a), call("t.py::b", b), call(CANARY["good"])]
    return [*events, call(CANARY["bad"], "failed"), *(extra or []), {"end": end}]


def raw(events: list[Any]) -> bytes:
    return b"".join(f"{NONCE} {json.dumps(event)}\n".encode() for event in events)


def verdict(events: list[Any], twin: list[Any], code: int = 1) -> dict[str, Any]:
    reports = {"tests": (CANARY, raw(events), code, NONCE), "twins/0": (CANARY, raw(twin), 1, NONCE)}
    return grade.judge(SPEC, reports)


GOOD_TWIN = report(a="failed")


def test_an_honest_report_counts() -> None:
    assert verdict(report(), GOOD_TWIN) == {"reward": 1.0, "f2p_rate": 1.0, "p2p_rate": 1.0, "flags": [], "failing": []}


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped"])
def test_what_is_not_passed_fails(outcome: str) -> None:
    found = verdict(report(a=outcome), GOOD_TWIN)
    assert (found["reward"], found["f2p_rate"], found["failing"]) == (0.0, 0.0, ["t.py::a"])


@pytest.mark.parametrize(
    ("events", "flag"),
    [
        ([], "incomplete"),
        (report()[:-1], "incomplete"),
        (report() + [call("t.py::c")], "incomplete"),
        (report(extra=[{"end": 1}]), "incomplete"),
        (report(extra=[call("t.py::a")]), "an event stands twice"),
        (report(extra=[{"collected": []}]), "an event stands twice"),
        (report(extra=[{"collected": 5}]), "malformed"),
        (report(extra=[{"id": [], "phase": "call", "outcome": "passed", "seconds": 0, "message": ""}]), "malformed"),
        (report(extra=[{"end": "1"}]), "malformed"),
        (report(extra=[5]), "malformed"),
        (report(extra=[call("t.py::a", "splendid", "setup")]), "malformed"),
        (report(end=0), "exit status"),
        ([{"collected": ["t.py::a"]}, *report()[1:]], "collected ids differ"),
        ([*report()[:4], call(CANARY["bad"]), {"end": 1}], "canary"),
        (report(extra=[call("t.py", "error", "collect")]), "could not be collected"),
    ],
)
def test_a_report_that_does_not_count(events: list[Any], flag: str) -> None:
    found = verdict(events, GOOD_TWIN)
    assert found["reward"] == 0.0
    assert any(flag in one for one in found["flags"]), found["flags"]


def test_a_deeply_nested_event_is_malformed() -> None:
    assert grade.parse(b"n " + b"[" * 100_000, NONCE) == [{"malformed": True}]


def test_a_test_that_was_only_set_up_is_not_passed() -> None:
    assert grade.outcomes([call("x", phase="setup"), call("x", phase="teardown")]) == {"x": "skipped"}


def test_an_exit_code_of_another_process_is_noticed() -> None:
    assert verdict(report(), GOOD_TWIN, code=-9)["flags"] == ["tests: exit status contradicts the report"]


@pytest.mark.parametrize(("a", "b"), [("passed", "passed"), ("passed", "failed"), ("failed", "failed")])
def test_a_twin_must_come_out_exactly(a: str, b: str) -> None:
    found = verdict(report(), report(a=a, b=b))
    assert found["reward"] == 0.0 and found["flags"][0].startswith("twins/0: tests ")


def test_a_missing_run_scores_0() -> None:
    found = grade.judge(SPEC, {"tests": (CANARY, raw(report()), 1, NONCE)})
    assert (found["reward"], found["failing"]) == (0.0, [])


def test_lines_without_the_nonce_are_not_read() -> None:
    assert grade.parse(b'x {"end": 0}\nn2 {"end": 0}\n{"end": 0}\n', NONCE) == []


def test_no_process_of_a_run_meets_the_next(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(Path(grade.__file__).parent)!r})
import grade
grade.adopt_strays()
done = subprocess.Popen(["/bin/sh", "-c", "(setsid sleep 60 & echo $!) > {tmp_path}/pid"], start_new_session=True)
done.wait()
pid = int(open("{tmp_path}/pid").read())
os.kill(pid, 0)
grade.end_strays()
print(os.path.exists(f"/proc/{{pid}}"))
"""
    found = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=30)
    assert found.stdout == b"False\n", found


def test_neither_times_nor_their_order_tell_a_twin(tmp_path: Path) -> None:
    for folder in ("files", "twin"):
        (tmp_path / folder).mkdir()
        for name in "abcdefgh" if folder == "files" else "d":
            (tmp_path / folder / name).write_text(folder)
    last = set()
    for number in range(30):
        target = tmp_path / str(number)
        grade.lay_in([str(tmp_path / "files"), str(tmp_path / "twin")], str(target))
        assert (target / "d").read_text() == "twin" and len({p.stat().st_mtime_ns for p in target.iterdir()}) == 1
        last.add(max(target.iterdir(), key=lambda path: path.stat().st_ctime_ns).name)
    assert len(last) > 2


def test_every_run_is_laid_out_alike() -> None:
    tests = {"tests.json": b"", "files/t.py": b"real", "files/u.py": b"", "twins/0/t.py": b"twin", "grade.py": b""}
    first, second = (laid_out(tests, SPEC, run) for run in (RUN, TWIN))
    assert list(first) == list(second) == ["files/t.py", "files/u.py", "grade.py", "tests.json"]
    assert (first["files/t.py"], second["files/t.py"]) == (b"real", b"twin")


def test_what_tells_the_runs_apart_is_put_away(tmp_path: Path) -> None:
    for name in ("files", "twins", "states", "reporters"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t").write_text(name)
    (tmp_path / "runner.py").touch()
    with grade.put_away(str(tmp_path)) as place:
        assert sorted(p.name for p in Path(place).iterdir()) == ["files", "states", "twins"]
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([Path(place).name, "reporters", "runner.py"])
    assert {p.name for p in tmp_path.iterdir()} == {"files", "twins", "states", "reporters", "runner.py"}


def test_an_answer_is_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("b")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    assert grade.read_answer(str(tmp_path / "secret")) == b"b"
    assert grade.read_answer(str(tmp_path / "link")) == b""
    assert grade.read_answer(str(tmp_path)) == b""
    assert grade.read_answer(str(tmp_path / "none")) == b""


def test_laying_in_replaces_links_and_files_in_the_way(tmp_path: Path) -> None:
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "outside"
    for folder in (source / "tests", target, outside):
        folder.mkdir(parents=True)
    (source / "tests/test_a.py").write_text("right")
    (target / "tests").symlink_to(outside)
    grade.lay_in([str(source)], str(target))
    assert (target / "tests/test_a.py").read_text() == "right" and not list(outside.iterdir())


def test_canaries_have_other_names_each_time() -> None:
    spec = {"framework": "pytest", "canary_folder": "tests"}
    names = {grade.canary_files(spec, random.SystemRandom())["file"] for _ in range(20)}
    assert len(names) > 15 and all(name.startswith("tests/test_") for name in names)


def test_a_file_is_parsed_once_however_many_of_its_tests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a():\n    n = 1\n    assert (\n        n == 2\n    )\n\n\ndef test_b():\n    {}[0]\n")
    parse, parsed, found = ast.parse, [], []
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or parse(text))
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    for name in ("test_a", "test_b"):
        with pytest.raises((AssertionError, KeyError)) as error:
            names[name]()
        found.append(runner.failing_line(error.tb, str(tmp_path)))
    assert found == ["# n = 1\nassert (\n    n == 2\n)\n\n", "{}[0]\n\n"]
    assert parsed.count(file.read_text()) == 1
