"""`glm5 plan serve`: whether a model fits on the devices of an engine, how much cache is left, and how fast decoding
can be at most. Bytes of weights and cache are exact; times are bounds from data sheets, without drafts, for choices of
experts that are even and independent."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from glm5.config.arithmetic import size_report
from glm5.config.devices import device_named
from glm5.config.model import PRESETS, GLM5Config
from glm5.engine.kv_pool import token_bytes
from glm5.errors import ConfigError, UsageError
from glm5.launch.plan import RESERVED, Report
from glm5.model.disk_names import disk_tensors
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.quantisers import Quantiser
from glm5.parallel.tensor import check_divisible, cut_of
from glm5.quant.in_place import SHORT
from glm5.quant.schemes import scheme_named

ITEM = 2
"""Bytes of a weight and of a cached number in bf16."""
CONTEXTS = (4096, 32768, 131072)
KINDS = ("embedding", "mtp", "experts", "other")
"""Weights by when a decoding step reads them: hardly, not without drafts, those of chosen experts, all."""

COLUMNS = {"context": 9, "sequences": 11, "tokens/s of one": 17, "of all": 10, "ms a step": 11, "first token s": 15}


def config_of(model: str) -> GLM5Config:
    """The configuration of a preset or of a checkpoint's folder. Raises UsageError for what is neither."""
    if model in PRESETS:
        return GLM5Config.preset(model)
    if not Path(model).is_dir():
        raise UsageError(f"{model!r:.80} is neither a checkpoint's folder nor a preset ({', '.join(PRESETS)}).")
    return GLM5Config.load(model)


def weight_bytes(config: GLM5Config, tp: int = 1, quantize: str | None = None) -> dict[str, int]:
    """Bytes of the weights on rank 0, which has most, by kind (`KINDS`). Raises ConfigError for a model that `tp` does
    not divide or the scheme does not fit, and for both at once, which the engine does not do."""
    model = GLM5ForCausalLM.deferred(config)
    found = dict.fromkeys(KINDS, 0)
    if quantize is None:
        if tp > 1:
            check_divisible(config, tp)
        for name, tensor in model.state_dict().items():
            cut = cut_of(name, tensor.shape, 0, tp) if tp > 1 else None
            kept = sum(count for _, count in cut.ranges) / tensor.shape[cut.dim] if cut is not None else 1
            item = 4 if name.endswith("e_score_correction_bias") else ITEM
            found[_kind(name, config)] += round(tensor.numel() * kept) * item
        return found
    if tp > 1:
        raise ConfigError("quantize needs one process per engine; leave out --tp.")
    scheme = scheme_named(SHORT.get(quantize, quantize))
    scheme.check(model)
    for name, tensor in disk_tensors(model).items():
        form = scheme.form(name, config)
        item = 4 if name.endswith("e_score_correction_bias") else ITEM
        own = tensor.numel() * item if form is None else _quantised_bytes(tensor.shape, form.weight)
        found[_kind(name, config)] += own
    return found


