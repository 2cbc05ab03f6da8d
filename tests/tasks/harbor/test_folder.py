"""Task folders as data: every schema version, unknown keys, hostile folders, reward files."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from glm5.errors import DataError
from glm5.tasks.harbor import folder as folders
from glm5.tasks.harbor.failures import cause_of
from glm5.tasks.harbor.folder import TaskFolder, without_canary
from glm5.tasks.harbor.reward import RewardError, parse_json, parse_text, scalar
from glm5.tasks.harbor.schema import read_config, resolve_env, write_config
from glm5.tasks.swe.in_room.grade import site_digest
from tests.tasks.harbor.tasks import make_task

OLD = """\
version = "1.0"
artifacts = ["/app/out"]
[metadata]
author_name = "A"
difficulty = "easy"
[verifier]
timeout_sec = 900.0
[verifier.env]
KEY = "${KEY:-none}"
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "x/y:1"
cpus = 1
memory = "2G"
storage = "512M"
allow_internet = false
future = {a = 1}
[[steps]]
name = "first"
min_reward = {tests = 0.5}
"""


def test_deprecated_fields_are_read_with_one_warning_each_and_unknown_ones_are_kept() -> None:
    config, warnings = read_config(OLD)
    environment = config.environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == (2048, 512, "no-network")
    assert sorted(warning.split()[0] for warning in warnings) == [
        "environment.allow_internet",
        "environment.memory",
        "environment.storage",
        "version",
    ]
    again = tomllib.loads(write_config(config))
    assert again["schema_version"] == "1.4" and again["environment"]["future"] == {"a": 1}
    assert "memory" not in again["environment"] and again["metadata"]["author_name"] == "A"
    assert again["steps"] == [{"name": "first", "min_reward": {"tests": 0.5}}] and again["artifacts"] == ["/app/out"]
    same, none = read_config(write_config(config))
    assert same == config.model_copy(update={"schema_version": "1.4"}) and none == []


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.3", "1.4"])
def test_schema_versions(version: str) -> None:
    assert read_config(f'schema_version = "{version}"')[1] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema_version = '2.0'", "is not one of"),
        ("x = ", "not TOML"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec"),
        ("[task]\nname = 'no-organisation'", "organisation/name"),
        ("[task]\nname = 'a/../b'", "organisation/name"),
        ("[environment]\nmemory = 'much'", "environment.memory"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 2", "differ"),
        ("[environment]\nos = 'plan9'", "environment.os"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]", "exclude each other"),
        ("[[steps]]\nname = '../x'", "steps.0.name"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", "same name"),
        ("environment = 3", "environment"),
        ("a." * 100 + "b = 1", "parts"),
        ("[environment.healthcheck]\ncommand = 'x'\ninterval_sec = 1e300", "healthcheck.interval_sec"),
    ],
)
def test_bad_configurations(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_config(text)


def test_templates_take_given_values_or_defaults_and_never_the_machines() -> None:
    env = {"A": "${HOME:-x}", "B": "plain $HOME", "C": "${GIVEN}"}
    assert resolve_env(env, {"GIVEN": "1"}, "") == {"A": "x", "B": "plain $HOME", "C": "1"}
    with pytest.raises(DataError, match="--env GIVEN=VALUE"):
        resolve_env(env, {}, "[environment] env")


def test_a_folder_is_read_and_written(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "task", environment__data_dot_txt="d", _dot_hidden="x")
    (folder / "environment" / "empty" / "inner").mkdir(parents=True)
    task = TaskFolder.read(folder)
    assert task.name == "tests/hello" and set(task.environment) == {"Dockerfile", "data.txt", "empty/inner/"}
    task.write(tmp_path / "copy")
    assert TaskFolder.read(tmp_path / "copy") == task
    assert without_canary("<!-- x canary y -->\n# Canary z\n\n# Title\n") == "# Title\n"
    assert without_canary(endless := "<!--" + "canary" * 150_000) == endless


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_missing_parts(tmp_path: Path, missing: str) -> None:
    (make_task(tmp_path) / missing).unlink()
    with pytest.raises(DataError, match="has no"):
        TaskFolder.read(tmp_path)


def test_test_dependencies_show_no_other_folder_of_the_machine(tmp_path: Path) -> None:
    """A list of tasks may bring links of its own: to a secret without modules, and to what never ends."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("secret")
    opt = tmp_path / "list/work/bases/x/opt"
    opt.mkdir(parents=True)
    (opt / "site").symlink_to(tmp_path / "secret")
    spec = json.dumps({"site_sha256": {"/opt/site": site_digest(str(tmp_path / "secret"))}})
    task = make_task(tmp_path / "list/tasks/t", tests__tests_dot_json=spec)
    assert TaskFolder.read(task).trees == {"/opt/site": None}
    (opt / "site").unlink()
    (opt / "site").mkdir()
    (opt / "site/a.py").symlink_to("/dev/zero")
    (opt / "site/b.py").symlink_to("/proc/kcore")
    os.mkfifo(opt / "site/c.py")
    assert TaskFolder.read(task).trees == {"/opt/site": opt / "site"}


