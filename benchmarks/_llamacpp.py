"""llama.cpp as a contestant: a checkpoint as a GGUF file of its `glm-dsa` architecture, and token ids in and out.

Needs `pip install gguf llama-cpp-python`. No text and no sampler: greedy tokens are chosen here from its logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPES = ("f32", "bf16", "q8_0")
Array = NDArray[np.float32]


class Tensors:
    """The tensors of a checkpoint directory, widened to fp32."""

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._file_of: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            opened = safe_open(path, framework="pt")
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def __call__(self, name: str) -> Array:
        found: Array = self._file_of[name].get_tensor(name).float().numpy()
        return found


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Convert a checkpoint. The vocabulary is a dummy of the right size; the MTP layer is left out."""
    import gguf

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), "glm-dsa")
    writer.add_file_type({"f32": 0, "bf16": 32, "q8_0": 7}[kind])
    _write_settings(writer, gguf, config)
    wanted = getattr(gguf.GGMLQuantizationType, kind.upper())

    def put(name: str, array: Array, keep: bool = False) -> None:
        array = np.ascontiguousarray(array, dtype=np.float32)
        short = kind == "q8_0" and array.shape[-1] % 32  # rows must fill whole blocks
        fits = gguf.GGMLQuantizationType.F16 if short else wanted
        chosen = gguf.GGMLQuantizationType.F32 if keep or array.ndim < 2 else fits
        writer.add_tensor(name, gguf.quants.quantize(array, chosen), raw_dtype=chosen)

    _write_tensors(put, Tensors(source), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, gguf: Any, config: dict[str, Any]) -> None:
    size, rank, rope = config["vocab_size"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    layers = config["num_hidden_layers"]
    writer.add_vocab_size(size)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)  # all heads share the latent
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_rope_dimension_count(rope)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    writer.add_array("glm-dsa.attention.indexer.types", [kind == "full" for kind in config["indexer_types"]])
    words = [chr(0x100 + i) if i < 256 else f"<dummy{i}>" for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges([f"{words[0]} {words[0]}"])  # never applied; the key must exist
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


ATTENTION = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
}
INDEXER = {"wq_b": "attn_q_b", "wk": "attn_k", "k_norm": "k_norm", "weights_proj": "proj"}


def _write_tensors(put: Callable[..., None], read: Tensors, config: dict[str, Any]) -> None:
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    put("token_embd.weight", read("model.embed_tokens.weight"))
    put("output_norm.weight", read("model.norm.weight"))
    put("output.weight", read("lm_head.weight"))
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, other in ATTENTION.items():
            put(f"{theirs}{other}.weight", read(f"{ours}{name}.weight"))
        up = read(f"{ours}self_attn.kv_b_proj.weight").reshape(heads, nope + value, -1)
        put(f"{theirs}attn_k_b.weight", up[:, :nope].transpose(0, 2, 1))
        put(f"{theirs}attn_v_b.weight", up[:, nope:])
        if config["indexer_types"][layer] == "full":
            for name, other in INDEXER.items():
                put(f"{theirs}indexer.{other}.weight", read(f"{ours}self_attn.indexer.{name}.weight"), other == "proj")
            put(f"{theirs}indexer.k_norm.bias", read(f"{ours}self_attn.indexer.k_norm.bias"))
        if layer < config["first_k_dense_replace"]:
            for part in ("gate", "up", "down"):
                put(f"{theirs}ffn_{part}.weight", read(f"{ours}mlp.{part}_proj.weight"))
            continue
        for part in ("gate", "up", "down"):
            names = [f"{ours}mlp.experts.{e}.{part}_proj.weight" for e in range(config["n_routed_experts"])]
            put(f"{theirs}ffn_{part}_exps.weight", np.stack([read(name) for name in names]))
            put(f"{theirs}ffn_{part}_shexp.weight", read(f"{ours}mlp.shared_experts.{part}_proj.weight"))
        put(f"{theirs}ffn_gate_inp.weight", read(f"{ours}mlp.gate.weight"), True)
        put(f"{theirs}exp_probs_b.bias", read(f"{ours}mlp.gate.e_score_correction_bias"))


class Session:
    """One llama.cpp context for `sequences` sequences of `length` tokens."""

    def __init__(self, path: Path, sequences: int, length: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, user: None)  # must outlive the library's use of it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            raise SystemExit(f"llama.cpp refused {path}.")
        self.size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = -(-length // 256) * 256 * sequences
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit("llama.cpp could not make a context.")
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def forward(
        self, ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: list[int]
    ) -> None:
        """Submit one batch; one entry per token."""
        batch = self.batch
        for i, (token, position, sequence) in enumerate(zip(ids, positions, sequences)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = i in wanted
        batch.n_tokens = len(ids)
        if self.api.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed.")

    def best(self, index: int) -> int:
        """The likeliest token of a batch entry."""
        pointer = self.api.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(pointer, shape=(self.size,)).argmax())

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """Greedy continuations of all prompts at once, as `generate` would make them."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        began = time.perf_counter()
        last = []
        for row, ids in enumerate(prompts):
            for start in range(0, len(ids), 512):
                part = ids[start : start + 512]
                self.forward(part, range(start, start + len(part)), [row] * len(part), [len(part) - 1])
            last.append(self.best(len(part) - 1))
        first = time.perf_counter()
        many, length = len(prompts), len(prompts[0])
        for step in range(tokens - 1):
            self.forward(last, [length + step] * many, range(many), list(range(many)))
            last = [self.best(i) for i in range(many)]
        ended = time.perf_counter()
        decode = (ended - first) / (many * (tokens - 1))
        return {"seconds": ended - began, "first": first - began, "decode": decode}
