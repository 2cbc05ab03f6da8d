"""What glm5 asks of a device: training, policy updates and the engine on a small model, beside the same on the CPU.
`glm5 platform check` runs it on any device of torch.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from glm5 import __version__
from glm5.device import choose_device, on_host, put, widest
from glm5.errors import UsageError
from glm5.launch.conformance_jobs import ENGINES, STAGES, UPDATES, Numbers, Watch, generate, learn, small_model, train
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.platforms import PLATFORMS, collectives_of

SIMULATED = "simulated"
"""A device without float64 that exists in Python only (`glm5.platforms.simulated`)."""
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""How far numbers and weights of training may differ from the CPU's, by the dtype of its products."""


class NotRun(Exception):
    """Why a check does not apply to a device."""


@dataclass(frozen=True)
class Check:
    """`result` is "passed", "failed" or "not run"; `detail` says how near the CPU's numbers are, or why."""

    name: str
    result: str
    detail: str
    seconds: float


def _numbers(device: torch.device) -> str:
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    for kind in kinds:
        values = torch.arange(48).reshape(6, 8).to(kind)
        there, ours = put(values, device), values.to(torch.float32)
        for found, wanted in (
            (there[:, 1:] * 2, ours[:, 1:] * 2),
            (there.index_select(0, put([4, 1], device)), ours[[4, 1]]),
        ):
            if not torch.equal(on_host(found).float(), wanted):
                raise AssertionError(f"{kind} gives other numbers than the CPU")
    large: dict[str, Any] = {
        "a": put([2**53 + 1, -(2**62)], device),
        "b": [put([True, False], device), put([0.1], device)],
    }
    home = on_host(large)
    if home["a"].tolist() != [2**53 + 1, -(2**62)] or home["b"][0].tolist() != [True, False]:
        raise AssertionError("integers do not survive the way to the device and back")
    return "float64 too" if widest(device) == torch.float64 else "no float64: sums over many tokens are in fp32"


def _weights_on_disk(device: torch.device) -> str:
    model = small_model(torch.bfloat16, str(device))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = GLM5ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device=device)
    same = [torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    if not all(same):
        raise AssertionError(f"{len(same) - sum(same)} of {len(same)} weights are others after saving and loading")
    return "equal bit for bit"


def _nearness(ours: Numbers, theirs: Numbers, limit: float) -> str:
    """How far two jobs' numbers and weights are apart. Raises AssertionError if that is more than `limit`."""
    weights = {name: float((a - theirs["weights"][name]).abs().max()) for name, a in ours["weights"].items()}
    numbers = dict[str, float]()
    for step, (mine, its) in enumerate(zip(ours["numbers"], theirs["numbers"], strict=True), start=1):
        for key, one in mine.items():
            other = its.get(key, math.inf)
            if not (math.isnan(one) and math.isnan(other)):
                numbers[f"{key} of step {step}"] = abs(one - other) / max(1.0, abs(one))
    (where, worst), (which, distance) = _largest(numbers), _largest(weights)
    if not worst <= limit or not distance <= limit:
        raise AssertionError(f"{where} differs by {worst:.2g}, {which} by {distance:.2g}; the limit is {limit:g}")
    return f"numbers within {worst:.1g}, weights within {distance:.1g}"


def _largest(values: dict[str, float]) -> tuple[str, float]:
    """The name and value of the largest number; NaN is larger than all."""
    return max(values.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1], default=("nothing", 0.0))


def _same_answers(ours: Numbers, theirs: Numbers, sampled: bool) -> str:
    """Rounding may decide a draw or a near-tie otherwise, after which a text goes its own way: up to there,
    log-probabilities are compared. Raises AssertionError if a greedy text differs, or more than a third of sampled."""
    same = [a == b for a, b in zip(ours["tokens"], theirs["tokens"], strict=True)]
    apart = dict[str, float]()
    for text, (mine, its) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        for at, (one, other) in enumerate(zip(mine, its, strict=True)):
            if one != other:
                break
            apart[f"{text}, {at}"] = abs(ours["logprobs"][text][at] - theirs["logprobs"][text][at])
    worst = _largest(apart)[1]
    said = f"{sum(same)} of {len(same)} texts equal, log-probabilities within {worst:.1g}"
    if theirs["failed"]:
        raise AssertionError("the device cannot capture graphs")
    if not worst <= 1e-3 or sum(same) < len(same) * (2 / 3 if sampled else 1):
        raise AssertionError(said)
    return said


