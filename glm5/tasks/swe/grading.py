"""Grades the result of an agent from outside its room; see `in_room/grade.py` for what makes a report count."""

from __future__ import annotations

import json
import random
import secrets
import time
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
    twins_first: bool = False,
    prepare: Callable[[Room], object] = lambda room: None,
) -> dict[str, Any]:
    """The verdict of `judge`, `judge_test` or `judge_choice` on the files that an environment holds now.

    `tests` are the files of the task's `tests` folder by relative path, `site` the folders with the test dependencies,
    which the environment shows read-only, or which are as `tests.json` says. `prepare` is called with each verifier
    room before the tests are laid in. Every process of the environment ends; its files stay as they are.

    Every run has a verifier room of its own, so that none can tell the next what it saw, and their order is random, for
    the time since the agent's end tells the code under test its place in it. With `shuffled` off, for code that no
    agent wrote, the tests come first, which alone refuse most of what is wrong; with `twins_first` the twins, for a
    cheat that only they refuse, and the first that does is the last run. Raises GradingError if the machine fails. A
    run that exceeds a limit is incomplete: reward 0; so is a verdict that is not there when `due` is over.
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
    for run in reversed(runs) if twins_first else runs:
        if environment.due is not None and time.monotonic() > environment.due:
            verdict = judge(spec, reports)
            return verdict | {"reward": 0.0, "flags": [*verdict["flags"], "no time is left"]}
        nonce = secrets.token_hex(16)
        canary = in_room.canary_files(spec, random.SystemRandom())
        needed = {f"{TESTS}/{path}": data for path, data in laid_out(tests, spec, run).items()}
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
        known = twins_first or spec["task"] != "repair" or "tests" in reports  # which tests pass
        if known and (verdict["failing"] or verdict["flags"]):  # the others could not change the reward
            break
    return verdict


def laid_out(tests: Mapping[str, bytes], spec: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the tests for one run, with those of its overlay in their final places. Every run of a repair task
    has the same names in the same order: a file system numbers what is made in it, and by a number of its own the code
    under test could tell a twin from the real run."""
    overlays = tuple(f"{one['overlay']}/" for one in spec["runs"] if one["overlay"])
    found = {path: data for path, data in tests.items() if not path.startswith(overlays)}
    own = f"{run['overlay']}/"
    found |= {
        f"files/{path[len(own) :]}": data for path, data in tests.items() if run["overlay"] and path.startswith(own)
    }
    return {path: found[path] for path in sorted(found)}
