"""From a package to validated tasks: the order of validation, the written folder, resuming, cheats."""

from __future__ import annotations

import functools
import json
import marshal
import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm5.errors import DataError, GradingError
from glm5.records import Message, ToolCall
from glm5.sandbox.environment import NamespaceEnvironment
from glm5.tasks.families import make_family
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.swe import audit, audit_sample
from glm5.tasks.harbor.trial import TaskRoom
from glm5.tasks.swe.attacks import QUICK, cheats, passing_cheats
from glm5.tasks.swe.build import MOST_FAULTS, MOST_MISSES, Build, Job, drawn
from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.copies import fix_is_elsewhere
from glm5.tasks.swe.driver import APP, DRIVERS, RoomDriver, TestRun, open_room
from glm5.tasks.swe.folder import SITE, read_tests
from glm5.tasks.swe.grading import grade
from glm5.tasks.swe.in_room import grade as in_room
from glm5.tasks.swe.mutate import Mutations
from glm5.tasks.swe.stdlib import standard_module
from glm5.tasks.swe.validate import Baseline, Rejected, Rules, baseline, solve, validate
from tests.rooms import needs_rooms
from tests.tasks.swe.tiny import CLIP, TESTS, site, tiny

pytestmark = needs_rooms
DRIVER, RULES = DRIVERS["python"], Rules(twins=1)
F2P = "tests/test_ranges.py::test_clip[9-5]"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = tiny(tmp_path_factory.mktemp("tiny"))
    (made.root / "tiny/__pycache__").mkdir()
    (made.root / "tiny/__pycache__/ranges.cpython-311.pyc").write_bytes(b"the fixed state")
    return made


@pytest.fixture(scope="module")
def clean(repository: Repository) -> Baseline:
    return baseline(repository, DRIVER, Rules(clean_runs=1))


@pytest.fixture(scope="module")
def task(repository: Repository, clean: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "one"
    validate(bug(repository, "return high", "return low"), clean, DRIVER, RULES, folder)
    return folder


READ = """
import os
if os.path.isdir("/tests"):
    import json
    json.load(open("/tests/tests.json"))
    clip = lambda x, low, high: max(low, min(x, high))
"""


def bug(repository: Repository, old: str, new: str) -> Candidate:
    return Candidate(repository, "mutate", {"tiny/ranges.py": CLIP.replace(old, new, 1)}, notes=("by hand in clip",))


def test_baseline_pins_the_ids_of_each_file(clean: Baseline) -> None:
    assert len(clean.stable) == 7
    assert set(clean.pinned) == {"tests/test_ranges.py"}
    assert F2P in clean.stable


@pytest.mark.slow
def test_flaky_and_failing_tests_are_left_out(tmp_path: Path) -> None:
    flaky = TESTS + "\n\ndef test_hash():\n    assert hash('a') % 2\n\n\ndef test_wrong():\n    assert False\n"
    found = baseline(tiny(tmp_path, tests=flaky), DRIVER, Rules(clean_runs=6))
    assert len(found.stable) == 7 or (found.stable - {"tests/test_ranges.py::test_hash"} and len(found.stable) == 8)
    assert "tests/test_ranges.py::test_wrong" not in found.stable


def test_a_package_without_passing_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no test passes"):
        baseline(tiny(tmp_path, tests="import nowhere\n"), DRIVER, Rules(clean_runs=1))


def test_an_unusable_package_is_tried_once(tmp_path: Path) -> None:
    opened, told = list[str](), list[str]()

    def broken() -> Any:
        opened.append("x")
        raise DataError("x: no tests")

    for _ in range(2):
        build = Build(tmp_path / "out", tmp_path / "work", told=told.append)
        assert build.run([Job("x 2 from 1", broken)], 1, None, 1)["unusable_packages"] == {"x 2 from 1": "x: no tests"}
    assert opened == ["x"] and told[0] == "x 2 from 1: x: no tests" and "packages.jsonl" in told[1]


@pytest.mark.parametrize(("named", "tried"), [(None, 2), ({"a": "b"}, 4)])
def test_the_jobs_of_a_series_share_the_limit_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, str] | None, tried: int
) -> None:
    names: list[str] = []
    monkeypatch.setattr(Build, "_draw", lambda self, name, *rest: names.append(name) or 1)
    repository = tiny(tmp_path / "repo")
    jobs = [Job(str(number), lambda: (repository, [Mutations()]), "commits") for number in range(4)]
    Build(tmp_path / "out", tmp_path / "work", named=named).run(jobs, 2, None, 1)
    assert len(names) == tried


