"""Grades a repository with the task's tests. Standard library only: the same file runs in a task's `tests` folder, and
glm5 uses its functions from outside the room.

`grade.py` alone does everything in one room and writes `reward.json`; `grade.py --run NAME` lays in the tests of one
run and becomes the test runner, with nonce and canary names as JSON on stdin, so that a grader outside the room reads
the report and no process of the room decides the reward.

The code under test shares its process with the test runner and can forge any report. A report counts only if
- every line carries the run's nonce, the collected ids are exactly the pinned ones, no phase is reported twice, the
  last line's exit code is the process's own and agrees with the outcomes;
- two canary tests with random names have their known outcomes;
- in the twin runs, the sabotaged tests fail. A twin is the same test file with some assertions changed so that correct
  code fails them. Its names are those of the real run, so only code that knows the right answers can tell them apart.
A report that does not count scores 0 and names its flags.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

CANARY = """\
import os


def {good}():
    assert os.sep.join({parts!r}) == {right!r}


def {bad}():
    assert os.sep.join({parts!r}) == {wrong!r}
"""
UNITTEST_CANARY = """\
import os
import unittest


class {case}(unittest.TestCase):
    def {good}(self):
        self.assertEqual(os.sep.join({parts!r}), {right!r})

    def {bad}(self):
        self.assertEqual(os.sep.join({parts!r}), {wrong!r})
"""
WORDS = "path order build scope parts value state names limit level index merge fetch group total cache split".split()
STARTUP = {"sitecustomize.py", "usercustomize.py"}  # run by every interpreter that finds them
CONFIGURATION = {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"}
ANSWER = "answer.txt"
RANKS = ("passed", "skipped", "failed", "error")
MOST_REPORT = 16 << 20  # bytes
SET_CHILD_SUBREAPER = 36
LAID_IN = 1_600_000_000  # time of all files of the tests


def canary_files(spec: dict[str, Any], choice: random.Random) -> dict[str, Any]:
    """{file, text, good, bad}: a test file with one test that passes and one that fails, under random names. Frameworks
    other than Python's have its template in the specification."""
    framework, folder = spec["framework"], spec["canary_folder"]
    words = [*choice.sample(WORDS, 4), f"{choice.getrandbits(16):04x}"]
    names = ["test_" + "_".join(words[:2]), "test_" + "_".join(words[2:4])]
    choice.shuffle(names)
    parts = [f"{choice.getrandbits(20):x}" for _ in range(2)]
    case = "".join(w.title() for w in words[:2]) + "Tests"
    if "canary" in spec:
        return _from_template(spec["canary"], folder, words, parts)
    text = {"pytest": CANARY, "unittest": UNITTEST_CANARY}[framework].format(
        good=names[0], bad=names[1], parts=parts, right="/".join(parts), wrong="/".join(reversed(parts)), case=case
    )
    name = "test_" + "_".join(words[1::3])
    file = os.path.join(folder, name + ".py") if folder else name + ".py"
    prefix = {"pytest": file + "::", "unittest": f"{name}.{case}."}[framework]
    return {"file": file, "text": text, "good": prefix + names[0], "bad": prefix + names[1]}


def _from_template(template: dict[str, str], folder: str, words: list[str], parts: list[str]) -> dict[str, Any]:
    """A canary of `languages/canaries.py`: @GOOD@ and so on are filled in."""
    good, bad = "_".join(words[:2]), "_".join(words[2:4])
    fill = {
        "@GOOD@": good, "@BAD@": bad, "@Good@": good.title().replace("_", ""), "@Bad@": bad.title().replace("_", ""),
        "@CASE@": "".join(w.title() for w in words[1::2]), "@FILE@": "_".join(words[1:3] + words[4:]),
        "@A@": parts[0], "@B@": parts[1],
    }  # fmt: skip
    filled = {}
    for key, value in template.items():
        for word, text in fill.items():
            value = value.replace(word, text)
        filled[key] = value
    file = os.path.join(folder, filled["file"])
    return {"file": file, "text": filled["text"], **{k: f"{file}::{filled[k]}" for k in ("good", "bad")}}


