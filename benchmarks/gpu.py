"""The GPU kernels on a GPU: first whether they are right, then how long they take. Without a GPU it says so and ends.

    python benchmarks/gpu.py kernels [--preset glm5] [--only attend] [--rounds 20] [--json FILE]

Right: every kernel against its torch form in fp64 on the CPU, in fp32 (root mean square of the error at most 1e-5 of
the values) and in bf16 (at most twice the error of the torch form in bf16, or 2^-8); whole numbers must be equal. A
kernel that is wrong is not timed, and the exit status is 1.

Times: at the preset's shapes in bf16, medians over rounds in which kernel and torch form take turns, with an empty
cache. `share` is the least time that the GPU's data sheet allows (see `glm5 kernels`) over the median. Beside them, if
they run: torch's own functions, FlashMLA, and for sparse prefill dense flash attention over the same 128k tokens.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.launch.kernels import shape_of
from glm5.ops import attention, cross_entropy, dense, elementwise, experts, indexer, indexer_kl, mlapo, rope, route
from glm5.ops import sampling as _sampling
from glm5.ops.indexer_8bit import quantise_rows
from glm5.ops.operators import TORCH_FORMS, TRITON_KERNELS
from glm5.ops.pages import Pages, plain_view
from glm5.ops.triton import Shape
from glm5.ops.triton.compiled import DEVICES, KERNELS, cases

assert all((attention, cross_entropy, dense, elementwise, experts, indexer, indexer_kl, mlapo, rope, route, _sampling))

SMALL = dict(queries=48, context=320, topk=64, sequences=3, hidden=768, experts=8, expert_inner=256, vocabulary=5000)
"""What a CPU computes in fp64 within seconds; the widths of heads stay those of the preset."""
PAGE = 64
ROUNDED = 2**-8
"""Error of a number that was rounded to bf16 twice, as weights of a softmax before a matrix product. On a CPU the torch
forms do not round them."""


@dataclass(frozen=True)
class Draw:
    """Random tensors of one dtype on one device, the same for all devices."""

    shape: Shape
    dtype: torch.dtype
    device: str
    source: torch.Generator

    def normal(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, generator=self.source, device=self.source.device).to(self.device, dtype or self.dtype)

    def whole(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=self.source, device=self.source.device).to(self.device)

    def picks(self, queries: int) -> Tensor:
        """Ascending keys of each query [1, T, K]: one from each equal part of the context."""
        part = self.shape.context // self.shape.topk
        return torch.arange(self.shape.topk, device=self.device) * part + self.whole(
            0, part, 1, queries, self.shape.topk
        )

    def ranges(self, keys: int, queries: int) -> tuple[Tensor, Tensor]:
        """The last `queries` tokens of a causal row of `keys`."""
        end = torch.arange(keys - queries, keys, device=self.device).unsqueeze(0) + 1
        return torch.zeros_like(end), end


def _attend(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, latents = d.normal(1, s.queries, s.heads, s.latent + s.rope), d.normal(1, s.context, s.latent + s.rope)
    return (q, latents, *plain_view(s.context), d.picks(s.queries), s.latent, s.head_dim**-0.5, False)


def _decode(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    per_row, rows = s.context // PAGE, torch.arange(s.sequences, device=d.device)
    order = torch.randperm(s.sequences * per_row, generator=d.source, device=d.source.device).to(d.device)
    pool = d.normal(s.sequences * per_row, PAGE, s.latent + s.rope)
    q = d.normal(1, s.sequences, s.heads, s.latent + s.rope)
    view = Pages(order.view(s.sequences, per_row), rows, PAGE, PAGE.bit_length() - 1).kernel_view()
    return (q, pool, *view, d.picks(s.sequences), s.latent, s.head_dim**-0.5, False)


def _attend_backward(d: Draw) -> tuple[Any, ...]:
    q, latents, *_, indices, value_dim, scale, _ = arguments = _attend(d)
    out, _, lse = TRITON_KERNELS["attend"](*arguments)
    return q, latents, indices, out, lse, d.normal(*q.shape[:3], value_dim), scale


def _index(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    s = d.shape
    q, k = d.normal(1, s.queries, s.index_heads, s.index_dim), d.normal(1, s.context, s.index_dim)
    return q, k, d.normal(1, s.queries, s.index_heads, dtype=wide(d.dtype))


def _select(d: Draw) -> tuple[Any, ...]:
    """Small whole numbers: sums are exact, and ties are many."""
    s = d.shape
    q, k = d.whole(-2, 3, 1, s.queries, s.index_heads, s.index_dim), d.whole(-2, 3, 1, s.context, s.index_dim)
    w = d.whole(-2, 3, 1, s.queries, s.index_heads).to(wide(d.dtype))
    return (q.to(d.dtype), k.to(d.dtype), *plain_view(s.context), w, *d.ranges(s.context, s.queries), s.topk)


def _select_8bit(d: Draw) -> tuple[Any, ...]:
    q, k, *view, w, start, end, topk = _select(d)
    (q, scale), (k, k_scale) = quantise_rows(q, "fp8"), quantise_rows(k, "fp8")
    # Scales that are powers of two keep sums exact.
    return q, k, k_scale.log2().round().exp2(), *view, w * scale.log2().round().exp2(), start, end, topk


def _indexer_kl(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, k = d.normal(1, s.heads, s.queries, s.head_dim), d.normal(1, s.heads, s.context, s.head_dim)
    weight = d.normal(1, s.queries, dtype=wide(d.dtype)).abs()
    return *_index(d), q, k, *d.ranges(s.context, s.queries), s.head_dim**-0.5, weight, True


def _ranges(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, k = (d.normal(1, s.heads, s.queries, s.head_dim) for _ in range(2))
    return q, k, d.normal(1, s.heads, s.queries, s.value), *d.ranges(s.queries, s.queries), s.head_dim**-0.5


def _ranges_backward(d: Draw) -> tuple[Any, ...]:
    *tensors, scale = _ranges(d)
    out, lse = TRITON_KERNELS["attend_ranges"](*tensors, scale)
    return *tensors, out, lse, d.normal(*out.shape), scale


def _layout(d: Draw) -> tuple[Tensor, int]:
    """Distinct experts for every token."""
    s = d.shape
    order = torch.rand(s.queries, s.experts, generator=d.source, device=d.source.device).argsort(-1)
    return order[:, : s.experts_per_token].sort(-1).values.to(d.device), s.experts


def _grouped(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    s = d.shape
    bounds = TORCH_FORMS["expert_layout"](*_layout(d))[2]
    x, weight = d.normal(s.queries * s.experts_per_token, s.hidden), d.normal(s.experts, 2 * s.expert_inner, s.hidden)
    return x, weight, bounds


def _grouped_weights(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bounds = _grouped(d)
    return d.normal(x.shape[0], weight.shape[1]), x, bounds


def _combine(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    s, slot_of = d.shape, TORCH_FORMS["expert_layout"](*_layout(d))[0]
    weights = d.normal(s.queries, s.experts_per_token, dtype=wide(d.dtype))
    return d.normal(s.queries * s.experts_per_token, s.hidden), slot_of, weights


def _norm(d: Draw) -> tuple[Any, ...]:
    return d.normal(d.shape.queries, d.shape.hidden), d.normal(d.shape.hidden), 1e-5


def _norm_backward(d: Draw) -> tuple[Any, ...]:
    x, weight, eps = _norm(d)
    return x, weight, TORCH_FORMS["rms_norm"](x, weight, eps)[1], d.normal(*x.shape)


def _gate_up(d: Draw) -> Tensor:
    return d.normal(d.shape.queries * d.shape.experts_per_token, 2 * d.shape.expert_inner)


def _turned(d: Draw, width: int) -> tuple[Tensor, Tensor]:
    angle = d.normal(width, d.shape.rope // 2, dtype=torch.float32)
    return angle.cos(), angle.sin()


def _rope(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    return d.normal(s.queries, s.heads, s.head_dim), *_turned(d, s.queries), s.nope, 1.0


def _route(d: Draw) -> tuple[Any, ...]:
    kind = wide(d.dtype)
    return d.normal(d.shape.queries, d.shape.experts, dtype=kind), d.normal(d.shape.experts, dtype=kind), \
        d.shape.experts_per_token, True, 2.5  # fmt: skip


def _route_backward(d: Draw) -> tuple[Any, ...]:
    weights, chosen, scores = TORCH_FORMS["route"](*_route(d))
    return scores, chosen, d.normal(*weights.shape, dtype=scores.dtype), None, True, 2.5


def _logits(d: Draw) -> tuple[Any, ...]:
    rows = min(512, d.shape.queries)
    return d.normal(rows, d.shape.vocabulary, dtype=wide(d.dtype)), d.whole(0, d.shape.vocabulary, rows), 1.0


def _logit_gradient(d: Draw) -> tuple[Any, ...]:
    logits, targets, scale = _logits(d)
    normaliser = TORCH_FORMS["logit_stats"](logits, targets, scale)[2]
    return logits, targets, normaliser, d.normal(len(logits), dtype=logits.dtype), scale, d.dtype


def _distribution(d: Draw) -> tuple[Any, ...]:
    rows, like = d.shape.sequences, dict(device=d.device)
    logits = d.normal(rows, d.shape.vocabulary, dtype=wide(d.dtype))
    limits = (torch.zeros(rows, **like), torch.full((rows,), 50, **like), torch.full((rows,), 2.0, **like))
    return logits, torch.ones(rows, **like), *limits


def _absorb(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    q, up = d.normal(s.queries, s.heads, s.head_dim), d.normal(s.heads, s.nope + s.value, s.latent)[:, : s.nope]
    return q, up, d.normal(s.queries, s.index_heads, s.index_dim), *_turned(d, s.queries)


def _latents(d: Draw) -> tuple[Any, ...]:
    s = d.shape
    index = [d.normal(s.queries, s.index_dim), d.normal(s.queries, s.index_heads), *d.normal(2, s.index_dim)]
    places = torch.arange(s.queries, device=d.device).flip(0)
    pools = (torch.zeros(s.queries, w, dtype=d.dtype, device=d.device) for w in (s.latent + s.rope, s.index_dim))
    return (
        *(d.normal(s.queries, s.query_latent), d.normal(s.queries, s.latent + s.rope), index),
        *(d.normal(s.query_latent), d.normal(s.latent), *_turned(d, s.queries), places, *pools, 1e-5, 1e-6),
    )


Make = Callable[[Draw], tuple[Any, ...]]
WORK: Mapping[str, tuple[str, str, Make]] = {
    "attend": ("attend", "sparse_forward", _attend),
    "attend, paged": ("attend", "sparse_decode", _decode),
    "attend_backward": ("attend_backward", "sparse_backward sparse_backward_q", _attend_backward),
    "select": ("select", "index_select", _select),
    "select_8bit": ("select_8bit", "index_select_fp8", _select_8bit),
    "selected": ("selected", "selected_scores", lambda d: (*_index(d), d.picks(d.shape.queries))),
    "selected_backward": (
        "selected_backward",
        "selected_scores_backward",
        lambda d: (
            *_index(d),
            d.picks(d.shape.queries),
            d.normal(1, d.shape.queries, d.shape.topk, dtype=wide(d.dtype)),
        ),
    ),
    "indexer_kl": ("indexer_kl", "", _indexer_kl),
    "attend_ranges": ("attend_ranges", "range_attention", _ranges),
    "attend_ranges_backward": (
        "attend_ranges_backward",
        "range_attention_backward range_backward_kv range_backward_k range_backward_v",
        _ranges_backward,
    ),
    "grouped_rows": ("grouped_rows", "grouped_matmul", _grouped),
    "grouped_weights": ("grouped_weights", "grouped_weights", _grouped_weights),
    "mla_latents": ("mla_latents", "mla_latents", _latents),
    "mla_absorb": ("mla_absorb", "mla_absorb", _absorb),
    "rms_norm": ("rms_norm", "rms_norm", _norm),
    "rms_norm_backward": ("rms_norm_backward", "rms_norm_backward", _norm_backward),
    "swiglu": ("swiglu", "swiglu", lambda d: (_gate_up(d),)),
    "swiglu_backward": (
        "swiglu_backward",
        "swiglu_backward",
        lambda d: (_gate_up(d), d.normal(d.shape.queries * d.shape.experts_per_token, d.shape.expert_inner)),
    ),
    "rope": ("rope", "rope", _rope),
    "route": ("route", "route", _route),
    "route_backward": ("route_backward", "route_backward", _route_backward),
    "expert_layout": ("expert_layout", "place_experts", _layout),
    "combine": ("combine", "combine", _combine),
    "combine_backward": (
        "combine_backward",
        "combine_backward",
        lambda d: (*_combine(d), d.normal(d.shape.queries, d.shape.hidden)),
    ),
    "logit_stats": ("logit_stats", "logit_stats", _logits),
    "logit_gradient": ("logit_gradient", "logit_gradient", _logit_gradient),
    "sampling_logprobs": ("sampling_logprobs", "sampling_logprobs", _distribution),
}
"""By name: operator, each `Case` whose FLOPs and bytes are those of a call, as far as the target has it, arguments."""


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def moved(values: Any, device: str, double: bool) -> Any:
    """Arguments on another device, floating-point tensors in fp64 if `double`."""
    if isinstance(values, list | tuple):
        return type(values)(moved(v, device, double) for v in values)
    if not isinstance(values, Tensor):
        return torch.float64 if double and isinstance(values, torch.dtype) else values
    kind = torch.float64 if double and values.is_floating_point() else values.dtype
    return values.to(device, kind, copy=True)


def results(run: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """What an operator returns, and what it writes to."""
    out = run(*arguments)
    found = [out] if isinstance(out, Tensor) else [*out]
    written = arguments[8:10] if len(arguments) == 12 else ()  # the caches of `mla_latents`
    return [x for x in (*found, *written) if x.numel()]


def selected_exactly(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    """The operators `select` and `select_8bit` without the factor d^-1/2, whose rounding would break ties of whole
    numbers."""
    *scale, w, start, end, topk = *rest[:-9], *rest[-4:]
    position = torch.arange(k.shape[1], device=k.device)
    valid = (position >= start.unsqueeze(-1)) & (position < end.unsqueeze(-1))
    scores = torch.stack([torch.relu(head @ k.transpose(1, 2)) for head in q.unbind(2)], 2)
    total = (w.unsqueeze(2) @ scores).squeeze(2)
    return indexer.select_topk(total * scale[0].unsqueeze(1) if scale else total, valid, topk)


EXACT: Mapping[str, Callable[..., Any]] = TORCH_FORMS | dict.fromkeys(("select", "select_8bit"), selected_exactly)


def check(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """Whether a kernel equals its torch form, at a small shape. `errors` are root mean squares of differences to fp64,
    relative to that of the values: the kernel's, and those of the torch form. A kernel that does not run is wrong."""
    operator, _, make = WORK[name]
    row: dict[str, Any] = {"name": name, "right": True, "errors": {}}
    for dtype in (torch.float32, torch.bfloat16):
        arguments = make(Draw(shape, dtype, device, torch.Generator().manual_seed(1)))
        exact = results(EXACT[operator], moved(arguments, "cpu", True))
        form = results(TORCH_FORMS[operator], moved(arguments, device, False))
        try:
            found = results(TRITON_KERNELS[operator], arguments)
        except Exception as error:  # Triton raises its own, for example for too much shared memory
            return row | {"right": False, "error": f"{type(error).__name__}: {error}"}
        worst = [0.0, 0.0]
        for own, other, best in zip(found[: len(exact)], form, exact):
            own, other = own.cpu(), other.cpu()
            if not own.is_floating_point():
                row["right"] &= torch.equal(own, best.to(own.dtype))
                continue
            both = best.isfinite()
            size = float(best[both].square().mean().sqrt()) or 1.0
            away, others = (float((x.double() - best)[both].square().mean().sqrt()) / size for x in (own, other))
            row["right"] &= bool((own.isfinite() == both).all())
            row["right"] &= away <= (1e-5 if dtype == torch.float32 else max(2 * others, ROUNDED))
            worst = [max(worst[0], away), max(worst[1], others)]
        row["errors"][str(dtype).removeprefix("torch.")] = worst
    return row