def test_a_package_that_nobody_expected_falls_alone(tmp_path: Path) -> None:
    """As one whose package.json is a list."""

    def odd() -> Any:
        json.loads("[]").get("license")

    build = Build(tmp_path / "out", tmp_path / "work")
    found = build.run([Job("x", odd)], 1, None, 1)["unusable_packages"]
    assert found == {"x": "x cannot be read: AttributeError(\"'list' object has no attribute 'get'\")"}


def test_a_build_knows_what_another_one_has_found_before_it_began(tmp_path: Path) -> None:
    """It may have read the lists, and then spent minutes on the history of a repository."""
    opened = []

    def broken() -> Any:
        opened.append("x")
        raise DataError("x: no tests")

    for build in [Build(tmp_path / "out", tmp_path / "work") for _ in range(2)]:
        build.run([Job("x 2 from 1", broken)], 1, None, 1)
    assert opened == ["x"]


PROPERTY = """
from hypothesis import given, strategies

@given(strategies.integers())
def test_small(n):
    assert n < 1000
"""


def test_property_tests_fail_alike_and_at_once(tmp_path: Path) -> None:
    """Random examples would make a verdict random, and the search for a smaller one takes minutes."""
    modules = ("hypothesis", "_hypothesis_globals", "sortedcontainers")
    repository = replace(tiny(tmp_path, tests=PROPERTY), site=(site(*modules),))
    runs = [DRIVER.run(repository, {}, repository.test_files, 60).messages for _ in range(2)]
    assert runs[0] == runs[1]
    (said,) = runs[0].values()
    assert int(said.partition("# n = ")[2].split()[0]) > 1000, said  # the smallest would be 1000


def test_the_written_task(task: Path) -> None:
    spec = json.loads((task / "tests/tests.json").read_bytes())
    assert spec["FAIL_TO_PASS"] == [F2P]
    assert len(spec["PASS_TO_PASS"]) == 6
    assert (task / "environment/repo/tiny/ranges.py").read_text() == CLIP.replace("return high", "return low", 1)
    assert not list(task.rglob("*.pyc"))
    shown = (task / "environment/repo/tests/test_ranges.py").read_text()
    assert "def test_clip(" not in shown and "def test_clip_edges(" in shown
    assert "clip(x, 2, 5) == want" in (task / "instruction.md").read_text()
    assert "# x = 9" in (task / "instruction.md").read_text()
    twin = next(run for run in spec["runs"] if run["overlay"])
    assert F2P in twin["must_fail"]


def test_slow_tests_are_left_out(tmp_path: Path) -> None:
    slow = "import time\n\n\ndef test_slow():\n    time.sleep(0.5)\n\n\ndef test_fast():\n    pass\n"
    found = baseline(tiny(tmp_path, tests=slow), DRIVER, Rules(clean_runs=2, tests_s=0.3))
    assert {name.split("::")[1] for name in found.stable} == {"test_fast"}
    assert {name.split("::")[1] for ids in found.pinned.values() for name in ids} == {"test_fast", "test_slow"}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return high", "return high  # same", "no failing test"),
        ('"""Numbers', 'raise ImportError\n"""Numbers', "too many failing tests"),
        pytest.param(
            "if x < low:\n        return low", "while x < low:\n        pass", "timeout", marks=pytest.mark.slow
        ),
        pytest.param("if x < low:", "import os\n    os._exit(3)\n    if x < low:", "crash", marks=pytest.mark.slow),
    ],
)
def test_rejects(repository: Repository, clean: Baseline, tmp_path: Path, old: str, new: str, reason: str) -> None:
    class Quick(RoomDriver):
        def run(self, repository: Repository, changes: Any, files: Any, timeout_s: float, *more: Any) -> TestRun:
            return DRIVER.run(repository, changes, files, min(timeout_s, 6.0), *more)

        def calls(self, *_: object) -> None:
            return None

    with pytest.raises(Rejected, match=reason):
        validate(bug(repository, old, new), clean, Quick("quick"), RULES, tmp_path / "task")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("copy", "found"),
    [
        ({"dist/tiny.txt": "(" + CLIP.replace("    ", "\t").replace("\n", "\r\n")}, "dist/tiny.txt"),
        ({"notes/a.txt": "if x > high:\n", "notes/b.bin": "\xff" + CLIP.replace("low", "lower")}, None),
        ({"dist/old.txt": CLIP.replace("return high", "return low")}, None),
    ],
)
def test_a_fix_that_stands_elsewhere_is_no_task(
    copy: dict[str, str], found: str | None, tmp_path: Path, clean: Baseline
) -> None:
    repository = tiny(tmp_path / "tiny")
    for path, text in copy.items():
        (repository.root / path).parent.mkdir(exist_ok=True)
        (repository.root / path).write_bytes(text.encode("latin-1"))
    candidate = bug(repository, "    if x > high:\n        return high", "    if x > high:\n        return low")
    assert fix_is_elsewhere(candidate) == found
    assert fix_is_elsewhere(bug(repository, "return x", "return  x")) is None  # but for spaces in the bugged state too
    if found:
        with pytest.raises(Rejected, match="fix elsewhere"):
            validate(candidate, clean, DRIVER, RULES, tmp_path / "task")