def protected(path: str, folders: list[str]) -> bool:
    """Whether the path (relative, /) belongs to the tests: the agent's version of it is replaced by the task's."""
    name = path.rsplit("/", 1)[-1]
    if name in CONFIGURATION or name in STARTUP:
        return True
    return any(path == f or path.startswith(f + "/") or ("*" in f and fnmatch.fnmatch(name, f)) for f in folders)


def remove(path: str) -> None:
    """Remove a file, a link or a folder, whatever its permissions."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, stat.S_IRWXU)
    shutil.rmtree(path)


def lay_in(sources: list[str], target: str) -> None:
    """Copy the files of the folders `sources` over `target`, a later folder's in the place of an earlier one's; links
    and files in the place of a folder are replaced. Neither times nor the order of inodes tell where a file is from."""
    files: dict[str, str] = {}
    places: dict[str, None] = {}
    for source in sources:
        for folder, _, names in os.walk(source):
            place = os.path.normpath(os.path.join(target, os.path.relpath(folder, source)))
            places[place] = None
            files.update({os.path.join(place, name): os.path.join(folder, name) for name in names})
    for place in sorted(places):
        if os.path.islink(place) or not os.path.isdir(place):
            if os.path.lexists(place):
                remove(place)
            os.makedirs(place)
        os.chmod(place, stat.S_IRWXU | 0o055)
    for path in random.SystemRandom().sample(sorted(files), len(files)):
        if os.path.lexists(path):
            remove(path)
        for _ in range(secrets.randbelow(8)):  # numbers of inodes, which are given in turn
            tempfile.TemporaryFile(dir=os.path.dirname(path)).close()
        shutil.copyfile(files[path], path)
        os.utime(path, (LAID_IN, LAID_IN))


def prepare(spec: dict[str, Any], tests: str, run: dict[str, Any], canary: dict[str, Any]) -> None:
    """Replace all that belongs to the tests in the repository by the task's version, for one run."""
    root = spec["root"]
    for folder, folders, files in os.walk(root):
        os.chmod(folder, stat.S_IRWXU | 0o055)
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, root).replace(os.sep, "/")
            if name == "__pycache__" or protected(relative, spec["protected"]):
                remove(path)
        folders[:] = [f for f in folders if os.path.lexists(os.path.join(folder, f))]
    lay_in([os.path.join(tests, part) for part in ("files", run["overlay"]) if part], root)
    path = os.path.join(root, canary["file"])
    with open(path, "w") as file:
        file.write(canary["text"])
    os.utime(path, (LAID_IN, LAID_IN))


def request(spec: dict[str, Any], run: dict[str, Any], canary: dict[str, Any] | None, nonce: str) -> dict[str, Any]:
    """The test runner's specification for one run. `select` are the ids to run, None for all."""
    paths = [os.path.normpath(os.path.join(spec["root"], path)) for path in spec["paths"]]
    keys = ("framework", "root", "site", "args", "reload", "build")
    common = {key: spec[key] for key in keys if key in spec}
    added = [] if canary is None else [canary["good"], canary["bad"]]
    select = None if run["select"] is None else [*run["select"], *added]
    files = [*run["files"], *([] if canary is None else [canary["file"]])]
    return {**common, "paths": paths, "nonce": nonce, "files": files, "select": select, "trace": False}


def parse(raw: bytes, nonce: str) -> list[dict[str, Any]]:
    """The events of a report; lines without the nonce are left out, malformed ones are `{"malformed": True}`."""
    events, start = [], nonce.encode() + b" "
    for line in raw[:MOST_REPORT].split(b"\n"):
        if line.startswith(start):
            try:
                event = json.loads(line[len(start) :])
            except (ValueError, RecursionError):
                event = None
            events.append(event if well_formed(event) else {"malformed": True})
    return events


