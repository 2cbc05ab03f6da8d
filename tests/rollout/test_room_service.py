"""Agents of a family "agent" in rooms, with a gateway in this process that they reach by its Unix socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.errors import ConfigError, GradingError
from glm5.rollout.engine_events import EngineLost
from glm5.rollout.engines import EnginePool
from glm5.rollout.gateway import Gateway, NewSession
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.orchestrator import Rollout
from glm5.rollout.room_service import RoomService
from glm5.rollout.services import Job, Result
from glm5.rollout.session import SessionOptions
from glm5.rollout.store import Store
from glm5.serve.connection import Server, ServerConfig, bind_path
from glm5.serve.options import Limits
from glm5.serve.samples import Delta
from glm5.tasks.agents import AgentFamily
from tests.rollout.conftest import ADMIN, ScriptedEngine
from tests.rooms import needs_rooms

pytestmark = needs_rooms

AGENT = """
import json, os, sys, time, urllib.request

def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("content-type", "application/json")
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["reasoning_content"]

def solve(base_url, api_key, task):
    found = ask(str(task))
    time.sleep(task if isinstance(task, float) else 0)
    return found

if __name__ == "__main__":
    exec(open("act.py").read())
"""


@dataclass
class Opened:
    play: Callable[[int], Awaitable[Result]]
    gateway: Gateway
    service: RoomService
    engine: ScriptedEngine
    tasks: asyncio.Task[None]


Open = Callable[..., Any]


@pytest.fixture
def opened(tokenizer: Tokenizer, tmp_path: Path) -> Open:
    @asynccontextmanager
    async def make(*tasks: dict[str, Any], turns: int = 4, **options: Any) -> AsyncIterator[Opened]:
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join(json.dumps({"id": str(i)} | task) for i, task in enumerate(tasks)))
        options = options if "function" in options else {"command": ["python3", "agent.py"], **options}
        family = AgentFamily(tasks=str(path), **options)
        ordered = sorted((family.problem("rl", i) for i in range(len(tasks))), key=lambda task: task.id)
        engine = ScriptedEngine(tokenizer, lambda prompt: "42<|user|>")
        with Store(tmp_path / "s.db") as store, bind_path(tmp_path / "socket") as listener:
            listener.listen()
            gateway = Gateway(EnginePool([engine]), store, tokenizer, ADMIN, 1 << 12)
            config = ServerConfig(create_gateway(gateway), Limits(), 1.0)
            server = Server(config, lambda _: None)
            serving = asyncio.create_task(server.serve([listener]))
            limits = SessionOptions(turns=turns, answer_tokens=16)
            with RoomService(
                lambda _, place: (ordered[place], {}), family.program, gateway, limits, str(tmp_path / "socket")
            ) as service:

                async def play(place: int) -> Result:
                    name = f"g{place}.0.0"
                    await gateway.create(NewSession(id=name, turns=turns, answer_tokens=16))
                    return await service.run(Job(Rollout(place, 0, 0, 0, place), name))

                yield Opened(play, gateway, service, engine, serving)
            server.should_exit = True
            await serving

    return make


def run(test: Awaitable[None]) -> None:
    async def inner() -> None:
        await test

    asyncio.run(inner())


def acts(act: str, **task: Any) -> dict[str, Any]:
    return {"files": {"agent.py": AGENT, "act.py": act}, "grade": {"file": "out", "equals": "42"}, **task}


KEEP = "open('out', 'w').write(ask('6 * 7'))"


@pytest.mark.long
def test_how_rollouts_of_commands_end(opened: Open) -> None:
    cases: list[tuple[dict[str, Any], str, float, dict[str, Any]]] = [
        (acts(KEEP), "solved", 1.0, {"exit_code": 0}),
        (acts(KEEP + "\nsys.exit(3)", grade={"exit_code": 3}), "solved", 1.0, {"exit_code": 3}),
        (acts("ask('a'); open('out', 'w').write('41')"), "failed", 0.0, {}),
        (acts("ask('a'); 1 / 0"), "failed", 0.0, {"exit_code": 1}),
        (acts(KEEP + "\ntime.sleep(60)"), "truncated", 0.0, {"cut": "wall"}),
        (acts(KEEP + "\nprint('x' * (1 << 22))"), "truncated", 0.0, {"cut": "output"}),
        (acts("[ask(str(i)) for i in range(9)]"), "failed", 0.0, {"exit_code": 1}),
        (acts(KEEP, grade={"command": ["grep", "42", "work/out"]}), "solved", 1.0, {"grade": "exit code 0"}),
        (acts(KEEP, grade={"command": ["grep", "41", "work/out"]}), "failed", 0.0, {"grade": "exit code 1"}),
        (acts(KEEP, grade={"command": ["./no-such-program"]}), "env_error", 0.0, {"cause": "grading"}),
        (acts("open('out', 'w').write('42')"), "env_error", 0.0, {"cause": "empty"}),
    ]

    async def test() -> None:
        tasks = (case[0] for case in cases)
        limits = {"wall_s": 8.0, "memory_mb": 512}
        async with opened(
            *(task | {"id": f"{i:02}"} for i, task in enumerate(tasks)), limits=limits, capacity=3
        ) as one:
            found = await asyncio.gather(*map(one.play, range(len(cases))))
        for (_, outcome, reward, detail), result in zip(cases, found, strict=True):
            assert (result.outcome, result.reward) == (outcome, reward), result
            assert detail.items() <= result.detail.items(), result

    run(test())


def shown(folder: Path, name: str, text: str) -> str:
    """A folder with a module that rooms may read."""
    folder.mkdir()
    (folder / name).write_text(text)
    for path in (*folder.parents[:3], folder):
        path.chmod(path.stat().st_mode | 0o055)
    return str(folder)


@pytest.mark.parametrize(
    ("task", "options", "match"),
    [
        ({}, {"command": ["no-such-program"]}, r"lacks the program no-such-program; show its folder with `read_only`"),
        ({}, {"command": ["/opt/nowhere/python", "-m", "agent"]}, "lacks the program /opt/nowhere/python"),
        ({}, {"command": ["python3"], "env": {"PATH": "/nowhere"}}, "lacks the program python3"),
        ({}, {"command": ["@/agent"], "read_only": ["@"]}, "lacks /nowhere/python, the interpreter of the program"),
        ({"grade": {"command": ["no-such-grader"]}}, {}, "lacks the program no-such-grader"),
        ({}, {"read_only": ["/proc/self"]}, "cannot be shown"),
        ({}, {"function": "no_such_module:solve"}, "No module named 'no_such_module'"),
        ({}, {"function": "json:solve"}, "no attribute 'solve'"),
        (
            {},
            {"function": "json:dumps", "python": "/opt/nowhere/python"},
            "start of /opt/nowhere/python: .*No such file",
        ),
    ],
)
def test_mistakes_of_a_recipe_show_before_the_first_rollout(
    opened: Open, tmp_path: Path, task: dict[str, Any], options: dict[str, Any], match: str
) -> None:
    folder = shown(tmp_path / "theirs", "agent", "#!/nowhere/python\n")
    (tmp_path / "theirs/agent").chmod(0o755)
    options = {
        name: [one.replace("@", folder) for one in value] if isinstance(value, list) else value
        for name, value in options.items()
    }

    async def test() -> None:
        with pytest.raises((ConfigError, GradingError), match=match) as caught:
            async with opened({"grade": {"exit_code": 0}} | task, **options):
                pass
        assert "\n" not in str(caught.value)

    run(test())


@pytest.mark.long
def test_a_rollout_that_is_stopped_leaves_other_rooms_alone(opened: Open, tmp_path: Path) -> None:
    """A room outlives the thread that built it, which ends with the rollout that is stopped."""
    tasks = [{"id": f"{place}", "task": seconds} for place, seconds in enumerate((0.4, 1.0, 3.0, 60.0))]
    path = shown(tmp_path / "theirs", "their_agent.py", AGENT)

    async def test() -> None:
        options: dict[str, Any] = {"function": "their_agent:solve", "path": [path], "grade": {"result": "42"}}
        async with opened(*tasks, **options, capacity=2) as one:
            first = asyncio.create_task(one.play(0))
            await asyncio.sleep(0.2)
            await asyncio.gather(first, one.play(1))
            other = asyncio.create_task(one.play(2))
            await asyncio.sleep(0.3)
            stopped = asyncio.create_task(one.play(3))
            await asyncio.sleep(1.0)
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)
            found = await other
            assert found.reward == 1.0, found.detail

    run(test())


def test_a_function_in_workers(opened: Open, tmp_path: Path) -> None:
    folder = shown(tmp_path / "theirs", "their_agent.py", AGENT)

    async def test() -> None:
        tasks = [{"task": "a"}, {"task": "b", "grade": {"result": "41"}}]
        async with opened(
            *tasks, function="their_agent:solve", path=[folder], grade={"result": "42"}, capacity=1
        ) as one:
            found = [await one.play(place) for place in (0, 1)]
        assert [(result.outcome, result.reward) for result in found] == [("solved", 1.0), ("failed", 0.0)], found

    run(test())


def test_engines_that_fail_are_no_verdict(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.rollout.engines.PAUSE_SECONDS", 0.001)

    async def dead(*_: Any) -> AsyncGenerator[Delta, None]:
        raise EngineLost("it is gone.")
        yield

    async def test() -> None:
        async with opened(acts("try: ask('a')\nexcept Exception: sys.exit(1)"), acts(KEEP)) as one:
            stream, one.engine.stream = one.engine.stream, dead  # type: ignore[method-assign]
            bad = await one.play(0)
            one.engine.stream = stream  # type: ignore[method-assign]
            good = await one.play(1)
        assert (bad.outcome, bad.detail["cause"], good.reward) == ("env_error", "engine", 1.0)

    run(test())


GIVES_UP = """
ask("before")
try:
    urlopen = urllib.request.urlopen
    urllib.request.urlopen = lambda request, timeout: urlopen(request, timeout=1)
    ask("lost")
