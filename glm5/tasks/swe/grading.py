"""Grades the result of an agent from outside its room; see `in_room/grade.py` for what makes a report count."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5.sandbox.environment import NamespaceEnvironment, Room, RoomFileError
from glm5.tasks.swe.driver import APP, ENVIRONMENT, LIMITS, PYTHON, TESTS
from glm5.tasks.swe.in_room import grade as in_room


def grade(
    environment: NamespaceEnvironment,
    tests: Mapping[str, bytes],
    site: Sequence[str],
    *,
    shuffled: bool = True,
    prepare: Callable[[Room], object] = lambda room: None,
) -> dict[str, Any]:
    """The verdict of `judge`, `judge_test` or `judge_choice` on the files that an environment holds now.

    `tests` are the files of the task's `tests` folder by relative path, `site` the folders with the test dependencies,
    which the environment shows read-only, or which are as `tests.json` says. `prepare` is called with each verifier
    room before the tests are laid in. Every process of the environment ends; its files stay as they are.

    Every run has a verifier room of its own, so that none can tell the next what it saw, and their order is random, for
    the time since the agent's end tells the code under test its place in it. With `shuffled` off, for code that no
    agent wrote, the tests come first, which alone refuse most of what is wrong. Raises GradingError if the machine
    fails. A run that exceeds a limit is incomplete: reward 0.
    """
    spec = json.loads(tests["tests.json"])
    if spec["task"] == "pick":
        try:
            return in_room.judge_choice(spec, environment.download(f"{APP}/{in_room.ANSWER}", 64))
        except RoomFileError:
            return in_room.judge_choice(spec, b"")
    judge = in_room.judge if spec["task"] == "repair" else in_room.judge_test
    kept = environment.snapshot()
    reports: dict[str, in_room.Report] = {}
    verdict: dict[str, Any] = {}
    runs = random.SystemRandom().sample(spec["runs"], len(spec["runs"])) if shuffled else spec["runs"]
    for run in runs:
        nonce = secrets.token_hex(16)
        canary = in_room.canary_files(spec, random.SystemRandom())
        needed = {
            f"{TESTS}/{path}": data
            for path, data in tests.items()
            if not path.startswith("twins/") or (run["overlay"] and path.startswith(run["overlay"] + "/"))
        }
        order = json.dumps({"nonce": nonce, "canary": canary, "site": list(site)}).encode()
        with environment.verifier(writable=[TESTS], limits=LIMITS) as room:
            prepare(room)
            room.upload(needed)
            done = room.exec(
                [*PYTHON, f"{TESTS}/grade.py", "--run", run["name"]],
                cwd="/", env=ENVIRONMENT, timeout_s=spec["timeout_s"], stdin=order,
            )  # fmt: skip
        environment.restore(kept)
        reports[run["name"]] = (canary, done.stdout, -9 if done.stopped else done.exit_code, nonce)
        verdict = judge(spec, reports)
        known = spec["task"] != "repair" or "tests" in reports  # which tests pass
        if known and (verdict["failing"] or verdict["flags"]):  # the others could not change the reward
            break
    return verdict
