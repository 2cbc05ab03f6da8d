"""Tokens per second of a training step of `nano`, dense and DSA, beside transformers on the same rows; prints JSON.

`step` is ours with optimizer; `ratio` compares forward + backward alone: time of transformers over ours, so more than 1
means that we are faster. Transformers always runs its indexer; "dense" gives it as many keys as a row has. Utilisation
sets the model's FLOPs (glm5.config.arithmetic) against a large matrix product in the same process.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from _timing import arguments, interleaved, machine, matmul_peak, nano, peer_of, ratio, spread

from glm5.config.arithmetic import size_report
from glm5.config.recipe import OptimConfig
from glm5.data.packing import Batch
from glm5.model.context import packed_context
from glm5.train.loop import build_optimizer, clip_gradients
from glm5.train.losses import language_loss


def measure(rows: int, length: int, repeats: int, peak: float, **changes: Any) -> dict[str, Any]:
    """One architecture on random rows, one document each."""
    ours = nano(**changes)
    dense = not ours.config.use_dsa
    theirs = peer_of(nano(index_topk=length) if dense else ours).train()
    ids = torch.randint(0, ours.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    optimizer = build_optimizer(ours, OptimConfig(steps=1, lr=1e-3), lambda name: ".indexer." not in name)
    theirs.requires_grad_(True)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_(".indexer." not in name)

    def backward() -> None:
        ours.zero_grad(set_to_none=True)
        language_loss(ours, batch, packed_context(batch.documents))[0].backward()

    def step() -> None:
        backward()
        clip_gradients(ours, 1.0)
        optimizer.step()

    def peer() -> None:
        theirs.zero_grad(set_to_none=True)
        theirs(ids, labels=ids, use_cache=False).loss.backward()

    seconds = interleaved({"step": step, "ours": backward, "transformers": peer}, repeats)
    tokens = rows * length
    flops = size_report(ours.config, length)["train_flops_per_token"]
    speed = {f"{name}_tokens_per_second": spread([tokens / s for s in taken]) for name, taken in seconds.items()}
    utilisation = speed["ours_tokens_per_second"]["median"] * flops / 1e9 / peak
    return {**speed, "ratio": ratio(seconds["transformers"], seconds["ours"]), "utilisation": utilisation}


def main() -> None:
    options = arguments(__doc__ or "", rows=8, length=256)
    peak = matmul_peak()
    found = {
        name: measure(options.rows, options.length, options.repeats, peak["median"], use_dsa=sparse)
        for name, sparse in (("dense", False), ("dsa", True))
    }
    shapes = {"preset": "nano", "rows": options.rows, "length": options.length, "repeats": options.repeats}
    print(json.dumps({**machine(), **shapes, "matmul_gflops": peak, **found}, indent=1))


if __name__ == "__main__":
    main()
