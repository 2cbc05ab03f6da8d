"""One trial of a task: prepare a room, let an agent work, judge the result in a verifier room (Harbor's order).

The verifier room opens after every process of the agent is dead. `/tests` and `/logs/verifier` are empty in it, and the
tests are laid in only then. The machine's programs come first on its PATH, and what an agent could have changed to run
inside of the verifier's own programs is put right from outside (`restore_startup`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from glm5.errors import ConfigError, GradingError
from glm5.sandbox.container import ContainerEnvironment, chosen_engine
from glm5.sandbox.dockerfile import Plan, read_dockerfile
from glm5.sandbox.dockerfile_build import BuildError, File, build, machine_base
from glm5.sandbox.environment import ExecResult, NamespaceEnvironment, Room, RoomFileError, RoomLimits, Snapshot
from glm5.sandbox.room import python_packages
from glm5.sandbox.system_files import restore_startup, startup_files, verifier_path
from glm5.tasks.harbor.failures import cause_of
from glm5.tasks.harbor.folder import TaskFolder
from glm5.tasks.harbor.reward import RewardError, read_rewards, scalar
from glm5.tasks.harbor.schema import resolve_env

AGENT_TIMEOUT_S = 600.0
"""Seconds of an agent if the task names no limit."""
MOST_TOLD = 4000
"""Characters of an output that a result keeps."""
MOST_MEMORY_MB, MOST_DISK_MB = 16_384, 4096
"""Limits of a room, whatever the task asks for. What is written takes memory too."""
VERIFIER_FOLDERS = ("/logs/verifier", "/tests", "/solution")
"""Empty in the verifier room, whatever the agent left there."""


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial. `rewards` is empty without a verdict. `error` is the name of Harbor's exception or None,
    `message` says more. `reward` is None if the trial measures nothing."""

    rewards: Mapping[str, float]
    error: str | None = None
    message: str = ""
    agent_output: str = ""
    verifier_output: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def cause(self) -> str | None:
        return cause_of(self.error)

    @property
    def reward(self) -> float | None:
        """The reward for training: 0 if the verifier of the task gave no verdict on what the agent left, for that is in
        the agent's reach; None after a failure of the machine, the model's server or the build."""
        if self.rewards:
            return scalar(self.rewards)
        return 0.0 if self.cause == "verifier_failed" else None


Agent = Callable[[Room, "TaskRoom"], ExecResult | None]
"""Works in the room; returns the end of its last command, or None if it ran none."""


