"""What decides how a stage of a recipe is divided into pipeline stages: its kind, and the indexers of its model."""

from __future__ import annotations

from typing import Any

from glm5.config.model import GLM5Config
from glm5.config.parallel import Layout
from glm5.config.pipeline import Span, divide
from glm5.config.recipe import DsaStage, PolicyStage, Stage
from glm5.errors import ConfigError

NO_INDEXER = (
    "Layer {} shares the indexer of an earlier pipeline stage. The loss of an indexer needs all layers that use it in "
    "one stage: set parallel.pp_layers so that each stage begins with a layer that has an indexer."
)


def stage_spans(stage: Stage, config: GLM5Config, layout: Layout) -> list[Span]:
    """The pipeline stages in which `stage` trains a model. Raises ConfigError if it cannot."""
    if layout.pp == 1:
        return divide(config, 1)
    spans = divide(config, layout.pp * layout.pp_stages_per_rank, layout.pp_layers)
    if isinstance(stage, PolicyStage):
        raise ConfigError(f"{stage.name}: stages of kind {stage.kind} have no pipeline stages; set parallel.pp = 1.")
    if getattr(stage, "compile", False):
        raise ConfigError(f"{stage.name}: compile = true does not work with parallel.pp above 1; remove one of them.")
    for span in spans:
        if isinstance(stage, DsaStage) and span.takes_indices:
            raise ConfigError(f"{stage.name}: {NO_INDEXER.format(span.layers.start)}")
    return spans


def with_fewer_indexers(config: GLM5Config, layers: int | str) -> GLM5Config:
    """Without the indexers of some layers (see `DsaStage.share_indexers`). Raises ConfigError for a model without
    sparse attention, or for a layer that would get its indexer back."""
    if not config.use_dsa:
        raise ConfigError("share_indexers: this model has no indexers; add them with a stage of kind dsa_warmup first.")
    keys: dict[str, Any] = {"index_topk_freq": 1, "index_skip_topk_offset": 2, "index_topk_pattern": None}
    if isinstance(layers, str):
        keys["index_topk_pattern"] = layers
        if len(layers) != config.num_hidden_layers:
            raise ConfigError(
                f'share_indexers = "{layers}" needs one letter for each of the {config.num_hidden_layers} layers.'
            )
    else:
        keys |= {"index_topk_freq": layers, "index_skip_topk_offset": 3}
    fewer = config.replace(indexer_types=(), **keys)
    depth = range(config.num_hidden_layers)
    if back := [layer for layer in depth if fewer.computes_topk(layer) and not config.computes_topk(layer)]:
        raise ConfigError(
            f"share_indexers = {layers!r} keeps an indexer in layer {back[0]}, which has none; choose fewer."
        )
    return fewer
