"""`glm5 kernels`: what the compilers make of every GPU kernel at a model's shapes, beside published measurements."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from glm5.config.model import GLM5Config
from glm5.errors import UsageError, nearest
from glm5.ops.triton import TARGETS, Shape
from glm5.ops.triton.compiled import KERNELS, measure, remembered, require_triton

ANCHORS = (
    "FlashMLA sparse prefill, H800: 640 TFLOP/s",
    "FlashMLA sparse decode, H800: 410 TFLOP/s",
    "sparse decode at <= 16 heads, top-k 2048, H200: 16.83 us (FlashMLA 22.81 us)",
    "sparse MLA backward by TileLang, H200: 100 to 115 TFLOP/s",
    "sparse MLA backward by cuDNN, B200 (64 heads, top-k 2048): 684 TFLOP/s",
)
"""What others have measured and published for kernels of this kind. Ours are not measured here."""


def shape_of(preset: str) -> Shape:
    """The kernels' sizes in a preset. Raises UsageError for a model without sparse attention."""
    config = GLM5Config.preset(preset)
    if not config.use_dsa or config.index_topk is None:
        raise UsageError(f"{preset} has no sparse attention; choose glm5, base, small or another preset with it.")
    return Shape(
        heads=config.num_attention_heads,
        latent=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        topk=config.index_topk,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        nope=config.qk_nope_head_dim,
        value=config.v_head_dim,
        query_latent=config.q_lora_rank,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_inner=config.moe_intermediate_size,
        vocabulary=config.vocab_size,
    )


def survey(
    preset: str = "glm5", targets: Sequence[str] = (), only: Sequence[str] = (), jobs: int = 1
) -> dict[str, Any]:
    """Compile kernels (default: all) for targets (default: all). Times are predictions from peak rates, not
    measurements. Raises UsageError for an unknown name, MissingExtraError without Triton."""
    for kind, names, known in (("target", targets, tuple(TARGETS)), ("kernel", only, KERNELS)):
        for name in names:
            if name not in known:
                raise UsageError(f"No {kind} {name!r}{nearest(name, known)}. There are: {', '.join(known)}.")
    require_triton()
    shape = shape_of(preset)
    work = [(name, shape, target) for name in only or KERNELS for target in targets or TARGETS]
    if jobs == 1:
        found = [measure(*arguments) for arguments in work]
    else:
        with ProcessPoolExecutor(min(jobs, len(work)), multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(measure, *zip(*work)))
    rows = [row for part in found for row in part]
    workload = {"queries": shape.queries, "context": shape.context, "sequences": shape.sequences}
    return {"preset": preset, "workload": workload, "predicted": ["roofline_us"], "anchors": ANCHORS, "kernels": rows}


def verdict() -> str:
    """One line for `glm5 doctor`: which of the kernels that were compiled before do not run on which target."""
    if importlib.util.find_spec("triton") is None:
        return "no Triton: pip install 'glm5[triton]'"
    rows = remembered()
    if not rows:
        return "not compiled yet: glm5 kernels"
    failed = [f"{row['name']} for {row['target']}: {row['problem']}" for row in rows if row["problem"]]
    return "; ".join(failed) or f"{len(rows)} compile: {', '.join(sorted({row['target'] for row in rows}))}"


def table(found: dict[str, Any]) -> str:
    """The survey as text."""
    load = found["workload"]
    lines = [
        f"{found['preset']}: prefill of {load['queries']:,} queries over {load['context']:,} tokens; decoding of "
        f"{load['sequences']} sequences. us: predicted least time from peak rates.",
        f"{'kernel':<26}{'target':<8}{'regs':>5}{'spills':>7}{'shared':>9}  {'tensor cores':<22}{'FLOP/B':>8}"
        f"{'H100 us':>10}{'H200 us':>10}{'B200 us':>10}{'MI300X us':>10}",
    ]
    for row in found["kernels"]:
        cores = " ".join(f"{name} {count}" for name, count in row["tensor_core_instructions"].items()) or "none"
        times = "".join(f"{time:>10,.1f}" for time in row["roofline_us"].values())
        lines.append(
            f"{row['name']:<26}{row['target']:<8}{row['registers']:>5}{row['spills']:>7}{row['shared_bytes']:>9,}"
            f"  {cores:<22}{row['arithmetic_intensity']:>8}{times}"
        )
        if row["problem"]:
            lines.append(f"  {row['problem']}")
    return "\n".join([*lines, "Measured by others:", *(f"  {line}" for line in found["anchors"])])
