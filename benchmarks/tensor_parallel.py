"""Tensor parallelism beside one process on this machine's CPUs: bytes of weights and tokens per second; prints JSON.

`two` is two processes with half of the threads each, `one` is one process with all threads, on the same random
checkpoint; they take turns, so that a slow moment of the machine hits both. `bytes` are those of all weights on each
rank. `single` decodes one stream, `batch` sixteen, `prompt` reads prompts of 512 tokens; numbers are medians of tokens
per second and, in brackets, smallest and largest. `ratio` is `two` over `one`. With `--flash-comm`, `one` is two
processes too, which sum in one piece.

    python benchmarks/tensor_parallel.py [--preset small] [--ranks 2] [--repeats 5] [--dtype float32]
        [--flash-comm plain|int8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOKENS, PROMPT, BATCH = 32, 512, 16


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--flash-comm", choices=("plain", "int8"))
    parser.add_argument("--contestant", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(engine: Any, job: str, number: int) -> float:
    """Tokens per second of one job; its prompts are new each time."""
    from glm5.records import SamplingParams

    count, length, tokens = {"single": (1, 16, TOKENS), "batch": (BATCH, 16, TOKENS), "prompt": (2, PROMPT, 1)}[job]
    vocab = engine.model.config.vocab_size
    prompts = [[(number + 7 * i + 13 * row * i + row) % vocab for i in range(length)] for row in range(count)]
    began = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    return count * (length if job == "prompt" else tokens) / (time.perf_counter() - began)


def serve(args: argparse.Namespace) -> None:
    """One contestant: does the jobs that it reads, one per line, and prints their results."""
    import torch

    from glm5.engine.engine import Engine
    from glm5.engine.tensor_parallel import TpEngine
    from glm5.engine.tensor_parallel_group import tensor_bytes

    path = Path(args.folder)
    ranks, form = args.contestant, args.flash_comm
    engine = Engine.from_pretrained(path, dtype=args.dtype, device="cpu", tp=ranks, exact=False, flash_comm=form)
    sizes = [tensor_bytes(engine.model)]
    if isinstance(engine, TpEngine):
        sizes = engine.group.bytes
    print(json.dumps({"bytes": sizes, "threads": torch.get_num_threads()}), flush=True)
    for number, line in enumerate(sys.stdin):
        print(measure(engine, line.strip(), 31 * number), flush=True)
    engine.close()


def start(args: argparse.Namespace, ranks: int, threads: int, folder: str, *form: str) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    own = ["--contestant", str(ranks), "--folder", folder, "--dtype", args.dtype, *form]
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, __file__, *own], stdin=pipe, stdout=pipe, text=True, env=environment)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def main() -> None:
    args = options()
    if args.contestant:
        serve(args)
        return
    sys.path.insert(0, str(ROOT))
    from glm5.config.model import GLM5Config
    from glm5.model.glm5 import GLM5ForCausalLM

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        GLM5ForCausalLM(GLM5Config.preset(args.preset)).save_pretrained(folder)
        form = ("--flash-comm", args.flash_comm) if args.flash_comm else ()
        fewer = args.ranks if form else 1
        contestants = {
            "two": start(args, args.ranks, max(1, cores // args.ranks), folder, *form),
            "one": start(args, fewer, max(1, cores // fewer), folder),
        }
        found: dict[str, Any] = {name: told for name, (_, told) in contestants.items()}
        for job in ("single", "batch", "prompt"):
            speeds: dict[str, list[float]] = {name: [] for name in contestants}
            for repeat in range(args.repeats + 1):
                for name, (process, _) in contestants.items():
                    process.stdin.write(f"{job}\n")
                    process.stdin.flush()
                    speed = float(process.stdout.readline())
                    if repeat:  # the first is warm-up
                        speeds[name].append(speed)
            for name, all_of_them in speeds.items():
                found[name][job] = [round(f(all_of_them), 1) for f in (statistics.median, min, max)]
            ratios = [a / b for a, b in zip(speeds["two"], speeds["one"], strict=True)]
            found.setdefault("ratio", {})[job] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        for process, _ in contestants.values():
            process.stdin.close()
            process.wait()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
