"""`gpu.py train`: first whether a bf16 step learns as fp32 does, then how fast it is and what it needs."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from _gpu_clock import Clock, spread

from glm5.config.activations import Forward
from glm5.config.model import GLM5Config
from glm5.config.recipe import PretrainStage
from glm5.config.step_memory import Setting, step_memory
from glm5.config.step_time import model_flops
from glm5.data.packing import Batch
from glm5.device import Fetch
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import NullMetrics
from glm5.parallel.ranks import Ranks
from glm5.train.loop import StageIO, Trainer
from glm5.train.losses import backbone_loss

ROUNDED = 2**-7
"""Largest difference of a loss in bf16 from that in fp32, relative to the loss, in the first steps."""
STEPS = 4
DOCUMENTS = 4
"""Documents per row."""
FORMULA = "model FLOPs of a token = 3 x (2 x active parameters + attention half-way through the row), MTP depths too"

Recompute = Literal[True, False, "selective"]


def trainer(config: GLM5Config, rows: int, length: int, device: torch.device, **keys: Any) -> Trainer:
    """The trainer of a pre-training stage, over random weights of one seed."""
    optim = {"steps": 10_000, "lr": 1e-3, "schedule": "constant", "ns_dtype": "bfloat16", "monitor_every": 0}
    stage = PretrainStage.model_validate(
        {"name": "bench", "kind": "pretrain", "rows": rows, "row_length": length, "mtp_depths": 1, "optim": optim}
        | keys
    )
    folder = Path(tempfile.mkdtemp())
    io = StageIO("bench", folder, NullMetrics(), lambda steps, numbers: None, Ranks(device))
    model = GLM5ForCausalLM(config).to(device)
    return Trainer(model, stage, io, lambda m, batch, ctx: backbone_loss(m, batch, ctx, stage), lambda name: True, 1e-3)


def batch(config: GLM5Config, rows: int, length: int) -> Batch:
    """Rows of `DOCUMENTS` documents each; the same tokens every time, so that the loss falls."""
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(length) * DOCUMENTS // length).expand(rows, -1).contiguous()
    return Batch(ids, documents, torch.ones_like(ids, dtype=torch.bool))


def losses(config: GLM5Config, rows: int, length: int, device: torch.device, **keys: Any) -> list[float]:
    made, data = trainer(config, rows, length, device, **keys), batch(config, rows, length)
    return [made.step(step, data)["loss"] for step in range(STEPS)]


def check(config: GLM5Config, length: int, clock: Clock, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of every variant in bf16 beside fp32 without `compile` and recomputation, on the same device."""
    exact = losses(config, 2, length, clock.device)
    rows = []
    for keys in variants:
        found = losses(config, 2, length, clock.device, dtype="bfloat16", **keys)
        away = max(abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True))
        rows.append({**keys, "right": away <= ROUNDED, "difference": away, "limit": ROUNDED, "losses": found})
    return rows


@contextmanager
def counted_waits() -> Iterator[list[int]]:
    """Counts the times that the host waits for a CUDA device: waits that CUDA sees, and those of `Fetch`."""
    count, fetch = [0], Fetch.__call__

    def counting(self: Any) -> Any:
        count[0] += self._event is not None
        return fetch(self)

    Fetch.__call__ = counting  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield count
        count[0] += sum("synchroniz" in str(warning.message) for warning in seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        Fetch.__call__ = fetch  # type: ignore[method-assign]


def optimizer_share(made: Trainer, step: Callable[[], Any], clock: Clock, rounds: int) -> list[float]:
    """The optimizer's part of a step, with the device idle before and after it."""
    plain, seconds = made.optimizer.step, list[float]()
    made.optimizer.step = lambda *_: seconds.append(clock.once(plain))  # type: ignore[method-assign, assignment]
    try:
        whole = [clock.once(step) for _ in range(rounds)]
    finally:
        made.optimizer.step = plain  # type: ignore[method-assign]
    return [a / b for a, b in zip(seconds, whole, strict=True)]


def measure(
    config: GLM5Config, rows: int, length: int, clock: Clock, limits: dict[str, Any], rounds: int, keys: dict[str, Any]
) -> dict[str, Any]:
    """Speed and memory of one variant in bf16."""
    row: dict[str, Any] = {"rows": rows, "length": length, **keys}
    numbers = iter(range(10_000))
    try:
        made, data = trainer(config, rows, length, clock.device, dtype="bfloat16", **keys), batch(config, rows, length)

        def step() -> None:
            made.step(next(numbers), data)

        first = clock.once(step)
        seconds = clock.rounds(step, rounds)
        row |= {"first_step_seconds": first, "peak_bytes": clock.peak_bytes(step)}
        row["optimizer_share"] = spread(optimizer_share(made, step, clock, rounds))
        if clock.device.type == "cuda":
            with counted_waits() as waits:
                step()
            row["host_waits"] = waits[0]
    except torch.OutOfMemoryError as error:
        return row | {"error": str(error).splitlines()[0]}
    forward = Forward(rows, length, depths=1, recompute=keys["recompute"], cpu=clock.device.type == "cpu")
    flops = model_flops(config, forward) * rows * length
    peaks = {"measured": limits["flops"], **{k: v["flops"] for k, v in limits.items() if k == "data_sheet"}}
    row["tokens_per_second"] = spread([rows * length / s for s in seconds])
    row["mfu"] = {name: spread([flops / s / peak for s in seconds]) for name, peak in peaks.items()}
    row["predicted_peak_bytes"] = step_memory(config, Setting(forward, ns_item=2))["peak"]
    return row


def run(presets: list[str], shapes: list[tuple[int, int]], clock: Clock, rounds: int, quick: bool) -> dict[str, Any]:
    """All presets, shapes and variants. A variant that is wrong is not timed."""
    modes: tuple[Recompute, ...] = (False, "selective", True)
    variants: list[dict[str, Any]] = [{"compile": c, "recompute": r} for c in (False, True) for r in modes]
    if quick:  # compiling takes half a minute
        variants = [v for v in variants if not v["compile"]]
    limits = clock.limits(quick)
    found: dict[str, Any] = {"limits": limits, "flops_formula": FORMULA, "checked": [], "times": []}
    for preset in presets:
        config = GLM5Config.preset(preset, use_dsa=False)
        checked = check(config, min(512, shapes[0][1]), clock, variants)
        found["checked"] += [{"preset": preset, **row} for row in checked]
        for keys, verdict in zip(variants, checked, strict=True):
            for rows, length in shapes if verdict["right"] else ():
                found["times"].append({"preset": preset, **measure(config, rows, length, clock, limits, rounds, keys)})
                gc.collect()
                if clock.device.type == "cuda":
                    torch.cuda.empty_cache()
    return found
