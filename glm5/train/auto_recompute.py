"""`recompute = "auto"`: what each layer recomputes, planned for the memory of this job's devices."""

from __future__ import annotations

from glm5.config.activations import Recompute
from glm5.config.devices import similar_device
from glm5.config.keep_plan import keeps_text
from glm5.config.model import GLM5Config
from glm5.config.recipe import GradientStage
from glm5.config.step_setting import planned_setting
from glm5.device import memory_of, name_of
from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks, node_size

_log = get_logger(__name__)


def recompute_of(stage: GradientStage, config: GLM5Config, ranks: Ranks) -> Recompute | tuple[Recompute, ...]:
    """The stage's `recompute`, or the list that "auto" stands for, which is that of `glm5 plan` on such a device.

    All ranks must call. They plan for one device, that with the least memory, so that all recompute the same: layers of
    divided experts communicate when they are recomputed. On a CPU, the processes of a machine share its memory.
    """
    if stage.recompute != "auto":
        return stage.recompute
    device, layout, cpu = ranks.device, ranks.layout, ranks.device.type == "cpu"
    memory = layout.memory_bytes
    if memory is None:
        memory = memory_of(device) // ((node_size() or ranks.world) if cpu else 1)
    memory, name = min(ranks.gather((memory, name_of(device))))
    kind = similar_device(name, memory)
    setting, peak = planned_setting(stage, config, layout, ranks.world, kind, cpu=cpu)
    modes = setting.forward.recompute
    assert isinstance(modes, tuple) and peak is not None
    if ranks.main:
        text = keeps_text([(mode, bool(setting.offload)) for mode in modes])
        said = f"{stage.name}: kept for backward: {text}; the predicted peak is {peak / 1e9:,.2f} GB"
        if peak > kind.usable:
            _log.warning("%s, and %.2f GB can be used. Take fewer micro_rows.", said, kind.usable / 1e9)
        else:
            _log.info("%s of %.2f.", said, kind.usable / 1e9)
    return modes
