"""What quantization costs: schemes and their steps, outliers, and training with rounding in the loop.

    python benchmarks/quantisation.py schemes CHECKPOINT     bits per byte and bytes of every scheme, and of ablations
    python benchmarks/quantisation.py outliers CHECKPOINT    the same with channels of the residual stream made large
    python benchmarks/quantisation.py qat CHECKPOINT         int4 after fine-tuning with and without rounding, 3 seeds
    python benchmarks/quantisation.py function CHECKPOINT    whether the steps before rounding keep the model's function

CHECKPOINT has a tokenizer; its text is the standard library, of which held-out files are scored. Sizes, seeds and
schemes are fixed here. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from glm5.chat import Tokenizer
from glm5.config.optim import OptimConfig
from glm5.data.packing import Batch
from glm5.launch.quantise import Options, calibration_ids, held_out_rows, held_out_score, run
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant import rotation
from glm5.quant.convert import quantise_checkpoint
from glm5.quant.qat import quantization_aware
from glm5.quant.schemes import SCHEMES, scheme_named
from glm5.quant.smoothing import Junction, input_readers
from glm5.train.loop import build_optimizer
from glm5.train.losses import language_loss

MEASURED = 400_000
ABLATIONS: dict[str, tuple[str, ...]] = {
    "paper-w4a8": (),
    "paper-w4a8 without quarot": ("quarot",),
    "paper-w4a8 without awq, ssz": ("awq", "ssz"),
    "paper-w4a8 without smooth": ("smooth",),
    "paper-w4a8, rounding only": ("quarot", "awq", "smooth", "ssz"),
}
SEEDS = (0, 1, 2)
OUTLIER = 300
STEPS, ROWS, LENGTH, RATE = 256, 8, 512, 1e-3
EPOCHS = 4  # the library's text has fewer tokens than all steps take
QAT_SCHEMES = ("w4a8", "w4a16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=tuple(JOBS))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu", help="of qat: where it trains and scores")
    chosen = parser.parse_args()
    more = {"device": chosen.device} if chosen.job == "qat" else {}
    with tempfile.TemporaryDirectory() as scratch:
        JOBS[chosen.job](chosen.checkpoint, Path(scratch), **more)


def schemes(checkpoint: Path, scratch: Path) -> None:
    """Every scheme, then the paper's with steps left out."""
    plain = {name: (name, ()) for name, scheme in SCHEMES.items() if not scheme.steps}
    for label, (name, without) in (plain | {key: ("paper-w4a8", steps) for key, steps in ABLATIONS.items()}).items():
        found = run(checkpoint, scratch / label, Options(name, without, measure=MEASURED), lambda *progress: None)
        before, after = found["bits_per_byte_before"], found["bits_per_byte_after"]
        kept = ("bytes_before", "bytes_after", "mean_error", "seconds")
        show(label, bits_per_byte=after, more=after / before - 1, **{key: found[key] for key in kept})


def outliers(checkpoint: Path, scratch: Path) -> None:
    """The function stays, but some channels after the input norms become OUTLIER times as large, as in large models."""
    model = GLM5ForCausalLM.from_pretrained(checkpoint)
    for block in model.model.layers:
        scales = torch.ones(model.config.hidden_size)
        scales[torch.arange(0, model.config.hidden_size, 61)] = 1 / OUTLIER
        readers = tuple((str(number), weight) for number, weight in enumerate(input_readers(block.self_attn)))
        Junction("input", "smooth", ((block.input_layernorm.weight, 0),), readers).apply(scales)
    changed = scratch / "outliers"
    model.save_pretrained(changed)
    Tokenizer.load(checkpoint).save(changed)
    schemes(changed, scratch)


