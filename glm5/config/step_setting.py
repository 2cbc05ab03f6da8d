"""How the steps of a stage run on one process of a job: what the predictions of memory and time start from."""

from __future__ import annotations

from dataclasses import replace

from glm5.config.activations import WIDE, Attention, Forward
from glm5.config.devices import Device
from glm5.config.keep_plan import recompute_plan
from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.recipe import CorpusStage, DsaStage, GradientStage, PolicyStage, PretrainStage, SftStage
from glm5.config.step_memory import Setting


def gradient_setting(
    stage: GradientStage, config: GLM5Config, layout: Layout, world: int, *, cpu: bool = False
) -> Setting:
    """Of a stage before RL, in a layout that the job accepts (`layout_rules`). With `recompute = "auto"`, nothing is
    recomputed yet: see `planned_setting`."""
    own = -(-stage.rows // (world // layout.pp // layout.cp))
    micro = min(stage.micro_rows or own, own)
    attention: Attention = "sparse" if config.selects_keys else "dense"
    depths, learns, trains = 0, False, "all"
    if isinstance(stage, PretrainStage) and config.use_dsa and not config.indexer_adapted:
        attention = "dense"
    if isinstance(stage, CorpusStage | SftStage) and stage.mtp_weight and config.num_nextn_predict_layers:
        depths = stage.mtp_depths
    if isinstance(stage, SftStage):
        trains, depths = "backbone", depths if stage.text_share else 0
    if isinstance(stage, DsaStage):
        learns, attention = stage.kind == "dsa_sparse", "sparse"
        if stage.kind == "dsa_warmup":
            attention, trains, depths = "warmup", "indexers", config.num_nextn_predict_layers
    forward = Forward(
        micro,
        stage.row_length,
        2 if stage.dtype == "bfloat16" else WIDE,
        attention,
        learns,
        depths,
        False if stage.recompute == "auto" else stage.recompute,
        balance=isinstance(stage, CorpusStage) and bool(stage.balance_weight),
        cpu=cpu,
        cp=layout.cp,
    )
    offload = stage.offload and not cpu  # on a CPU the key does nothing
    return job_setting(stage, layout, world, forward, parts=-(-own // micro), trains=trains, offload=offload)


def planned_setting(
    stage: GradientStage, config: GLM5Config, layout: Layout, world: int, device: Device, *, cpu: bool = False
) -> tuple[Setting, int | None]:
    """`gradient_setting`; with `recompute = "auto"`, it recomputes as little as fits on the device, and the predicted
    peak of the fullest process is given."""
    setting = gradient_setting(stage, config, layout, world, cpu=cpu)
    if stage.recompute != "auto":
        return setting, None
    modes, peak = recompute_plan(config, setting, device)
    return replace(setting, forward=replace(setting.forward, recompute=modes)), peak


def job_setting(
    stage: GradientStage | PolicyStage,
    layout: Layout,
    world: int,
    forward: Forward,
    *,
    parts: int,
    trains: str,
    offload: bool = False,
) -> Setting:
    """What the processes and the optimizer decide of a setting."""
    return Setting(
        forward,
        parts,
        world=world,
        ep=layout.ep,
        pp=layout.pp,
        stages_per_rank=layout.pp_stages_per_rank,
        pp_layers=tuple(layout.pp_layers),
        deferred=layout.pp_deferred,
        optimizer=stage.optim.kind,
        ns_item=2 if stage.optim.ns_dtype == "bfloat16" else WIDE,
        reduce_once=layout.reduce_once,
        offload=offload,
        trains=trains,
    )
