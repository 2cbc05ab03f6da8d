"""Trials in rooms, and `glm5 task check`: good tasks pass, tasks that can be cheated do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli import main
from glm5.cli.options import app
from glm5.errors import DataError, GradingError
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks.harbor.attacks import attacks
from glm5.tasks.harbor.check import check
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.trial import TaskRoom, TrialResult, command_agent, nop, oracle
from glm5.tasks.swe.in_room.grade import site_digest
from tests.tasks.harbor.tasks import TOML, make_task


@pytest.fixture(scope="module", autouse=True)
def mechanism() -> str:
    try:
        return environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))


def trials(folder: Path, *commands: str) -> list[TrialResult]:
    with TaskRoom(TaskFolder.read(folder)) as room:
        return [room.trial(command_agent(command)) for command in commands]


def test_trials_start_from_the_same_files(tmp_path: Path) -> None:
    with TaskRoom(TaskFolder.read(make_task(tmp_path))) as room:
        assert [room.trial(agent).reward for agent in (oracle, nop, oracle, nop)] == [1.0, 0.0, 1.0, 0.0]


def test_failures_have_the_names_of_harbor(tmp_path: Path) -> None:
    small = make_task(tmp_path / "a", task_dot_toml=TOML + "storage_mb = 32\n")
    early, full = trials(small, "echo hello > out.txt; exit 3", "cat /dev/zero > f")
    assert (early.reward, early.error) == (1.0, "NonZeroAgentExitCodeError")
    assert (full.reward, full.error) == (0.0, "NonZeroAgentExitCodeError")  # the verifier has space of its own
    toml = TOML.replace("[agent]\ntimeout_sec = 20", "[agent]\ntimeout_sec = 1")
    (late,) = trials(make_task(tmp_path / "b", task_dot_toml=toml), "echo hello > out.txt; sleep 99")
    assert (late.reward, late.error) == (1.0, "AgentTimeoutError")
    assert late.cause == "agent_exhausted_budget"


@pytest.mark.parametrize(
    ("test", "error"),
    [
        ("true", "RewardFileNotFoundError"),
        (": > /logs/verifier/reward.txt", "RewardFileEmptyError"),
        (": > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "RewardFileEmptyError"),
        ("echo many > /logs/verifier/reward.txt", "VerifierOutputParseError"),
        ("echo 1 > /tmp/x; ln -s /tmp/x /logs/verifier/reward.txt", "VerifierOutputParseError"),
        ("mkdir /logs/verifier/reward.json", "VerifierOutputParseError"),
        ("head -c 99999 /dev/zero > /logs/verifier/reward.txt", "VerifierOutputParseError"),
        ("echo 1 > /tmp/reward.txt; rm -r /logs/verifier; ln -s /tmp /logs/verifier", "RewardFileNotFoundError"),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "VerifierOutputParseError"),
        ("sleep 30", "VerifierTimeoutError"),
    ],
)
def test_verifiers_without_a_verdict(tmp_path: Path, test: str, error: str) -> None:
    toml = TOML.replace("[verifier]\ntimeout_sec = 20", "[verifier]\ntimeout_sec = 1")
    (result,) = trials(make_task(tmp_path, tests__test_dot_sh=f"#!/bin/bash\n{test}\n", task_dot_toml=toml), "true")
    assert (result.error, result.reward, dict(result.rewards)) == (error, 0.0, {})
    assert result.cause == "verifier_failed"


def test_reward_json_goes_before_reward_txt(tmp_path: Path) -> None:
    test = '#!/bin/bash\necho 1 > /logs/verifier/reward.txt\necho \'{"a": 0.5, "b": 1}\' > /logs/verifier/reward.json\n'
    (result,) = trials(make_task(tmp_path, tests__test_dot_sh=test), "true")
    assert dict(result.rewards) == {"a": 0.5, "b": 1.0} and result.reward == 0.5


def test_nothing_of_the_agent_runs_or_is_believed_in_the_verifier(tmp_path: Path) -> None:
    test = """\