def _collectives(device: torch.device) -> str:
    import torch.distributed as dist

    name = collectives_of(device)
    if dist.is_initialized():
        raise NotRun("this process is in a group already")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(name, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            tensor = put([1.0, 2.0], device)
            dist.all_reduce(tensor)
            if tensor.tolist() != [1.0, 2.0]:
                raise AssertionError(f"{name} sums wrongly")
        finally:
            dist.destroy_process_group()
    return f"{name} in one process; several were not tried"


def checks_of(device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, function that returns a detail, raises NotRun, or fails) of every check."""
    place, dtype = str(device), widest(device)
    plain = Watch()
    yield "numbers", lambda: _numbers(device)
    yield "saving and loading", lambda: _weights_on_disk(device)
    for name in STAGES:
        limit = CLOSE[torch.bfloat16 if name == "bf16" else dtype]
        yield (
            f"training: {name}",
            lambda name=name, limit=limit: _nearness(  # type: ignore[misc]
                train("cpu", plain, name, dtype), train(place, plain, name, dtype), limit
            ),
        )
    for name in UPDATES:
        yield (
            f"policy update: {name}",
            lambda name=name: _nearness(  # type: ignore[misc]
                learn("cpu", plain, name, dtype), learn(place, plain, name, dtype), CLOSE[dtype]
            ),
        )
    for name in ENGINES:
        yield f"engine: {name}", lambda name=name: _engine(device, name)  # type: ignore[misc]
    yield "collectives", lambda: _collectives(device)


def _engine(device: torch.device, name: str) -> str:
    if "graphs" in name and device.type != "cuda":
        raise NotRun("graphs are captured on CUDA devices only")
    sampled = "sampled" in name or name == "graphs, drafts"
    return _same_answers(generate("cpu", Watch(), name), generate(str(device), Watch(), name), sampled)


def conform(name: str, only: Sequence[str] = (), told: Callable[[Check], None] = lambda check: None) -> dict[str, Any]:
    """Run the checks on a platform, a device of torch, or "simulated". `only` are beginnings of checks' names.

    Returns the machine, the device and the checks; `ok` if none failed. Raises ConfigError if the device is not here,
    and UsageError if `only` leaves no check.
    """
    inside: AbstractContextManager[Any] = nullcontext()
    families = {platform.name: platform for platform in PLATFORMS}
    if name == SIMULATED:
        from glm5.platforms.simulated import DEVICE, Pretending

        inside, device = Pretending([], float64=False), torch.device(f"{DEVICE}:0")
    else:
        device = families[name].find() if name in families else choose_device(name)
    found = []
    with inside:
        for label, check in checks_of(device):
            if only and not label.startswith(tuple(only)):
                continue
            if label == "collectives" and name == SIMULATED:
                continue
            found.append(_done(label, check))
            told(found[-1])
    if not found:
        raise UsageError(f"no check begins with {' or '.join(only)}.")
    return {
        "platform": name,
        "device": str(device),
        "hardware": _hardware(device, name),
        "glm5": __version__,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "ok": all(check.result != "failed" for check in found),
        "checks": [asdict(check) for check in found],
    }


def _done(label: str, check: Callable[[], str]) -> Check:
    began = time.perf_counter()
    try:
        result, detail = "passed", check()
    except NotRun as reason:
        result, detail = "not run", str(reason)
    except Exception as error:  # whatever a device's back end raises
        said = str(error).strip().splitlines() or [""]
        result, detail = (
            "failed",
            f"{'' if isinstance(error, AssertionError) else type(error).__name__ + ': '}{said[0]:.300}",
        )
    return Check(label, result, detail, round(time.perf_counter() - began, 2))


def _hardware(device: torch.device, name: str) -> str:
    if name == SIMULATED or device.type == "cpu":
        return "CPU"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else "unknown"
