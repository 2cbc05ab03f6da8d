"""`glm5 quantize`: calibration text, the conversion, and what it costs in bits per byte and saves in bytes."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.chat import Tokenizer
from glm5.data.sources import iter_sources
from glm5.errors import DataError
from glm5.files import atomic_write, write_manifest
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant.convert import CALIBRATED, REPORT, quantise_checkpoint
from glm5.quant.schemes import Scheme, scheme_named


@dataclass(frozen=True)
class Options:
    """`rows` x `length` tokens of `text` (sources as in `glm5 data build`) calibrate; `without` leaves steps out."""

    scheme: str
    without: tuple[str, ...] = ()
    text: tuple[str, ...] = ("stdlib",)
    rows: int = 16
    length: int = 512
    seed: int = 0
    measure: int = 0
    """Bytes of held-out documents of `text` to measure bits per byte on, before and after; 0: none."""
    layout: str = "compressed-tensors"
    """A key of `quant.formats.FORMATS`."""

    def resolved(self) -> Scheme:
        return scheme_named(self.scheme).without(*self.without)


def calibration_ids(tokenizer: Tokenizer, sources: Sequence[str], rows: int, length: int) -> Tensor:
    """ids [rows, length] of documents in the order of their sources, joined by end-of-text tokens.

    Only documents of the training split: the others are left for measuring. Raises DataError if they are too short.
    """
    ids: list[int] = []
    for document in iter_sources(sources):
        if not document.held_out:
            ids += [*tokenizer.encode(document.text[: 4 * length]), tokenizer.special["<|endoftext|>"]]
        if len(ids) >= rows * length:
            return torch.tensor(ids[: rows * length]).view(rows, length)
    raise DataError(
        f"calibration needs {rows * length:,} tokens, and {', '.join(sources)} has {len(ids):,}; give more text, or "
        f"fewer or shorter rows."
    )


def held_out_score(checkpoint: Path, rows: list[list[int]], size: int, device: str = "cpu") -> float:
    """Bits per byte of documents [ids with the end-of-text token in front], `size` bytes in all; long ones are cut."""
    model = GLM5ForCausalLM.from_pretrained(checkpoint, device=device)
    nats = 0.0
    with torch.no_grad():
        for ids in rows:
            batch = torch.tensor([ids], device=device)
            logprobs = model(batch[:, :-1]).logits.log_softmax(-1)
            nats -= float(logprobs.gather(2, batch[:, 1:, None]).cpu().double().sum())
    return nats / math.log(2) / size


def held_out_rows(tokenizer: Tokenizer, options: Options) -> tuple[list[list[int]], int]:
    """Documents for `held_out_score`, and their bytes."""
    rows, size = [], 0
    for document in iter_sources(options.text):
        if document.held_out and size < options.measure:
            ids = tokenizer.encode(document.text[: 4 * options.length])[: options.length - 1]
            while ids and tokenizer.decode(ids).endswith("\ufffd"):  # half a character
                ids.pop()
            size += len(tokenizer.decode(ids).encode())
            rows.append([tokenizer.special["<|endoftext|>"], *ids])
    if not rows:
        raise DataError(f"{', '.join(options.text)} has no held-out documents to measure on; give more text.")
    return rows, size


def run(source: Path, out: Path, options: Options, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Quantise `source` into `out`. Returns sizes, the mean error of rounded matrices and the process's peak memory."""
    scheme, ids = options.resolved(), None
    if any(step in CALIBRATED for step in scheme.steps):
        tokenizer = Tokenizer.load(source)
        ids = calibration_ids(tokenizer, options.text, options.rows, options.length)
    report = quantise_checkpoint(source, out, scheme, ids, seed=options.seed, layout=options.layout, progress=progress)
    errors = [error for piece in report["pieces"].values() for error in piece["tensors"].values()]
    scores = {}
    if options.measure:
        rows, size = held_out_rows(Tokenizer.load(source), options)
        for when, folder in (("before", source), ("after", out)):
            progress(f"measuring {when}", 0, 1)
            scores[f"bits_per_byte_{when}"] = held_out_score(folder, rows, size)
        atomic_write(out / REPORT, json.dumps(report | scores, indent=2) + "\n")
        write_manifest(out)
    return scores | {
        "scheme": scheme.name,
        "format": options.layout,
        "steps": list(scheme.steps),
        "bytes_before": report["bytes_before"],
        "bytes_after": report["bytes_after"],
        "rounded_tensors": len(errors),
        "mean_error": sum(errors) / len(errors),
        "largest_error": max(errors),
        "seconds": round(sum(piece["seconds"] for piece in report["pieces"].values()), 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
