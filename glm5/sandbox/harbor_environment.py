"""Rooms as an environment of Harbor, by its import path `glm5.sandbox.harbor_environment:RoomEnvironment`.

Harbor (Python 3.12 or newer) is not a dependency: install glm5 into Harbor's own virtual environment, without torch if
you like. The task's Dockerfile is carried out by `dockerfile_build`; what it asks for beyond the subset is Harbor's
`SandboxBuildFailedError`. There is no network, and one ordinary user, who may change every file: `user` is ignored.
A room's Python is the one that Harbor's virtual environment was made with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, GradingError
from glm5.sandbox import programs
from glm5.sandbox.dockerfile import Plan, read_dockerfile
from glm5.sandbox.dockerfile_build import BuildError, File, build, machine_base, read_context
from glm5.sandbox.environment import NamespaceEnvironment, RoomLimits, environment_mechanism
from glm5.sandbox.limits import FOREVER_S
from glm5.sandbox.room_thread import RoomThread

try:
    from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
    from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
except ImportError as error:
    raise ImportError("harbor is not installed here; it needs Python 3.12 or newer: pip install harbor") from error


class RoomEnvironment(BaseEnvironment):
    """One room. Harbor's constructor and methods; see `harbor.environments.base.BaseEnvironment`.

    `base` (`--ek base=IMAGE=DIR`): the folders of DIR stand for FROM IMAGE. Raises ConfigError if DIR is no folder.
    """

    def __init__(self, *args: Any, base: str | None = None, **keywords: Any) -> None:
        self._bases = _bases(base)
        self._plan = Plan("", (), {}, "/")
        self._context: dict[str, File] = {}
        self._room: NamespaceEnvironment | None = None
        self._thread = RoomThread()
        super().__init__(*args, **keywords)

    @staticmethod
    def type() -> str:
        return "glm5-room"

    @classmethod
    def preflight(cls) -> None:
        """Raises SystemExit with one sentence if this machine cannot build rooms."""
        try:
            environment_mechanism()
        except GradingError as error:
            raise SystemExit(str(error)) from None

    @property
    def capabilities(self) -> Any:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> Any:
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        """Raises FileNotFoundError if there is neither a Dockerfile nor an image."""
        dockerfile, image = Path(self.environment_dir, "Dockerfile"), self.task_env_config.docker_image
        if not dockerfile.is_file() and not image:
            raise FileNotFoundError(f"{dockerfile} is missing, and the task names no docker_image.")

    async def start(self, force_build: bool) -> None:
        """Build the room. Raises SandboxBuildFailedError for a Dockerfile that cannot be carried out here."""
        await self._thread.call(self._build)

    def _build(self) -> None:
        folder, config = Path(self.environment_dir), self.task_env_config
        self._context = read_context(folder)
        given = self._context.get("Dockerfile")
        text = given.data.decode("utf-8", "replace") if given else f"FROM {config.docker_image}\n"
        self._plan = read_dockerfile(text, self._context, machine_base(), bases=tuple(self._bases))
        limits = RoomLimits(memory_mb=config.memory_mb or 2048, disk_mb=config.storage_mb or 1024)
        room = NamespaceEnvironment(self._bases.get(self._plan.base), limits=limits)
        room.start()
        try:
            build(room, self._plan, self._context, config.build_timeout_sec)
        except BuildError as error:
            room.stop()
            raise SandboxBuildFailedError(str(error)) from error
        except BaseException:
            room.stop()
            raise
        self._room = room
        self._exec(["/usr/bin/mkdir", "-p", self._workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts"], "/", {})

    async def stop(self, delete: bool) -> None:
        """End the room's processes and drop its files."""
        await self._thread.call(self._close)
        self._thread.close()

    def _close(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.stop()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Run a line for bash. Raises RuntimeError when it takes longer than `timeout_sec`."""
        merged = {**self._plan.env, **(self._merge_env(env) or {})}
        done = await self._thread.call(lambda: self._exec(command, cwd or self._workdir, merged, timeout_sec))
        if done.stopped == "wall":
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        out, err = (data.decode("utf-8", "replace") for data in (done.stdout, done.stderr))
        return ExecResult(stdout=out, stderr=err, return_code=done.shell_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        data, mode = source.read_bytes(), source.stat().st_mode & 0o777
        await self._thread.call(lambda: self._open.upload({target_path: data}, {target_path: mode}))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._thread.call(lambda: self._open.upload_tree(Path(source_dir), target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data = await self._thread.call(lambda: self._open.download(source_path))
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Regular files only; links that the room's programs made are left out."""
        files = await self._thread.call(lambda: self._open.download_tree(source_dir))
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)

    @property
    def _open(self) -> NamespaceEnvironment:
        if self._room is None:
            raise RuntimeError("the environment has not been started, or has been stopped.")
        return self._room

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._plan.workdir

    def _exec(
        self, command: str | list[str], cwd: str, env: dict[str, str], seconds: float | None = None
    ) -> programs.ExecResult:
        return self._open.exec(command, cwd=cwd, env=env, timeout_s=seconds or FOREVER_S)


def _bases(text: str | None) -> dict[str, dict[str, Path]]:
    """The folders that stand for an image, by their places, from `IMAGE=DIR`."""
    if text is None:
        return {}
    image, _, folder = text.partition("=")
    if not (image and folder and Path(folder).is_dir()):
        raise ConfigError(f"base={text:.200}: it takes IMAGE=DIR, and DIR must be a folder.")
    return {image: {f"/{path.name}": path for path in sorted(Path(folder).iterdir()) if path.is_dir()}}
