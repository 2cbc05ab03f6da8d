"""The engine beside transformers on one trained checkpoint: decoding, batches, shared prefixes, drafts; prints JSON.

Contestants are processes of their own. Transformers runs `generate` with every dtype x attention x experts setting;
its fastest, also with the allocator setting that `glm5` gives its own process, then takes turns with ours and, where
`gguf` and `llama-cpp-python` are installed, with llama.cpp's, so that a slow moment of the machine hits all alike. A
ratio is their time over ours, round by round. Prompts are held-out text.

    glm5 train recipes/tiny-serving.toml
    python benchmarks/serving.py [--model DIR] [--repeats N] [--own | --http | --precision]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _contest import TUNED, Process, answer
from _http import over_http
from _llamacpp import TYPES

PROMPT, TOKENS, BATCH = 512, 128, 16
SHARED, OWN = 2000, 32
CONTEXTS = (1024, 4096, 16384)
DRAFTS = 3
JOBS = ("single", "batch")
Job = Callable[[int], "float | dict[str, float]"]


def contestants() -> dict[str, dict[str, str]]:
    """Name -> what its process is told."""
    found = {"glm5 bf16": {"dtype": "bfloat16"}, "glm5 fp32": {"dtype": "float32"}}
    for dtype, attention, experts in itertools.product(
        ("bfloat16", "float32"), ("eager", "sdpa"), ("eager", "grouped_mm", "batched_mm")
    ):
        name = f"transformers {dtype} {attention} {experts}"
        found[name] = {"dtype": dtype, "attention": attention, "experts": experts}
    if importlib.util.find_spec("gguf") and importlib.util.find_spec("llama_cpp"):
        found |= {f"llama.cpp {kind}": {"gguf": kind} for kind in TYPES}
    return found


def text_prompts(directory: str, count: int, length: int) -> list[list[int]]:
    """Prompts of one length, from files that no model was trained on."""
    from glm5.chat.tokenizer import Tokenizer
    from glm5.data.sources import read_source

    tokenizer = Tokenizer.load(Path(directory))
    ids: list[int] = []
    for document in read_source("stdlib"):
        if document.held_out and len(ids) < count * length:
            ids += tokenizer.encode(document.text)
    return [ids[i * length : (i + 1) * length] for i in range(count)]


# ------------------------------------------------------------------------------------------------ inside a process


def glm5_jobs(told: dict[str, str]) -> dict[str, Job]:
    from glm5.process import tune

    tune()
    import torch

    from glm5.config.model import GLM5Config
    from glm5.engine.engine import Engine
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.quant.in_place import quantise_in_place
    from glm5.records import SamplingParams

    directory = told["model"]
    if "preset" in told:
        model = GLM5ForCausalLM(GLM5Config.preset(told["preset"], num_nextn_predict_layers=0)).cast(torch.bfloat16)
    else:
        model = GLM5ForCausalLM.from_pretrained(directory, dtype=getattr(torch, told["dtype"]))
    if "quantize" in told:
        quantise_in_place(model, told["quantize"])
    drafts = int(told.get("drafts", "0"))
    overlap = "overlap" in told
    engine = Engine(model, exact=False, speculative=drafts, max_batch=64, host_cache_bytes=1 << 28, overlap=overlap)
    prompts = text_prompts(directory, 64, PROMPT)

    def run(ids: list[list[int]], tokens: int = TOKENS, temperature: float = 0.0) -> dict[str, float]:
        """Time to the first token of all, seconds per step behind it, and where the engine's time went."""
        engine.flush_cache()
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=1)
        before = engine.stats()
        began = time.perf_counter()
        requests = [r for prompt in ids for r in engine.submit(prompt, params)]
        while not all(r.completion.token_ids for r in requests):
            engine.step()
        first, known = time.perf_counter(), sum(len(r.completion.token_ids) for r in requests)
        while not all(r.done for r in requests):
            engine.step()
        ended = time.perf_counter()
        after = engine.stats()
        spent = {key: after["seconds"][key] - before["seconds"][key] for key in after["seconds"]}
        rounds = after["rounds"] - before["rounds"]
        accepted = [b - a for a, b in zip(before["accepted"], after["accepted"], strict=True)]
        return {
            "seconds": ended - began,
            "first": first - began,
            "decode": (ended - first) / max(1, len(ids) * tokens - known),
            "scheduler": spent["scheduler"] / sum(spent.values()),
            "sampling": spent["sampling"] / sum(spent.values()),
            **{f"accepted {k + 1}": n / max(1, rounds) for k, n in enumerate(accepted)},
        }

    def prefix(_: int) -> dict[str, float]:
        """First token of a prompt, and of a second one with the same beginning."""
        known = [token for prompt in prompts for token in prompt]
        beginning, ends = known[:SHARED], (known[-OWN:], known[-2 * OWN : -OWN])
        engine.flush_cache()
        params = SamplingParams(max_tokens=1, temperature=0.0)
        seconds = []
        for end in ends:
            began = time.perf_counter()
            engine.generate([beginning + end], params)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds[0], "again": seconds[1]}

    return {
        "single": lambda _: run(prompts[:1]),
        "single-warm": lambda _: run(prompts[:1], temperature=1.0),
        "batch": lambda _: run(prompts[:BATCH]),
        "batch-warm": lambda _: run(prompts[:BATCH], temperature=1.0),
        "crowd": lambda _: run(prompts),
        "after": lambda length: run([[token for prompt in prompts for token in prompt][:length]], tokens=2 * TOKENS),
        "read": lambda _: {"seconds": 1.0, "bytes_per_second": read_rate()},
        "prefix": prefix,
        "attention": lambda length: attention(model, length),
    }


