"""Checkpoints as GGUF files of llama.cpp's architecture "glm-dsa", written tensor by tensor.

Names are llama.cpp's: experts of a layer are one tensor, `kv_b_proj` is split into `attn_k_b` (transposed per head) and
`attn_v_b`, the MTP layer is the last block. Types are those of llama.cpp's own quantisers, by the package `gguf`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import CheckpointError, ConfigError, MissingExtraError, nearest
from glm5.files import disk_errors
from glm5.model.disk_names import disk_name, disk_parts
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.hf_weights import verify_checkpoint
from glm5.model.weight_source import RowPart
from glm5.quant.gguf_vocab import add_vocabulary
from glm5.quant.schemes import KINDS

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2}
"""llama.cpp's numbers of the types that a whole file can have."""
LARGEST_F16 = 65504.0
HADAMARD = 64
"""llama.cpp rotates index keys in blocks of this size."""

LAYER = {
    "input_layernorm": ("attn_norm",),
    "post_attention_layernorm": ("ffn_norm",),
    "self_attn.q_a_proj": ("attn_q_a",),
    "self_attn.q_a_layernorm": ("attn_q_a_norm",),
    "self_attn.q_b_proj": ("attn_q_b",),
    "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
    "self_attn.kv_a_layernorm": ("attn_kv_a_norm",),
    "self_attn.kv_b_proj": ("attn_k_b", "attn_v_b"),
    "self_attn.o_proj": ("attn_output",),
    "self_attn.indexer.wq_b": ("indexer.attn_q_b",),
    "self_attn.indexer.wk": ("indexer.attn_k",),
    "self_attn.indexer.k_norm": ("indexer.k_norm",),
    "self_attn.indexer.weights_proj": ("indexer.proj",),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
    "mlp.down_proj": ("ffn_down",),
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
    "mlp.shared_experts.gate_up_proj": ("ffn_gate_shexp", "ffn_up_shexp"),
    "mlp.shared_experts.down_proj": ("ffn_down_shexp",),
    "mlp.gate": ("ffn_gate_inp",),
    "eh_proj": ("nextn.eh_proj",),
    "enorm": ("nextn.enorm",),
    "hnorm": ("nextn.hnorm",),
    "shared_head.norm": ("nextn.shared_head_norm",),
}
"""Tensors of a layer by their names in memory, without ".weight", and the tensors that each becomes."""
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"} | {
    "lm_head.weight": "output.weight"
}
EXACT = ("ffn_gate_inp", "indexer.proj")
"""Matrices that stay in fp32: a rounded router chooses other experts."""


@dataclass(frozen=True)
class Target:
    """A tensor of the file: rows, not blocks, in `shape`; `kind` is a name of `gguf.GGMLQuantizationType`."""

    name: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Source:
    """A tensor in memory, its shape, and the tensors of the file that it becomes. A stack is read matrix by matrix;
    `split` makes one part per target of a matrix, or of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    targets: tuple[Target, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]


def export_gguf(
    folder: Path, out: Path, kind: str, progress: Callable[[str, int, int], None] = lambda name, done, total: None
) -> dict[str, Any]:
    """Write the checkpoint `folder` as the GGUF file `out`, of type `kind` (a key of FILE_TYPES); returns sizes.

    Quantised checkpoints are read as plain ones. One tensor of the file is in memory, already in its type, beside one
    matrix in fp32. `out` appears when it is complete. Raises ConfigError for a model that "glm-dsa" does not describe,
    CheckpointError for weights that are damaged or do not fit the type, MissingExtraError without the package `gguf`.
    """
    if kind not in FILE_TYPES:
        raise ConfigError(
            f'there is no type "{kind}"{nearest(kind, FILE_TYPES)}; choose one of {", ".join(FILE_TYPES)}.'
        )
    gguf = _package()
    _check_out(out)
    verify_checkpoint(folder)
    model = GLM5ForCausalLM.from_pretrained(folder, device="meta")
    check(model.config, str(folder))
    sources = list(plan(model, kind))
    aside = out.with_name(f".{out.name}.writing")
    with disk_errors(out):
        writer = gguf.GGUFWriter(str(aside), "glm-dsa")
        try:
            _settings(writer, gguf, model.config, kind, folder)
            add_vocabulary(writer, gguf, folder, model.config)
            _write(writer, gguf, model, sources, progress)
            writer.close()
            os.replace(aside, out)
        finally:
            writer.close()
            aside.unlink(missing_ok=True)
    return {
        "out": str(out),
        "type": kind,
        "tensors": sum(len(source.targets) for source in sources),
        "bytes": out.stat().st_size,
        "vocabulary": (folder / "tokenizer.json").exists(),
    }


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "gguf") from None
    return gguf


def _check_out(out: Path) -> None:
    """Raises ConfigError for a path in no folder, and for one of something else: only a GGUF file is replaced."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder; make it first.")
    start = b""
    if out.is_file():
        with out.open("rb") as file:
            start = file.read(4)
    if out.exists() and start != b"GGUF":
        raise ConfigError(f"{out} exists and is not a GGUF file; give --out another name, such as model.gguf.")


