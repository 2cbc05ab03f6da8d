"""The seven accelerator families of the paper (§5): what torch calls their devices, how processes find theirs, and what
they lack. No code of ours is particular to one of them; `glm5 platform check` shows what holds on a machine.

Facts are from the makers' plug-ins for vLLM and from FlagGems (September 2026); none of them was run here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from glm5.device import BACK_ENDS, choose_device
from glm5.errors import ConfigError


@dataclass(frozen=True)
class Platform:
    """One family. `device` is torch's name of it, `collectives` the back end of `torch.distributed`, `visible` the
    variable that says which devices a process may use. Where a family presents its devices as "cuda", one of `marks`
    stands in the names of its devices or in torch's version. `limits` are sentences for users."""

    name: str
    maker: str
    device: str
    collectives: str
    visible: str
    float64: bool
    limits: str = ""
    marks: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """What has to be installed."""
        return BACK_ENDS.get(self.device, "the maker's build of torch")

    def find(self) -> torch.device:
        """The first of its devices here. Raises ConfigError if there is none: another device is never taken for it."""
        package = BACK_ENDS.get(self.device)
        if package is not None and not importlib.util.find_spec(package):
            raise ConfigError(
                f"{self.maker} needs {package}, which is not installed here; install the maker's package beside torch "
                f"{torch.__version__}."
            )
        device = choose_device(f"{self.device}:0")
        if self.marks and not any(mark in _evidence(torch.get_device_module(device)) for mark in self.marks):
            raise ConfigError(
                f'the device "{self.device}" of this machine is not one of {self.maker}: neither its name nor torch\'s '
                f"version has {' or '.join(self.marks)}."
            )
        return device


PLATFORMS = (
    Platform("ascend", "Huawei Ascend", "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", False),
    Platform("moore-threads", "Moore Threads", "musa", "mccl", "MUSA_VISIBLE_DEVICES", False),
    Platform("hygon", "Hygon", "cuda", "nccl", "HIP_VISIBLE_DEVICES", True, marks=("hygon", "hcu", "dcu", "dtk")),
    Platform("cambricon", "Cambricon", "mlu", "cncl", "MLU_VISIBLE_DEVICES", False),
    Platform(
        "kunlunxin", "Kunlunxin", "cuda", "nccl", "XPU_VISIBLE_DEVICES", False, marks=("kunlun",)
    ),
    Platform("metax", "MetaX", "cuda", "nccl", "CUDA_VISIBLE_DEVICES", True, marks=("metax", "maca", "mxc")),
    Platform(
        "enflame", "Enflame", "gcu", "eccl", "TOPS_VISIBLE_DEVICES", False,
        limits="int64 is said to be incomplete; token ids and positions are int64.",
    ),
)  # fmt: skip


def families() -> list[dict[str, str | bool]]:
    """The table for users; `here` says whether a device is on this machine, and that none was ever run."""

    def here(platform: Platform) -> str:
        try:
            return f"{platform.find()}, adapter not run"
        except ConfigError:
            return "not here, adapter not run"

    return [
        {**{k: v for k, v in asdict(p).items() if k != "marks"}, "package": p.package, "here": here(p)}
        for p in PLATFORMS
    ]


def collectives_of(device: torch.device) -> str:
    """The back end that `torch.distributed` takes for a device, "none" if it has none."""
    try:
        return str(dist.get_default_backend_for_device(device))
    except ValueError:
        return "none"


def _evidence(module: ModuleType) -> str:
    name: Callable[[int], str] = getattr(module, "get_device_name", lambda number: "")
    return f"{torch.__version__} {[key for key in dir(torch) if 'hcu' in key]} {name(0)}".lower()