def well_formed(event: Any) -> bool:
    """Whether an event has one of the four forms."""
    if not isinstance(event, dict):
        return False
    if set(event) == {"id", "phase", "outcome", "seconds", "message"}:
        texts = all(isinstance(event[key], str) for key in ("id", "phase", "outcome", "message"))
        return texts and type(event["seconds"]) in (int, float) and event["outcome"] in RANKS
    if set(event) == {"collected"}:
        return isinstance(event["collected"], list) and all(isinstance(name, str) for name in event["collected"])
    return (set(event) == {"end"} and type(event["end"]) is int) or set(event) == {"calls"}


def outcomes(events: list[dict[str, Any]]) -> dict[str, str]:
    """The outcome per reported id: the worst of its phases, in the order of RANKS. A test that was set up and never
    called is skipped."""
    found: dict[str, str] = {}
    called = {event["id"] for event in events if event.get("phase") == "call"}
    for event in events:
        if "id" in event:
            name, first = event["id"], "passed" if event["id"] in called else "skipped"
            found[name] = max(found.get(name, first), event["outcome"], key=RANKS.index)
    return found


def flags(run: dict[str, Any], canary: dict[str, Any], events: list[dict[str, Any]], code: int) -> list[str]:
    """Why a report does not count; empty if it does."""
    found = []
    collected = [event["collected"] for event in events if "collected" in event]
    ends = [event["end"] for event in events if "end" in event]
    results = outcomes(events)
    phases = [(event.get("id"), event.get("phase")) for event in events if "id" in event]
    broken = [event["id"] for event in events if event.get("phase") == "collect"]
    if broken:
        return [f"{str(broken[0])[:200]} could not be collected"]
    if any("malformed" in event for event in events):
        return ["forged: a malformed event"]
    if len(ends) != 1 or "end" not in events[-1]:
        return ["incomplete"]
    if len(collected) != 1 or len(set(phases)) != len(phases):
        found.append("forged: an event stands twice or is missing")
    elif run["collected"] is not None and sorted(collected[0]) != sorted(
        [*run["collected"], canary["good"], canary["bad"]]
    ):
        found.append("collected ids differ from the pinned ids")
    if ends[0] != code or code != 1:  # the canary that fails makes it 1
        found.append("exit status contradicts the report")
    if (results.get(canary["good"]), results.get(canary["bad"])) != ("passed", "failed"):
        found.append("canary")
    return found


Report = tuple[dict[str, Any], bytes, int, str]


def judge(spec: dict[str, Any], reports: dict[str, Report]) -> dict[str, Any]:
    """The verdict; `reports`: run name to (canary, raw report, exit code, nonce).

    `reward` is 1.0 if every FAIL_TO_PASS and PASS_TO_PASS test passed and the reports of all runs are there and count,
    else 0.0; the two rates are shares of 0 to 1.
    """
    found: list[str] = []
    wanted = {"f2p_rate": spec["FAIL_TO_PASS"], "p2p_rate": spec["PASS_TO_PASS"]}
    rates = dict.fromkeys(wanted, 0.0)
    failing: list[str] = []
    for run in spec["runs"]:
        if run["name"] not in reports:
            continue
        canary, raw, code, nonce = reports[run["name"]]
        events = parse(raw, nonce)
        results = outcomes(events)
        found += [f"{run['name']}: {flag}" for flag in flags(run, canary, events, code)]
        if run["name"] == "tests":
            passed = {name for name, outcome in results.items() if outcome == "passed"}
            failing = sorted({*spec["FAIL_TO_PASS"], *spec["PASS_TO_PASS"]} - passed)
            rates = {key: sum(i in passed for i in ids) / len(ids) if ids else 1.0 for key, ids in wanted.items()}
        elif any(results.get(name) not in ("failed", "error") for name in run["must_fail"]):
            found.append(f"{run['name']}: tests passed that must fail")
        elif any(results.get(name) != "passed" for name in run["must_pass"]):
            found.append(f"{run['name']}: tests failed that must pass")
    resolved = not failing and not found and len(reports) == len(spec["runs"])
    return {"reward": float(resolved), **rates, "flags": found, "failing": failing[:50]}