def test_a_fix_among_the_test_dependencies_is_no_task(repository: Repository, clean: Baseline, tmp_path: Path) -> None:
    """As soupsieve has beautifulsoup4 among its own, which needs soupsieve."""
    (tmp_path / "site/tiny").mkdir(parents=True)
    (tmp_path / "site/tiny/ranges.py").write_text(CLIP)
    candidate = bug(repository, "    if x > high:\n        return high", "    if x > high:\n        return low")
    assert fix_is_elsewhere(candidate) is None
    more = replace(repository, site=(*repository.site, str(tmp_path / "site")))
    assert fix_is_elsewhere(replace(candidate, repository=more)) == f"{tmp_path}/site/tiny/ranges.py"


def test_the_machines_python_packages_are_hidden(task: Path) -> None:
    """Some machine has the repository's package, with the fix in it."""
    folders = f"/usr/lib/python3*/*-packages {sys.base_prefix}/lib/python3*/*-packages"
    with TaskRoom(replace(TaskFolder.read(task), trees={SITE: Path(site())})) as room:
        seen = room.room.exec(f"for f in {folders}; do ls -A $f; done; python3 -S -c 'import json'")
    assert (seen.stdout, seen.exit_code) == (b"", 0), seen


def test_another_right_solution_scores_1(task: Path, repository: Repository) -> None:
    with open_room(task / "environment/repo", repository.site) as room:
        room.upload({f"{APP}/tiny/ranges.py": CLIP.replace("return high", "return min(x, high)").encode()})
        verdict = grade(room, read_tests(task), repository.site)
    assert (verdict["reward"], verdict["flags"]) == (1.0, [])


def test_a_solution_that_breaks_another_test_scores_0(task: Path, repository: Repository) -> None:
    with open_room(task / "environment/repo", repository.site) as room:
        room.upload({f"{APP}/tiny/ranges.py": CLIP.replace("return 0", "return 1").encode()})
        verdict = grade(room, read_tests(task), repository.site)
    assert verdict["reward"] == 0.0
    assert (verdict["f2p_rate"], verdict["failing"]) == (1.0, ["tests/test_ranges.py::TestSpread::test_empty"])


@pytest.mark.slow
def test_every_cheat_scores_0(task: Path) -> None:
    assert audit(task, repeats=1, bases={"python:3.11-slim": {SITE: Path(site())}}) == {
        "ok": True, "oracle": [1.0], "no_op": [0.0], "repeats": 1, "tried": len(cheats(task)), "cheats": []
    }  # fmt: skip
    assert len(cheats(task)) >= 21


def test_a_twin_ends_what_only_twins_refuse(
    task: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[str]] = []
    judge = in_room.judge
    monkeypatch.setattr(in_room, "judge", lambda spec, reports: runs.append(list(reports)) or judge(spec, reports))
    graded = functools.partial(grade, tests=read_tests(task), site=repository.site, shuffled=False)
    with open_room(task / "environment/repo", repository.site) as room:
        before = room.snapshot()
        for first in (False, True):
            assert passing_cheats(task, room, functools.partial(graded, twins_first=first), QUICK)[1] == []
        assert runs == [["tests"], ["tests", "twins/0"], ["twins/0"]]
        runs.clear()
        room.restore(before)
        solve(task, room)
        assert graded(room, twins_first=True)["reward"] == 1.0 and len(runs) == 2


