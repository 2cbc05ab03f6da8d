"""A server under all kinds of misuse at once: what it weighs and how soon a good request is answered; prints JSON.

A real `glm5 serve` is asked by clients that write their headers a byte at a time, leave streams and scores, send bodies
of megabytes, fresh schemas and fresh salts, and update the weights, two at a time. Beside them one client asks for four
tokens, again and again. Resident size is that of the process and all its children.

    python benchmarks/abuse.py [--minutes 60] [--model DIR] [-- options of glm5 serve]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

QUIET_SECONDS = 10.0
SAMPLE_SECONDS = 3.0
SETTLED_MINUTES = 10.0
"""After this time, or half of a shorter run, the resident size is the one that the last is compared with."""
FAILED = (500, 502)
PAGES = "glm5_cache_pages_free"
WEIGHTS = "/update_weights_from_disk"
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


class Abuse:
    """The clients, and what they saw. `answers` counts what came back by kind: a status, or the name of an error."""

    def __init__(self, client: httpx.AsyncClient, directory: str, seed: int) -> None:
        self.client = client
        self.directory = directory
        self.rng = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.waits: list[float] = []

    def words(self, count: int) -> str:
        return " ".join(f"w{self.rng.randrange(10_000)}" for _ in range(count))

    async def post(self, kind: str, path: str, body: Any, **options: Any) -> int:
        answer = await self.client.post(path, **({"json": body} if not isinstance(body, bytes) else {"content": body}))
        self.answers[f"{kind} {answer.status_code}"] += 1
        return answer.status_code

    async def slow_socket(self) -> None:
        """Headers, a byte at a time; then half a body."""
        reader, writer = await asyncio.open_connection(self.client.base_url.host, self.client.base_url.port)
        try:
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\nX-Pad: {'x' * 40}\r\n\r\n"
                + "{" * 40
            )
            for byte in head.encode():
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(self.rng.uniform(0.05, 0.6))
                if reader.at_eof():
                    break
            self.answers["slow socket done"] += 1
        finally:
            writer.close()

    async def left_stream(self) -> None:
        """Reads a few events of a long answer of many samples, and goes."""
        body = {"prompt": self.words(30), "max_tokens": 1500, "ignore_eos": True, "n": 8, "stream": True}
        async with self.client.stream("POST", TEXT, json=body) as response:
            self.answers[f"left stream {response.status_code}"] += 1
            async for number, _ in _numbered(response.aiter_lines()):
                if number > 5:
                    break

    async def left_score(self) -> None:
        """Asks for the log-probabilities of long prompts, and does not wait for them."""
        texts = [self.words(400) for _ in range(4)]
        body = {"text": texts, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
        await self.client.post(NATIVE, json=body, timeout=self.rng.uniform(0.01, 0.5))
        self.answers["score in time"] += 1

    async def salted(self) -> None:
        salt = f"{self.rng.getrandbits(64):x}"
        await self.post("salted", TEXT, {"prompt": self.words(60), "max_tokens": 2, "cache_salt": salt})

    async def schema(self) -> None:
        """A form that nobody has asked for before."""
        names = {f"k{self.rng.randrange(10**6)}": {"type": "string", "maxLength": 5} for _ in range(12)}
        form = {"type": "object", "properties": names, "required": sorted(names), "additionalProperties": False}
        kind = {"type": "json_schema", "json_schema": {"name": "n", "schema": form}}
        say = [{"role": "user", "content": self.words(3)}]
        await self.post("schema", CHAT, {"messages": say, "max_tokens": 8, "response_format": kind})

    async def update(self) -> None:
        """New weights, which are the old ones, twice at once; now and then from where there are none."""
        place = self.directory if self.rng.random() < 0.8 else "/nowhere"
        await asyncio.gather(*(self.post("update", WEIGHTS, {"model_path": place}) for _ in range(2)))
        await asyncio.sleep(2)

    async def huge(self) -> None:
        """A prompt of megabytes, a body above the limit, or a hundred thousand prompts."""
        pick = self.rng.randrange(3)
        one = json.dumps({"prompt": "x" * 7_000_000}).encode() if pick == 0 else b" " * (12 << 20)
        await self.post("huge", TEXT, {"prompt": ["x"] * 100_000, "max_tokens": 1} if pick == 2 else one)

    async def probe(self) -> None:
        """The good client: one question, again and again."""
        began = time.perf_counter()
        status = await self.post("probe", CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        self.waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.5 if status == 200 else 1.0)

    async def again(self, act: Callable[[], Awaitable[None]], end: float) -> None:
        """Do it until `end`; what goes wrong is counted, and nobody stops for it."""
        while time.monotonic() < end:
            try:
                await act()
            except (httpx.HTTPError, OSError) as error:
                self.answers[f"{act.__name__} {type(error).__name__}"] += 1
                await asyncio.sleep(0.05)


async def _numbered(lines: Any) -> Any:
    number = 0
    async for line in lines:
        number += 1
        yield number, line


def resident_mb(root: int) -> float:
    """Resident size of a process and its descendants."""
    parents, sizes = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            sizes[int(folder.name)] = int((folder / "statm").read_text().split()[1]) * 4096 / 2**20
    family = {root}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes.get(pid, 0.0) for pid in family)


async def sample(pid: int, end: float, seen: list[tuple[float, float]]) -> None:
    began = time.monotonic()
    while time.monotonic() < end:
        seen.append((time.monotonic() - began, resident_mb(pid)))
        await asyncio.sleep(SAMPLE_SECONDS)


def quantiles(waits: list[float]) -> dict[str, float]:
    """In milliseconds."""
    if not waits:
        return {"count": 0}
    cuts = statistics.quantiles(waits, n=100) if len(waits) > 1 else waits * 99
    named = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(waits)}
    return {"count": len(waits)} | {name: round(value * 1e3, 1) for name, value in named.items()}


async def run(url: str, pid: int, directory: str, minutes: float) -> dict[str, Any]:
    """Quiet, then abuse, then quiet again: how often, how long, how large."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits) as client:
        abuse = Abuse(client, directory, seed=1)
        await abuse.again(abuse.probe, time.monotonic() + 3)  # the first steps are slower
        abuse.waits.clear()
        await abuse.again(abuse.probe, time.monotonic() + QUIET_SECONDS)
        calm, abuse.waits = abuse.waits, []
        before, end, sizes = await numbers(client), time.monotonic() + minutes * 60, list[tuple[float, float]]()
        several = [(abuse.slow_socket, 20), (abuse.left_stream, 3), (abuse.left_score, 2), (abuse.salted, 3)]
        several += [(abuse.schema, 2), (abuse.update, 1), (abuse.huge, 1), (abuse.probe, 1)]
        acts = [asyncio.ensure_future(abuse.again(act, end)) for act, count in several for _ in range(count)]
        await sample(pid, end, sizes)
        print(f"abuse is over: {dict(abuse.answers)}", file=sys.stderr)
        for act in acts:
            act.cancel()  # whoever still waits is one more who left
        await asyncio.gather(*acts, return_exceptions=True)
        rough, abuse.waits = abuse.waits, []
        left = await settle(client)
        await abuse.again(abuse.probe, time.monotonic() + QUIET_SECONDS)
        after = await numbers(client)
    settled = min(SETTLED_MINUTES, minutes / 2) * 60
    minutely = [  # medians, for a body of megabytes or a step of scoring is there one moment and gone the next
        statistics.median(size for _, size in found)
        for _, found in itertools.groupby(sizes, key=lambda sample: int(sample[0] // 60))
    ]
    middle, last = minutely[min(int(settled // 60), len(minutely) - 1)], minutely[-1]
    probe = {"quiet": quantiles(calm), "abused": quantiles(rough), "afterwards": quantiles(abuse.waits)}
    return {
        "minutes": minutes,
        "resident_mb": {"start": round(sizes[0][1]), "settled": round(middle), "end": round(last),
                        "most": round(max(size for _, size in sizes)), "settled_minutes": settled / 60,
                        "by_minute": [round(size) for size in minutely]},
        "end_over_settled": round(last / middle, 3),
        "probe_ms": probe,
        "probe_p99_ratio": round(probe["abused"]["p99"] / probe["quiet"]["p99"], 1) if rough and calm else None,
        "samples_left": left,
        "pages_back": bool(after) and before.get(PAGES) == after.get(PAGES),
        "failures": sum(n for kind, n in abuse.answers.items() if kind.endswith(tuple(f" {s}" for s in FAILED))),
        "answers": dict(sorted(abuse.answers.items())),
    }  # fmt: skip


async def settle(client: httpx.AsyncClient, seconds: float = 120) -> int:
    """Samples that still run so long after everybody left."""
    deadline, left = time.monotonic() + seconds, -1
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        with contextlib.suppress(httpx.HTTPError):
            left = (await client.get("/get_server_info")).json()["samples"]
    return left


async def numbers(client: httpx.AsyncClient) -> dict[str, float]:
    """What /metrics says, after the cache was emptied; nothing where the server does not answer."""
    try:
        await client.post("/flush_cache")
        lines = (await client.get("/metrics")).text.splitlines()
    except httpx.HTTPError:
        return {}
    return {line.split()[0]: float(line.split()[1]) for line in lines if line and line[0] != "#"}


@contextlib.contextmanager
def server(directory: str, options: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`glm5 serve`, and its address."""
    command = [sys.executable, "-m", "glm5", "serve", directory, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("Ready on "):
                sys.exit(f"The server did not start: {line}")
            yield process, line.split()[-1]
        finally:
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--model", help="checkpoint directory; default: a random `nano`")
    parser.add_argument("serve", nargs="*", help="options of `glm5 serve`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model or f"{folder}/nano"
        if options.model is None:
            subprocess.run([sys.executable, "-m", "glm5", "init", "nano", "--out", directory], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
        with server(directory, options.serve) as (process, url):
            found = asyncio.run(run(url, process.pid, directory, options.minutes))
            found["alive"] = process.poll() is None
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
