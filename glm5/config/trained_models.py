"""Which model every stage of a recipe trains, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glm5.config.model import GLM5Config
from glm5.config.recipe import (
    DsaStage,
    GradientStage,
    PolicyStage,
    PretrainStage,
    RunRecipe,
    Stage,
    TokenizerStage,
)
from glm5.errors import ConfigError


def check_indexers(recipe: RunRecipe) -> None:
    """Raise ConfigError for a run from scratch that calls its indexers adapted: they would select keys at random, and a
    selection has no gradient to learn from."""
    if recipe.start is None and recipe.model.get("indexer_adapted"):
        raise ConfigError(
            f"{recipe.name}: model.indexer_adapted = true asks for sparse attention with untrained indexers; remove "
            'it. Attention is dense until a stage of kind "dsa_warmup" or "dsa_sparse" trains them.'
        )


def trained_models(recipe: RunRecipe) -> Iterator[tuple[Stage, GLM5Config]]:
    """Every stage that trains, with the configuration of its model. Raises ConfigError for one that cannot be."""
    check_indexers(recipe)
    preset = GLM5Config.preset(recipe.preset)
    config: GLM5Config | None = None
    if recipe.start is not None:
        config = GLM5Config.load(recipe.start)
    vocabulary: dict[str, Any] = {}
    for stage in recipe.stages:
        if isinstance(stage, TokenizerStage):
            vocabulary = {"vocab_size": stage.vocab_size}
            continue
        if config is None:
            config = GLM5Config.preset(recipe.preset, **{**vocabulary, **recipe.model})
            config = config.replace(indexer_adapted=False) if config.use_dsa else config
        if isinstance(stage, PretrainStage) and stage.max_position_embeddings is not None:
            config = config.replace(max_position_embeddings=stage.max_position_embeddings)
        if isinstance(stage, DsaStage):
            config = _with_indexers(config, recipe, preset, stage)
            if stage.share_indexers is not None:
                try:
                    config = with_fewer_indexers(config, stage.share_indexers)
                except ConfigError as error:
                    raise ConfigError(f"{stage.name}: {error}") from None
        if isinstance(stage, GradientStage | PolicyStage):
            yield stage, config


def _with_indexers(config: GLM5Config, recipe: RunRecipe, preset: GLM5Config, stage: DsaStage) -> GLM5Config:
    if config.use_dsa:
        return config.replace(indexer_adapted=True)
    topk = recipe.model.get("index_topk") or preset.index_topk
    if not topk:
        raise ConfigError(f"{stage.name}: set model.index_topk; the preset has no sparse attention.")
    return config.replace(use_dsa=True, index_topk=topk)


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
