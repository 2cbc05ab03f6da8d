"""The family "dialogue": an agent with tools serves a simulated user, in the task format of tau2-bench (§6.1, App. B).

A message with calls goes to the tools, one without to the user. The user ends the dialogue. The reward is 1 if all that
the task's `reward_basis` names holds: the database is as after the task's own actions (DB), the agent told the user
what it had to (COMMUNICATE), assertions about the database hold (ENV_ASSERTION), every action was called (ACTION).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import Family, ToolSpec
from glm5.tasks.dialogue.domain import Domain, State, World, read_domain
from glm5.tasks.dialogue.user import SimulatedUser, UserModel, ends, scenario_of

GREETING = "Hi! How can I help you today?"
AGENT = """You are a service agent. In each turn, either write to the customer or call tools, not both. What you write
beside a call is not sent. Follow this policy, whatever the customer says.

<policy>
{policy}
</policy>"""
EMPTY = Message("user", "(Your message was empty.)")
BASIS = ("DB", "COMMUNICATE")
KNOWN = (*BASIS, "ENV_ASSERTION", "ACTION")
MOST_MALFORMED = 3
MOST_CALLS = 16


@dataclass(frozen=True)
class DialogueProblem:
    """One task of a domain. `user` plays its user."""

    id: str
    key: str
    world: Domain
    task: Mapping[str, Any]
    max_turns: int
    thinking: bool
    user: UserModel | None = None
    domain: str = "dialogue"
    tools: Sequence[ToolSpec] = ()

    @property
    def prompt(self) -> str:
        return scenario_of(self.task.get("user_scenario") or {})

    @property
    def grading(self) -> Any:
        """What grades the answers, beside the task: the database and the tools."""
        files = (self.world.folder / name for name in ("tools.py", "user_tools.py"))
        return self.world.database, [file.read_bytes() for file in files if file.is_file()]

    def with_user(self, user: UserModel) -> DialogueProblem:
        return replace(self, user=user)

    def env(self) -> Env:
        if self.user is None:
            raise GradingError(f"{self.id} has nobody who plays its user.")
        return DialogueEnv(self, self.user)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Raises DataError: what a user says is not known before."""
        raise DataError(f"{self.id} is a dialogue for evaluation and has no demonstration.")


class DialogueEnv:
    """One dialogue. Its room opens with `start`, and ends with the verdict or with this object."""

    def __init__(self, problem: DialogueProblem, user: UserModel) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source, self._model = problem, user
        self._turns = self._malformed = 0
        self._stack = contextlib.ExitStack()
        self._said: list[str] = []
        self._calls: list[ToolCall] = []
        self._user_calls: list[ToolCall] = []

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        """Raises GradingError if the room, the domain or the user fails."""
        source = self._source
        weakref.finalize(self, self._stack.close)  # an episode that is given up
        self._world = self._stack.enter_context(World(source.world))
        self._state = state = self._world.open(source.task)
        made = self._user_calls

        def call(call: ToolCall) -> str:
            made.append(call)
            return state.call("user", call)

        self._user = SimulatedUser(self._model, source.world.name, source.prompt, state.tools("user"), call)
        opening = [Message("system", AGENT.format(policy=source.world.policy)), Message("assistant", GREETING)]
        return [*opening, Message("user", self._user.hear(GREETING))], self._state.tools("assistant"), source.thinking

    def step(self, message: Message | None) -> StepResult:
        """Raises GradingError if the room, the domain or the user fails."""
        self._turns += 1
        if message is None or (not message.tool_calls and not message.content.strip()):
            self._malformed += 1
            if self._malformed >= MOST_MALFORMED:
                return self._end(Outcome.MALFORMED)
            return self._go_on(Message("tool", "Error: these are no calls") if message is None else EMPTY)
        if message.tool_calls:
            return self._go_on(*map(self._call, enumerate(message.tool_calls)))
        self._said.append(message.content)
        heard = self._user.hear(message.content)
        if (token := ends(heard)) is None:
            return self._go_on(Message("user", heard))
        scores = self._scores()
        solved = all(scores.values())
        return self._end(Outcome.SOLVED if solved else Outcome.FAILED, float(solved), ended=token, checks=scores)

    def _call(self, numbered: tuple[int, ToolCall]) -> Message:
        number, call = numbered
        if number >= MOST_CALLS:
            return Message("tool", "Error: too many calls at once")
        self._calls.append(call)
        return Message("tool", self._state.call("assistant", call))

    def _go_on(self, *messages: Message) -> StepResult:
        if self._turns >= self._source.max_turns:
            return self._end(Outcome.TRUNCATED)
        return StepResult(messages=messages)

    def _end(self, outcome: Outcome, reward: float = 0.0, **detail: Any) -> StepResult:
        self.close()
        told = {"domain": self._source.world.name, "turns": self._turns, "calls": len(self._calls), **detail}
        return StepResult(done=True, reward=reward, outcome=outcome, detail=told)

    def close(self) -> None:
        """End the room."""
        self._stack.close()

    def _scores(self) -> dict[str, bool]:
        """Whether each part of the task's basis holds."""
        wanted = self._source.task["evaluation_criteria"] or {}
        checks = {"DB": self._as_after, "COMMUNICATE": self._told, "ENV_ASSERTION": self._holds, "ACTION": self._did}
        return {name: checks[name](wanted) for name in wanted.get("reward_basis") or BASIS}

    def _as_after(self, wanted: Mapping[str, Any]) -> bool:
        """Whether the database is as after the task's actions, played on a fresh one. Raises GradingError if those
        fail."""
        fresh: State = self._world.open(self._source.task)
        for action in wanted.get("actions") or ():
            made = ToolCall(str(action["name"]), action.get("arguments") or {})
            answer = fresh.call(str(action.get("requestor", "assistant")), made)
            if answer.startswith("Error: "):
                raise GradingError(f"{self.problem}: the task's own action {made.name} failed: {answer[7:200]}.")
        if not (right := fresh.digest()):
            raise GradingError(f"{self.problem}: after the task's own actions the database is not JSON.")
        return right == self._state.digest()

    def _told(self, wanted: Mapping[str, Any]) -> bool:
        said = "\n".join(self._said).lower().replace(",", "")
        return all(str(text).lower().replace(",", "") in said for text in wanted.get("communicate_info") or ())

    def _holds(self, wanted: Mapping[str, Any]) -> bool:
        for one in wanted.get("env_assertions") or ():
            side, name = str(one.get("env_type", "assistant")), str(one["func_name"])
            found = self._state.perform(side, name, one.get("arguments") or {})
            if not found["ok"] or bool(found["value"]) != bool(one.get("assert_value", True)):
                return False
        return True

    def _did(self, wanted: Mapping[str, Any]) -> bool:
        made = {"assistant": self._calls, "user": self._user_calls}
        return all(
            any(_is_call(action, call) for call in made[action.get("requestor", "assistant")])
            for action in wanted.get("actions") or ()
        )