except OSError:
    urllib.request.urlopen = urlopen
    {}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("then", "end"),
    [
        ("sys.exit(1)", ("env_error", "engine")),
        ("open('out', 'w').write('42')", ("solved", None)),
        ("ask('lost'); sys.exit(1)", ("failed", None)),
        ("ask('other'); sys.exit(1)", ("env_error", "engine")),
        ("time.sleep(60)", ("env_error", "engine")),
    ],
)
def test_an_agent_that_gives_up_while_an_engine_is_lost(
    opened: Open, monkeypatch: pytest.MonkeyPatch, then: str, end: tuple[str, str | None]
) -> None:
    """Its own timeout ends its request: no error of ours ever reaches it."""
    monkeypatch.setattr("glm5.rollout.engines.PAUSE_SECONDS", 2.0)

    async def test() -> None:
        async with opened(acts(GIVES_UP.format(then)), limits={"wall_s": 8.0}) as one:
            stream, lost = one.engine.stream, []

            async def once(ids: Any, params: Any, session: str, every: int) -> AsyncGenerator[Delta, None]:
                if "lost" in one.engine.tokenizer.decode(list(ids)) and not lost:
                    lost.append(1)
                    raise EngineLost("it is gone.")
                async for delta in stream(ids, params, session):
                    yield delta

            one.engine.stream = once  # type: ignore[method-assign]
            found = await one.play(0)
        assert lost and (found.outcome, found.detail.get("cause")) == end, found

    run(test())


def test_closing_ends_the_rooms_at_work(opened: Open) -> None:
    async def test() -> None:
        async with opened(acts(KEEP + "\ntime.sleep(300)")) as one:
            task = asyncio.create_task(one.play(0))
            while not one.engine.log:
                await asyncio.sleep(0.05)
            began = time.monotonic()
            await asyncio.to_thread(one.service.close)
            assert (await task).outcome == "env_error" and time.monotonic() - began < 10

    run(test())


def test_a_rollout_that_is_stopped_ends_its_room_at_once(opened: Open) -> None:
    async def test() -> None:
        async with opened(acts(KEEP + "\ntime.sleep(300)"), acts(KEEP), capacity=1) as one:
            task = asyncio.create_task(one.play(0))
            while not one.engine.log:
                await asyncio.sleep(0.05)
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await one.play(1)).reward == 1.0  # its place is free
            assert time.monotonic() - began < 30

    run(test())
