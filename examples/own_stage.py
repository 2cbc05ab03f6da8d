"""Your own stage in one file: the average of a model's weights with those of an earlier stage (arXiv 2203.05482).

python examples/own_stage.py [stages.average.share=0.5 ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from pydantic import Field

from glm5.config.load import load_recipe
from glm5.config.recipe import STAGES, RunRecipe
from glm5.launch.pipeline import run_pipeline
from glm5.launch.stages import CustomStage, RunState
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.loop import StageIO


class AverageStage(CustomStage):
    """The fields are the keys of the stage in the recipe."""

    other: str
    """Name of an earlier stage."""
    share: float = Field(0.5, ge=0, le=1)
    """Weight of the other stage's model."""

    def run(self, state: RunState, io: StageIO) -> dict[str, float]:
        model, moved = state.need_model(), 0.0
        other = dict(GLM5ForCausalLM.from_pretrained(state.checkpoints[self.other]).named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                change = self.share * (other[name] - parameter)
                parameter += change
                moved += float(change.square().sum())
        io.advance(1, {})
        return {"moved": moved**0.5}


if __name__ == "__main__":
    STAGES.add("average", AverageStage)
    print(run_pipeline(load_recipe(Path(__file__).with_name("own_stage.toml"), RunRecipe, sys.argv[1:])))
