"""The family "tool_decathlon": work with MCP servers, checked by the task's own program in a verifier room (App. B).

A task is a folder of Tool-Decathlon's form: `docs/task.md`, `docs/agent_system_prompt.md`, `task_config.json` with
`needed_mcp_servers`, and `initial_workspace`, `groundtruth_workspace`, `preprocess/main.py`, `evaluation/main.py`. The
task is solved if `evaluation/main.py` ends with 0. Rooms have no network, so only tasks without one can be played.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Env, Message, Outcome, StepResult
from glm5.sandbox.environment import ExecResult, Room, RoomFileError
from glm5.sandbox.room import interpreter
from glm5.sandbox.system_files import restore_startup, startup_files, verifier_path
from glm5.tasks.contract import Family, ToolSpec
from glm5.tasks.mcp.client import check_shown, chosen, read_servers, require
from glm5.tasks.mcp.env import WORKSPACE, McpEnv, McpProblem, Setting

TASK = "/task"
"""Where the verifier room has the evaluation and the ground truth; the agent's room does not."""
PROGRAM_S = 300.0
PLACE = "!!<<<<||||workspace_dir||||>>>>!!"
"""What the published system prompts have for the working folder."""
DONE: ToolSpec = {
    "type": "function",
    "function": {
        "name": "claim_done",
        "description": "Say that the task is done.",
        "parameters": {"type": "object", "properties": {}},
    },
}
MOST_FILES = 64 << 20
HIDDEN = ("evaluation", "groundtruth_workspace")


@dataclass(frozen=True)
class DecathlonProblem(McpProblem):
    """One task folder. `python` and `library` run its programs."""

    folder: Path = Path()
    python: str = ""
    library: str = ""

    @property
    def grading(self) -> Any:
        """What grades the answers: the hidden files, as hashes."""
        files = [(name, path, data) for name in HIDDEN for path, data in _files(self.folder / name).items()]
        return sorted((name, path, hashlib.sha256(data).hexdigest()) for name, path, data in files)

    def env(self) -> Env:
        return DecathlonEnv(self)


class DecathlonEnv(McpEnv):
    """Ends when the agent says that it is done; then the task's program looks at the working folder."""

    def __init__(self, problem: DecathlonProblem) -> None:
        super().__init__(problem)
        self._task, self._said = problem, list[Message]()
        self._launched = time.strftime("%Y-%m-%d %H:%M:%S")

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        messages, tools, thinking = super().start()
        return messages, [*tools, DONE], thinking

    def step(self, message: Message | None) -> StepResult:
        if message is not None:
            self._said.append(message)
            if any(call.name == "claim_done" for call in message.tool_calls):
                with self._ending():
                    return self._answer(message.content)
        return super().step(message)

    def _prepare(self) -> None:
        program = self._task.folder / "preprocess" / "main.py"
        if program.is_file():
            self.room.upload_tree(program.parent, f"{TASK}/preprocess")
            done = self._run(self.room, f"{TASK}/preprocess/main.py")
            gone = self.room.exec(["/bin/rm", "-rf", TASK])  # it may say what is wanted
            if done.exit_code or gone.exit_code:
                why = _tail(done if done.exit_code else gone)
                raise GradingError(f"{self.problem}: preprocess/main.py failed, or cannot be removed: {why}")
        self._startup = startup_files(self.room, WORKSPACE) if self.room.machine else {}

    def _answer(self, text: str) -> StepResult:
        self._servers.__exit__()
        log = {"messages": [{"role": one.role, "content": one.content} for one in self._said], "status": "success"}
        files = {f"{TASK}/log.json": json.dumps(log).encode()}
        for name in HIDDEN:
            files |= {f"{TASK}/{name}/{path}": data for path, data in _files(self._task.folder / name).items()}
        with self.room.verifier(files, writable=[TASK]) as room:
            try:  # what the agent left must not run inside of the task's program
                if room.machine:
                    restore_startup(room, self._startup, WORKSPACE)
            except (RoomFileError, OSError) as error:
                told = self._counts() | {"reply": text, "evaluation": f"not begun: {error}"}
                return StepResult(done=True, outcome=Outcome.FAILED, detail=told)
            done = self._run(room, f"{TASK}/evaluation/main.py", "--groundtruth_workspace",
                             f"{TASK}/groundtruth_workspace", "--res_log_file", f"{TASK}/log.json")  # fmt: skip
        solved = done.exit_code == 0  # one that a limit has ended was kept from a verdict by what the agent left
        outcome = Outcome.SOLVED if solved else Outcome.FAILED
        stopped = f" [stopped: {done.stopped}]" if done.stopped is not None else ""
        detail = self._counts() | {"reply": text, "evaluation": _tail(done) + stopped}
        return StepResult(done=True, reward=float(solved), outcome=outcome, detail=detail)

    def _run(self, room: Room, program: str, *arguments: str) -> ExecResult:
        """One of the task's programs. It takes nothing from the home folder, which agents can write."""
        given = ["--agent_workspace", WORKSPACE, "--launch_time", self._launched, *arguments]
        argv = [self._task.python or interpreter(), "-s", "-B", program, *given]
        env = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1"}
        if room.machine:
            env["PATH"] = verifier_path()
        if self._task.library:
            env["PYTHONPATH"] = self._task.library
        return room.exec(argv, cwd=WORKSPACE, env=env, timeout_s=PROGRAM_S)


