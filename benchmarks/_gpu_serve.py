"""`gpu.py serve`: first whether the engine in bf16 agrees with fp32, then prefill and decoding."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _gpu_clock import Clock, spread

from glm5.config.decoding import step_bytes
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.engine.kv_pool import PAGE, token_bytes
from glm5.engine.scoring import score_row
from glm5.launch.plan_serve import weight_bytes
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams

ROUNDED = 2**-5
"""Mean difference of log-probabilities, in nats, to the model in fp32 that the engine in bf16 may always have."""
BESIDE = 1.25
"""What it may have otherwise, over the difference of the model's own pass over whole rows in bf16."""
MOST = 2**-4
"""What it may never have."""
CHUNK = 8192
"""Tokens of a step on a GPU."""
CACHE_SHARE = 0.3
"""Share of a GPU's free memory that the cache may take: when it grows, the old and the new one are there."""


def prompts(config: GLM5Config, count: int, length: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(count * 100_003 + length)
    rows: list[list[int]] = torch.randint(0, config.vocab_size, (count, length), generator=source).tolist()
    return rows


def check(model: GLM5ForCausalLM, length: int) -> dict[str, Any]:
    """Greedy tokens of the engine, scored by an fp32 copy of the same weights, and by the model itself."""
    engine, rows = Engine(model, exact=False, max_batch=4), prompts(model.config, 4, length)
    done = engine.generate(rows, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
    wide = model.clone(dtype=torch.float32)
    away, own = [], []
    for row, out in zip(rows, done, strict=True):
        exact, whole = (score_row(m, [*row, *out.token_ids], 1.0)[len(row) - 1 :] for m in (wide, model))
        away += [abs(a - b) for a, b in zip(out.logprobs, exact, strict=True)]
        own += [abs(a - b) for a, b in zip(whole, exact, strict=True)]
    mean, passes = sum(away) / len(away), sum(own) / len(own)
    limit = min(max(ROUNDED, BESIDE * passes), MOST)
    row = {"right": mean <= limit, "mean_abs": mean, "max_abs": max(away), "whole_rows_mean_abs": passes}
    return row | {"limit": limit, "tokens": len(away)}


def prefill(engine: Engine, clock: Clock, length: int, rounds: int) -> list[float]:
    """Seconds from a prompt to its first token, without the prefix cache."""
    rows = prompts(engine.model.config, rounds + 1, length)

    def one(row: list[int]) -> float:
        engine.flush_cache()
        params = SamplingParams(max_tokens=1, temperature=0.0)
        return clock.once(lambda: engine.generate([row], params))

    return [one(row) for row in rows][1:]


def room(batch: int, context: int, rounds: int, chunk: int = CHUNK) -> int:
    """Tokens that a sequence may add: those of the measured steps, and of the steps in which others are prefilled."""
    return rounds + 8 + batch * context // chunk + batch


def decode(engine: Engine, clock: Clock, batch: int, context: int, rounds: int) -> list[float]:
    """Seconds per step of `batch` sequences of about `context` tokens. The cache is filled by prefilling."""
    engine.flush_cache()
    params = SamplingParams(max_tokens=room(batch, context, rounds, engine.chunk), temperature=0.0, ignore_eos=True)
    requests = [r for row in prompts(engine.model.config, batch, context) for r in engine.submit(row, params)]
    while any(not r.completion.token_ids for r in requests):
        engine.step()
    for _ in range(2):
        engine.step()
    seconds = [clock.once(engine.step) for _ in range(rounds)]
    if any(r.done for r in requests):
        raise RuntimeError("a sequence ended before the last round")
    engine.abort_all()
    return seconds


def ours(
    model: GLM5ForCausalLM,
    clock: Clock,
    lengths: list[int],
    batches: list[int],
    contexts: list[int],
    limits: dict[str, Any],
    rounds: int,
) -> dict[str, Any]:
    """Prefill by length, and decoding by batch and context, with the share of the memory bound."""
    chunk = 512 if clock.device.type == "cpu" else CHUNK
    more = room(max(batches), max(contexts), rounds, chunk) + 2 * PAGE  # tokens of a sequence besides its prompt
    config, longest = model.config, max([*lengths, *contexts]) + more
    tokens = max(max(lengths), max(batches) * max(contexts)) + max(batches) * more
    if clock.device.type == "cuda":
        free = torch.cuda.mem_get_info(clock.device)[0] * CACHE_SHARE
        tokens = min(tokens, int(free / token_bytes(config, model.dtype)))
    engine = Engine(model, exact=False, max_batch=max(batches), max_length=longest, cache_tokens=tokens, chunk=chunk)
    weights, per_token = weight_bytes(config), token_bytes(config, model.dtype)
    found: dict[str, Any] = {"prefill": [], "decode": []}
    for length in lengths:
        speeds = [length / s for s in prefill(engine, clock, length, rounds)]
        found["prefill"].append({"length": length, "tokens_per_second": spread(speeds)})
    for context in contexts:
        for batch in batches:
            row: dict[str, Any] = {"batch": batch, "context": context}
            if batch * (context + more) > tokens:
                found["decode"].append(row | {"error": "the cache would not hold these sequences"})
                continue
            seconds = decode(engine, clock, batch, context, rounds)
            least = step_bytes(config, weights, per_token, batch, context) / limits["bandwidth"]
            row |= {"tokens_per_second": spread([batch / s for s in seconds])}
            found["decode"].append(row | {"share_of_memory_bound": spread([least / s for s in seconds])})
    return found


def transformers_peer(
    config: GLM5Config, clock: Clock, lengths: list[int], batches: list[int], context: int, rounds: int
) -> dict[str, Any]:
    """Transformers' model of the same configuration with random weights in bf16: its own cache, no engine."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    values = {k: v for k, v in config.to_dict().items() if k not in ("num_nextn_predict_layers", "latent_norm_eps")}
    peer = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**values, attn_implementation="eager"))
    peer = peer.to(clock.device, torch.bfloat16).eval()

    def read(count: int, length: int) -> Any:
        ids = torch.tensor(prompts(config, count, length), device=clock.device)
        return peer(ids, use_cache=True, logits_to_keep=1)

    found: dict[str, Any] = {"prefill": [], "decode": []}
    with torch.inference_mode():
        for length in lengths:
            seconds = clock.rounds(lambda length=length: read(1, length), rounds, 1)  # type: ignore[misc]
            found["prefill"].append({"length": length, "tokens_per_second": spread([length / s for s in seconds])})
        for batch in batches:
            out = read(batch, context)

            def step() -> None:
                nonlocal out
                out = peer(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)

            speeds = [batch / s for s in clock.rounds(step, rounds)]
            found["decode"].append({"batch": batch, "context": context, "tokens_per_second": spread(speeds)})
    return found


def engine_peer(
    name: str, folder: Path, config: GLM5Config, lengths: list[int], batches: list[int], context: int, rounds: int
) -> dict[str, Any]:
    """vLLM or SGLang over our checkpoint. Decoding is the time of many tokens less that of one."""
    tokens = rounds + 1
    generate: Callable[[list[list[int]], int], Any]
    if name == "vllm":
        from vllm import LLM  # type: ignore[import-not-found]
        from vllm import SamplingParams as Params

        engine = LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False)

        def generate(rows: list[list[int]], count: int) -> Any:
            params = Params(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            return engine.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    else:
        import sglang  # type: ignore[import-not-found]

        engine = sglang.Engine(
            model_path=str(folder), skip_tokenizer_init=True, dtype="bfloat16", disable_radix_cache=True
        )

        def generate(rows: list[list[int]], count: int) -> Any:
            params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
            return engine.generate(input_ids=rows, sampling_params=params)

    def seconds(rows: list[list[int]], count: int) -> float:
        began = time.perf_counter()
        generate(rows, count)
        return time.perf_counter() - began

    found: dict[str, Any] = {"prefill": [], "decode": []}
    for length in lengths:
        rows = prompts(config, 1, length)
        speeds = [length / s for s in [seconds(rows, 1) for _ in range(rounds + 1)][1:]]
        found["prefill"].append({"length": length, "tokens_per_second": spread(speeds)})
    for batch in batches:
        rows = prompts(config, batch, context)
        pairs = [(seconds(rows, 1), seconds(rows, 1 + tokens)) for _ in range(4)][1:]
        speeds = [batch * tokens / max(1e-9, many - one) for one, many in pairs]
        found["decode"].append({"batch": batch, "context": context, "tokens_per_second": spread(speeds)})
    return found


def peers(config: GLM5Config, clock: Clock, shapes: tuple[list[int], list[int], int], rounds: int) -> dict[str, Any]:
    """Every engine that is installed. One that fails has an `error`, which never ends the others."""
    found: dict[str, Any] = {}
    for name in ("transformers", "vllm", "sglang"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            if name == "transformers":
                found[name] = transformers_peer(config, clock, *shapes, rounds)
                continue
            with tempfile.TemporaryDirectory() as folder:
                GLM5ForCausalLM(config).cast(torch.bfloat16).save_pretrained(folder)
                found[name] = engine_peer(name, Path(folder), config, *shapes, rounds)
        except Exception as error:  # whatever another project's engine raises
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        gc.collect()
    return found


def run(
    preset: str, clock: Clock, lengths: list[int], batches: list[int], contexts: list[int], rounds: int, quick: bool
) -> dict[str, Any]:
    """Sparse and dense attention of one preset, random weights in bf16, then other engines."""
    limits = clock.limits(quick)
    found: dict[str, Any] = {"preset": preset, "limits": limits, "checked": [], "times": {}}
    longest = max([*lengths, *contexts]) + room(max(batches), max(contexts), rounds) + 1024
    for name, sparse in (("sparse", True), ("dense", False)):
        changes: dict[str, Any] = {"use_dsa": sparse, "num_nextn_predict_layers": 0}
        config = GLM5Config.preset(preset, **changes)
        if longest > config.max_position_embeddings:
            config = config.replace(max_position_embeddings=longest)
        with torch.no_grad():
            model = GLM5ForCausalLM(config).cast(torch.bfloat16).to(clock.device)
            verdict = check(model, min(256, min(lengths)))
            found["checked"].append({"attention": name, **verdict})
            if verdict["right"]:
                found["times"][name] = ours(model, clock, lengths, batches, contexts, limits, rounds)
        del model
        gc.collect()
        if sparse:
            peer_config = config
    found["times"] |= peers(peer_config, clock, (lengths, batches, min(contexts)), rounds)
    if {"sparse", "dense"} <= found["times"].keys():
        found["dense_over_sparse"] = [
            {"batch": s["batch"], "context": s["context"], "ratio": _speed(s) / _speed(d)}
            for s, d in zip(*(found["times"][n]["decode"] for n in ("sparse", "dense")), strict=True)
            if "error" not in s and "error" not in d
        ]
    return found


def _speed(row: dict[str, Any]) -> float:
    return float(row["tokens_per_second"]["median"])
