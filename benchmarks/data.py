"""Reading training data at scale: opening a corpus, its rows, hashes, SFT rows, prefetching; prints JSON.

The corpus is synthetic: `--documents` of log-normal length (median 100 tokens). Every loader opens it in processes of
its own, of which `--repeats` are counted: seconds until its first row is there, and what is resident then beyond the
imports. `anonymous_mb` belongs to the process; `index_mb` adds mapped borders and byte counts, which ranks of a machine
share. Pages of the tokens that are read are left out: they are the system's cache of the file. `sft` compares the first
start of a stage with the second, `hashes` all files by one process with the largest part of 1 of 8, `prefetch` steps
of which the computing is a sleep as long as building the rows: 2 is the best that building ahead of time can reach.

    python benchmarks/data.py [--documents N] [--conversations N] [--repeats N]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.fim import FimDocuments, FimTokens
from glm5.data.loader import BestFitLoader, RowLoader, StreamLoader
from glm5.data.long_context import InterleaveLoader, NegativesLoader
from glm5.data.shards import Shard, open_shard, verify_shards
from glm5.files import write_manifest

SHAPE = dict(rows=16, row_length=4096, seed=0)
LOADERS: dict[str, Callable[[Shard], RowLoader]] = {
    "truncate": lambda shard: StreamLoader(shard, **SHAPE),
    "truncate, FIM": lambda shard: StreamLoader(fim(shard), **SHAPE),
    "best_fit": lambda shard: BestFitLoader(shard, **SHAPE),
    "interleave": lambda shard: InterleaveLoader(shard, **SHAPE),
    "negatives": lambda shard: NegativesLoader(shard, **SHAPE),
}


def fim(shard: Shard) -> FimDocuments:
    return FimDocuments(shard, FimTokens(1, 2, 3), rate=0.5, spm_share=0.5, seed=0)


def write_corpus(folder: Path, documents: int) -> None:
    """A shard folder whose tokens are noise."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", documents), ("held_out", documents // 50)):
        lengths = np.clip(generator.lognormal(np.log(100), 1.0, count), 2, 20_000).astype(np.int64)
        np.concatenate(([0], lengths.cumsum())).tofile(folder / f"{split}.borders")
        lengths.tofile(folder / f"{split}.bytes")
        generator.integers(0, 60_000, int(lengths.sum()), dtype=np.uint16).tofile(folder / f"{split}.tokens")
        (folder / f"{split}.paths").write_text("".join(f'"{i}"\n' for i in range(count)), encoding="ascii")
    (folder / "shards.json").write_text(json.dumps({"dtype": "uint16", "tokenizer": ""}), encoding="utf-8")
    write_manifest(folder)


def memory() -> dict[str, float]:
    """Resident megabytes of this process: its own, and with the mapped files of an index."""
    anonymous = index = 0
    counted = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = line.endswith((".borders", ".bytes"))
        elif line.startswith("Anonymous:"):
            anonymous += int(line.split()[1])
        elif counted and line.startswith("Rss:"):
            index += int(line.split()[1])
    return {"anonymous_mb": anonymous / 1024, "index_mb": (anonymous + index) / 1024}


def opened(folder: Path, name: str) -> dict[str, float]:
    """In a process of its own: open a corpus, make a loader and its first row."""
    before, began = memory(), time.perf_counter()
    shard = open_shard(folder, "train", verify=False)
    loader = LOADERS[name](shard)
    loader.build(range(1))
    seconds, after = time.perf_counter() - began, memory()
    began = time.perf_counter()
    loader.build(range(1, 33))
    rate = 32 * SHAPE["row_length"] / (time.perf_counter() - began)
    return {"seconds": seconds, "tokens_per_second": rate} | {key: after[key] - before[key] for key in after}


def conversations(path: Path, count: int) -> None:
    generator = np.random.default_rng(1)
    with path.open("w", encoding="utf-8") as file:
        for length in generator.integers(20, 1200, count):
            text = " ".join(f"word{n}" for n in generator.integers(0, 999, length // 8))
            turns = [{"role": "user", "content": text[: length // 3]}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")


def sft_start(folder: Path, name: str) -> dict[str, float]:
    """In a process of its own: the first batch of an SFT stage."""
    from glm5.chat.tokenizer import Tokenizer
    from glm5.config.optim import OptimConfig
    from glm5.config.recipe import SftStage
    from glm5.train import sft

    tokenizer, optim = Tokenizer.byte_level(), OptimConfig(steps=1, lr=1e-3)
    data = str(folder.parent / "talks.jsonl")
    stage = SftStage(kind="sft", name=name, optim=optim, data=data, rows=16, row_length=4096)
    before, began = memory(), time.perf_counter()
    batches, _ = sft.prepare(stage, tokenizer, folder.parent / "stage", 0)
    batches(0)
    seconds, after = time.perf_counter() - began, memory()
    return {"seconds": seconds, "anonymous_mb": after["anonymous_mb"] - before["anonymous_mb"]}


def prefetched(folder: Path, name: str) -> dict[str, float]:
    """In a process of its own: seconds per step that computes for as long as its rows take to build."""
    from glm5.config.optim import OptimConfig
    from glm5.config.recipe import PretrainStage
    from glm5.parallel.ranks import Ranks
    from glm5.train.prefetch import Prefetch
    from glm5.train.pretrain import StageRows

    stage = PretrainStage(kind="pretrain", name="p", optim=OptimConfig(steps=1, lr=1e-3), rows=64, row_length=4096)
    batches = StageRows(LOADERS["truncate"](open_shard(folder, "train", verify=False)), stage)
    steps = range(40)
    for step in steps:  # so that all three loops find the tokens in the system's cache
        batches(step)
    began = time.perf_counter()
    for step in steps:
        batches(step).counts()
    pause = (time.perf_counter() - began) / len(steps)
    began = time.perf_counter()
    for step in steps:
        batches(step).counts()
        time.sleep(pause)
    plain = time.perf_counter() - began
    began = time.perf_counter()
    with Prefetch(batches, steps, Ranks()) as ahead:
        for step in steps:
            ahead.take(step)
            time.sleep(pause)
    seconds = time.perf_counter() - began
    return {"at_the_step_seconds": plain / len(steps), "seconds": seconds / len(steps), "ratio": plain / seconds}


JOBS = {"sft": sft_start, "prefetch": prefetched}


def hashes(folder: Path, repeats: int) -> dict[str, Any]:
    from _timing import interleaved, ratio, spread

    parts = 8
    jobs: dict[str, Callable[[], Any]] = {"all": lambda: verify_shards(folder)}
    jobs |= {str(part): lambda part=part: verify_shards(folder, part=part, parts=parts) for part in range(parts)}
    seconds = interleaved(jobs, repeats)
    longest = [max(seconds[str(part)][i] for part in range(parts)) for i in range(repeats)]
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    return {
        "megabytes": size,
        "seconds": spread(seconds["all"]),
        "ratio_of_largest_part": ratio(seconds["all"], longest),
    }


def main() -> None:
    from _contest import Process
    from _timing import arguments, machine, ratio, spread

    options = arguments(__doc__ or "", documents=1_000_000, conversations=5_000)

    def once(job: str) -> dict[str, float]:
        process = Process(__file__, {"folder": str(folder), "job": job})
        found = process.run("job")
        process.close()
        return found

    def spreads(runs: list[dict[str, float]]) -> dict[str, Any]:
        return {k: spread([run[k] for run in runs]) for k in runs[0] if k not in ("bytes", "resident")}

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "corpus"
        write_corpus(folder, options.documents)
        conversations(folder.parent / "talks.jsonl", options.conversations)
        found: dict[str, Any] = {}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
        for _ in range(options.repeats):
            for name in LOADERS:
                runs[name].append(once(name))
        found |= {name: spreads(of) for name, of in runs.items()}
        first = [once("sft")]
        again = [once("sft") for _ in range(options.repeats)]
        faster = ratio([first[0]["seconds"]] * len(again), [run["seconds"] for run in again])
        found["sft"] = {"first": spreads(first), "again": spreads(again), "ratio": faster}
        found["prefetch"] = spreads([once("prefetch") for _ in range(options.repeats)])
        found["hashes"] = hashes(folder, options.repeats)
    shapes = {name: getattr(options, name) for name in ("documents", "conversations", "repeats")}
    print(json.dumps({**machine(), **shapes, **found}, indent=1))


def child(told: dict[str, str]) -> None:
    from _contest import answer

    folder, job = Path(told["folder"]), told["job"]
    answer({"job": lambda _: JOBS.get(job, opened)(folder, job)})


if __name__ == "__main__":
    child(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--child"] else main()
