"""Inspect AI's `--model glm5/DIR` and `--sandbox glm5-room`, which it finds by the entry point `inspect_ai`.

Inspect AI is not a dependency: install glm5 with the extra `serve` and `inspect_ai` into one virtual environment. The
model is served by a child process; Inspect's own provider for OpenAI's API speaks to it. A room has no network, and one
ordinary user. Its files are those of a sample and, if the sandbox names one, what a Dockerfile makes
(`glm5.sandbox.dockerfile_build`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import posixpath
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from inspect_ai.model import GenerateConfig, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)

from glm5.agents.endpoint import Endpoint
from glm5.agents.models import served
from glm5.errors import UsageError
from glm5.eval import inspect_tau2  # noqa: F401 - registers its tasks
from glm5.sandbox.dockerfile import Plan, read_dockerfile
from glm5.sandbox.dockerfile_build import build, machine_base, read_context
from glm5.sandbox.environment import NamespaceEnvironment, RoomFileError, RoomLimits
from glm5.sandbox.limits import FOREVER_S
from glm5.sandbox.room_files import RoomFileTooLarge, open_inside
from glm5.sandbox.room_thread import RoomThread

T = TypeVar("T")
WORK = "/workspace"
"""The working folder of a room without a Dockerfile."""
USERS = ("agent", "root", "0")  # a room's one user; a Dockerfile's root is that one too
LIMITS = RoomLimits(output_kb=16 * 1024)


@modelapi(name="glm5")
class GLM5API(OpenAICompatibleAPI):
    """`glm5/DIR`: the checkpoint in DIR (`glm5//abs/dir` for an absolute path).

    Model arguments (`-M`) are options of `glm5 serve`, such as `-M device=cuda -M dtype=bfloat16`. Raises UsageError if
    DIR is no folder, CheckpointError if it cannot be served.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  as all providers have it
        **options: Any,
    ) -> None:
        self._open = contextlib.ExitStack()
        key = api_key or secrets.token_urlsafe(24)
        if base_url is None:
            if not Path(model_name).is_dir():
                raise UsageError(f"glm5/{model_name}: {model_name} is no folder with a checkpoint.")
            told = [part for name, value in options.items() for part in _option(name, value)]
            base_url = self._open.enter_context(served(Path(model_name), key, told))
            atexit.register(self._open.close)  # Inspect does not close the models of a run
        with contextlib.closing(Endpoint(base_url, key=key)) as endpoint:
            self._known_as = endpoint.name
        url = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        super().__init__(model_name, url, key, config, service="glm5")

    def service_model_name(self) -> str:
        """The name that the server gives the model."""
        return self._known_as

    async def aclose(self) -> None:
        """End the connection and the server."""
        await super().aclose()
        self._open.close()
        atexit.unregister(self._open.close)


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]


@sandboxenv(name="glm5-room")
class RoomSandbox(SandboxEnvironment):
    """A room (`glm5.sandbox`) for every sample."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder, self._thread = folder, RoomThread()
        self._room = NamespaceEnvironment(writable=[WORK], limits=LIMITS)
        self._plan = Plan("", (), {}, WORK)

    @classmethod
    def config_files(cls) -> list[str]:
        return ["Dockerfile"]

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """`config`: the path of a Dockerfile, or None. Raises UsageError for anything else, BuildError for a Dockerfile
        that cannot be carried out here, GradingError on a machine without namespaces."""
        if config is not None and not (isinstance(config, str) and Path(config).is_file()):
            raise UsageError(f"glm5-room takes the path of a Dockerfile, not {config!r:.100}.")
        sandbox = cls(Path(config) if config is not None else None)
        await sandbox._thread.call(sandbox._start)
        return {"default": sandbox}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        for environment in environments.values():
            sandbox = environment.as_type(RoomSandbox)
            await sandbox._thread.call(sandbox._room.stop)
            sandbox._thread.close()

    def _start(self) -> None:
        self._room.start()
        try:
            if self._folder is not None:
                context = read_context(self._folder.parent)
                text = self._folder.read_text(encoding="utf-8", errors="replace")
                self._plan = read_dockerfile(text, context, machine_base())
                build(self._room, self._plan, context)
        except BaseException:
            self._room.stop()
            raise

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program. See `SandboxEnvironment.exec`; `timeout_retry` and `concurrency` are ignored."""
        if user is not None and user not in USERS:
            raise SandboxUserUnsupportedError(f"A room has one user; it cannot execute as {user!r:.100}.")
        given = input.encode() if isinstance(input, str) else input or b""
        where, known = posixpath.join(self._plan.workdir, cwd or ""), {**self._plan.env, **(env or {})}
        seconds = FOREVER_S if timeout is None else float(timeout)
        done = await self._thread.call(
            lambda: self._room.exec(cmd, cwd=where, env=known, timeout_s=seconds, stdin=given)
        )
        if done.stopped == "wall":
            raise TimeoutError(f"the command took longer than {seconds:g} seconds")
        out, err = (data.decode("utf-8", "replace") for data in (done.stdout, done.stderr))
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if done.stopped == "output" or max(len(done.stdout), len(done.stderr)) > most:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, (out or err)[:most])
        if done.exit_code == 127 and err.startswith(f"start of {cmd[0]}: [Errno {errno.EACCES}]"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cmd[0])
        return ExecResult(done.exit_code == 0, done.shell_code, out, err)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file. Raises IsADirectoryError, PermissionError."""
        path, data = self._path(file), contents.encode() if isinstance(contents, str) else contents

        def write() -> None:
            self._allowed(path, stat.S_IWUSR)
            self._room.upload({path: data})

        await self._files(write)

    async def read_file(self, file: str, text: bool = True) -> Any:  # str or bytes: two overloads in the base class
        """A file's text or bytes. Raises FileNotFoundError, IsADirectoryError, PermissionError, UnicodeDecodeError, and
        OutputLimitExceededError for one that is too large."""
        path, most = self._path(file), SandboxEnvironmentLimits.MAX_READ_FILE_SIZE

        def read() -> bytes:
            self._allowed(path, stat.S_IRUSR)
            return self._room.download(path, most)

        try:
            data = await self._files(read)
        except RoomFileTooLarge:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from None
        return data.decode("utf-8") if text else data

    def _path(self, file: str) -> str:
        return posixpath.normpath(posixpath.join(self._plan.workdir, file))

    def _allowed(self, path: str, right: int) -> None:
        """Raises IsADirectoryError, and PermissionError for a file that its owner may not read or write: from outside,
        a room's files may always be."""
        try:
            descriptor = open_inside(self._room.files.root, path, os.O_PATH)
        except OSError:
            return  # it is not there, or a link; the caller finds out
        mode = os.fstat(descriptor).st_mode
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not mode & right:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    async def _files(self, work: Callable[[], T]) -> T:
        """The result of `work` on files, with the errors that Inspect knows."""
        try:
            return await self._thread.call(work)
        except RoomFileError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise
