"""Evaluation during a training stage: bits per byte of held-out text, and a sampled continuation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer
from glm5.data.shards import Shard
from glm5.engine.engine import Engine
from glm5.eval.text import bits_per_byte, xz_bits_per_byte
from glm5.files import atomic_write
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.records import SamplingParams

PROMPT_TOKENS = 32

_log = get_logger(__name__)


@dataclass
class Probe:
    """Scores held-out text in overlapping windows and continues the beginning of one held-out file.

    Called with the model and the step; returns metrics. Unless `folder` is None, it writes the continuation to
    `samples.jsonl` in `folder`, one line per step.
    """

    shard: Shard
    tokenizer: Tokenizer
    window: int
    max_bytes: int
    folder: Path | None
    reference: float | None = None

    def __call__(self, model: GLM5ForCausalLM, step: int) -> dict[str, float]:
        if self.reference is None:
            self.reference = xz_bits_per_byte(self.shard, self.tokenizer)
        end = self.tokenizer.special["<|endoftext|>"]
        score = bits_per_byte(
            model, self.shard, end, max_bytes=self.max_bytes, window=self.window, overlap=self.window // 2
        )
        if self.folder is not None:
            self._sample(model, step, self.folder / "samples.jsonl")
        return {
            "held_out_bits_per_byte": score.bits_per_byte,
            "reference_bits_per_byte": self.reference,
        }

    def _sample(self, model: GLM5ForCausalLM, step: int, path: Path) -> None:
        prompt = self.shard.document(0)[:PROMPT_TOKENS].astype(int).tolist()
        engine = Engine(model, self.tokenizer, exact=False)
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=64, temperature=0.8, seed=step))
        line = {"step": step, "prompt": self.tokenizer.decode(prompt), "text": self.tokenizer.decode(done.token_ids)}
        kept = [old for old in _samples(path) if old["step"] < step]  # a resumed stage repeats steps
        atomic_write(path, "".join(json.dumps(sample) + "\n" for sample in (*kept, line)))


def _samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a file; empty for a missing file. Skips malformed lines with a warning."""
    found = []
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines() if path.exists() else (), 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            _log.warning("%s:%d is not a sample and is left out.", path, number)
    return found