def judge_test(spec: dict[str, Any], reports: dict[str, Report]) -> dict[str, Any]:
    """The verdict on a test that an agent wrote: it passes in every state that is right, and one of its tests fails in
    every state with the bug. Each state comes in two spellings, so that a test cannot go by the text of the source."""
    found, failing = [], []
    for run in spec["runs"]:
        if run["name"] in reports:
            canary, raw, code, nonce = reports[run["name"]]
            events = parse(raw, nonce)
            found += [f"{run['name']}: {flag}" for flag in flags(run, canary, events, code)]
            results = [how for name, how in outcomes(events).items() if name not in (canary["good"], canary["bad"])]
            wanted = {"passed"} if run["passes"] else {"passed", "failed"}
            told = set(results) - {"skipped"}
            if not told or not told <= wanted or ("failed" in told) == run["passes"]:
                failing.append(run["name"])
    done = not failing and not found and len(reports) == len(spec["runs"])
    return {"reward": float(done), "flags": found, "failing": failing}


def judge_choice(spec: dict[str, Any], answer: bytes) -> dict[str, Any]:
    """The verdict on the letter of a patch."""
    right = answer.strip().lower() == spec["answer"].encode()
    return {"reward": float(right), "flags": [], "failing": [] if right else ["answer"]}


