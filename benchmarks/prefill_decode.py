"""Long prompts that arrive beside short answers: one engine that prefills and one that decodes, against two plain ones.

Both servers are `glm5 serve` on one model, with two engine processes behind the router. They take turns, so that a slow
moment of the machine hits both. Short requests come from clients that ask again at once, long prompts at random times,
the same ones for both. Prints JSON: quantiles of the time to the first token and of the time per token over all
requests of all rounds, and the lowest and highest p99 of a round.

    python benchmarks/prefill_decode.py [--model DIR] [--rounds N] [--seconds S] [--long N] [--every S]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

KINDS = {"2 plain": ["--dp", "2"], "1 prefill + 1 decode": ["--prefill-engines", "1", "--decode-engines", "1"]}
SHORT, ANSWER, CLIENTS = 32, 64, 4
LONG, FEW, EVERY = 3000, 8, 1.5
"""Tokens of short prompts and of their answers, and clients that send them; tokens of long prompts and of their
answers, and the mean of the seconds between two of them. Long prompts do not wait for each other, so a machine that is
too slow for them needs another `--long` or `--every`."""
Times = dict[str, list[float]]


def random_model(folder: Path) -> Path:
    """A random `tiny` checkpoint: times do not depend on what a model has learned."""
    subprocess.run([sys.executable, "-m", "glm5", "init", "tiny", "--out", str(folder)], check=True, stdout=2)
    return folder


class Server:
    """`glm5 serve` with some options."""

    def __init__(self, model: Path, options: list[str]) -> None:
        command = [sys.executable, "-m", "glm5", "serve", str(model), "--port", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


async def ask(client: httpx.AsyncClient, ids: list[int], tokens: int, session: str) -> tuple[float, list[float]]:
    """Seconds to the first token of an answer, and between tokens."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True, "incremental_streaming_output": True}
    began, times = time.perf_counter(), list[float]()
    async with client.stream("POST", "/generate", json=body, headers={"x-session-id": session}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found = len(json.loads(line[6:]).get("output_ids", ()))
                times += [time.perf_counter()] * found
    assert len(times) == tokens, f"an answer has {len(times)} tokens"
    return times[0] - began, [b - a for a, b in itertools.pairwise(times)]


async def mixed(url: str, seconds: float, seed: int, long: int, every: float) -> Times:
    """One round of the load, with prompts of `long` tokens every so many seconds."""
    found: Times = defaultdict(list)
    end = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def chat(number: int) -> None:
            chance, turn = random.Random(f"{seed} chat {number}"), 0
            while time.perf_counter() < end:
                ids = [chance.randrange(256) for _ in range(SHORT)]
                first, gaps = await ask(client, ids, ANSWER, f"{number} {turn}")
                found["short: first token"].append(first)
                found["short: per token"] += gaps
                turn += 1

        async def read(ids: list[int], session: str) -> None:
            found["long: first token"].append((await ask(client, ids, FEW, session))[0])

        chance, tasks = random.Random(f"{seed} long"), [asyncio.ensure_future(chat(n)) for n in range(CLIENTS)]
        while time.perf_counter() < end:
            await asyncio.sleep(chance.expovariate(1 / every))
            ids = [chance.randrange(256) for _ in range(long)]
            tasks.append(asyncio.ensure_future(read(ids, f"long {len(tasks)}")))
        await asyncio.gather(*tasks)
    return found


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint; default: a random tiny one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--long", type=int, default=LONG, help="tokens of long prompts")
    parser.add_argument("--every", type=float, default=EVERY, help="mean seconds between two of them")
    given = parser.parse_args()
    load = (given.long, given.every)
    rounds: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or random_model(Path(scratch) / "tiny")
        servers: dict[str, Server] = {}
        try:
            for kind, options in KINDS.items():
                servers[kind] = Server(model, options)
                asyncio.run(mixed(servers[kind].url, 3.0, -1, *load))  # not counted
            for number in range(given.rounds):
                for kind in list(KINDS)[:: 1 if number % 2 else -1]:
                    rounds[kind].append(asyncio.run(mixed(servers[kind].url, given.seconds, number, *load)))
        finally:
            for server in servers.values():
                server.close()
    shown: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg(), "rounds": given.rounds, "long": load}
    for kind, found in rounds.items():
        for what in sorted({name for one in found for name in one}):
            all_of = [value for one in found for value in one[what]]
            each = [quantile(one[what], 0.99) for one in found if one[what]]
            shown.setdefault(what, {})[kind] = {
                "n": len(all_of),
                "p50_ms": round(1e3 * statistics.median(all_of), 1),
                "p99_ms": round(1e3 * quantile(all_of, 0.99), 1),
                "p99_ms_of_rounds": [round(1e3 * min(each), 1), round(1e3 * max(each), 1)],
            }
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main()