def qat(checkpoint: Path, scratch: Path, device: str) -> None:
    """Fine-tune on the same rows with and without rounding; score both before and after rounding to int4."""
    tokenizer = Tokenizer.load(checkpoint)
    held_out, size = held_out_rows(tokenizer, Options("w4a16", length=LENGTH, measure=MEASURED))
    rows = calibration_ids(tokenizer, ("stdlib",), ROWS * STEPS // EPOCHS, LENGTH)
    for name in QAT_SCHEMES:
        losses: dict[str, list[float]] = {"rounded after": [], "trained rounded": []}
        for seed in SEEDS:
            drawn = torch.Generator().manual_seed(seed)
            order = torch.cat([torch.randperm(len(rows), generator=drawn) for _ in range(EPOCHS)])
            scores = {}
            for label, scheme in (("plain", None), ("qat", name)):
                folder = scratch / f"{name}-{seed}-{label}"
                tune(checkpoint, rows[order].to(device), scheme).save_pretrained(folder)
                rounded = folder.with_name(f"{folder.name}-int4")
                quantise_checkpoint(folder, rounded, scheme_named(name))
                scores[label] = held_out_score(folder, held_out, size, device)
                scores[f"{label} int4"] = held_out_score(rounded, held_out, size, device)
            losses["rounded after"].append(scores["plain int4"] - scores["plain"])
            losses["trained rounded"].append(scores["qat int4"] - scores["plain"])
            show(f"{name}, seed {seed}", **scores)
        show(f"{name}, bits per byte lost", **{key: statistics.mean(values) for key, values in losses.items()})


def tune(checkpoint: Path, rows: torch.Tensor, scheme: str | None) -> GLM5ForCausalLM:
    model = GLM5ForCausalLM.from_pretrained(checkpoint, device=rows.device)
    optimizer = build_optimizer(model, OptimConfig(steps=STEPS, lr=RATE))
    with quantization_aware(model, scheme):
        for step in range(STEPS):
            ids = rows[step * ROWS : (step + 1) * ROWS]
            batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
            ctx = packed_context(batch.documents, exact=False)
            language_loss(model, batch, ctx, mtp_weight=0.0, mtp_depths=0)[0].backward()
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - step / STEPS)
            optimizer.step()
            optimizer.zero_grad()
    return model


def same_function(checkpoint: Path, scratch: Path) -> None:
    """Router choices, selected keys and logits of 4,096 tokens of held-out text, of trunk and two MTP depths, against
    those in float64: after each step before rounding, in float64 and fp32, and after a rotation that leaves out what
    the indexer reads."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.quant.same_function import function, without_rounding

    tokenizer = Tokenizer.load(checkpoint)
    rows, _ = held_out_rows(tokenizer, Options("paper-w4a8", measure=MEASURED))
    ids = torch.tensor([token for row in rows for token in row][: ROWS * LENGTH]).view(ROWS, LENGTH)
    plain = GLM5ForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    exact = function(plain, ids)

    def apart(label: str, model: GLM5ForCausalLM) -> None:
        found = function(model, ids)
        whole = {name: value for name, value in exact.items() if not value.is_floating_point()}
        size = {name: float(exact[name].abs().max()) for name in exact.keys() - whole.keys()}
        show(
            label,
            tokens=ids.numel(),
            experts=sum(int((found[n] != v).sum()) for n, v in whole.items() if "experts" in n),
            keys=sum(int((found[n] != v).sum()) for n, v in whole.items() if "keys" in n),
            logits=max(float((found[n] - exact[n]).abs().max()) / size[n] for n in size),
        )

    apart("fp32 as it is", GLM5ForCausalLM.from_pretrained(checkpoint))
    calibration = calibration_ids(tokenizer, Options("paper-w4a8").text, ROWS, LENGTH)
    for steps in (("quarot",), ("awq", "smooth", "ssz"), ("quarot", "awq", "smooth", "ssz")):
        changed, _ = without_rounding(checkpoint, scratch / "-".join(steps), steps, calibration)
        apart(f"{', '.join(steps)} in float64", changed)
        apart(f"{', '.join(steps)} in float32", changed.clone(dtype=torch.float32))
    with patch.object(rotation, "query_readers", lambda attention: [attention.q_b_proj.weight]):
        apart("a rotation that forgets the indexer's queries, in float64", rotation.rotate(plain))


def show(label: str, **values: Any) -> None:
    rounded = {key: float(f"{value:.6g}") for key, value in values.items()}
    print(json.dumps({"what": label} | rounded), flush=True)


JOBS = {"schemes": schemes, "outliers": outliers, "qat": qat, "function": same_function}

if __name__ == "__main__":
    main()
