"""CPU per turn of the rollout process (gateway, store and orchestrator together), many rollouts of agents in flight.

`python benchmarks/orchestration.py [--rollouts 3000] [--in-flight 1000] [--turns 10] [--engine inside]`. It runs the
process that `glm5 rl` starts. A task service plays the rollouts, with agents that speak over sockets; a stub engine
answers every turn with 100 tokens within about two seconds, in as many pieces as it is asked for; a stub learner takes
all results and reports updates. Counted is the CPU time of all threads of the rollout process from the first allowance
to the last update. Agents and learner run in this process, the engine in one of its own, which speaks SGLang's
`/generate`; neither is counted. With `--engine inside` it is an object in the rollout process, and so counted; no HTTP
leads to it then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway import ANSWER, Free, ask

from glm5.chat import Tokenizer
from glm5.config.launch import Launch
from glm5.config.recipe import AgenticStage
from glm5.rl import rollout_process
from glm5.rl.rollout_process import RolloutJob
from glm5.rollout.simulated import SimulatedFleet

GROUP, PROMPTS = 8, 16
Answer = Callable[[str, str, Any, asyncio.StreamWriter], Awaitable[Any]]


async def serve(answer: Answer, port: int = 0) -> int:
    """Answer requests with the JSON that `answer(method, path, body, writer)` returns, unless it is None; the port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.decode().split(" ", 2)
                size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                body = json.loads(await reader.readexactly(size)) if size else None
                told = await answer(method, path, body, writer)
                if told is not None:
                    raw = json.dumps(told).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 24, backlog=1024)
    found: int = server.sockets[0].getsockname()[1]
    return found


async def engine(tokenizer: Tokenizer, seconds: float) -> None:
    """The engine process: tells its port, then answers for ever."""
    ids = Free(tokenizer, seconds).ids

    async def generate(writer: asyncio.StreamWriter, every: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        ends = [*range(1, ANSWER, every), ANSWER]  # the first token at once, as SGLang does
        for at, end in itertools.pairwise([0, *ends]):
            step, piece = end - at, ids[at:end]
            await asyncio.sleep(seconds * step / ANSWER * random.uniform(0.5, 1.5))
            meta: dict[str, Any] = {
                "id": "0", "finish_reason": {"type": "stop"} if end == ANSWER else None, "prompt_tokens": 1,
                "completion_tokens": end, "weight_version": "0", "output_weight_versions": [0] * step,
                "output_token_logprobs": [[-0.51234567, token, None] for token in piece],
            }  # fmt: skip
            raw = f"data: {json.dumps({'text': 'a' * step, 'output_ids': piece, 'meta_info': meta})}\n\n".encode()
            raw += b"data: [DONE]\n\n" if end == ANSWER else b""
            writer.write(b"%x\r\n%s\r\n" % (len(raw), raw) + (b"0\r\n\r\n" if end == ANSWER else b""))

    async def answer(method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> Any:
        if path == "/generate":
            return await generate(writer, body["sampling_params"].get("stream_interval", 1))
        if path == "/get_model_info":
            return {"max_model_len": 1 << 16}
        return {"success": True, "weight_version": "0"}

    print(await serve(answer), flush=True)
    await asyncio.Event().wait()


class FreeFleet(SimulatedFleet):
    """One engine within the process."""

    def __init__(self, tokenizer: Tokenizer, seconds: float) -> None:
        self._engine = Inside(tokenizer, seconds)
        self.sources = [self._engine]


class Inside(Free):
    weight_version, ready = 0, True

    async def version(self) -> int:
        return self.weight_version


class Service:
    """A task service and its agents. `seconds` are those of every turn."""

    def __init__(self, turns: int) -> None:
        self.turns, self.seconds, self.playing, self.most = turns, list[float](), set[asyncio.Task[None]](), 0
        self.connections = list[Any]()
        self.events, self.arrived = list[dict[str, Any]](), asyncio.Event()

    async def answer(self, method: str, path: str, body: Any, writer: asyncio.StreamWriter) -> Any:
        if path == "/run":
            task = asyncio.create_task(self.play(body))
            self.playing.add(task)
            self.most = max(self.most, len(self.playing))
            task.add_done_callback(self.playing.discard)
            return {"run_id": body["run_id"]}
        after = int(path.partition("after=")[2].partition("&")[0])
        while len(self.events) <= after:
            self.arrived.clear()
            await self.arrived.wait()
        return {"events": self.events[after : after + 16]}

    async def play(self, run: Mapping[str, Any]) -> None:
        port = int(run["base_url"].split("/")[2].partition(":")[2])
        path = "/" + run["base_url"].split("/", 3)[3] + "/chat/completions"
        connection = self.connections.pop() if self.connections else await asyncio.open_connection("127.0.0.1", port)
        messages = [{"role": "user", "content": f"task {run['task']}"}]
        for turn in range(self.turns):
            began = time.perf_counter()
            answer = await ask(connection, "POST", path, run["api_key"], {"model": "m", "messages": messages})
            self.seconds.append(time.perf_counter() - began)
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"result {turn} " * 10}]
        self.connections.append(connection)
        self.events.append({"id": len(self.events) + 1, "run_id": run["run_id"], "reward": 1.0, "outcome": "solved"})
        self.arrived.set()


