"""The torchrun process group as `Ranks` of pipeline stages: pp x the ranks of a stage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from glm5.config.layout_rules import model_problems, refuse
from glm5.config.parallel import Layout
from glm5.config.pipeline import divide
from glm5.errors import ConfigError
from glm5.model.dsa import INDEXER
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.pipeline_stage import StagePass, keep_stages
from glm5.parallel.expert import divide_experts
from glm5.parallel.fsdp import RUN, fill_shards
from glm5.parallel.mesh import TorchRanks
from glm5.parallel.pipeline import CHANNELS, Pipeline, StageLinks
from glm5.parallel.zero import shard_parameters

K = TypeVar("K")
P = TypeVar("P")
T = TypeVar("T")


class PipelineRanks(TorchRanks):
    """Ranks of which the first world / `pp` have the first stage of the model, and so on; within a stage they are
    divided as without stages. A sharded model has only the layers of this rank's stages."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        stages = torch.arange(self.world).view(layout.pp, -1)
        self.pipeline_stages, self._stage_world = stages.shape
        self._index, place = divmod(self.rank, self._stage_world)
        columns, timeout = stages.T.tolist(), timedelta(seconds=layout.timeout_seconds)
        groups = [[dist.new_group(column, timeout=timeout) for column in columns] for _ in range(CHANNELS)]
        self._links = StageLinks(columns[place], self._index, [channel[place] for channel in groups], self.device)

    @property
    def data_ranks(self) -> tuple[int, int]:
        """See `Ranks`."""
        return self.rank % self._stage_world // self.layout.cp, self._stage_world // self.layout.cp

    @property
    def writes_whole(self) -> bool:
        """See `Ranks`."""
        return self.rank % self._stage_world == 0

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """See `Ranks`."""
        return self._everyone.get_group()

    def shard(self, model: GLM5ForCausalLM, dtype: torch.dtype, trainable: Callable[[str], bool]) -> GLM5ForCausalLM:
        refuse(model_problems(self.layout, model.config))
        gc.collect()  # the shards of the stage before are in reference cycles
        source, model.weight_source = model.weight_source, None
        layout, names = self.layout, [name for name, _ in model.named_parameters()]
        spans = divide(model.config, layout.pp * layout.pp_stages_per_rank, layout.pp_layers)
        own = spans[self._index :: layout.pp]
        keep_stages(model, own)
        if self._experts is not None:
            divide_experts(model, self._experts)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable(name))
        shard_parameters(model, self._everyone, self._grid["dp"], self.device)
        if hasattr(model.model, "embed_tokens") and not any(span.embeds for span in own):
            model.model.embed_tokens.weight.tied_copy = True  # type: ignore[attr-defined]
        if source is not None:
            self.together(lambda: fill_shards(model, source), patient=True)
        learns = any(trainable(name) for name in names if INDEXER not in name)
        setattr(model, RUN, Pipeline(model, spans, self._links, dtype, learns, layout.pp_deferred))
        return model

    def accumulate(
        self, model: GLM5ForCausalLM, parts: Sequence[P], work: Callable[[P, StagePass | None], Tensor]
    ) -> list[Tensor]:
        found: list[Tensor] = getattr(model, RUN).accumulate(parts, work)
        return found

    def run(self, function: Callable[..., T], model: GLM5ForCausalLM, *args: Any) -> T:
        pipeline: Pipeline = getattr(model, RUN)
        if pipeline.computing:
            return function(model, *args)
        with pipeline.relayed():
            return function(model, *args)

    def main_copy(self, model: GLM5ForCausalLM) -> GLM5ForCausalLM:
        raise ConfigError("A model in pipeline stages cannot generate on one rank; run this with parallel.pp = 1.")

    def union(self, named: dict[K, T]) -> dict[K, T]:
        """See `Ranks`."""
        return {name: value for part in self.gather(named) for name, value in part.items()}