def _quantised_bytes(shape: torch.Size, how: Quantiser) -> int:
    """With scales in fp32, as the kernels take them."""
    *rows, width = shape
    groups = -(-width // how.columns(width))
    return prod(shape) * how.bits // 8 + -(-prod(rows) // how.block) * groups * 4


def _kind(name: str, config: GLM5Config) -> str:
    if name.startswith(("mtp.", f"model.layers.{config.num_hidden_layers}.")):
        return "mtp"
    if "embed_tokens" in name:
        return "embedding"
    return "experts" if ".mlp.experts." in name else "other"


def plan_serve(
    model: str,
    device: str,
    gpus: int = 1,
    tp: int = 1,
    quantize: str | None = None,
    cache_dtype: str = "auto",
    contexts: Sequence[int] = CONTEXTS,
) -> Report:
    """`gpus` devices in engines of `tp` each. Raises UsageError for an unknown model or device and for numbers out of
    range, ConfigError for what the engine does not do."""
    if gpus < 1 or tp < 1 or gpus % tp:
        raise UsageError(f"--gpus {gpus} must be a multiple of --tp {tp}, and both at least 1.")
    if cache_dtype not in ("auto", "int8"):
        raise UsageError(f'--cache-dtype is "auto" or "int8", not {cache_dtype!r:.20}.')
    if not contexts or min(contexts) < 1:
        raise UsageError("--context is at least 1.")
    config, kind = config_of(model), device_named(device)
    weights = weight_bytes(config, tp, quantize)
    own = config
    if tp > 1:
        own = config.replace(num_attention_heads=config.num_attention_heads // tp)
        if config.attention_type == "gqa":
            own = own.replace(num_key_value_heads=config.num_key_value_heads // tp)
    per_token = token_bytes(own, torch.bfloat16, packed=cache_dtype == "int8")
    usable = kind.memory * (1 - RESERVED)
    free = usable - sum(weights.values())
    engines = gpus // tp
    tokens = max(0, int(free // per_token))
    rows = [
        _row(config, kind.bandwidth, kind.flops, weights, per_token, tokens, length, tp, engines) for length in contexts
    ]
    problems = []
    if free < 0:
        problems.append(
            f"does not fit: the weights of a rank are {sum(weights.values()) / 1e9:,.1f} GB, and {usable / 1e9:,.1f} "
            f"of {kind.memory / 1e9:,.0f} GB can be used. Take a larger --tp, --quantize, or a device with more memory."
        )
    for length in contexts if free >= 0 else ():
        if length > config.max_position_embeddings:
            problems.append(
                f"{length:,} tokens are more than the model's {config.max_position_embeddings:,} positions."
            )
        elif length > tokens:
            problems.append(f"the cache holds {tokens:,} tokens, less than one sequence of {length:,}.")
    return {
        "model": model,
        "device": device.lower(),
        "gpus": gpus,
        "tp": tp,
        "engines": engines,
        "quantize": quantize,
        "cache_dtype": cache_dtype,
        "reserved": RESERVED,
        "weight_bytes": weights,
        "cache_bytes_per_token": per_token,
        "cache_tokens": tokens,
        "contexts": rows,
        "problems": problems,
        "fits": not problems,
    }


def _row(
    config: GLM5Config,
    bandwidth: float,
    flops: float,
    weights: dict[str, int],
    per_token: int,
    tokens: int,
    context: int,
    tp: int,
    engines: int,
) -> dict[str, Any]:
    """Of sequences of `context` tokens: how many an engine holds, and what a step of one and of all takes at least."""
    sequences = tokens // context
    report = size_report(config, context)

    def seconds(batch: int) -> float:
        read = step_bytes(config, weights, per_token, batch, context)
        return max(read / bandwidth, batch * report["decode_flops_per_token"] / tp / flops)

    first = context * report["train_flops_per_token"] / 3 / tp / flops
    return {
        "context": context,
        "sequences": sequences,
        "tokens_per_second_of_one": 1 / seconds(1),
        "tokens_per_second": engines * sequences / seconds(sequences) if sequences else 0.0,
        "step_seconds": seconds(max(1, sequences)),
        "first_token_seconds": first,
    }


def step_bytes(config: GLM5Config, weights: dict[str, int], per_token: int, batch: int, context: int) -> float:
    """Bytes that a rank reads in a decoding step at least: weights but for the embedding, MTP and experts that no
    sequence chose (even, independent choices), and of the cache the index keys of the context in the layers with an
    indexer and the selected latents, or all latents."""
    left = (1 - config.num_experts_per_tok / max(1, config.n_routed_experts)) ** batch
    layers = config.num_hidden_layers
    keys, latents = _cached_values(config, layers)
    share = keys / max(1, keys + latents)
    both = sum(_cached_values(config, layers + config.num_nextn_predict_layers))
    each = per_token * (keys + latents) / max(1, both)
    read = min(context, config.index_topk or context) if config.selects_keys else context
    cache = each * (share * context * config.selects_keys + (1 - share) * read)
    return weights["other"] + weights["experts"] * (1 - left) + batch * cache


def _cached_values(config: GLM5Config, layers: int) -> tuple[int, int]:
    """Elements of index keys and of latents that the first layers cache per token."""
    indexing = sum(config.caches_index_keys(layer) for layer in range(layers))
    keeping = sum(not config.is_recurrent(layer) for layer in range(layers))
    return indexing * config.index_head_dim, keeping * config.cache_values_per_token


def table(found: Report) -> str:
    """The plan as text."""
    weights, memory = sum(found["weight_bytes"].values()), device_named(found["device"]).memory
    kept = f"{found['reserved']:.0%} of its {memory / 1e9:,.0f} GB are kept free"
    lines = [
        f"{found['engines']} engine{'s' if found['engines'] > 1 else ''} of {found['tp']} x {found['device']}; {kept}.",
        f"Weights of a rank {weights / 1e9:,.2f} GB; cache {found['cache_bytes_per_token']:,} bytes a token, room for "
        f"{found['cache_tokens']:,} tokens an engine.",
        "Without drafts at most, by what a step reads and computes; choices of experts even and independent:",
        "".join(f"{name:>{width}}" for name, width in COLUMNS.items()),
    ]
    for row in found["contexts"]:
        numbers = [row["context"], row["sequences"], row["tokens_per_second_of_one"], row["tokens_per_second"]]
        cells = [f"{number:,.0f}" for number in numbers]
        cells += [f"{1e3 * row['step_seconds']:,.2f}", f"{row['first_token_seconds']:,.2f}"]
        lines.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True)))
    return "\n".join([*lines, *found["problems"]])