def test_hostile_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(said: str) -> None:
        with pytest.raises(DataError, match=said):
            TaskFolder.read(task)

    task = make_task(tmp_path / "task")
    odd = task / "tests" / "odd"
    odd.symlink_to("/etc/passwd")
    refused("is a link")
    odd.unlink()
    os.mkfifo(odd)
    refused("neither a file nor a folder")
    odd.unlink()
    odd = task / "tests" / "a\nb"
    odd.write_text("")
    refused("control characters")
    odd.unlink()
    odd = Path(os.fsdecode(os.fsencode(task / "tests") + b"/\xff"))
    odd.write_text("")
    refused("not UTF-8")
    odd.unlink()
    deep = task / "tests" / "/".join("d" * 40)
    deep.mkdir(parents=True)
    refused("inside each other")
    monkeypatch.setattr(folders, "MOST_FILES", 3)
    refused("more than 3 files")
    monkeypatch.setattr(folders, "MOST_FILES", 999)
    monkeypatch.setattr(folders, "MOST_DEPTH", 99)
    monkeypatch.setattr(folders, "MOST_BYTES", 20)
    refused("more than 20 bytes")
    with pytest.raises(DataError, match="not a folder"):
        TaskFolder.read(task / "task.toml")


@pytest.mark.parametrize(
    "text", ["", "[]", "1", "{}", '{"reward": "1"}', '{"reward": true}', '{"reward": NaN}', '{"a": 1e999}', "[" * 9999]
)
def test_rewards_that_are_none(text: str) -> None:
    with pytest.raises(RewardError) as caught:
        parse_json(text.encode())
    assert caught.value.name == "VerifierOutputParseError"


@pytest.mark.parametrize("text", ["", "one", "nan", "inf", "1 0", "\xb2", '{"reward": 1}'])
def test_reward_texts_that_are_none(text: str) -> None:
    with pytest.raises(RewardError):
        parse_text(text.encode())


def test_rewards() -> None:
    assert parse_json(b'{"reward": 1, "speed": 0.5}') == {"reward": 1.0, "speed": 0.5}
    assert parse_text(b" 0.25\n") == {"reward": 0.25}
    assert scalar({"reward": 1.0, "speed": 0.5}) == 1.0 and scalar({"a": 1.0, "b": 0.5}) == 0.5
    assert json.loads(json.dumps(parse_json(b'{"a": 1}'))) == {"a": 1.0}


def test_failure_names() -> None:
    assert cause_of("AgentTimeoutError") == "agent_exhausted_budget"
    assert cause_of("RewardFileEmptyError") == "verifier_failed"
    assert cause_of("SomethingElse") == "unclassified" and cause_of(None) is None