def check(config: GLM5Config, where: str) -> None:
    """Raises ConfigError for a model that llama.cpp's "glm-dsa" does not compute."""
    reason = ""
    if not config.use_dsa:
        reason = "it has no sparse attention (DSA); `glm5 adapt` gives it indexers"
    elif config.rotated_residual:
        reason = "its final norms turn a rotated residual stream back; export the checkpoint before rotation"
    elif config.index_head_dim % HADAMARD:
        reason = f"its index_head_dim is {config.index_head_dim}, and llama.cpp needs a multiple of {HADAMARD}"
    elif not config.n_routed_experts or config.first_k_dense_replace == config.num_hidden_layers:
        reason = "no layer of its trunk has experts"
    if reason:
        raise ConfigError(f'{where} cannot be a GGUF file of the architecture "glm-dsa": {reason}.')


# --- what the file holds ----------------------------------------------------------------------------------------------


def plan(model: GLM5ForCausalLM, kind: str) -> Iterator[Source]:
    """Every tensor of a model, in the order of its layers."""
    config = model.config
    for name, tensor in model.state_dict(keep_vars=False).items():
        shape = tuple(tensor.shape)
        quantised = _is_quantised(disk_parts(name, config, tensor)[0])
        targets, split = [], _splitter(name, config)
        parts = split(torch.empty(shape[-2:] if len(shape) > 2 else shape, device="meta"))
        for target, part in zip(_names(name, config), parts, strict=True):
            whole = (*shape[:-2], *part.shape)
            targets.append(Target(target, whole, _kind(target, whole, kind, quantised)))
        yield Source(name, shape, tuple(targets), split)


def _names(name: str, config: GLM5Config) -> list[str]:
    """Names in the file of a tensor in memory."""
    if name in ENDS:
        return [ENDS[name]]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?", disk_name(name, config))
    assert match is not None, name
    layer, inner, end = match.groups()
    if inner == "mlp.gate.e_score_correction_bias":
        return [f"blk.{layer}.exp_probs_b.bias"]
    return [f"blk.{layer}.{target}{end or '.weight'}" for target in LAYER[inner]]


def _splitter(name: str, config: GLM5Config) -> Callable[[Tensor], tuple[Tensor, ...]]:
    if "gate_up_proj" in name:
        return lambda matrix: matrix.chunk(2)
    if "kv_b_proj" in name:

        def keys_and_values(matrix: Tensor) -> tuple[Tensor, ...]:
            heads = matrix.unflatten(0, (config.num_attention_heads, -1))
            nope = config.qk_nope_head_dim
            return heads[:, :nope].transpose(1, 2), heads[:, nope:]

        return keys_and_values
    return lambda matrix: (matrix,)


def _is_quantised(disk: str) -> bool:
    """Whether our schemes round this matrix too (see `schemes.KINDS`)."""
    return any(re.search(kind + "$", disk) for kind in KINDS.values())