def read_answer(path: str) -> bytes:
    """The start of a regular file, b"" if there is none; links are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 64) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)


def unreadable(folder: str, names: list[str]) -> list[str]:
    """Names that cannot be copied: pipes, sockets and devices. Gives this user access to the others."""
    found = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.islink(path):
            continue
        if os.path.isdir(path) or os.path.isfile(path):
            os.chmod(path, 0o777)
        else:
            found.append(name)
    return found


@contextlib.contextmanager
def put_away(tests: str) -> Iterator[str]:
    """Move what tells the runs apart into a folder below `tests` whose name cannot be guessed; yields it. Landlock
    keeps the code under test from reading and listing, but not from looking at a known path: sizes and times of the
    twins would tell which of them is running. If the folder cannot be changed, everything stays where it is."""
    place, moved = os.path.join(tests, secrets.token_hex(16)), []
    names = [name for name in os.listdir(tests) if os.path.isdir(os.path.join(tests, name)) and name != "reporters"]
    try:
        os.mkdir(place, 0o700)
        for name in names:
            os.rename(os.path.join(tests, name), os.path.join(place, name))
            moved.append(name)
    except OSError:
        for name in moved:
            os.rename(os.path.join(place, name), os.path.join(tests, name))
        moved, place = [], tests
    try:
        yield place
    finally:
        for name in moved:
            os.rename(os.path.join(place, name), os.path.join(tests, name))
        if place != tests:
            os.rmdir(place)


def run_here(spec: dict[str, Any], tests: str, kept: str, run: dict[str, Any]) -> Report:
    """One run in this room, on a copy of the repository, confined so that the code under test reaches neither the
    grader and its files nor the next run. `kept` is the folder with the files of the runs."""
    nonce, canary = secrets.token_hex(16), canary_files(spec, random.SystemRandom())
    scratch = tempfile.mkdtemp()
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    root, spec = spec["root"], {**spec, "root": os.path.join(scratch, "app")}
    shutil.copytree(root, spec["root"], symlinks=True, ignore=unreadable)
    prepare(spec, kept, run, canary)
    for name in ("runner.py", "suite.py", "compiled.py", "confine.py"):
        if os.path.exists(os.path.join(tests, name)):
            shutil.copy(os.path.join(tests, name), scratch)
    if os.path.isdir(os.path.join(tests, "reporters")):
        shutil.copytree(os.path.join(tests, "reporters"), os.path.join(scratch, "reporters"))
    os.chmod(tests, 0o700)
    for folder, _, files in os.walk(scratch):
        for path in [folder, *(os.path.join(folder, name) for name in files)]:
            if not os.path.islink(path):
                os.chmod(path, 0o777)
    python = [sys.executable, "-I", "-S", "-B"]
    command = [*python, os.path.join(scratch, "confine.py"), tests, scratch, "--"]
    # The cache is fresh: compiled files of the test dependencies could have been forged.
    command += [*python, "-X", f"pycache_prefix={scratch}/cache", os.path.join(scratch, spec["runner"])]
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
    }
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/",
        start_new_session=True,
    )  # fmt: skip
    try:
        raw, _ = process.communicate(json.dumps(request(spec, run, canary, nonce)).encode(), spec["timeout_s"])
    except subprocess.TimeoutExpired:
        raw = b""
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end_strays()
        remove(scratch)
        for name in set(os.listdir("/dev/shm")) - shared if os.path.isdir("/dev/shm") else ():
            remove(os.path.join("/dev/shm", name))
    return canary, raw, process.returncode, nonce


def adopt_strays() -> None:
    """Have processes whose parents end become children of this one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_strays() -> None:
    """Kill all children, and those that become children by it: they could tell the next run what they saw."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)
    raise TimeoutError("processes of the tests cannot be ended")


def site_digest(folder: str) -> str:
    """SHA-256 over the modules of a folder with test dependencies, byte code left out; "" if it does not exist. What is
    no file, or a link that leads outside of the folder, is left out: reading it might never end."""
    found, real = hashlib.sha256(), os.path.join(os.path.realpath(folder), "")
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in ("__pycache__", "bin") and not f.endswith(".dist-info"))
        for name in sorted(files):
            if name.endswith(
                (".py", ".so", ".pyc", ".zip", ".egg", ".js", ".cjs", ".mjs", ".json", ".node", ".rb", ".php", ".go")
            ):
                path = os.path.join(place, name)
                if not os.path.isfile(path) or not os.path.realpath(path).startswith(real):
                    continue
                with open(path, "rb") as file:
                    found.update(os.path.relpath(path, folder).encode() + b"\0" + hashlib.sha256(file.read()).digest())
    return found.hexdigest() if os.path.isdir(folder) else ""


def load(tests: str) -> dict[str, Any]:
    with open(os.path.join(tests, "tests.json"), encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    return spec


def verdict_here(spec: dict[str, Any], tests: str) -> dict[str, Any]:
    """The verdict, by runs in this room."""
    if spec["task"] == "pick":
        return judge_choice(spec, read_answer(os.path.join(spec["root"], ANSWER)))
    if any(site_digest(folder) != digest for folder, digest in spec["site_sha256"].items()):
        return {"reward": 0.0, "flags": ["test dependencies changed"]}
    runs = random.SystemRandom().sample(spec["runs"], len(spec["runs"]))
    with put_away(tests) as kept:
        reports = {run["name"]: run_here(spec, tests, kept, run) for run in runs}
    return (judge if spec["task"] == "repair" else judge_test)(spec, reports)


def main() -> None:
    tests = os.path.dirname(os.path.abspath(__file__))
    spec = load(tests)
    if sys.argv[1:2] == ["--run"]:
        run = next(r for r in spec["runs"] if r["name"] == sys.argv[2])
        order = json.load(sys.stdin)
        spec["site"] = order["site"]
        if any(path in spec["site"] and site_digest(path) != known for path, known in spec["site_sha256"].items()):
            sys.exit("the test dependencies are changed")
        prepare(spec, tests, run, order["canary"])
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request(spec, run, order["canary"], order["nonce"])).encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
        for name in ("files", "twins", "states", "tests.json"):  # the code under test must not see which run it is
            if os.path.lexists(os.path.join(tests, name)):
                remove(os.path.join(tests, name))
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", os.path.join(tests, spec["runner"])])
    adopt_strays()
    try:
        verdict = verdict_here(spec, tests)
    except Exception as error:  # the files that the agent left can cause it
        verdict = {"reward": 0.0, "flags": [f"grader: {error!r:.500}"]}
    folder = sys.argv[1] if len(sys.argv) > 1 else "/logs/verifier"
    with open(os.path.join(folder, "details.json"), "w", encoding="utf-8") as file:
        json.dump(verdict, file)
    numbers = {key: value for key, value in verdict.items() if isinstance(value, float)}
    with open(os.path.join(folder, "reward.json"), "w", encoding="utf-8") as file:
        json.dump(numbers, file)


if __name__ == "__main__":
    main()
