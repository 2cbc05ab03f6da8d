"""SWE tasks on the harness: graded from outside, and audited with every cheat (`glm5 task audit`)."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5.errors import DataError, Glm5Error
from glm5.files import exclusive, read_rows
from glm5.sandbox.environment import NamespaceEnvironment, RoomFileError
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.trial import TaskRoom, TrialResult, oracle
from glm5.tasks.swe.attacks import passing_cheats
from glm5.tasks.swe.build import drawn
from glm5.tasks.swe.driver import APP
from glm5.tasks.swe.grading import grade

LEAST_CHEAT_S = 5.0


def judge(task: TaskRoom, *, shuffled: bool = True, timeout_s: float | None = None) -> TrialResult:
    """Grade the room's files from outside, each run of the tests in a verifier room of its own: what the script of the
    tests does in one room is easier to deceive. A task without `tests.json` is judged by its script. `timeout_s`
    shortens the limit of a run. For `shuffled` see `grade`."""
    tests = {name: file.data for name, file in task.folder.tests.items() if not name.endswith("/")}
    if "tests.json" not in tests:
        return task.judge()
    spec = spec_of(tests["tests.json"], task.folder.name)
    if timeout_s is not None:
        spec["timeout_s"] = min(spec["timeout_s"], timeout_s)
        tests["tests.json"] = json.dumps(spec).encode()
    try:
        verdict = grade(task.room, tests, spec["site"], prepare=task.restore_startup, shuffled=shuffled)
    except RoomFileError as error:  # an agent must not escape a verdict by what it leaves
        return TrialResult({"reward": 0.0}, message=str(error))
    return TrialResult({name: value for name, value in verdict.items() if isinstance(value, float)})


def audit(path: Path, repeats: int = 3, bases: Mapping[str, Mapping[str, Path]] | None = None) -> dict[str, Any]:
    """Every invariant of a task that repairs code: `{ok, oracle, no_op, repeats, tried, cheats}`. The first two are
    rewards; the solution is applied and the agent's tests are deleted. `tried` is the number of cheats, `cheats` are
    the names of those that do not score 0.

    Doing nothing and the cheats are graded with the tests first, which tells a cheat more than an agent knows, and each
    of their runs gets four times what one with the solution took, at least `LEAST_CHEAT_S`: some never end.

    Raises what `TaskRoom` raises."""
    folder = TaskFolder.read(path)
    spec = spec_of(folder.tests["tests.json"].data, path)
    with TaskRoom(folder, bases=bases) as task:
        unsolved = task.room.snapshot()
        oracle(task.room, task)
        task.room.exec(["/bin/rm", "-rf", *(f"{APP}/{path}" for path in spec["protected"])])
        start = time.monotonic()
        solved = [judge(task).reward for _ in range(repeats)]
        limit = max(LEAST_CHEAT_S, 4 * (time.monotonic() - start) / (repeats * len(spec["runs"])))

        def graded(_: NamespaceEnvironment) -> dict[str, Any]:
            return {"reward": judge(task, shuffled=False, timeout_s=limit).reward}

        task.room.restore(unsolved)
        no_op = [graded(task.room)["reward"] for _ in range(repeats)]
        tried, passing = passing_cheats(path, task.room, graded)
    ok = not passing and set(no_op) == {0.0} and set(solved) == {1.0}
    return {"ok": ok, "oracle": solved, "no_op": no_op, "repeats": repeats, "tried": tried, "cheats": passing}


def audit_row(path: Path, repeats: int = 3) -> dict[str, Any]:
    """`audit` as a row with the task's id; a task that cannot be audited is not ok."""
    try:
        return {"id": path.name, **audit(path, repeats)}
    except Glm5Error as error:
        return {"id": path.name, "ok": False, "error": str(error)[:500]}


def audit_sample(
    out: Path, count: int | None, seed: int, *, repeats: int = 3, at_once: int = 2,
    told: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Audit `count` tasks of the folder of a build, default all, and return `{audited, ok, tried, bad}`; `bad` has the
    rows of those that are not ok. The tasks are those with the smallest numbers of `drawn`, by which a build draws too.
    Every row is appended to `audit.jsonl`; a task that stands there is not audited again.

    Raises DataError if the folder has no task."""
    names = [path.parents[1].name for path in sorted((out / "tasks").glob("*/tests/tests.json")) if _repairs(path)]
    if not names:
        raise DataError(f"{out / 'tasks'} has no task to audit; build some with `glm5 task build swe`.")
    chosen = sorted(sorted(names, key=lambda name: drawn(name, seed))[: count or len(names)])
    with exclusive(out, f"another build or audit writes to {out}."):
        rows = {row["id"]: row for row in read_rows(out / "audit.jsonl")}
        with ThreadPoolExecutor(at_once) as pool, (out / "audit.jsonl").open("a", encoding="utf-8") as file:
            left = [out / "tasks" / name for name in chosen if name not in rows]
            for row in pool.map(functools.partial(audit_row, repeats=repeats), left):
                rows[row["id"]] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                told(f"{row['id']}: {'ok' if row['ok'] else row}")
    found = [rows[name] for name in chosen]
    return {
        "audited": len(found), "ok": sum(row["ok"] for row in found),
        "tried": sum(row.get("tried", 0) for row in found),
        "bad": [row for row in found if not row["ok"]],
    }  # fmt: skip


def _repairs(tests: Path) -> bool:
    return bool(spec_of(tests.read_bytes(), tests.parents[1])["task"] == "repair")


class _Run(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    overlay: str = ""
    files: list[str]
    collected: list[str] | None = None
    must_fail: list[str] = []
    must_pass: list[str] = []


class _Spec(BaseModel):
    """What everything that grades needs of a `tests.json`; there is more in it."""

    model_config = ConfigDict(strict=True)
    task: Literal["repair", "write-test", "pick"]
    site: list[str]
    site_sha256: dict[str, str] = {}
    runs: list[_Run]
    timeout_s: float = Field(gt=0, le=86_400)
    protected: list[str]
    FAIL_TO_PASS: list[str] = []
    PASS_TO_PASS: list[str] = []
    paths: list[str] = []
    args: list[str] = []
    language: str = ""
    framework: str = ""


def spec_of(data: bytes, task: object) -> dict[str, Any]:
    """The content of a `tests.json`. Raises DataError if it is none."""
    try:
        spec: dict[str, Any] = json.loads(data)
        _Spec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first["loc"] else "it is no object"
        raise DataError(f"{task}: tests/tests.json is not the tests of a SWE task: {said}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{task}: tests/tests.json is not the tests of a SWE task: it is not JSON.") from None
    return spec
