"""One function call and its answer: `weather in Rome on Mon` > get_weather(city=Rome, day=Mon) > `sunny` > `sunny`.

For SFT, RL and evaluation. The reward is 1 if the first message makes exactly the right call and the final answer is
the tool's result. A wrong or malformed call ends the episode with 0, like GLM-4.5's exact-match reward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5.records import Env, Message, Outcome, StepResult, ToolCall
from glm5.tasks.contract import Family, ToolSpec, draw, function_tool

CITIES = tuple(
    "Rome Oslo Lima Bonn Nice Bern Cork Kiev Riga Doha Pune Bari Graz Lyon Metz Linz Ulm Vigo Gent Kobe".split()
)
DAYS = tuple("Mon Tue Wed Thu Fri Sat Sun".split())
ITEMS = tuple("tea salt rice milk corn soap oats jam figs kale nuts plum leek beef lamb cake pie ham egg bun".split())


@dataclass(frozen=True)
class Service:
    """A tool: its question template, the values of its parameters by name, and its possible results."""

    tool: str
    question: str
    values: Mapping[str, tuple[str, ...]]
    results: tuple[str, ...]


SERVICES: Mapping[str, Service] = {
    "weather": Service(
        "get_weather", "weather in {} on {}", {"city": CITIES, "day": DAYS}, ("sunny", "rain", "snow", "fog", "windy")
    ),
    "time": Service(
        "get_time", "time in {} plus {} h", {"city": CITIES, "hours": tuple(map(str, range(2, 24)))},
        ("6:00", "9:30", "12:15", "18:45", "23:05"),
    ),
    "price": Service(
        "get_price", "price of {1} {0}", {"item": ITEMS, "count": tuple(map(str, range(2, 30)))},
        ("2", "3", "5", "8", "12", "20"),
    ),
    "stock": Service("get_stock", "stock of {} in {}", {"item": ITEMS, "city": CITIES}, ("0", "4", "7", "15", "31")),
}  # fmt: skip


@dataclass(frozen=True)
class ToolCallProblem:
    """A question, the right tool and a wrong one, and the tool's result."""

    id: str
    service: str
    arguments: tuple[str, ...]
    result: str
    tools: Sequence[ToolSpec]
    domain: str = "toolcall"
    thinking: bool = False

    @property
    def prompt(self) -> str:
        return SERVICES[self.service].question.format(*self.arguments)

    @property
    def key(self) -> str:
        return f"toolcall {self.prompt}"

    @property
    def call(self) -> ToolCall:
        service = SERVICES[self.service]
        return ToolCall(service.tool, dict(zip(service.values, self.arguments, strict=True)))

    def env(self) -> Env:
        return ToolCallEnv(self)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Question, call, result, answer. `rng_seed` is ignored: there is only one good conversation."""
        return [
            Message("user", self.prompt),
            Message("assistant", tool_calls=(self.call,)),
            Message("tool", self.result),
            Message("assistant", self.result),
        ]


class ToolCallEnv:
    """Two steps: the call, then the answer."""

    def __init__(self, problem: ToolCallProblem) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._source, self._called = problem, False

    def start(self) -> tuple[Sequence[Message], Sequence[ToolSpec], bool]:
        return (Message("user", self._source.prompt),), self._source.tools, self._source.thinking

    def step(self, message: Message | None) -> StepResult:
        if message is None:
            return StepResult(done=True, outcome=Outcome.MALFORMED)
        if not self._called:
            calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
            if calls != [(self._source.call.name, dict(self._source.call.arguments))]:
                return StepResult(done=True, outcome=Outcome.FAILED, detail={"calls": len(calls)})
            self._called = True
            return StepResult(messages=(Message("tool", self._source.result),))
        right = not message.tool_calls and message.content.strip(" \n.") == self._source.result
        return StepResult(done=True, reward=float(right), outcome=Outcome.SOLVED if right else Outcome.FAILED)


class ToolCallFamily(Family):
    """Draws a service, its arguments, a result and one distracting tool. There are 1,540 different questions."""

    name = "toolcall"
    domain = "toolcall"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def problem(self, split: str, index: int) -> ToolCallProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> ToolCallProblem:
        right, wrong = rng.sample(sorted(SERVICES), 2)
        offered = [SERVICES[right], SERVICES[wrong]]
        rng.shuffle(offered)
        tools = tuple(function_tool(service.tool, *service.values) for service in offered)
        service = SERVICES[right]
        arguments = tuple(rng.choice(values) for values in service.values.values())
        return ToolCallProblem(name, right, arguments, rng.choice(service.results), tools)
