"""The server as a streaming client sees it, beside the engine by itself in the same round; used by `serving.py`."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from _contest import Process, answer

END = b"data: [DONE]"


async def stream(host: str, port: int, body: dict[str, Any]) -> list[float]:
    """Send a completion request; the times at which its events arrived."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    times, rest = list[float](), b""
    while END not in rest:
        piece = await reader.read(1 << 16)
        if not piece:
            raise SystemExit("the server closed the connection")
        rest += piece
        whole, _, rest = rest.rpartition(b"\n\n") if END not in rest else (rest, b"", rest)
        times += [time.perf_counter()] * whole.count(b"data: {")
    writer.close()
    return times


async def many(address: str, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """One request per prompt, all at once. `decode` is seconds per token after the first of all, as for the engine."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /flush_cache HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
    if b" 200 " not in (said := await reader.read()).partition(b"\r\n")[0]:
        raise SystemExit(f"the cache was not cleared: {said!r:.200}")
    writer.close()
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    found = await asyncio.gather(*(stream(host, int(port), {**body, "prompt": prompt}) for prompt in prompts))
    ended, first = time.perf_counter(), max(times[0] for times in found)
    events = [len(times) - 1 for times in found]  # the last one has no token
    per_event = len(prompts) * tokens / sum(events)
    known = sum(time <= first for times in found for time in times) * per_event
    gaps = sorted(b - a for times in found for a, b in itertools.pairwise(times))
    return {
        "seconds": ended - began,
        "first": first - began,
        "decode": (max(times[-1] for times in found) - first) / (len(prompts) * tokens - known),
        "per_event": per_event,
        "p99_gap": gaps[int(0.99 * len(gaps))],
    }


def client_jobs(told: dict[str, Any]) -> dict[str, Callable[[int], dict[str, float]]]:
    """What a client process does; its job's number is the number of streams."""
    return {"stream": lambda count: asyncio.run(many(told["address"], told["prompts"][:count], told["tokens"]))}


def over_http(told: dict[str, str], prompts: list[list[int]], tokens: int, repeats: int) -> dict[str, Any]:
    """Rates of `glm5 serve` and their ratios to those of the engine alone, the two in turn; client, server and engine
    share the machine. Then the server once more beside a process that computes all the time."""
    from _timing import ratio, spread

    engine = Process(__file__.replace("_http", "serving"), told)
    command = [sys.executable, "-m", "glm5", "serve", told["model"], "--port", "0", "--dtype", told["dtype"]]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().removeprefix("Ready on ").strip()
    client = Process(__file__, {"address": address, "prompts": prompts, "tokens": tokens})  # type: ignore[dict-item]
    result: dict[str, Any] = {}
    try:
        for job, count in (("single", 1), ("batch", len(prompts))):
            rounds = [(engine.run(job), client.run("stream", count)) for _ in range(repeats + 1)][1:]
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                beside = [client.run("stream", count) for _ in range(repeats + 1)][1:]
            finally:
                busy.kill()
                busy.wait()
            ours, theirs = ([pair[i] for pair in rounds] for i in (1, 0))

            def column(runs: list[dict[str, float]], key: str) -> list[float]:
                return [run[key] for run in runs]

            result[f"{count} at once"] = {
                "decode_tokens_per_second": spread([1 / s for s in column(ours, "decode")]),
                "whole_tokens_per_second": spread([count * tokens / s for s in column(ours, "seconds")]),
                "decode over the engine's": ratio(column(theirs, "decode"), column(ours, "decode")),
                "whole over the engine's": ratio(column(theirs, "seconds"), column(ours, "seconds")),
                "first token over the engine's": ratio(column(ours, "first"), column(theirs, "first")),
                "tokens_per_event": spread(column(ours, "per_event")),
                "p99_gap": spread(column(ours, "p99_gap")),
                "decode beside a busy process over quiet": ratio(column(ours, "decode"), column(beside, "decode")),
            }
    finally:
        server.terminate()
        server.wait()
        client.close()
        engine.close()
    return result


if __name__ == "__main__":
    answer(client_jobs(json.loads(sys.argv[2])))