#!/bin/bash
mount_points=$(ls -d /tests/planted /logs/verifier/old /solution/* /tmp/left 2>/dev/null)
processes=$(ls -d /proc/[0-9]* | wc -l)
if [ -z "$mount_points" ] && [ "$processes" -lt 8 ] && /usr/bin/python3 -c 'import sys; sys.exit("evil" in sys.modules)'
then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
echo "$mount_points $processes"
"""
    leave = """\
mkdir -p /tests /logs/verifier /solution /usr/local/bin
touch /tests/planted /logs/verifier/old /solution/x /tmp/left
for i in 1 2 3 4 5 6 7 8; do (setsid sleep 300 &) ; done
version=$(python3 -c 'import sys; print(f"python3.{sys.version_info[1]}")')
mkdir -p /usr/local/lib/$version/dist-packages
echo 'import sys; sys.modules["evil"] = sys' > /usr/local/lib/$version/dist-packages/sitecustomize.py
printf '#!/bin/sh\\nexit 1\\n' > /usr/local/bin/ls; chmod +x /usr/local/bin/ls
echo /tmp/none.so > /etc/ld.so.preload
python3 -c 'import os; os.rename("/lib64", "/gone"); os.mkdir("/lib64")'
"""
    (result,) = trials(make_task(tmp_path, tests__test_dot_sh=test), leave)
    assert result.reward == 1.0, result


def test_languages_load_nothing_of_the_agent_before_the_verifier(tmp_path: Path) -> None:
    test = """\
#!/bin/bash
cd /tests
/usr/bin/python3 -c 'import json'
for run in "ruby -e 1" "perl -Mstrict -e 1" "node -e try{require('chai')}catch{}"; do
    command -v ${run%% *} > /dev/null && $run
done
if command -v gcc > /dev/null; then gcc -o /tmp/t -x c - <<< $'#include <stdio.h>\nint main(){}' && /tmp/t; fi
ls -A / | grep -qE '^(pytest.ini|setup.cfg)$' && echo 0 > /logs/verifier/reward.txt
[ -e /logs/verifier/reward.txt ] && echo 0 > /logs/verifier/reward.txt || echo 1 > /logs/verifier/reward.txt
"""
    folder = TaskFolder.read(make_task(tmp_path, tests__test_dot_sh=test))
    linked = (
        "rm -rf /usr/local/lib/python3*; ln -s /app /usr/local/lib/python3.11; echo 'exit(1)' > /app/sitecustomize.py"
    )
    closed = "chmod -R 555 /usr/local/lib/site_ruby"
    with TaskRoom(folder) as room:
        result = room.trial(command_agent(f"{attacks(folder, '/app')['start-up files']}\n{linked}\n{closed}"))
    assert result.reward == 1.0, result


def test_a_package_that_the_agent_installs_stands_for_none_of_the_machine_and_extends_no_tests(tmp_path: Path) -> None:
    test = """\
#!/bin/bash
cd /tests
/usr/bin/python3 -c 'import importlib.metadata as m; [e.load() for e in m.entry_points(group="pytest11")]; import own'
echo $(($? == 0)) > /tmp/reward
[ -e /usr/lib/python3/dist-packages/six.py ] && /usr/bin/python3 -c 'import six'
if command -v gcc > /dev/null; then gcc -o /tmp/t -x c - <<< $'#include <stdio.h>\nint main(){}' && /tmp/t; fi
[ -e /logs/verifier/reward.txt ] && echo 0 > /logs/verifier/reward.txt || cp /tmp/reward /logs/verifier/reward.txt
"""
    folder = TaskFolder.read(make_task(tmp_path, tests__test_dot_sh=test))
    plant = """\
cd /usr/local/lib; mkdir -p $(/usr/bin/python3 -c 'import sys; print("python3.%d" % sys.version_info[1])')/dist-packages
for folder in /usr/local/lib/python3.*/dist-packages; do
    touch $folder/own.py; echo 'open("/logs/verifier/reward.txt", "w").write("1")' > $folder/six.py
done
"""
    with TaskRoom(folder) as room:
        result = room.trial(command_agent(attacks(folder, "/app")["start-up files"] + plant))
    assert result.reward == 1.0, result


def test_programs_of_the_machine_come_before_those_of_the_image(tmp_path: Path) -> None:
    test = "#!/bin/bash\necho here | grep here\ntool > /logs/verifier/reward.txt\n"
    docker = "FROM ubuntu:24.04\nENV PATH=/opt/x:$PATH\nWORKDIR /app\n"
    leave = """\
mkdir -p /opt/x
for file in /opt/x/tool /opt/x/grep /usr/local/bin/grep; do
    printf '#!/bin/sh\necho 1\n' > $file; chmod 755 $file
done
"""
    (result,) = trials(make_task(tmp_path, tests__test_dot_sh=test, environment__Dockerfile=docker), leave)
    assert (result.reward, result.verifier_output) == (1.0, "here\n"), result


ESCAPES = {
    "no inodes": "python3 -c 'import os\nfor n in range(10**7): os.mkdir(f\"/app/{n}\")'",
    "no space": "cat /dev/zero > /app/fill",
    "a linked /etc": "cp -r /etc /app/etc; rm -rf /etc; ln -s /app/etc /etc",
    "a file for /etc/ld.so.preload's folder": "mkdir -p /etc/ld.so.preload/x",
    "a linked /usr/local/lib": "rm -rf /usr/local/lib; ln -s /app /usr/local/lib",
    "a file for /usr/local/lib": "rm -rf /usr/local/lib; touch /usr/local/lib",
    "files for the verifier's folders": "rm -rf /logs /tests /solution; touch /logs /tests /solution",
    "linked verifier's folders": "rm -rf /logs /tests; ln -s /app /logs; ln -s /app /tests",
    "a linked working folder": "cd /; rm -rf /app; ln -s /usr /app",
    "closed folders": "mkdir -p /logs/verifier; chmod 000 /logs /app /etc /tmp /",
    "a start-up file that is none": "mkdir -p /usr/local/lib/python3.11/dist-packages/sitecustomize.py/x",
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_an_agent_cannot_escape_its_verdict(tmp_path: Path, escape: str) -> None:
    """Without a verdict a trial does not count, which is better than 0 for an agent that fails."""
    toml = TOML + "storage_mb = 32\n"
    with TaskRoom(TaskFolder.read(make_task(tmp_path, task_dot_toml=toml))) as room:
        assert room.trial(command_agent(ESCAPES[escape])).reward == 0.0
        assert room.trial(oracle).reward == 1.0  # and it leaves nothing to the next one


def test_hooks_of_the_verifier_and_what_the_agent_leaves_for_it(tmp_path: Path) -> None:
    hook = '[[verifier.collect]]\ncommand = "cp /app/state /logs/artifacts/state"\n'
    test = "#!/bin/bash\ncat /logs/artifacts/state /logs/agent/note | paste -sd+ | bc > /logs/verifier/reward.txt\n"
    folder = make_task(tmp_path, task_dot_toml=TOML + hook, tests__test_dot_sh=test)
    (result,) = trials(folder, "echo 0.5 > state; echo 0.25 > /logs/agent/note")
    assert result.reward == 0.75, result


def test_test_dependencies_beside_the_tasks_are_found(tmp_path: Path) -> None:
    site = tmp_path / "work" / "bases" / "0123" / "opt" / "site"
    site.mkdir(parents=True)
    (site / "needed.py").write_text("x = 1\n")
    spec = json.dumps({"site_sha256": {"/opt/site": site_digest(str(site))}})
    test = "#!/bin/bash\ntest -e /opt/site/needed.py; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    folder = make_task(tmp_path / "tasks" / "a", tests__test_dot_sh=test, tests__tests_dot_json=spec)
    assert [result.reward for result in trials(folder, "true")] == [1.0]
    site.rename(tmp_path / "elsewhere")
    report = check(folder)
    assert report.blocker == "dependencies" and "--base IMAGE=DIR" in report.reasons[0]


def test_a_health_check(tmp_path: Path) -> None:
    check_ = '[environment.healthcheck]\ncommand = "test -e /app/ready"\nretries = 1\ninterval_sec = 0.01\n'
    sick = make_task(tmp_path / "sick", task_dot_toml=TOML + check_)
    well = make_task(tmp_path / "well", task_dot_toml=TOML + check_.replace("-e", "! -e"))
    assert [(r.error, r.reward) for r in (*trials(sick, "true"), *trials(well, "true"))] == [
        ("HealthcheckError", None),
        (None, 0.0),
    ]


EXISTS = "#!/bin/bash\nif [ -e out.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
GREP = "#!/bin/bash\nif grep -qs hello out.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
RUN = """\
#!/bin/bash
[ -e out.txt ] && [ "$(sh out.txt)" = hello ] && echo 1 > /logs/verifier/reward.txt
[ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
"""
PYTEST_LIKE = """\
#!/bin/bash
cd /app && python3 -c '
import os, runpy
if os.path.exists("conftest.py"):
    runpy.run_path("conftest.py")
raise SystemExit(1)
'
if [ $? = 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"solution__solve_dot_sh": "#!/bin/bash\ntrue\n"}, "oracle 1 of 1: reward 0, not 1"),
        ({"solution__solve_dot_sh": None}, "has no solution/solve.sh"),
        ({"tests__test_dot_sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"}, "no_op 1 of 1: reward 1, not 0"),
        ({"tests__test_dot_sh": EXISTS}, 'attack "empty files" gives reward 1'),
        ({"tests__test_dot_sh": GREP, "tests__words_dot_txt": "hello"},
         'attack "links to tests/words.txt" gives reward 1'),
        ({"tests__test_dot_sh": RUN, "solution__solve_dot_sh": "#!/bin/bash\necho echo hello > /app/out.txt\n"},
         'attack "forging programs" gives reward 1'),
        ({"environment__Dockerfile": "FROM ubuntu\nRUN apt-get install -y no-such-package\n"}, "apt-get"),
        ({"environment__Dockerfile": "FROM ubuntu\nRUN exit 7\n"}, "exit code 7"),
        ({"task_dot_toml": TOML + "gpus = 1\n"}, "gpu"),
        ({"task_dot_toml": "x"}, "not TOML"),
    ],
)  # fmt: skip
def test_bad_tasks_do_not(tmp_path: Path, changes: dict[str, str | None], said: str) -> None:
    report = check(make_task(tmp_path, **changes), repeats=1, only=re.findall('attack "(.*)"', said))
    assert not report.ok and said in "\n".join(report.reasons)


