"""The families "swe" and "terminal": the policy works in a room, and the task's verifier gives the reward."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Message, Outcome, SamplingParams, StepResult, ToolCall
from glm5.tasks import DistinctProblems, make_family
from glm5.tasks.difficulty import PassCount, measure_pass_rates
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.harbor.changes import MOST_COMPARED, MOST_LINES, FolderDiff
from glm5.tasks.harbor.family import RoomEnv, RoomFamily
from tests.rooms import needs_rooms
from tests.tasks.test_difficulty import TOKENIZER, Fixed

pytestmark = needs_rooms

TASK = """\
schema_version = "1.4"
[task]
name = "glm5/{name}"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
"""


def write_task(folder: Path, name: str, dockerfile: str = "FROM debian\nWORKDIR /app\nCOPY . /app\n") -> None:
    for path, text in {
        "task.toml": TASK.format(name=name),
        "instruction.md": "Make add(a, b) in /app/sums.py add.",
        "environment/Dockerfile": dockerfile,
        "environment/sums.py": "def add(a, b):\n    return a - b\n",
        "solution/solve.sh": "#!/bin/bash\nsed -i 's/a - b/a + b/' /app/sums.py\n",
        "tests/test.sh": "#!/bin/bash\ncd /tests && python3 -I check.py && echo 1 > /logs/verifier/reward.txt"
        " || echo 0 > /logs/verifier/reward.txt\n",
        "tests/check.py": "import runpy; assert runpy.run_path('/app/sums.py')['add'](2, 3) == 5\n",
    }.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(8):
        write_task(tmp_path, f"task-{number}")
    return tmp_path


def env_of(folder: Path, **options: object) -> RoomEnv:
    env = make_family("swe", folder=str(folder), **options).problem("rl", 0).env()
    assert isinstance(env, RoomEnv)
    return env


def call(env: RoomEnv, name: str, **arguments: object) -> str:
    result = env.step(Message("assistant", tool_calls=(ToolCall(name, arguments),)))
    assert not result.done
    return result.messages[0].content


def end(env: RoomEnv) -> StepResult:
    return env.step(Message("assistant", "done"))


def test_the_policy_is_paid_for_what_it_leaves(folder: Path) -> None:
    env = env_of(folder)
    messages, tools, thinking = env.start()
    assert messages[0].content.startswith("Make add") and len(tools) == 2 and thinking
    assert call(env, "bash", command="pwd; cat sums.py; exit 3") == (
        "/app\ndef add(a, b):\n    return a - b\n[exit code 3]"
    )
    assert call(env, "edit", path="sums.py", old="a * b", new="a + b").startswith("error: the old text occurs 0 times")
    assert call(env, "edit", path="/app/sums.py", old="a - b", new="a + b") == "[edited]"
    result = end(env)
    assert (result.reward, result.outcome, result.detail["calls"]) == (1.0, Outcome.SOLVED, 3)
    assert env._room is not None
    with pytest.raises(GradingError):
        env._room.room.exec("true")  # the room has ended


def test_the_detail_has_the_changes_step_by_step(folder: Path) -> None:
    env = env_of(folder)
    call(env, "edit", path="sums.py", old="a - b", new="a + b")
    call(env, "bash", command="cat sums.py")
    call(env, "bash", command="rm sums.py; printf 'x\\0' > new; mkdir .git; touch .git/x; seq 9999 > long; echo ä > é")
    call(env, "bash", command="cd ..; rm -r app")
    call(env, "bash", command="mkdir -p /app; touch /app/x")
    first, *rest = end(env).detail["diffs"]
    assert (
        first
        == "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    )
    names = "long has changed\nnew has changed\n"
    gone = "--- a/sums.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-def add(a, b):\n-    return a + b\n"
    assert rest == ["", f"{names}{gone}--- /dev/null\n+++ b/é\n@@ -0,0 +1 @@\n+ä\n", "", ""]


def test_many_changed_files_are_named_only(folder: Path) -> None:
    env = env_of(folder)
    most = MOST_COMPARED // MOST_LINES
    call(env, "bash", command=f"for i in $(seq 100 {100 + most + 4}); do seq {MOST_LINES} > f$i; done")
    assert env._room is not None
    diffs = FolderDiff(env._room.room, "/app")
    env._room.room.exec("for f in f*; do : > $f; done", cwd="/app")
    assert diffs.new().count("has changed") == 5


def test_no_work_no_reward_and_the_verifier_is_out_of_reach(folder: Path) -> None:
    assert end(env_of(folder)).reward == 0.0
    env = env_of(folder)
    call(
        env,
        "bash",
        command="mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo > /tests/check.py",
    )
    assert (end(env).reward, env._malformed) == (0.0, 0)


def test_a_demonstration_solves_its_task(folder: Path) -> None:
    problem = make_family("terminal", folder=str(folder), thinking=False).problem("train", 2)
    env = problem.env()
    _, work, _, last = problem.demonstration(0)
    assert not env.step(work).done
    assert env.step(last).reward == 1.0


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("python", {"code": "1"}, "no such tool"),
        ("bash", {}, "bad arguments"),
        ("bash", {"command": 3}, "a short text"),
        ("bash", {"command": "x" * 70_000}, "a short text"),
        ("bash", {"command": "a\0b"}, "a short text"),
        ("bash", {"command": "\ud800"}, "not text"),
        ("edit", {"path": "sums.py", "old": "x"}, "bad arguments"),
    ],
)
def test_bad_calls_are_told_and_counted(folder: Path, name: str, arguments: dict[str, object], said: str) -> None:
    env = env_of(folder)
    assert said in call(env, name, **arguments)
    env.step(None)
    assert env.step(None).outcome is Outcome.MALFORMED
    assert env._room is None  # nothing was started for it


def test_limits_of_an_episode(folder: Path) -> None:
    env = env_of(folder, max_turns=3, command_s=0.5, most_output=100)
    assert "[stopped: wall]" in call(env, "bash", command="sleep 30")
    assert len(call(env, "bash", command="seq 1000")) <= 100
    assert (
        env.step(Message("assistant", tool_calls=(ToolCall("bash", {"command": "true"}),))).outcome is Outcome.TRUNCATED
    )


@pytest.mark.long
def test_an_episode_cannot_be_made_to_time_out(folder: Path) -> None:
    """A policy that does not like its verdict must not turn it into an error of the environment."""
    env = env_of(folder)
    spin = "[ os.fork() for _ in range(4) ]\nwhile True: pass\n"
    with EnvThreadPool(1, limit_s=12.0) as threads:
        calls = tuple(ToolCall("bash", {"command": command}) for command in ("pwd", "sleep 60"))
        shown = threads.wait(threads.submit(env.step, Message("assistant", tool_calls=calls))).messages[1].content
        assert shown.startswith("[stopped: wall]")
        call(env, "bash", command=f"printf 'import os\n{spin}' > sums.py")
        result = threads.wait(threads.submit(env.step, Message("assistant", "done")))
    assert (result.reward, result.outcome, result.detail["error"]) == (0.0, Outcome.FAILED, "VerifierTimeoutError")


def test_links_and_odd_files_are_not_edited(folder: Path) -> None:
    env = env_of(folder)
    call(
        env, "bash", command="ln -s /etc/passwd link; mkdir dir; mkfifo pipe; printf '\\xff a - b' > raw; chmod 755 raw"
    )
    for path in ("link", "dir", "pipe", "none", "../../etc/shadow", "\n", "/proc/1/mem", "/proc/1/pagemap"):
        assert call(env, "edit", path=path, old="a", new="b").startswith("error: ")
    assert call(env, "edit", path="raw", old="a - b", new="c") == "[edited]"
    system = call(env, "edit", path="/usr/lib/os-release", old="PRETTY_NAME", new="x")
    assert "Read-only" in system  # not a fault of the machine, which would not count
    assert call(env, "bash", command="od -An -c raw; stat -c %a raw").split() == ["377", "c", "755"]


def test_a_room_ends_with_an_episode_that_is_given_up(folder: Path) -> None:
    env = env_of(folder)
    call(env, "bash", command="true")
    assert env._room is not None
    room = env._room.room
    del env
    gc.collect()
    with pytest.raises(GradingError):
        room.exec("true")


def test_a_task_that_cannot_be_built_says_nothing_about_the_policy(tmp_path: Path) -> None:
    write_task(tmp_path, "far", "FROM debian\nRUN curl -f http://example.com\n")
    with pytest.raises(GradingError, match="far cannot be built"):
        end(env_of(tmp_path, held_out=0.0))


def test_tasks_are_counted_without_reading_them(folder: Path) -> None:
    """A search for distinct problems asks for each of a thousand tasks ten times."""
    for number in range(8):
        (folder / f"task-{number}" / "instruction.md").unlink()
    family = make_family("swe", folder=str(folder), held_out=0.0)
    assert len(DistinctProblems(family, "rl").indices(100)) == 8
    with pytest.raises(DataError, match="instruction"):
        family.problem("rl", 0).env().start()


def test_pass_rates_are_measured_in_rooms(folder: Path) -> None:
    """What `difficulty` of a stage asks for: the policy says "done", which half of the tasks pay."""
    for number in (0, 1):
        (folder / f"task-{number}" / "environment" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    family = make_family("swe", folder=str(folder), held_out=0.0, thinking=False)
    easy = [index for index in range(8) if family.problem("rl", index).key in ("task-0", "task-1")]
    hard = [index for index in range(8) if index not in easy][:2]
    params = SamplingParams(max_tokens=20, seed=1)
    counts = measure_pass_rates(Fixed("done"), TOKENIZER, family, [*easy, *hard], 1, params, split="rl")
    assert counts == dict.fromkeys(easy, PassCount(1, 1)) | dict.fromkeys(hard, PassCount(0, 1))


def test_tasks_of_one_bug_are_held_out_together(tmp_path: Path) -> None:
    """The patches of one task show the solution of another."""
    for number in range(20):
        for name in ("", "-write-test", "-pick"):
            (tmp_path / f"{number:016x}{name}").mkdir()
            (tmp_path / f"{number:016x}{name}/task.toml").touch()
    family = RoomFamily(folder=str(tmp_path), held_out=0.5)
    sides = [{family.problem(split, n).key[:16] for n in range(60)} for split in ("heldout", "rl")]
    assert all(sides) and not sides[0] & sides[1]


def test_splits_and_options(folder: Path) -> None:
    family = RoomFamily(folder=str(folder), held_out=0.5)
    rollouts, heldout = ({family.problem(split, i).key for i in range(20)} for split in ("rl", "heldout"))
    assert rollouts and heldout and not rollouts & heldout and len(rollouts | heldout) == 8
    for options in (
        {},
        {"folder": "nowhere"},
        {"tools": ["x"]},
        {"max_turns": 0},
        {"most_output": 1},
        {"command_s": 0},
    ):
        with pytest.raises(ConfigError, match="families"):
            RoomFamily(**{"folder": str(folder), **options} if options else {})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"task\.toml"):
        RoomFamily(folder=str(folder / "task-0" / "tests"))