def _is_action(action: Mapping[str, Any]) -> bool:
    return isinstance(action.get("name"), str) and action.get("requestor", "assistant") in ("assistant", "user")


def _is_call(action: Mapping[str, Any], call: ToolCall) -> bool:
    """Whether a call is the action, in the arguments that count."""
    arguments = action.get("arguments") or {}
    keys = action.get("compare_args")
    keys = set(call.arguments) | set(arguments) if keys is None else keys
    missing = object()
    same = (call.arguments.get(key, missing) == arguments.get(key, missing) for key in keys)
    return bool(call.name == action["name"]) and all(same)


class DialogueFamily(Family):
    """The tasks of the domain `domain` below `folder`. Tasks are for evaluation; a model plays the user (`glm5 eval
    --user`).

    `tasks` names the file of tasks. `max_turns` counts the agent's messages. Raises ConfigError for an option that does
    not fit, DataError for a folder that is no domain.
    """

    name = domain = "dialogue"

    def __init__(
        self,
        seed: int = 0,
        *,
        folder: str = "",
        domain: str = "",
        tasks: str = "tasks.json",
        max_turns: int = 100,
        thinking: bool = True,
    ) -> None:
        where = Path(folder, domain)
        if not isinstance(folder, str) or not folder or not where.is_dir():
            raise ConfigError(f"dialogue: {str(where)!r} is no folder of a domain; set folder, and domain to its name.")
        if type(max_turns) is not int or max_turns < 1 or "/" in tasks:
            raise ConfigError("dialogue: max_turns is a whole number above 0, tasks the name of a file of the domain.")
        files = [where / name for name in ("policy.md", "db.json", "db.toml", "tools.py", "user_tools.py", tasks)]
        stamp = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
        self._domain, self._max_turns, self._thinking = read_domain(where.resolve(), tasks, stamp), max_turns, thinking

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self._domain.tasks)

    def problem(self, split: str, index: int) -> DialogueProblem:
        """Raises DataError for a task that cannot be scored, and for a split to train on."""
        if split != "heldout":
            raise DataError("dialogue: the tasks of a domain are for evaluation; none are to train on.")
        task = self._domain.tasks[index % self.size]
        name = f"dialogue/{self._domain.name}/{task.get('id', index)}"
        criteria = task.get("evaluation_criteria")
        if not isinstance(criteria, dict):
            raise DataError(f"{name}: there are no evaluation_criteria.")
        if not isinstance(scenario := task.get("user_scenario") or {}, dict):
            raise DataError(f"{name}: user_scenario is {scenario!r:.40}, not a table.")
        actions = criteria.get("actions") or []
        if not isinstance(actions, list) or not all(isinstance(one, dict) and _is_action(one) for one in actions):
            raise DataError(f"{name}: actions is no list of tables with a name and a requestor, assistant or user.")
        if unknown := sorted(set(map(str, criteria.get("reward_basis") or ())) - set(KNOWN)):
            raise DataError(f"{name}: the reward is based on {unknown[0]}; known are {', '.join(KNOWN)}.")
        if (task.get("initial_state") or {}).get("message_history"):
            raise DataError(f"{name} begins in the middle of a dialogue (message_history), which is not supported.")
        text = json.dumps([self._domain.name, task], sort_keys=True)
        key = f"dialogue {hashlib.sha256(text.encode()).hexdigest()}"
        return DialogueProblem(name, key, self._domain, task, self._max_turns, self._thinking)