def test_an_audit_of_a_sample_goes_on(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def audited(path: Path, repeats: int) -> dict[str, Any]:
        if path.name == "b":
            raise GradingError("the room is gone")
        return {"ok": path.name != "c", "tried": 21, "cheats": []}

    with pytest.raises(DataError, match="no task to audit"):
        audit_sample(tmp_path, None, 0)
    for name in "abcd":
        shutil.copytree(task, tmp_path / "tasks" / name)
    monkeypatch.setattr("glm5.tasks.harbor.swe.audit", audited)
    told: list[str] = []
    first = audit_sample(tmp_path, 2, 0, told=told.append)
    every = audit_sample(tmp_path, None, 0, told=told.append)
    assert (first["audited"], every["audited"], len(told)) == (2, 4, 4)
    assert [(row["id"], row.get("error")) for row in every["bad"]] == [("b", "the room is gone"), ("c", None)]
    assert (every["ok"], every["tried"]) == (2, 63)


def test_a_build_audits_a_share_that_a_later_audit_knows(
    task: Path, repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged(candidate: Candidate, clean: Any, driver: Any, rules: Any, folder: Path, *_: Any) -> dict[str, Any]:
        shutil.copytree(task, folder)
        return {"failing": candidate.id}

    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)
    bugs = [bug(repository, "return high", f"return {i}") for i in range(20)]
    source: Any = SimpleNamespace(name="versions", candidates=lambda *_: iter(bugs))
    row = {"ok": False, "tried": 0, "cheats": []}  # what is not ok stays in the list, and in the sample
    build = Build(tmp_path, tmp_path / "work", audit=lambda path: {"id": path.name, **row}, audited=0.3)
    build.run([Job("tiny", lambda: (repository, [source]))], per_package=99, count=None, at_once=1)
    found = [json.loads(line)["id"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    ids = [one.id for one in bugs]
    assert found == [name for name in ids if drawn(name, 0) < 0.3] and 0 < len(found) < 20
    assert all((tmp_path / "tasks" / name).is_dir() for name in ids)
    monkeypatch.setattr("glm5.tasks.harbor.swe.audit", lambda *_: pytest.fail("audited before"))
    assert audit_sample(tmp_path, len(found), 0)["audited"] == len(found)


WRONG = '{{"task": "repair", "site": [], "runs": {}, "timeout_s": {}, "protected": []}}'


@pytest.mark.parametrize(
    "text",
    ["[1]", "{", "{}", '{"task": "repair"}', "[" * 99999, WRONG.format("[3]", 1),
     WRONG.format('[{"name": 1, "files": []}]', 1), WRONG.format("[]", "NaN"), WRONG.format("[]", 1e300),
     WRONG.format("[]", '"1"')],
)  # fmt: skip
def test_an_audit_refuses_tests_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks/x/tests").mkdir(parents=True)
    (tmp_path / "tasks/x/tests/tests.json").write_text(text)
    with pytest.raises(DataError, match=r"tasks/x: tests/tests\.json is not the tests of a SWE task"):
        audit_sample(tmp_path, None, 0)


def test_a_verdict_is_there_in_time(task: Path, repository: Repository) -> None:
    with open_room(task / "environment/repo", repository.site) as room:
        room.due = time.monotonic() - 1.0
        verdict = grade(room, read_tests(task), repository.site)
    assert (verdict["reward"], verdict["flags"]) == (0.0, ["no time is left"])


@pytest.mark.parametrize(
    ("name", "reward"),
    [("solution", 1.0), *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("nothing", 0.0), ("pytest changed", 0.0), ("reward written", 0.0), ("process killed", 0.0),
        ("stray process", 1.0), ("twins read", 0.0), ("pipe left", 1.0),
    ))],
)  # fmt: skip
def test_graded_by_its_own_script_in_the_room(task: Path, repository: Repository, name: str, reward: float) -> None:
    site = Path(repository.site[0])
    with NamespaceEnvironment({APP: task / "environment/repo", SITE: site}, writable=["/logs"]) as room:
        if name in ("solution", "stray process", "pytest changed", "pipe left"):
            solve(task, room)
        if name == "pytest changed":
            room.upload({f"{SITE}/pytest/__init__.py": b"main = lambda *a, **k: 0\n"})
        if name == "pipe left":
            room.exec("mkfifo /app/tiny/pipe; chmod 000 /app/tiny/pipe /app/setup.py")
        if name == "twins read":
            room.upload({f"{APP}/tiny/ranges.py": (CLIP.replace("return high", "return low") + READ).encode()})
        if name in cheats(task):
            cheat = cheats(task)[name]
            room.upload({f"{APP}/{p}": t.encode() for p, t in cheat.files.items()} if name != "stray process" else {})
            room.exec(cheat.command or "true")
        tests = {f"/tests/{path}": data for path, data in read_tests(task).items()}
        with room.verifier(tests, writable=["/tests", "/logs"]) as verifier:
            done = verifier.exec("bash /tests/test.sh", timeout_s=120)
            found = json.loads(verifier.download("/logs/verifier/reward.json"))
    assert (done.exit_code, found["reward"]) == (0, reward), done.stderr


def test_rows_that_a_crash_cut_off_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text(
        '{"id": "a", "source": "mutate", "package": "p", "kind": "k", "tier": "t"}\n{"id": "b'
    )
    (tmp_path / "rejects.jsonl").write_text('{"id": "c", "source": "mutate", "reason": "crash"}\n')
    assert Build(tmp_path, tmp_path).summary() == {
        "tasks": 1, "packages": 1, "kinds": {"k": 1}, "tiers": {"t": 1}, "unusable_packages": {},
        "sources": {"mutate": {"tasks": 1, "rejects": {"crash": 1}}},
    }  # fmt: skip
    assert (tmp_path / "manifest.jsonl").read_text().endswith("}\n")


@pytest.mark.slow
def test_a_build_resumes(repository: Repository, tmp_path: Path) -> None:
    def build() -> Build:
        return Build(tmp_path / "out", tmp_path / "work", rules=Rules(twins=1, clean_runs=1, bug_runs=1))

    job = Job("tiny", lambda: (repository, [Mutations()]))
    first = build().run([job], per_package=2, count=1, at_once=1)
    assert first["tasks"] == 1
    rows = (tmp_path / "out/rejects.jsonl").read_text() if (tmp_path / "out/rejects.jsonl").exists() else ""
    manifest = tmp_path / "out/manifest.jsonl"
    kept = manifest.read_text()
    manifest.write_text(kept + '{"id": "cut o')
    second = build().run([job], per_package=2, count=2, at_once=2)
    assert second["tasks"] == 2
    assert manifest.read_text().startswith(kept)
    assert (tmp_path / "out/rejects.jsonl").read_text().startswith(rows) if rows else True
    ids = [json.loads(line)["id"] for line in manifest.read_text().splitlines()]
    assert sorted(ids) == sorted(p.name for p in (tmp_path / "out/tasks").iterdir())
    third = build().run([job], per_package=2, count=None, at_once=1)
    assert third == second
    last = json.loads(manifest.read_text().splitlines()[1])
    named = {last["id"]: last["sha256"], "elsewhere": ""}
    again = replace(build(), out=tmp_path / "again", named=named)
    result = again.run([job], per_package=2, count=None, at_once=1)
    assert (result["tasks"], result["not_built"], result["differ"]) == (1, ["elsewhere"], [])


def test_what_is_known_runs_no_tests(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that goes on runs a release's tests only if one of its candidates is new."""
    monkeypatch.setattr(Build, "_baseline", lambda *_: pytest.fail("the tests are run"))
    known = bug(repository, "return high", "return low")
    (tmp_path / "manifest.jsonl").write_text(json.dumps({"id": known.id, "package": "tiny", "source": "versions",
                                                         "kind": "bug-fix", "tier": "single"}) + "\n")  # fmt: skip
    source: Any = SimpleNamespace(name="versions", candidates=lambda *_: iter([known]))
    told: list[str] = []
    build = Build(tmp_path, tmp_path / "work", told=told.append)
    build.run([Job("tiny", lambda: (repository, [source]))], per_package=2, count=None, at_once=1)
    assert told == ["tiny: 1 tasks from versions"] and not (tmp_path / "packages.jsonl").exists()


def test_a_part_of_what_fails_no_test_is_not_tried(
    repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a part of a part. A part of what fails a test is tried."""
    runs: list[str] = []

    def run(_: Any, changes: Any, files: Any, seconds: Any, select: Any) -> TestRun:
        runs.append(changes.get("tiny/ranges.py", "fixed")[-3:])
        passed = () if runs[-1] == "# 2" else select
        return TestRun(tuple(select), dict.fromkeys(passed, "passed"), {}, {}, 0.1, None)

    def part(number: int, within: Candidate | None = None) -> Candidate:
        text = CLIP.replace("return high", "return low") + f"# {number}"
        return replace(bug(repository, "", ""), source="versions", changes={"tiny/ranges.py": text}, within=within)

    silent, failing = part(1), part(2)
    parts = [part(3, silent), part(4, part(5, silent)), part(6, failing), part(7, failing)]
    tried: list[str] = []

    def judged(candidate: Candidate, *_: Any) -> dict[str, Any]:
        tried.append(candidate.id)
        raise Rejected("crash")

    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: replace(clean, alone={}))
    source: Any = SimpleNamespace(name="versions", candidates=lambda *_: iter(parts))
    driver: Any = SimpleNamespace(run=run, name="python")
    build = Build(tmp_path, tmp_path / "work", driver=driver)
    build.run([Job("tiny", lambda: (repository, [source]))], per_package=9, count=None, at_once=1)
    assert tried == [one.id for one in parts[2:]] and runs == ["# 1", "# 2", "xed"]  # the last without a change
    rows = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == ["no failing test"] * 2 + ["crash"] * 2
    tried.clear()
    build = Build(tmp_path / "named", tmp_path / "work", driver=driver, named=dict.fromkeys((p.id for p in parts), ""))
    build.run([Job("tiny", lambda: (repository, [source]))], per_package=9, count=None, at_once=1)
    assert tried == [one.id for one in parts]  # another build has made them


def test_kept_byte_code_is_of_the_fixed_state(tmp_path: Path) -> None:
    """The run of the fixed state writes it, later runs load it, and what a candidate changes is compiled again, also
    if its length is the same."""
    found = replace(tiny(tmp_path / "repo"), bytecode=str(tmp_path / "kept"))
    for path in found.root.rglob("*.py"):
        os.utime(path, (1e9, 1e9))  # Python looks at seconds only, and the change may come within this one
    assert len(DRIVER.run(found, {}, found.test_files, 60).passed) == 7
    assert not list(found.root.rglob("*.pyc")) and list((tmp_path / "kept").rglob("test_ranges*pytest*.pyc"))
    same_length = CLIP.replace("return x", "return 7")
    assert (
        F2P.replace("9-5", "3-3") not in DRIVER.run(found, {"tiny/ranges.py": same_length}, found.test_files, 60).passed
    )
    (kept,) = (tmp_path / "kept").rglob("ranges.*.pyc")
    other = compile(same_length, f"{APP}/tiny/ranges.py", "exec")
    kept.write_bytes(kept.read_bytes()[:16] + marshal.dumps(other))
    assert F2P.replace("9-5", "3-3") not in DRIVER.run(found, {}, found.test_files, 60).passed


def test_a_test_that_needs_another_file_is_no_failing_test(repository: Repository, tmp_path: Path) -> None:
    """It passes only after another file's tests, and the bug cannot reach those."""
    a, b = "tests/test_a.py::test_it", "tests/test_b.py::test_it"
    two = replace(repository, test_files=("tests/test_a.py", "tests/test_b.py"))
    runs: list[tuple[str, ...]] = []

    def run(_: Any, changes: Any, files: Any, *rest: Any) -> TestRun:
        runs.append(tuple(files))
        return TestRun((b,), {b: "passed" if len(files) == 2 else "failed"}, {}, {}, 0.1, None)

    pinned = {"tests/test_a.py": (a,), "tests/test_b.py": (b,)}
    known = Baseline(frozenset((a, b)), pinned, 0.1, 0, {"tests/test_b.py": ["tiny/ranges.py:clip"]})
    driver: Any = SimpleNamespace(run=run)
    for high in ("low", "x"):
        candidate = replace(bug(repository, "return high", f"return {high}"), repository=two)
        with pytest.raises(Rejected, match="no failing test"):
            validate(candidate, known, driver, RULES, tmp_path / "task")
    assert runs == [("tests/test_b.py",)] * 3  # without the bug only once


@pytest.mark.long
def test_a_test_that_needs_one_left_out_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task runs a sample of the tests, and this one passes only after another test of its file."""
    found = tiny(tmp_path / "repo")
    order = "\n\nseen = []\n\n\ndef test_first():\n    seen.append(1)\n\n\ndef test_second():\n    assert seen\n"
    path = found.root / found.test_files[0]
    path.write_text(path.read_text() + order)
    rules = Rules(twins=1, clean_runs=1, bug_runs=1)
    sample = {f"{found.test_files[0]}::test_second", f"{found.test_files[0]}::test_clip_edges"}
    monkeypatch.setattr("glm5.tasks.swe.validate._sample", lambda *_: set(sample))
    bugged = bug(found, "return high", "return low")
    known = baseline(found, DRIVER, rules)
    assert sample < known.stable
    validate(bugged, known, DRIVER, rules, tmp_path / "task")
    assert set(json.loads(read_tests(tmp_path / "task")["tests.json"])["PASS_TO_PASS"]) == sample - {
        f"{found.test_files[0]}::test_second"
    }


@pytest.mark.long
def test_a_twin_that_loses_tests_is_none(
    repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report would not count, and so the solution would score 0."""
    run, twins = RoomDriver.run, []

    def ends_early(self: RoomDriver, found: Repository, changes: dict[str, str | None], *args: Any) -> TestRun:
        done = run(self, found, changes, *args)
        if set(changes) <= set(found.test_files) and changes:
            twins.append(done)
            return replace(done, collected=done.collected[:-1]) if len(twins) == 1 else done
        return done

    monkeypatch.setattr(RoomDriver, "run", ends_early)
    validate(bug(repository, "return high", "return low"), clean, DRIVER, RULES, tmp_path / "task")
    assert len(json.loads(read_tests(tmp_path / "task")["tests.json"])["runs"]) == len(
        twins
    )  # the tests, one twin less


def test_two_threads_do_not_pass_the_count(
    repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def judged(candidate: Candidate, clean: Any, driver: Any, rules: Any, folder: Path, *_: Any) -> dict[str, Any]:
        both.wait(30)
        folder.mkdir(parents=True)
        return {"failing": candidate.id}

    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)

    def job(word: str) -> Job:
        mine = bug(repository, "return high", f"return {word}")
        source = SimpleNamespace(name="mutate", candidates=lambda *_: iter([mine]))
        return Job(word, lambda: (repository, [source]))

    jobs = [job("low"), job("x")]
    build = Build(tmp_path / "out", tmp_path / "work")
    assert build.run(jobs, per_package=9, count=1, at_once=2)["tasks"] == 1
    assert len(list((tmp_path / "out/tasks").iterdir())) == 1


@pytest.mark.parametrize(("faults", "tried"), [((3,), 4), ((2, 2), 6), ((99,), MOST_FAULTS + 1)])
def test_candidates_that_the_machine_cannot_judge(
    repository: Repository,
    clean: Baseline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: tuple[int, ...],
    tried: int,
) -> None:
    """They get no row, so another run tries them again; too many in a row end the build."""
    plan = iter([ok for count in faults for ok in [False] * count + [True]])

    def judged(*_: Any) -> dict[str, Any]:
        calls.append(1)
        if not next(plan):
            raise GradingError("the room is gone")
        raise Rejected("crash")

    calls: list[int] = []
    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)
    candidates = [bug(repository, "return high", f"return {i}") for i in range(tried)]
    source = SimpleNamespace(name="mutate", candidates=lambda *_: iter(candidates))
    build = Build(tmp_path / "out", tmp_path / "work")
    job = Job("tiny", lambda: (repository, [source]))
    if faults == (99,):
        with pytest.raises(GradingError, match="the room is gone"):
            build.run([job], per_package=9, count=None, at_once=1)
    else:
        build.run([job], per_package=9, count=None, at_once=1)
    assert len(calls) == tried
    assert len(build.summary()["sources"].get("mutate", {"rejects": {}})["rejects"]) == (faults != (99,))


def test_a_candidate_that_nobody_expected_ends_nothing_but_itself(
    repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def candidates(*_: Any) -> Any:
        yield bug(repository, "return high", "return 1")
        raise RecursionError("too deep")

    def judged(*_: Any) -> dict[str, Any]:
        return {}["a key that is not there"]

    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)
    told: list[str] = []
    build = Build(tmp_path / "out", tmp_path / "work", told=told.append)
    source = SimpleNamespace(name="mutate", candidates=candidates)
    build.run([Job("tiny", lambda: (repository, [source]))], per_package=9, count=None, at_once=1)
    (row,) = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
    assert row["reason"] == "error" and row["notes"] == ["KeyError('a key that is not there')"]
    assert "candidates are left out: too deep" in told[1] and told[2] == "tiny: 0 tasks from mutate"


def test_two_sources_with_the_same_candidate(
    repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one must not remove the first one's task."""

    def judged(candidate: Candidate, clean: Any, driver: Any, rules: Any, folder: Path, *_: Any) -> dict[str, Any]:
        if (tmp_path / "out/manifest.jsonl").exists():
            raise Rejected("same failing tests")
        folder.mkdir(parents=True)
        return {"failing": "f"}

    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)
    same = bug(repository, "return high", "return low")
    sources = [SimpleNamespace(name=name, candidates=lambda *_: iter([same])) for name in ("versions", "patches")]
    build = Build(tmp_path / "out", tmp_path / "work")
    build.run([Job("tiny", lambda: (repository, sources))], per_package=9, count=None, at_once=1)
    assert (tmp_path / "out/tasks" / same.id).is_dir() and not (tmp_path / "out/rejects.jsonl").exists()


def test_a_file_without_finds_is_left_alone(
    repository: Repository, clean: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an interrupt ends the build at the next candidate."""
    tried: list[str] = []

    def judged(candidate: Candidate, *_: Any) -> dict[str, Any]:
        tried.append(next(iter(candidate.changes)))
        if len(tried) == 30:
            raise KeyboardInterrupt
        raise Rejected("no failing test")

    monkeypatch.setattr("glm5.tasks.swe.build.validate", judged)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)

    def candidates(*_: Any) -> Any:
        yield from (replace(bug(repository, "return high", f"return {i}")) for i in range(40))
        for i in range(100):
            path = f"tiny/other{i % 10}.py"
            yield replace(bug(repository, "return high", f"return {i}"), changes={path: f"x = {i}\n"})

    source = SimpleNamespace(name="versions", candidates=candidates)
    jobs = [Job("tiny", lambda: (repository, [source])), Job("second", lambda: (repository, [source]))]
    with pytest.raises(KeyboardInterrupt):
        Build(tmp_path / "out", tmp_path / "work").run(jobs, per_package=99, count=None, at_once=1)
    assert tried.count("tiny/ranges.py") == MOST_MISSES and len(tried) == 30


def test_a_module_of_the_standard_library(tmp_path: Path) -> None:
    try:
        repository = standard_module("textwrap", tmp_path)
    except DataError as error:
        pytest.skip(str(error))
    run = DRIVER.run(repository, {}, repository.test_files, 60)
    assert len(run.passed) > 50 and run.stopped is None
    text = repository.read("Lib/textwrap.py").replace("def dedent(text):", "def dedent(text):\n    return text\n", 1)
    run = DRIVER.run(repository, {"Lib/textwrap.py": text}, repository.test_files, 60)
    failed = {name for name, outcome in run.outcomes.items() if outcome == "failed"}
    assert {name.split(".")[1] for name in failed} == {"DedentTestCase", "IndentTestCase"}


@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("true", 0.0),
        ("patch -p1 < /app/fix; rm -r tests", 1.0),
        ("patch -p1 < /app/fix; echo >> /opt/site/pluggy/__init__.py", 0.0),
        ("rm -r /app; ln -s /opt/site /app", 0.0),
    ],
)
def test_the_family_grades_from_outside(task: Path, tmp_path: Path, command: str, reward: float) -> None:
    shutil.copytree(task, tmp_path / "tasks" / "one")
    shutil.copytree(site(), tmp_path / "work/bases/0/opt/site")
    shutil.copy(task / "solution/fix.patch", tmp_path / "tasks/one/environment/repo/fix")
    env = make_family("swe", folder=str(tmp_path), held_out=0.0).problem("rl", 0).env()
    env.start()
    first = env.step(Message("assistant", tool_calls=(ToolCall("bash", {"command": command}),)))
    assert not first.done
    last = env.step(Message("assistant", "done"))
    assert last.done and last.reward == reward and "p2p_rate" in last.detail["rewards"], last.detail