def read_rate(repeats: int = 7) -> float:
    """Bytes per second of summing an array that no cache holds, with this process's threads: the median."""
    import torch

    array = torch.ones(1 << 28)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        array.sum()
        seconds.append(time.perf_counter() - began)
    return array.nbytes / statistics.median(seconds)


def attention(model: Any, length: int) -> dict[str, float]:
    """Seconds per decoded token at a context length: gather and attention over the selected rows of all layers, and the
    whole forward pass with its indexer."""
    import torch

    from glm5.engine.kv_pool import PAGE, KVPool
    from glm5.engine.runner import SHIFT
    from glm5.model.context import paged_context
    from glm5.ops.attention import sparse_attention
    from glm5.ops.pages import Pages

    config = model.config
    pool = KVPool(config, length + 2 * PAGE, states=1, dtype=model.dtype)
    table = torch.tensor([pool.alloc(length // PAGE + 1)])
    ids = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))

    def context(start: int, end: int) -> Any:
        rows = torch.zeros(end - start, dtype=torch.long)
        return paged_context(
            pool.cache, Pages(table, rows, PAGE, SHIFT), torch.arange(start, end).view(1, -1), longest=end, exact=False
        )

    with torch.inference_mode():
        for start in range(0, length - 1, PAGE * 8):
            end = min(length - 1, start + PAGE * 8)
            model.model(ids[start:end].view(1, -1), context(start, end))
        whole = time.perf_counter()
        rounds = 50
        for _ in range(rounds):
            model.model(ids[length - 1 :].view(1, 1), context(length - 1, length))
        whole = (time.perf_counter() - whole) / rounds
        # Rows anywhere in the context, none near another: the worst that an indexer could choose for memory.
        latents = pool.cache.latents
        query = torch.rand(1, 1, config.num_attention_heads, config.cache_values_per_token, dtype=model.dtype)
        pages = context(length - 1, length).pages
        chosen = [
            torch.randperm(length, generator=torch.Generator().manual_seed(n))[: config.index_topk]
            .sort()
            .values.view(1, 1, -1)
            for n in range(rounds)
        ]
        began = time.perf_counter()
        for n in range(rounds):
            for layer in range(config.num_hidden_layers):
                sparse_attention(
                    query, latents[layer], chosen[n], value_dim=config.kv_lora_rank, scale=0.125, pages=pages
                )
        return {"seconds": (time.perf_counter() - began) / rounds, "forward": whole}


def transformers_jobs(told: dict[str, str]) -> dict[str, Job]:
    import torch
    from transformers import GlmMoeDsaForCausalLM

    directory = told["model"]
    model = GlmMoeDsaForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, told["dtype"]), attn_implementation=told["attention"]
    ).eval()
    model.generation_config.eos_token_id = None
    prompts = torch.tensor(text_prompts(directory, BATCH, PROMPT))

    @torch.inference_mode()
    def run(rows: torch.Tensor) -> dict[str, float]:
        def generate(tokens: int) -> float:
            began = time.perf_counter()
            model.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
            return time.perf_counter() - began

        # batched_mm copies an expert's matrices for every token, which only decoding can afford.
        model.set_experts_implementation("grouped_mm" if told["experts"] == "batched_mm" else told["experts"])
        first = generate(1)
        model.set_experts_implementation(told["experts"])
        whole = generate(TOKENS) if told["experts"] != "batched_mm" else _by_hand(rows, first)
        return {"seconds": whole, "first": first, "decode": (whole - first) / (len(rows) * (TOKENS - 1))}

    def _by_hand(rows: torch.Tensor, first: float) -> float:
        """Reading with one setting and decoding with another, which `generate` cannot."""
        model.set_experts_implementation("grouped_mm")
        out = model(rows, use_cache=True, logits_to_keep=1)
        model.set_experts_implementation("batched_mm")
        began = time.perf_counter()
        for _ in range(TOKENS - 1):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
        return first + time.perf_counter() - began

    return {"single": lambda _: run(prompts[:1]), "batch": lambda _: run(prompts)}


