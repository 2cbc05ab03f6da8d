"""Pre-training and context extension: packed rows, MTP, loss-free balance (§2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.config.recipe import CorpusStage, PretrainStage
from glm5.data.loader import RowLoader
from glm5.data.mixture import make_loader
from glm5.data.packing import Batch, StepBatches
from glm5.data.shards import Shard
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.optim.schedules import rows_at, rows_before
from glm5.train.loop import Evaluate, StageIO, train
from glm5.train.losses import backbone_loss
from glm5.train.step_metrics import StepMetrics


@dataclass(frozen=True)
class StageRows(StepBatches):
    """The batches of a stage: the loader's next rows, in the number given by the stage's ramp."""

    loader: RowLoader
    stage: CorpusStage

    def num_rows(self, step: int) -> int:
        """See `StepBatches`."""
        return rows_at(step, **self._ramp)

    def build(self, step: int, rows: range) -> Batch:
        """See `StepBatches`."""
        before = rows_before(step, **self._ramp)
        batch = self.loader.build(range(before + rows.start, before + rows.stop))
        return replace(batch, before=before * self.stage.row_length)

    @property
    def _ramp(self) -> dict[str, int]:
        stage = self.stage
        if stage.ramp is None:
            return dict(first=stage.rows, last=stage.rows, ramp=0)
        return dict(first=stage.ramp.rows, last=stage.rows, ramp=round(stage.ramp.tokens / stage.row_length))


def batches(shards: Shard | Mapping[str, Shard], tokenizer: Tokenizer, stage: CorpusStage, seed: int) -> StageRows:
    """The batches of a stage; they depend only on the seed, the stage's name and the step."""
    named = {"corpus": shards} if isinstance(shards, Shard) else shards
    loader = make_loader(
        stage.corpus, named, tokenizer, rows=stage.rows, row_length=stage.row_length, seed=seed, name=stage.name
    )
    return StageRows(loader, stage)


def run(
    model: GLM5ForCausalLM,
    stage: PretrainStage,
    shards: Shard | Mapping[str, Shard],
    tokenizer: Tokenizer,
    io: StageIO,
    seed: int,
    evaluate: Evaluate | None = None,
) -> dict[str, float]:
    """Train all parameters. After every step the router bias moves against each expert's excess load."""

    def loss_of(model: GLM5ForCausalLM, batch: Batch, ctx: ForwardContext) -> tuple[Tensor, StepMetrics]:
        return backbone_loss(model, batch, ctx, stage)

    batch_at = batches(shards, tokenizer, stage, seed)
    return train(model, stage, io, batch_at, loss_of, bias_rate=stage.bias_rate, evaluate=evaluate)