def timed(jobs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each job: median and range. Jobs take turns; a write over 256 MB empties the cache before. What
    takes longer than half a second is timed three times."""
    cache = torch.empty(1 << 28, dtype=torch.int8, device="cuda")

    def once(job: Callable[[], Any]) -> float:
        cache.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        job()
        last.record()
        torch.cuda.synchronize()
        return 1000 * first.elapsed_time(last)

    counts = {}
    for name, job in jobs.items():
        try:
            once(job)
            counts[name] = rounds if once(job) < 5e5 else min(rounds, 3)
        except Exception as error:  # too little memory, or a peer without a kernel for the shape
            print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", file=sys.stderr)
            torch.cuda.empty_cache()
    seen: dict[str, list[float]] = {name: [] for name in counts}
    for turn in range(rounds):
        for name in seen:
            if turn < counts[name]:
                seen[name].append(once(jobs[name]))
    return {n: {"median": statistics.median(v), "low": min(v), "high": max(v)} for n, v in seen.items()}


def peers(name: str, arguments: tuple[Any, ...], shape: Shape) -> dict[str, Callable[[], Any]]:
    """Other people's functions for the same work."""
    functions = torch.nn.functional
    if name == "rms_norm":
        return {"torch.rms_norm": lambda: functions.rms_norm(arguments[0], (shape.hidden,), arguments[1], 1e-5)}
    if name == "swiglu":
        gate, up = arguments[0].chunk(2, -1)
        return {"torch silu * up": lambda: functions.silu(gate) * up}
    if name == "attend_ranges":
        q, k, v, *_ = arguments
        return {"torch flash": lambda: functions.scaled_dot_product_attention(q, k, v, is_causal=True)}
    if name != "attend":
        return {}
    q, latents, *_, indices, value_dim, scale, _ = arguments
    like: dict[str, Any] = dict(dtype=q.dtype, device=q.device)
    dense_q = torch.randn(1, shape.heads, shape.queries, shape.head_dim, **like)
    dense_k, dense_v = (torch.randn(1, shape.heads, shape.context, w, **like) for w in (shape.head_dim, shape.value))
    found: dict[str, Callable[[], Any]] = {
        "dense flash over all keys": lambda: functions.scaled_dot_product_attention(dense_q, dense_k, dense_v)
    }
    if importlib.util.find_spec("flash_mla"):
        flash, short = importlib.import_module("flash_mla"), indices[0].unsqueeze(1).int()
        found["FlashMLA"] = lambda: flash.flash_mla_sparse_fwd(q[0], latents[0].unsqueeze(1), short, scale, value_dim)
    return found


def measure(name: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """Times at the real shape, and the share of what the GPU allows."""
    operator, case_names, make = WORK[name]
    arguments = make(Draw(shape, torch.bfloat16, "cuda", torch.Generator("cuda").manual_seed(1)))
    jobs: dict[str, Callable[[], Any]] = {
        "kernel": lambda: TRITON_KERNELS[operator](*arguments),
        "torch form": lambda: TORCH_FORMS[operator](*arguments),
    }
    times = timed(jobs | peers(name, arguments, shape), rounds)
    row: dict[str, Any] = {"name": name, "us": times}
    least = least_us(case_names, shape)
    if least is not None and "kernel" in times:
        row |= {"least_us": least, "share": least / times["kernel"]["median"]}
    return row


def least_us(case_names: str, shape: Shape) -> float | None:
    """The least time that the data sheet of this GPU allows, the sum over launches; None for other GPUs, and if the
    cases are not those of a whole call."""
    device = next((d for n, d in DEVICES.items() if n in torch.cuda.get_device_name()), None)
    found = [case for module in KERNELS for case in cases(module, shape, "sm_90") if case.name in case_names.split()]
    if device is None or not found:
        return None
    times = (max(c.flops / (c.rate * device.flops), c.bytes / device.bandwidth) for c in found)
    return 1e6 * sum(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels"], nargs="?", default="kernels")
    parser.add_argument("--preset", default="glm5")
    parser.add_argument("--only", action="append", choices=[*WORK], default=None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    told = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU: nothing was run. `glm5 kernels` compiles the kernels without one.")
        return
    shape, names = shape_of(told.preset), told.only or [*WORK]
    checked = [check(name, replace(shape, **SMALL), "cuda") for name in names]
    for row in checked:
        told_of = json.dumps(row["errors"]) + row.get("error", "")
        print(f"{row['name']:<24}{'right' if row['right'] else 'WRONG':<7}{told_of}", flush=True)
    rows = []
    for row in checked:
        if row["right"]:
            rows.append(measure(row["name"], shape, told.rounds))
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checked": checked, "times": rows}
    if told.json:
        told.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not all(row["right"] for row in checked):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
