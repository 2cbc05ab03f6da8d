"""The gateway's own cost: many rollouts at once on an engine that costs nothing, and turns stored per second.

`python benchmarks/gateway.py [--sessions 1000] [--turns 10]`. The agents run in this process and speak over sockets;
the gateway runs in its own. Every answer has 100 tokens. CPU per turn is that of all threads of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import resource
import socket
import statistics
import tempfile
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.records import Message, SamplingParams
from glm5.rollout.engines import EnginePool
from glm5.rollout.gateway import Gateway
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.history import Node
from glm5.rollout.store import Store
from glm5.rollout.store_reader import SessionRow
from glm5.serve.connection import Server, ServerConfig, fitted
from glm5.serve.options import Limits
from glm5.serve.samples import Delta

ADMIN, ANSWER = "admin", 100
Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Free:
    """An engine that answers after `seconds` with fixed ids, in four pieces or fewer."""

    name = "free"

    def __init__(self, tokenizer: Tokenizer, seconds: float) -> None:
        self.ids = tokenizer.encode("</think>" + "a" * (ANSWER - 2) + "<|user|>", allow_special=True)
        self.seconds, self.sampled = seconds, 0

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        size = max(25, every)
        for at in range(0, ANSWER, size):
            piece = self.ids[at : at + size]
            await asyncio.sleep(self.seconds * len(piece) / ANSWER * random.uniform(0.5, 1.5))
            reason = "stop" if at + size >= len(self.ids) else None
            self.sampled += reason is not None
            yield Delta(0, piece, [-0.5] * len(piece), [], reason, [1] * len(piece))

    async def version(self) -> int:
        return 1


def serve(path: Path, seconds: float, listener: socket.socket, told: Connection) -> None:
    """The gateway process. Tells its CPU time and memory at the end."""
    tokenizer = Tokenizer.byte_level()
    engine, limits = Free(tokenizer, seconds), fitted(Limits(requests=4096, samples=4096, header_seconds=60), files=2)
    with Store(path) as store:
        gateway = Gateway(EnginePool([engine], most=4096), store, tokenizer, ADMIN, 1 << 16, limits)
        server = Server(ServerConfig(create_gateway(gateway), limits, 1.0))
        began = cpu()

        async def until_told() -> None:
            running = asyncio.ensure_future(server.serve(sockets=[listener]))
            await asyncio.to_thread(told.recv)
            told.send((cpu() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, engine.sampled))
            server.should_exit = True
            await running

        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(until_told())


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def ask(connection: Connected, method: str, path: str, key: str, body: object = None) -> Any:
    """The answer to one request, of which the server tells the length."""
    reader, writer = connection
    raw = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    answer = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = int(answer.partition(b"content-length:")[2].split(b"\r\n")[0])
    told = await reader.readexactly(size)
    assert b" 200 " in answer[:20], told
    return json.loads(told)


async def rollouts(port: int, sessions: int, turns: int) -> list[float]:
    """Play all sessions at once; the seconds of each turn. Raises if a turn is lost or doubled."""
    seconds: list[float] = []

    async def one(i: int) -> None:
        # A connection of its own: httpx looks at all connections of a client in every request.
        connection = await asyncio.open_connection("127.0.0.1", port)
        made = await ask(connection, "POST", "/sessions", ADMIN, {"task_id": str(i)})
        messages = [{"role": "user", "content": f"task {i}"}]
        for turn in range(turns):
            began = time.perf_counter()
            body = {"model": "m", "messages": messages}
            answer = await ask(connection, "POST", "/v1/chat/completions", made["api_key"], body)
            seconds.append(time.perf_counter() - began)
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"result {turn} " * 10}]
        found = await ask(connection, "GET", f"/sessions/{made['id']}/samples", ADMIN)
        assert len(found["samples"]) == 1 and found["turns"] == turns and found["tokens_lost"] == 0, found["forks"]
        connection[1].close()

    await asyncio.gather(*(one(i) for i in range(sessions)))
    return seconds


async def stored(path: Path, count: int) -> float:
    """Turns per second that the store takes, with 1,000 writers."""
    with Store(path) as store:
        await store.add_session(SessionRow("s", "t", None, "train", {}, 0.0))
        message = Message("user", "x" * 200)

        async def some(start: int) -> None:
            for i in range(start, count, 1000):
                node = Node(None, array("i", range(50)), array("i", range(100)), array("f", [0.0] * 100),
                            array("i", [1] * 100), (message,), message, b"h")  # fmt: skip
                await store.add_turn("s", node, "stop", b"%d" % i, {})

        began = time.perf_counter()
        await asyncio.gather(*(some(i) for i in range(1000)))
        return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--stored", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            mine, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("fork")
            process = context.Process(target=serve, args=(Path(folder) / "s.db", 2.0, listener, theirs), daemon=True)
            process.start()
            began = time.perf_counter()
            seconds = asyncio.run(rollouts(listener.getsockname()[1], options.sessions, options.turns))
            took = time.perf_counter() - began
            mine.send(None)
            used, memory, sampled = mine.recv()
            process.join()
            turns = options.sessions * options.turns
            assert sampled == turns, f"{sampled} generations for {turns} turns"
            rate = asyncio.run(stored(Path(folder) / "t.db", options.stored))
            found.append({"cpu_ms_per_turn": 1000 * used / turns, "memory_mb": memory, "turns_per_second": turns / took,
                          "median_turn_seconds": statistics.median(seconds), "stored_per_second": rate})  # fmt: skip
            print(json.dumps({name: round(value, 3) for name, value in found[-1].items()}), flush=True)
    print(json.dumps({name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}))


if __name__ == "__main__":
    main()
