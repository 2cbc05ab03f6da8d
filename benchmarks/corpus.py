"""`glm5 data run` beside datatrove's own pipeline with the same filters: CPU seconds, and how two processes scale.

    python benchmarks/corpus.py [--megabytes 40] [--rounds 3]

Both read the same JSONL (text of documentation and packages installed here), identify languages, apply the same rules
with the same words and remove near-duplicates by MinHash with the same numbers. Each measurement is a new process, in
turns. Ours also hashes and counts every document, keeps samples of what it drops and removes exact copies.
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

TASKS = 8
STAGES = ("read", "exact", "minhash", "pairs", "proposed", "verify", "clusters")
"""Ours that do what the other pipeline does; the others write token shards."""


def write_records(folder: Path, size: int) -> int:
    """JSONL files with at least `size` bytes of text; returns the bytes."""
    from glm5.config.corpus import LimitConfig, SourceConfig
    from glm5.data.corpus.inputs import documents
    from glm5.data.corpus.plan import list_inputs
    from glm5.data.corpus.text import Text, extract_here

    folder.mkdir()
    files = [(folder / f"{part}.jsonl").open("w", encoding="utf-8") for part in range(TASKS)]
    total = number = 0
    for name in ("doc", "site-packages", "stdlib"):
        source, limits = SourceConfig(name=name, path=name), LimitConfig()
        for found in (
            found for one in list_inputs(source)[0] for found in documents(one, source, limits, extract_here)
        ):
            if total < size and isinstance(found, Text):
                files[number % TASKS].write(json.dumps({"text": found.text, "id": str(number)}) + "\n")
                number, total = number + 1, total + len(found.text.encode())
    for file in files:
        file.close()
    return total


def recipe(records: Path) -> Any:
    from glm5.config.corpus import CorpusRecipe, SourceConfig

    return CorpusRecipe(
        name="throughput", tasks=TASKS, sources=[SourceConfig(name="records", path=str(records), kind="web")]
    )


def ours(records: Path, out: Path) -> int:
    """Run the stages in this process; returns the documents kept."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.utils.logging import logger

    from glm5.data.corpus.plan import make_plan
    from glm5.data.corpus.stages import stages

    logger.remove()
    made = recipe(records)
    make_plan(made, out)
    kept = 0
    for stage in stages(made, out):
        if stage.name in STAGES:
            LocalPipelineExecutor(stage.steps, stage.tasks, 1, str(out / "log" / stage.name)).run()
        if stage.name == "tokens":  # its first steps read what deduplication leaves
            kept = sum(1 for part in range(TASKS) for _ in _through(stage.steps[:-1], part))
    return kept


def theirs(records: Path, out: Path) -> int:
    """datatrove's own reader, filters, writer and deduplication."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.filters.lambda_filter import LambdaFilter
    from datatrove.pipeline.readers.jsonl import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger
    from datatrove.utils.text import TextNormConfig

    from glm5.config.corpus import DedupConfig, FilterConfig
    from glm5.data.corpus.filters import WORDS, rule_set
    from glm5.data.corpus.language import Identify

    logger.remove()
    filters, numbers, identify = FilterConfig(), DedupConfig(), Identify()
    near = MinhashConfig(
        n_grams=numbers.shingle_words,
        num_buckets=numbers.buckets,
        hashes_per_bucket=numbers.hashes,
        norm_config=TextNormConfig(norm_numbers=False),
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )

    def english(document: Any) -> bool:
        language, score = identify(document.text)
        return language == "en" and score >= filters.language_score

    rules = [rule_set(name, filters.options.get(name, {})) for name in filters.rules["web"]]
    read = str(out / "documents")
    signatures, pairs, clusters = (str(out / name) for name in ("signatures", "pairs", "clusters"))
    pipelines: list[tuple[list[Any], int]] = [
        ([JsonlReader(str(records)), LambdaFilter(english), *rules, JsonlWriter(read)], TASKS),
        ([JsonlReader(read), MinhashDedupSignature(signatures, near, language=WORDS)], TASKS),
        ([MinhashDedupBuckets(signatures, pairs, config=near)], numbers.buckets),
        ([MinhashDedupCluster(pairs, clusters, near)], 1),
    ]
    for number, (steps, tasks) in enumerate(pipelines):
        LocalPipelineExecutor(steps, tasks, 1, logging_dir=str(out / "log" / str(number))).run()
    return sum(1 for part in range(TASKS) for _ in _through([JsonlReader(read), MinhashDedupFilter(clusters)], part))


def _through(steps: list[Any], part: int) -> Any:
    data: Any = None
    for step in steps:
        data = step.run(data, part, TASKS)
    return data


def in_process(kind: str, records: Path, out: Path) -> None:
    """In a process of its own: run one, and print its CPU seconds and documents."""
    began = time.process_time()
    kept = (ours if kind == "ours" else theirs)(records, out)
    print(json.dumps({"seconds": time.process_time() - began, "kept": kept}))


def measure(kind: str, records: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--kind", kind, "--records", str(records), "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def by_the_clock(records: Path, out: Path, workers: int) -> float:
    """Seconds of a whole `glm5 data run`, with token shards."""
    path = out.with_suffix(".toml")
    source = f'[[sources]]\nname = "records"\npath = "{records}"\nkind = "web"\n'
    path.write_text(f'name = "throughput"\ntasks = {TASKS}\n{source}', encoding="utf-8")
    command = [sys.executable, "-m", "glm5", "data", "run", str(path), "--out", str(out), "--workers", str(workers)]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        return in_process(options.kind, options.records, options.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_records(folder / "records", int(options.megabytes * 1e6))
        ratios, clocks = [], []
        for number in range(options.rounds):
            order = ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours")
            found = {kind: measure(kind, folder / "records", folder / f"{kind}-{number}") for kind in order}
            ratios.append(found["theirs"]["seconds"] / found["ours"]["seconds"])
            told = ", ".join(f"{kind} {one['seconds']:.1f} s, {one['kept']:.0f} kept" for kind, one in found.items())
            print(f"{told}: {ratios[-1]:.2f} of datatrove's throughput per core", flush=True)
        for number in range(options.rounds):
            one, two = (by_the_clock(folder / "records", folder / f"clock-{number}-{n}", n) for n in (1, 2))
            clocks.append(one / two)
            print(f"one process {one:.1f} s, two {two:.1f} s: {clocks[-1]:.2f}", flush=True)
        for what, values in (("datatrove's throughput per core", ratios), ("speed-up by two processes", clocks)):
            print(f"{what}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"{size / 1e6:.0f} MB, {options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
