"""Kernels, training steps and the engine on a GPU: first whether they are right, then how fast they are.

    python benchmarks/gpu.py kernels [--preset glm5] [--only attend] [--rounds 20] [--json FILE]
    python benchmarks/gpu.py train [--preset small --preset base] [--shape 8x4096 1x32768] [--json FILE]
    python benchmarks/gpu.py serve [--preset base] [--prompt 512 4096] [--batch 1 16 64] [--context 1024 65536]

Without a GPU it says so and ends. `train --quick` and `serve --quick` run all of it at tiny sizes on the CPU. What is
wrong is not timed, and the exit status is then 1.

kernels. Right: every kernel against its torch form in fp64 on the CPU, in fp32 (root mean square of the error at most
1e-5 of the values) and in bf16 (at most twice the error of the torch form in bf16, or 2^-8); whole numbers must be
equal. Times: at the preset's shapes in bf16, medians over rounds in which kernel and torch form take turns, with an
empty cache. `share` is the least time that the GPU's data sheet allows (see `glm5 kernels`) over the median. Beside
them, if they run: torch's own functions, FlashMLA, and for sparse prefill dense flash attention over the same 128k
tokens.

train. Right: the losses of four bf16 steps, with and without `compile` and in every mode of recomputation, are within
2^-7 of those of fp32 without either, on the same device. Then tokens per second, model FLOPs over the peak that a large
bf16 product reached in the same run (`mfu.measured`) and over the data sheet's, the optimizer's share of a step, peak
memory beside the predicted one, and how often the host waits for the device in a step.

serve. Right: log-probabilities of greedy tokens are within 2^-5 nats, on average, of the same weights in fp32, or both
within 1.25 times what the model's own pass over whole rows in bf16 is, and 2^-4. Then prefill by length and decoding by
batch and context, for sparse and dense attention; `share_of_memory_bound` is the time to read what a step must read, at
the bandwidth of a large copy in the same run, over the measured time. Beside them transformers, vLLM and SGLang, if
they are installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _gpu_clock import Clock
from _gpu_inputs import SMALL, WORK, Draw
from torch import Tensor

from glm5.device import choose_device
from glm5.launch.kernels import shape_of
from glm5.ops.indexer import select_topk
from glm5.ops.operators import TORCH_FORMS, TRITON_KERNELS
from glm5.ops.triton import Shape
from glm5.ops.triton.compiled import DEVICES, KERNELS, cases

ROUNDED = 2**-8
"""Error of a number that was rounded to bf16 twice, as weights of a softmax before a matrix product. On a CPU the torch
forms do not round them."""


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
    return select_topk(total * scale[0].unsqueeze(1) if scale else total, valid, topk)


EXACT: Mapping[str, Callable[..., Any]] = {
    **TORCH_FORMS,
    **dict.fromkeys(("select", "select_8bit"), selected_exactly),
    "round_rows": lambda x: TORCH_FORMS["round_rows"](x.float()),  # in fp64, other numbers are halfway
}


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


def kernels(told: argparse.Namespace) -> dict[str, Any]:
    """Check, then time the kernels that are right."""
    shape, names = shape_of(told.preset[0] if told.preset else "glm5"), told.only or [*WORK]
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
    return {"device": torch.cuda.get_device_name(), "checked": checked, "times": rows}


def model(told: argparse.Namespace) -> dict[str, Any]:
    """`train` or `serve` on the device that `choose_device` finds; prints the result."""
    from glm5.process import tune

    tune()
    clock, quick = Clock(choose_device("cpu" if told.quick else "auto")), told.quick
    rounds = 2 if quick else told.rounds
    if told.what == "train":
        import _gpu_train

        shapes = [(2, 64)] if quick else [(int(r), int(n)) for r, n in (s.split("x") for s in told.shape)]
        found = _gpu_train.run(["nano"] if quick else told.preset or ["small", "base"], shapes, clock, rounds, quick)
    else:
        import _gpu_serve

        sizes = ([64], [1, 2], [64]) if quick else (told.prompt, told.batch, told.context)
        preset = "nano" if quick else (told.preset or ["base"])[0]
        found = _gpu_serve.run(preset, clock, *sizes, rounds, quick)
    found = {"device": clock.name(), "quick": quick, **found}
    print(json.dumps(found, indent=1))
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kernels", "train", "serve"], nargs="?", default="kernels")
    parser.add_argument("--preset", action="append", help="repeatable for train; default glm5, small and base, base")
    parser.add_argument("--only", action="append", choices=[*WORK], default=None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="train, serve: tiny sizes on the CPU; shows that it runs")
    parser.add_argument("--shape", nargs="+", default=["8x4096", "1x32768"], help="train: ROWSxLENGTH of a step")
    parser.add_argument("--prompt", nargs="+", type=int, default=[512, 4096, 32768], help="serve: prompt lengths")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64], help="serve: sequences at once")
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 16384, 65536], help="serve: tokens before")
    told = parser.parse_args()
    if bad := [shape for shape in told.shape if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape)]:
        parser.error(f"--shape takes ROWSxLENGTH such as 8x4096, not {bad[0]!r:.40}")
    if min([told.rounds, *told.prompt, *told.batch, *told.context]) < 1:
        parser.error("--rounds, --prompt, --batch and --context are at least 1")
    return told


def main() -> None:
    told = options()
    if told.what == "kernels" and not torch.cuda.is_available():
        print("No GPU: nothing was run. `glm5 kernels` compiles the kernels without one.")
        return
    if told.what != "kernels" and not told.quick and choose_device().type == "cpu":
        print("No GPU: nothing was run. `--quick` runs everything at tiny sizes on the CPU.")
        return
    found = (kernels if told.what == "kernels" else model)(told) | {"torch": torch.__version__}
    if told.json:
        told.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not all(row["right"] for row in found["checked"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