def _tail(done: ExecResult) -> str:
    return (done.stdout + done.stderr).decode("utf-8", "replace")[-1000:].strip()


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative path; links are left out. Raises DataError for too many bytes."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = path.read_bytes()
    if sum(map(len, found.values())) > MOST_FILES:
        raise DataError(f"{folder} has more than {MOST_FILES >> 20} MiB.")
    return found


class DecathlonFamily(Family):
    """The task folders below `folder`.

    Args:
        servers: a JSON file with the servers, as clients have it (see `read_servers`); a task gets those it names.
        show: folders of the machine that the servers and the tasks' programs need, read-only.
        python, library: the interpreter and the Python path of the tasks' programs; default: this machine's Python.
        seconds: time of an episode.
    """

    name = domain = "tool_decathlon"

    def __init__(
        self,
        seed: int = 0,
        *,
        folder: str = "",
        servers: str = "",
        show: Sequence[str] = (),
        python: str = "",
        library: str = "",
        seconds: float = 5400.0,
        max_turns: int = 100,
        thinking: bool = True,
    ) -> None:
        require()
        if not folder or not servers or isinstance(show, str) or not seconds > 0 or max_turns < 1:
            raise ConfigError("tool_decathlon: set folder to the tasks and servers to a JSON file of MCP servers.")
        check_shown(self.name, show)
        self._paths = sorted(path.parent for path in Path(folder).glob("**/task_config.json"))
        if not self._paths:
            raise DataError(f"tool_decathlon: there is no task_config.json below {folder}.")
        self._servers, self._programs = read_servers(Path(servers)), (python, library)
        self._show, self._limits = tuple(show), (max_turns, float(seconds), bool(thinking))

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self._paths)

    def problem(self, split: str, index: int) -> DecathlonProblem:
        """Raises DataError for a folder that is no task, and for a split to train on."""
        if split != "heldout":
            raise DataError("tool_decathlon: the tasks are for evaluation; none are to train on.")
        folder = self._paths[index % self.size].absolute()
        try:
            prompt = (folder / "docs" / "task.md").read_text(encoding="utf-8").strip()
            config: Any = json.loads((folder / "task_config.json").read_bytes())
            needed = [str(name) for name in config["needed_mcp_servers"]]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(f"{folder} is no task of Tool-Decathlon: {error!s:.200}.") from None
        if not (folder / "evaluation" / "main.py").is_file():
            raise DataError(f"{folder} has no evaluation/main.py.")
        text = folder / "docs" / "agent_system_prompt.md"
        system = text.read_text(encoding="utf-8").replace(PLACE, WORKSPACE).strip() if text.is_file() else ""
        first = folder / "initial_workspace"
        key = f"tool_decathlon {hashlib.sha256(f'{folder.name} {prompt}'.encode('utf-8', 'replace')).hexdigest()}"
        return DecathlonProblem(
            f"tool_decathlon/{folder.name}", key, prompt,
            Setting(chosen(self._servers, needed), self._show, *self._limits),
            system=system, files=first if first.is_dir() else None, folder=folder, python=self._programs[0],
            library=self._programs[1],
        )  # fmt: skip