def llamacpp_jobs(told: dict[str, str]) -> dict[str, Job]:
    from _llamacpp import Session

    from glm5.quant.gguf_file import export_gguf

    prompts = text_prompts(told["model"], BATCH, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        export_gguf(Path(told["model"]), path, told["gguf"].upper())
        sessions = {many: Session(path, many, PROMPT + TOKENS) for many in (1, BATCH)}
    return {
        "single": lambda _: sessions[1].run(prompts[:1], TOKENS),
        "batch": lambda _: sessions[BATCH].run(prompts, TOKENS),
    }


# ------------------------------------------------------------------------------------------------ outside


def turns(final: dict[str, Process], job: str, repeats: int, length: int = 0) -> dict[str, list[dict[str, float]]]:
    """Answers by contestant, one unrecorded round first."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in final}
    for number in range(repeats + 1):
        for name, process in final.items():
            found = process.run(job, length)
            if number:
                runs[name].append(found)
    return runs


def column(runs: list[dict[str, float]], key: str) -> list[float]:
    return [run[key] for run in runs]


def race(told: dict[str, dict[str, str]], repeats: int) -> dict[str, Any]:
    """Every contestant once by itself, then ours and the fastest of the others in turn, for each job."""
    from _timing import ratio, spread

    heat: dict[str, dict[str, dict[str, float]]] = {}
    for name, what in told.items():
        process = Process(__file__, what)
        process.run("single")
        heat[name] = {job: process.run(job) for job in JOBS}
        process.close()

    def fastest(job: str, *words: str) -> str:
        return min((n for n in heat if all(w in n for w in words)), key=lambda n: heat[n][job]["seconds"])

    found: dict[str, Any] = {}
    for job in JOBS:
        mine = fastest(job, "glm5")
        best = fastest(job, "transformers")
        told[f"{best}, our allocator setting"] = told[best] | TUNED
        rivals = {"transformers": best, "transformers, our allocator setting": f"{best}, our allocator setting"}
        rivals |= {name: name for name in heat if name.startswith("llama.cpp")}
        final = {name: Process(__file__, told[name]) for name in (mine, *rivals.values())}
        runs = turns(final, job, repeats)
        for process in final.values():
            process.close()
        many = BATCH if job == "batch" else 1
        ours = runs[mine]
        found[job] = {
            "ours": mine,
            "decode_tokens_per_second": spread([1 / s for s in column(ours, "decode")]),
            "tokens_per_second": spread([many * TOKENS / s for s in column(ours, "seconds")]),
            "scheduler_share": spread(column(ours, "scheduler")),
            "over ours": {
                label: {
                    "setting": name,
                    "decode": ratio(column(runs[name], "decode"), column(ours, "decode")),
                    "whole": ratio(column(runs[name], "seconds"), column(ours, "seconds")),
                    "decode_tokens_per_second": spread([1 / s for s in column(runs[name], "decode")]),
                }
                for label, name in rivals.items()
            },
        }
    found["all settings once, seconds"] = {
        name: {job: round(heat[name][job]["seconds"], 3) for job in JOBS} for name in heat
    }
    return found


def own(told: dict[str, str], repeats: int) -> dict[str, Any]:
    """What concerns our engine alone: drafts, shared prefixes, long contexts, crowds."""
    from _timing import ratio, spread

    final = {"plain": Process(__file__, told), "drafts": Process(__file__, told | {"drafts": str(DRAFTS)})}
    found: dict[str, Any] = {"drafts": {}}
    for job in ("single", "single-warm", "batch", "batch-warm"):
        runs = turns(final, job, repeats)
        found["drafts"][job] = {
            "plain over drafts": ratio(column(runs["plain"], "decode"), column(runs["drafts"], "decode")),
            "accepted": [spread(column(runs["drafts"], f"accepted {k + 1}"))["median"] for k in range(DRAFTS)],
        }
    final.pop("drafts").close()
    final["overlap"] = Process(__file__, told | {"overlap": "1"})
    for job in ("batch", "crowd"):
        runs = turns(final, job, repeats)
        found[f"plain over overlap, {job}"] = ratio(column(runs["plain"], "decode"), column(runs["overlap"], "decode"))
    final.pop("overlap").close()
    again = turns(final, "prefix", repeats)["plain"]
    found["first token, shared prefix"] = {
        "ratio": ratio(column(again, "seconds"), column(again, "again")),
        "first": spread(column(again, "seconds")),
        "again": spread(column(again, "again")),
    }
    crowd = turns(final, "crowd", repeats)["plain"]
    found["64 at once"] = {key: spread(column(crowd, key)) for key in ("seconds", "scheduler", "sampling")}
    lengths = {length: turns(final, "attention", repeats, length)["plain"] for length in CONTEXTS}
    found["attention and gather over that at 1k"] = {
        length: ratio(column(runs, "seconds"), column(lengths[CONTEXTS[0]], "seconds"))
        for length, runs in lengths.items()
    }
    found["forward over that at 1k"] = {
        length: ratio(column(runs, "forward"), column(lengths[CONTEXTS[0]], "forward"))
        for length, runs in lengths.items()
    }
    final["plain"].close()
    return found


def precisions(told: dict[str, str], repeats: int) -> dict[str, Any]:
    """bf16 beside the same weights as integers: decoding after a short and a long prompt and of many sequences, and how
    much of the rate at which memory can be read a step of one sequence needs."""
    import torch
    from _timing import ratio, spread

    from glm5.config.decoding import step_bytes
    from glm5.config.model import GLM5Config
    from glm5.engine.kv_pool import token_bytes
    from glm5.launch.plan_serve import weight_bytes

    schemes = {"int8": "w8a8", "int4": "w4a8-channel" if "preset" in told else "w4a8"}  # groups of 128 need 128 columns
    plain = {"plain": told, **{name: told | {"quantize": scheme} for name, scheme in schemes.items()}}
    config = GLM5Config.preset(told["preset"]) if "preset" in told else GLM5Config.load(Path(told["model"]))
    weights, per_token = weight_bytes(config), token_bytes(config, torch.bfloat16)
    processes = {name: Process(__file__, what) for name, what in plain.items()}
    found: dict[str, Any] = {}
    jobs = (("after 128", "after", 128), ("after 2048", "after", 2048), (f"{BATCH} at once", "batch", 0))
    for label, job, length in jobs:
        runs = turns(processes, job, repeats, length)
        found[label] = {"tokens_per_second": {n: spread([1 / s for s in column(r, "decode")]) for n, r in runs.items()}}
        found[label] |= {
            f"plain over {name}": ratio(column(runs["plain"], "decode"), column(runs[name], "decode"))
            for name in schemes
        }
        if length:
            rates = column(turns({"plain": processes["plain"]}, "read", 1)["plain"], "bytes_per_second")
            least = step_bytes(config, weights, per_token, 1, length + TOKENS) / rates[0]
            found[label]["share_of_read_rate"] = spread([least / s for s in column(runs["plain"], "decode")])
            found[label]["read_gb_per_second"] = rates[0] / 1e9
    for process in processes.values():
        process.close()
    return found


def main() -> None:
    from _timing import machine, matmul_peak

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/tiny-serving/final")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--own", action="store_true", help="only what concerns our engine alone")
    parser.add_argument("--http", action="store_true", help="only the server beside the engine")
    parser.add_argument("--precision", action="store_true", help="only our integer weights beside bf16")
    parser.add_argument("--preset", help="for --precision: random weights of this size in place of the model's")
    options = parser.parse_args()
    if not (Path(options.model) / "config.json").exists():
        parser.exit(1, f"{options.model} holds no model; make it with `glm5 train recipes/tiny-serving.toml`.\n")
    told = {name: what | {"model": options.model} for name, what in contestants().items()}
    if options.precision:
        size = {"preset": options.preset} if options.preset else {}
        print(json.dumps({**machine(), **precisions(told["glm5 bf16"] | size, options.repeats)}, indent=1))
        return
    found = {} if options.own or options.http else race(told, options.repeats)
    if not options.http:
        found |= own(told["glm5 bf16"], options.repeats)
    prompts = text_prompts(options.model, BATCH, PROMPT)
    found["over HTTP"] = over_http(told["glm5 bf16"], prompts, TOKENS, options.repeats)
    shapes = {"prompt": PROMPT, "tokens": TOKENS, "batch": BATCH, "shared": SHARED, "repeats": options.repeats}
    peaks = {dtype: matmul_peak(dtype=dtype) for dtype in ("float32", "bfloat16")}
    print(json.dumps({**machine(), **shapes, "matmul_gflops": peaks, **found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        given = json.loads(sys.argv[2])
        kind = llamacpp_jobs if "gguf" in given else transformers_jobs if "attention" in given else glm5_jobs
        answer(kind(given))
    else:
        main()
