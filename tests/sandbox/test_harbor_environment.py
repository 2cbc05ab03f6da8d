"""Rooms under Harbor's method names, over a small stand-in for its base class: Harbor itself needs Python 3.12."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, GradingError
from glm5.sandbox.environment import environment_mechanism


@dataclass
class Config:
    docker_image: str | None = None
    memory_mb: int | None = 512
    storage_mb: int | None = 64
    build_timeout_sec: float = 60.0
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)


class Base:
    def __init__(self, environment_dir: Path, task_env_config: Config, **_: object) -> None:
        self.environment_dir, self.task_env_config = environment_dir, task_env_config
        assert self.type() == "glm5-room" and self.capabilities["disable_internet"]  # type: ignore[attr-defined]
        self._validate_definition()  # type: ignore[attr-defined]

    def _merge_env(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return {**self.task_env_config.env, **(env or {})} or None


class BuildFailed(Exception):
    pass


@pytest.fixture
def room_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))
    base: Any = types.ModuleType("harbor.environments.base")
    base.BaseEnvironment, base.SandboxBuildFailedError, base.ExecResult = Base, BuildFailed, types.SimpleNamespace
    capabilities: Any = types.ModuleType("harbor.environments.capabilities")
    capabilities.EnvironmentCapabilities = capabilities.EnvironmentResourceCapabilities = dict
    for name in ("harbor", "harbor.environments"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, capabilities.__name__, capabilities)
    sys.modules.pop("glm5.sandbox.harbor_environment", None)
    yield importlib.import_module("glm5.sandbox.harbor_environment").RoomEnvironment
    sys.modules.pop("glm5.sandbox.harbor_environment", None)


def test_a_trial_in_harbors_order(room_environment: Any, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nENV A=1\nWORKDIR /app\nCOPY run.sh .\nRUN ./run.sh > built\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho $A $PWD\n")
    (tmp_path / "run.sh").chmod(0o755)
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text("#!/bin/sh\ncp /app/out /logs/verifier/reward.txt\n")

    async def play() -> None:
        environment = room_environment(tmp_path, Config(env={"B": "2"}))
        await environment.start(force_build=False)
        try:
            done = await environment.exec("cat built; echo $A$B$C; echo no >&2; exit 3", env={"C": "3"}, user="root")
            assert (done.stdout, done.stderr, done.return_code) == ("1 /app\n123\n", "no\n", 3)
            assert (await environment.exec("kill -9 $$")).return_code == 137
            await environment.exec("echo 1 > out; ln -s /etc/passwd /logs/verifier/link", cwd="/app")
            await environment.upload_dir(tests, "/tests")
            await environment.upload_file(tests / "test.sh", "/app/deep/er/test.sh")
            await environment.exec("chmod +x /tests/test.sh && /tests/test.sh")
            await environment.download_dir("/logs/verifier", tmp_path / "verifier")
            assert {path.name for path in (tmp_path / "verifier").iterdir()} == {"reward.txt"}
            await environment.download_file("/app/out", tmp_path / "x" / "out")
            assert (tmp_path / "x" / "out").read_text() == "1\n"
            with pytest.raises(RuntimeError, match="timed out after 1 second"):
                await environment.exec("sleep 60", timeout_sec=1)
        finally:
            await environment.stop(delete=True)

    asyncio.run(play())


def test_a_cancelled_command_ends_and_leaves_the_room_usable(room_environment: Any, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\n")

    async def play() -> None:
        environment = room_environment(tmp_path, Config())
        await environment.start(force_build=False)
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(environment.exec("sleep 9999"), 0.5)
            async with asyncio.timeout(30):
                assert "sleep" not in (await environment.exec("cat /proc/[0-9]*/cmdline")).stdout
        finally:
            await environment.stop(delete=True)

    asyncio.run(play())


def test_a_base_is_a_folder_that_stands_for_an_image(room_environment: Any, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM own:1\nRUN cp /data/in /data/out\n")
    (tmp_path / "base" / "data").mkdir(parents=True)
    (tmp_path / "base" / "data" / "in").write_text("1")

    async def play() -> None:
        environment = room_environment(tmp_path, Config(), base=f"own:1={tmp_path / 'base'}")
        await environment.start(force_build=False)
        try:
            assert (await environment.exec("cat /data/out")).stdout == "1"
        finally:
            await environment.stop(delete=True)

    asyncio.run(play())
    with pytest.raises(ConfigError, match="IMAGE=DIR"):
        room_environment(tmp_path, Config(), base="own:1")


def test_definitions_that_cannot_be_built(room_environment: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="names no docker_image"):
        room_environment(tmp_path, Config())
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN apt-get install -y no-such-package\n")
    with pytest.raises(BuildFailed, match="no-such-package"):
        asyncio.run(room_environment(tmp_path, Config()).start(force_build=True))


def test_without_harbor_the_import_says_what_is_missing() -> None:
    if importlib.util.find_spec("harbor") is not None:
        pytest.skip("harbor is installed")
    sys.modules.pop("glm5.sandbox.harbor_environment", None)
    with pytest.raises(ImportError, match=r"Python 3\.12"):
        importlib.import_module("glm5.sandbox.harbor_environment")