def _kind(name: str, shape: tuple[int, ...], kind: str, quantised: bool) -> str:
    """The type of one tensor in a file of type `kind`: vectors and routers stay fp32, what our schemes never round gets
    8 bits instead of 4, and rows that do not fill blocks of 32 stay F16, as with llama.cpp's converter."""
    if len(shape) < 2 or any(f".{part}." in name for part in EXACT):
        return "F32"
    if kind.startswith("Q") and shape[-1] % 32:
        return "F16"
    return "Q8_0" if kind == "Q4_0" and not quantised else kind


# --- writing ----------------------------------------------------------------------------------------------------------


def _write(
    writer: Any, gguf: Any, model: GLM5ForCausalLM, sources: list[Source], progress: Callable[[str, int, int], None]
) -> None:
    """The header for all tensors, then their data, in the same order."""
    for target in (target for source in sources for target in source.targets):
        kind = gguf.GGMLQuantizationType[target.kind]
        writer.add_tensor_info(target.name, target.shape, np.dtype(np.float32), _bytes(gguf, target), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, source in enumerate(sources):
        progress(source.targets[0].name, number, len(sources))
        buffers = [np.empty(_bytes(gguf, target), dtype=np.uint8) for target in source.targets]
        filled = [0] * len(buffers)
        for matrix in _matrices(model, source):
            for place, (target, part) in enumerate(zip(source.targets, source.split(matrix), strict=True)):
                raw = _encoded(gguf, target, part)
                buffers[place][filled[place] : filled[place] + raw.size] = raw
                filled[place] += raw.size
        for buffer in buffers:
            writer.write_tensor_data(buffer)


def _bytes(gguf: Any, target: Target) -> int:
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[target.kind]]
    return int(np.prod(target.shape, dtype=np.int64)) // values * size


def _matrices(model: GLM5ForCausalLM, source: Source) -> Iterator[Tensor]:
    """The tensor in fp32, or the matrices of a stack one after the other. Raises CheckpointError for infinite numbers
    and NaN."""
    weights = model.weight_source
    assert weights is not None
    stacked = len(source.shape) > 2
    total = source.shape[0]
    buffer = torch.empty((1, *source.shape[1:]) if stacked else source.shape)
    for first in range(total if stacked else 1):
        weights.fill({source.name: RowPart(buffer, first, total)})
        if not bool(buffer.isfinite().all()):
            raise CheckpointError(f'tensor "{source.name}" holds numbers that are not finite; such a model is damaged.')
        yield buffer[0] if stacked else buffer


def _encoded(gguf: Any, target: Target, part: Tensor) -> Any:
    """The bytes of a matrix in the type of its tensor, uint8 [bytes]."""
    if target.kind == "F16" and float(part.abs().max()) > LARGEST_F16:
        raise CheckpointError(f'"{target.name}" has numbers above {LARGEST_F16:,.0f}, too large for F16; choose BF16.')
    values = np.ascontiguousarray(part.numpy())
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[target.kind])
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)


def _settings(writer: Any, gguf: Any, config: GLM5Config, kind: str, folder: Path) -> None:
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_name(folder.resolve().name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + config.num_nextn_predict_layers)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)  # all heads share the latent
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_theta))
    writer.add_rope_dimension_count(rope)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config.qk_nope_head_dim + rope)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_indexer_head_count(config.index_n_heads)
    writer.add_indexer_key_length(config.index_head_dim)
    # Indexers that no stage has trained select nothing yet: llama.cpp then gets all keys.
    writer.add_indexer_top_k(config.index_topk if config.selects_keys else config.max_position_embeddings)
    full = [config.computes_topk(layer) for layer in range(config.num_hidden_layers)]
    writer.add_array("glm-dsa.attention.indexer.types", full)
    if config.num_nextn_predict_layers:
        writer.add_nextn_predict_layers(config.num_nextn_predict_layers)
