"""llama.cpp as a contestant: token ids in and out of a GGUF file that `glm5 export` wrote.

Needs `pip install gguf llama-cpp-python`. No text and no sampler: greedy tokens are chosen here from its logits.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TYPES = ("f32", "bf16", "q8_0")
Array = NDArray[np.float32]


class Session:
    """One llama.cpp context for `sequences` sequences of `length` tokens; with `exact`, attention is fp32."""

    def __init__(self, path: Path, sequences: int, length: int, *, exact: bool = False) -> None:
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
        if exact:
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16
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

    def logits(self, index: int) -> Array:
        """Of a batch entry, [V]; valid until the next `forward`."""
        pointer = self.api.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(pointer, shape=(self.size,))

    def best(self, index: int) -> int:
        """The likeliest token of a batch entry."""
        return int(self.logits(index).argmax())

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, special tokens included."""
        raw = text.encode()
        ids = (self.api.llama_token * (len(raw) + 8))()
        vocabulary = self.api.llama_model_get_vocab(self.model)
        return ids[: self.api.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), False, True)]

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