async def learn(port: int, key: str, groups: int) -> int:
    """Take the results of all groups, an update per `PROMPTS` of them; the number of tokens sampled."""
    connection = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    await ask(connection, "POST", "/trainer/allow", key, {"groups": groups})
    at, version, tokens, members, ready = 0, 0, 0, Counter[int](), list[int]()
    sessions: defaultdict[int, list[str]] = defaultdict(list)
    while version * PROMPTS < groups:
        found = await ask(connection, "GET", f"/trainer/results?after={at}&seconds=10", key)
        for row in found["results"]:
            assert row["outcome"] == "solved" and row["id"] > at, row
            at = row["id"]
            tokens += sum(len(turn["output"]) for turn in row["turns"])
            members[row["group"]] += 1
            sessions[row["group"]].append(row["detail"]["session"])
            if members[row["group"]] == GROUP:
                ready.append(row["group"])
        while len(ready) >= PROMPTS:
            version, used = version + 1, ready[:PROMPTS]
            del ready[:PROMPTS]
            body = {"version": version, "sessions": [name for one in used for name in sessions.pop(one)]}
            await ask(connection, "POST", "/trainer/updated", key, {**body, "trained": used, "dropped": []})
    return tokens


def used(pid: int) -> tuple[float, float]:
    """CPU seconds of a process so far, and the most memory that it had, in MB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print("user,sys", fields[11], fields[12], file=sys.stderr)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), peak


@contextlib.contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    groups = options.rollouts // GROUP // PROMPTS * PROMPTS
    os.environ["GLM5_ADMIN_KEY"] = "admin"
    with contextlib.ExitStack() as stack:
        launch: dict[str, Any] = {"simulate_engine": options.seconds}
        if options.engine == "http":
            stub = stack.enter_context(started(__file__, "--part", "engine", "--seconds", str(options.seconds)))
            assert stub.stdout is not None
            launch = {"engine_urls": [f"http://127.0.0.1:{int(stub.stdout.readline())}"]}
        stage = AgenticStage.model_validate({
            "kind": "agentic", "name": "rl", "prompts": PROMPTS, "group": GROUP, "concurrency": options.in_flight,
            "max_turns": 1024, "max_context": 1 << 16, "max_tokens": 256, "max_staleness": 1024, "env_seconds": 600,
            "families": [{"name": "remote", "options": {"family": "talks"}}], "optim": {"steps": 1, "lr": 1e-4},
        })  # fmt: skip
        job = RolloutJob(
            stage.model_dump(mode="json"), Launch(**launch).model_dump(mode="json"), 0, str(folder), 0, 0,
            str(folder / "sessions.db"), 0, str(folder / "pass"), "",
        )  # fmt: skip
        process = stack.enter_context(started(__file__, "--part", "process", stdin=subprocess.PIPE))
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(job.to_json().encode() + b"\n")
        process.stdin.flush()
        port = json.loads(process.stdout.readline())["port"]
        service = Service(options.turns)
        url = f"http://127.0.0.1:{await serve(service.answer)}"
        admin = await asyncio.open_connection("127.0.0.1", port)
        body = {"name": "talks", "url": url, "families": ["talks"], "capacity": options.in_flight}
        lease = asyncio.create_task(registered(admin, body))
        await asyncio.sleep(1.0)
        before, began = used(process.pid)[0], time.perf_counter()
        tokens = await learn(port, "admin", groups)
        after, memory = used(process.pid)
        took = time.perf_counter() - began
        lease.cancel()
    turns = groups * GROUP * options.turns
    assert tokens == turns * ANSWER and len(service.seconds) == turns, f"{tokens} tokens of {turns} turns"
    return {
        "cpu_ms_per_turn": 1000 * (after - before) / turns, "memory_mb": memory, "turns_per_second": turns / took,
        "median_turn_seconds": statistics.median(service.seconds), "most_in_flight": service.most,
    }  # fmt: skip


async def registered(connection: Any, body: dict[str, Any]) -> None:
    while True:
        body |= {"registration": (await ask(connection, "POST", "/services", "admin", body))["registration"]}
        await asyncio.sleep(8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--engine", choices=("http", "inside"), default="http")
    parser.add_argument("--seconds", type=float, default=2.0, help="of an answer, on average")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part", choices=("engine", "process"), help="used by this script itself")
    options = parser.parse_args()
    tokenizer = Tokenizer.byte_level()
    if options.part == "engine":
        asyncio.run(engine(tokenizer, options.seconds))
        return
    if options.part == "process":
        fleet = rollout_process._fleet

        def chosen(stage: Any, launch: Launch, *rest: Any) -> Any:
            if (seconds := launch.simulate_engine) is not None:
                return FreeFleet(tokenizer, seconds)
            return fleet(stage, launch, *rest)

        rollout_process._fleet = chosen
        rollout_process.main()
        return
    found = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as name:
            tokenizer.save(Path(name))
            found.append(asyncio.run(measure(Path(name), options)))
        print(json.dumps({key: round(value, 3) for key, value in found[-1].items()}), flush=True)
    print(json.dumps({key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}))


if __name__ == "__main__":
    main()