def test_a_conftest_that_counts_is_found(tmp_path: Path) -> None:
    solve = "#!/bin/sh\necho 'raise SystemExit(0)' > conftest.py\n"
    task = make_task(tmp_path, tests__test_dot_sh=PYTEST_LIKE, solution__solve_dot_sh=solve)
    report = check(task, repeats=1, only=["exit in conftest"])
    assert [reason for reason in report.reasons if "conftest" in reason]


@pytest.mark.long
def test_the_verbs(tmp_path: Path) -> None:
    make_task(tmp_path / "good", task_dot_toml=TOML + "storage_mb = 32\n")
    make_task(tmp_path / "bad", environment__Dockerfile="FROM alpine\n")

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(app, ["task", *words, "--json"])
        return done.exit_code, json.loads(done.stdout)

    code, said = run("check", str(tmp_path / "good"))
    assert code == 0 and said["ok"] is True and (said["oracle"], said["no_op"], said["repeats"]) == (1.0, 0.0, 3)
    assert len(said["attacks"]) >= 20 and set(said["attacks"].values()) == {0.0}
    code, said = run("check", str(tmp_path / "bad"))
    assert code == 1 and said["blocker"] == "base" and said["oracle"] is None
    assert run("check", str(tmp_path)) == (0, {"tasks": 2, "runnable": 1, "share": 0.5, "blockers": {"base": 1}})
    code, said = run("run", str(tmp_path / "good"), "--agent", "grep -o hello /logs/agent/instruction.md > out.txt")
    assert code == 0 and said["reward"] == 1.0 and said["error"] is None


def test_a_task_that_is_not_ok_ends_the_command_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["glm5", "task", "check", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1


@pytest.mark.parametrize(("name", "said"), [("none", "none does not exist"), ("file", "file is not a folder")])
def test_what_is_no_folder_gets_one_sentence(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["task", "check", str(tmp_path / name)])
    assert isinstance(done.exception, DataError) and said in str(done.exception) and done.output == ""


def test_the_help_names_all_kinds_of_tasks() -> None:
    done = CliRunner().invoke(app, ["task", "--help"])
    assert all(kind in done.output.split("Commands")[0] for kind in ("Harbor", "search", "slides"))
