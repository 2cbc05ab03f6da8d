"""Activation offload on a device that this machine does not have, in a process of its own (see `device_worker.py`).
Copies on a side stream are really late: they happen when somebody waits for their event, and not before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from glm5.config.model import GLM5Config
from glm5.data.packing import Batch, StepCounts
from glm5.model import offload
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.offload import Offload
from glm5.platforms.simulated import DEVICE, Pretender, Pretending
from tests.model.device_worker import (
    FAKE,
    LAYERS,
    Walk,
    fake_batch,
    fake_model,
    move,
    train,
)

aten = torch.ops.aten


class Stream:
    """A stream whose work waits in a list."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        assert other is COMPUTE, "copies wait for what computes"

    def record_event(self) -> tuple[Stream, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        stream, end = event
        while stream.done < end:
            stream.work[stream.done]()
            stream.work[stream.done] = lambda: None  # frees the tensors
            stream.done += 1


COMPUTE = Stream()
running = [COMPUTE]
protected: set[int] = set()


def current_stream(device: Any = None) -> Stream:
    return running[-1]


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    running.append(stream)
    yield
    running.pop()


device = torch.get_device_module(DEVICE)
device.Stream, device.current_stream, device.stream = Stream, current_stream, on_stream


def record_stream(self: Tensor, stream: Stream) -> None:
    assert stream is not COMPUTE


Pretender.record_stream = FakeTensor.record_stream = record_stream  # type: ignore[assignment, method-assign]


class Late(Pretending):
    """`Pretending`, with copies between host and device on streams."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", None):
            assert torch.device(kwargs.get("device") or "cpu").type == "cpu", "only host memory is pinned"
        if func.overloadpacket is not aten.copy_ or running[-1] is COMPUTE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        target, source, not_blocking = args
        assert not_blocking
        plain = [x.held if isinstance(x, Pretender) else x for x in (target, source)]
        running[-1].work.append(lambda: plain[0].copy_(plain[1]))
        return target


def gradients(recompute: Any, least: int | None) -> tuple[list[Tensor], Offload | None]:
    config = GLM5Config.preset("nano", **LAYERS | dict(num_hidden_layers=3))
    model = move(GLM5ForCausalLM(config, seed=3), Pretender)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (2, 40), generator=generator)
    documents = torch.zeros_like(ids)
    documents[0, 15:], documents[1, 35:] = 1, -1
    unit = None if least is None else Offload(least)
    with Late():
        batch = Batch(
            Pretender(ids), Pretender(documents), Pretender(documents >= 0), step=StepCounts(2, 75, (70,) * 9)
        )
        train(model, batch, watch="sparse", recompute=recompute, offload=unit)  # type: ignore[arg-type]
    return [p.grad.held for p in model.parameters() if p.grad is not None], unit  # type: ignore[attr-defined]


def compare(recompute: Any, expected: list[Tensor], wait: bool = True) -> dict[str, Any]:
    """Whether the gradients are the expected ones, and what was copied."""
    early: list[bool] = []
    copies: list[int] = []
    get, waits, begin = offload._Copy.get, offload._Lane.wait, offload._Copy.__init__

    def count(self: Any, tensor: Tensor, layer: Any) -> None:
        copies.append(tensor.nbytes)
        begin(self, tensor, layer)

    def look(self: Any) -> Tensor:
        early.append(self.back is not None)
        return get(self)

    offload._Copy.get, offload._Copy.__init__ = look, count  # type: ignore[method-assign]
    if not wait:
        offload._Lane.wait = lambda self, event: None  # type: ignore[method-assign]
    try:
        found, unit = gradients(recompute, 0)
    except IndexError:  # what has not arrived is no index
        return {"equal": False}
    finally:
        offload._Copy.get, offload._Lane.wait = get, waits  # type: ignore[method-assign]
        offload._Copy.__init__ = begin  # type: ignore[method-assign]
    assert unit is not None and unit.bytes == sum(copies) and len(found) == len(expected) > 50
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(found, expected)),
        "bytes": unit.bytes,
        "copies": len(copies),
        "fetched before use": sum(early) / len(early),
    }


def walk(recompute: Any) -> str:
    """What went wrong on fake tensors, "" if nothing did: only copies leave the device."""
    offload._lane.cache_clear()
    model = fake_model(GLM5Config.preset("nano", n_routed_experts=16, **LAYERS), torch.bfloat16)
    seen: set[str] = set()

    def look(name: str, tensor: Tensor) -> None:
        if tensor.device.type != DEVICE and tensor.ndim and tensor.numel():
            seen.add(name)

    with FAKE, Walk(look):
        train(model, fake_batch(2, 96), watch="sparse", recompute=recompute, offload=Offload(0))
    return " ".join(sorted(seen - {"aten.copy_", "aten.empty"})) if "aten.copy_" in seen else "nothing was copied"


if __name__ == "__main__":
    expected, _ = gradients(False, None)
    modes = False, True, "selective"
    result: dict[str, Any] = {str(mode): compare(mode, expected) for mode in modes}
    result["without waits"] = compare(False, expected, wait=False)
    print(json.dumps(result | {"walk": {str(mode): walk(mode) for mode in modes}}))