class TaskRoom:
    """A task's environment: built once, then used for trials one after the other. A context manager.

    Raises BuildError if the Dockerfile cannot be carried out here, GradingError if the machine fails.
    """

    def __init__(
        self,
        folder: TaskFolder,
        *,
        env: Mapping[str, str] | None = None,
        bases: Mapping[str, Mapping[str, Path]] | None = None,
        agent_timeout_s: float | None = None,
    ) -> None:
        config = folder.config
        self.folder, self.given, self.bases = folder, dict(env or {}), dict(bases or {})
        self.plan = plan_of(folder, tuple(self.bases))
        self.workdir = config.environment.workdir or self.plan.workdir
        self.env = {**self.plan.env, **resolve_env(config.environment.env, self.given, "[environment] env")}
        self.agent_timeout_s = agent_timeout_s or config.agent.timeout_sec or AGENT_TIMEOUT_S
        memory = min(config.environment.memory_mb or 2048, MOST_MEMORY_MB)
        limits = RoomLimits(memory_mb=memory, disk_mb=min(config.environment.storage_mb or 1024, MOST_DISK_MB))
        found = {place: tree for place, tree in folder.trees.items() if tree is not None}
        self.room = _room(folder, dict(self.bases.get(self.plan.base, found)), limits, bool(bases))
        self._ready: Snapshot | None = None

    def __enter__(self) -> TaskRoom:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.room)
            self._prepare()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.room.stop()

    def _prepare(self) -> None:
        config = self.folder.config.environment
        build(self.room, self.plan, self.folder.environment, config.build_timeout_sec)
        if isinstance(self.room, ContainerEnvironment):
            self.workdir = config.workdir or self.room.workdir
        self.room.exec(["/usr/bin/mkdir", "-p", self.workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts"])
        self._startup = startup_files(self.room, self.workdir) if self.room.machine else {}
        self._ready = self.room.snapshot()

    def trial(self, agent: Agent) -> TrialResult:
        """Let `agent` work in the prepared files, and judge what it leaves."""
        if self._ready is None:
            raise GradingError("the room of the task has not been prepared.")
        self.room.restore(self._ready)
        seconds = dict[str, float]()
        started = time.monotonic()
        error, message, output = None, "", ""
        if (sick := self._healthcheck()) is not None:
            return TrialResult({}, "HealthcheckError", sick)
        done = agent(self.room, self)
        seconds["agent"] = time.monotonic() - started
        if done is not None:
            output = _told(done)
            error, message = _agent_error(done)
        for hook in self.folder.config.verifier.collect:
            self.execute(self.room, hook.command, timeout_s=hook.timeout_sec)
        return self._verify(TrialResult({}, error, message, output, seconds=seconds))

    def judge(self) -> TrialResult:
        """Judge the room's files as they are; the room ends."""
        return self._verify(TrialResult({}))

    def execute(
        self, room: Room, command: str, *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> ExecResult:
        """Run a command line in the working folder of the task, with the variables of its image."""
        merged = {**self.env, **(env or {})}
        return room.exec(command, cwd=self.workdir, env=merged, timeout_s=timeout_s or self.agent_timeout_s)

    def _healthcheck(self) -> str | None:
        """Why the environment is not ready, or None."""
        check = self.folder.config.environment.healthcheck
        if check is None:
            return None
        grace = time.monotonic() + check.start_period_sec
        failures = 0
        while True:
            done = self.execute(self.room, check.command, timeout_s=check.timeout_sec)
            if done.exit_code == 0:
                return None
            early = time.monotonic() < grace
            failures += not early
            if failures > check.retries:
                return f"the health check failed: {_told(done)[-300:]}"
            time.sleep(check.start_interval_sec if early else check.interval_sec)

    def restore_startup(self, judge: Room) -> None:
        """Put right, in a verifier room, what runs inside of the verifier's own programs. Raises RoomFileError."""
        if not judge.machine:  # agents cannot change a container's system
            return
        try:
            restore_startup(judge, self._startup, self.workdir)
        except OSError as error:
            raise RoomFileError(str(error)) from error

    def _verify(self, so_far: TrialResult) -> TrialResult:
        config = self.folder.config.verifier
        given = resolve_env(config.env, self.given, "[verifier] env")
        env = {**self.env, **given}
        if self.room.machine and "PATH" not in given:
            env["PATH"] = verifier_path(self.env.get("PATH", ""))
        env |= {"HOME": "/tmp", "PYTHONNOUSERSITE": "1"}
        tests = {f"/tests/{name}": file.data for name, file in self.folder.tests.items() if not name.endswith("/")}
        modes = {f"/tests/{name}": 0o755 if f.executable else 0o644 for name, f in self.folder.tests.items()}
        try:
            return self._judge(so_far, tests, modes | {"/tests/test.sh": 0o755}, env)
        except RoomFileError as error:  # an agent must not escape a verdict by what it leaves
            message = f"what the agent left keeps the tests out: {error}"
            return replace(so_far, error="RewardFileNotFoundError", message=message)

    def _judge(
        self, so_far: TrialResult, tests: Mapping[str, bytes], modes: Mapping[str, int], env: Mapping[str, str]
    ) -> TrialResult:
        config, started = self.folder.config.verifier, time.monotonic()
        with self.room.verifier(writable=VERIFIER_FOLDERS) as judge:
            self.restore_startup(judge)
            judge.upload(tests, modes)
            cwd = self.workdir if _is_folder(judge, self.workdir) else "/"
            # A list: bash would be killed by what kills its child, and the exit code would hide it.
            done = judge.exec(["/usr/bin/env", "/tests/test.sh"], cwd=cwd, env=env, timeout_s=config.timeout_sec)
            judge.clear()  # nothing may change the reward file between its check and its use
            seconds = {**so_far.seconds, "verifier": time.monotonic() - started}
            judged = replace(so_far, verifier_output=_told(done), seconds=seconds)
            if done.stopped == "wall":
                message = f"test.sh took longer than {config.timeout_sec:g} s."
                return replace(judged, error="VerifierTimeoutError", message=message)
            if done.exit_code < 0:
                message = f"test.sh was ended by {done.stopped or f'signal {-done.exit_code}'}."
                return replace(judged, error="VerifierOutputParseError", message=message)
            try:
                return replace(judged, rewards=read_rewards(judge))
            except RewardError as error:
                return replace(judged, error=error.name, message=str(error))


def _room(folder: TaskFolder, trees: Mapping[str, Path], limits: RoomLimits, based: bool) -> NamespaceEnvironment:
    """A room for a task. If an engine makes it, the engine builds the task's image as well."""
    engine, config = chosen_engine(), folder.config.environment
    if engine is None:
        # A repository's package may be among those of the machine's Python, with the fix in it.
        return NamespaceEnvironment(
            trees, hidden=python_packages() if "tests.json" in folder.tests else (), limits=limits
        )
    if based:
        raise ConfigError(f"folders cannot stand for an image in {engine[0]}; tag an image with the name of FROM.")
    context = {"Dockerfile": File(f"FROM {config.docker_image}\n".encode()), **folder.environment}
    writable = ["/logs", *([config.workdir] if config.workdir else [])]
    return ContainerEnvironment(
        trees, program=engine[0], context=context, build_s=config.build_timeout_sec, writable=writable, limits=limits
    )


def plan_of(folder: TaskFolder, bases: tuple[str, ...] = ()) -> Plan:
    """The plan of a task's environment; empty if an engine builds its image. Raises BuildError with the kind of what
    rooms do not have."""
    config = folder.config
    unsupported = {
        "windows": config.environment.os == "windows",
        "gpu": bool(config.environment.gpus or config.environment.tpu),
        "compose": any(name.startswith(("docker-compose.", "compose.")) for name in folder.environment)
        or any(hook.service != "main" for hook in config.verifier.collect),
        "steps": bool(config.steps),
        "mcp": bool(config.environment.mcp_servers),
        "verifier-environment": config.verifier.environment is not None,
    }
    for kind, present in unsupported.items():
        if present:
            raise BuildError(kind, f"{folder.name}: rooms do not support this kind of task ({kind}).")
    if "Dockerfile" not in folder.environment:
        image = config.environment.docker_image or ""
        if not image:
            raise BuildError("syntax", f"{folder.name} has neither environment/Dockerfile nor a docker_image.")
        text = f"FROM {image}\n"
    else:
        text = folder.environment["Dockerfile"].data.decode("utf-8", "replace")
    if chosen_engine() is not None:
        return Plan("", (), {}, "/")
    plan = read_dockerfile(text, folder.environment, machine_base(), bases=bases, present=folder.trees)
    if None in folder.trees.values() and plan.base not in bases:
        raise BuildError(
            "dependencies",
            f"{folder.name}: its test dependencies are not in work/bases of a folder above it; name the folder that "
            "has them below opt/site with --base IMAGE=DIR.",
        )
    return plan


def _is_folder(room: Room, path: str) -> bool:
    return room.exec(["/usr/bin/test", "-d", path]).exit_code == 0


def _agent_error(done: ExecResult) -> tuple[str | None, str]:
    if done.stopped == "wall":
        return "AgentTimeoutError", "the agent reached its time limit."
    if done.exit_code:
        limit = f" at the limit of {done.stopped}" if done.stopped else ""
        return "NonZeroAgentExitCodeError", f"the agent ended with exit code {done.exit_code}{limit}."
    return None, ""


def _told(done: ExecResult) -> str:
    return (done.stdout + done.stderr).decode(errors="replace")[-MOST_TOLD:]


def oracle(room: Room, task: TaskRoom) -> ExecResult:
    """The agent that runs the task's own solution."""
    if "solve.sh" not in task.folder.solution:
        raise BuildError("solution", f"{task.folder.name} has no solution/solve.sh.")
    files = {name: file for name, file in task.folder.solution.items() if not name.endswith("/")}
    modes = {f"/solution/{name}": 0o755 if file.executable else 0o644 for name, file in files.items()}
    room.upload({f"/solution/{n}": file.data for n, file in files.items()}, modes | {"/solution/solve.sh": 0o755})
    env = resolve_env(task.folder.config.solution.env, task.given, "[solution] env")
    return task.execute(room, "/solution/solve.sh", env={"DEBIAN_FRONTEND": "noninteractive", **env})


def nop(room: Room, task: TaskRoom) -> None:
    """The agent that does nothing."""


def command_agent(command: str) -> Agent:
    """An agent that is a command line in the room; the instruction is in /logs/agent/instruction.md."""

    def agent(room: Room, task: TaskRoom) -> ExecResult:
        room.upload({"/logs/agent/instruction.md": task.folder.instruction.encode()})
        return task.execute(room, command)

    return agent
