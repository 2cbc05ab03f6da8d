"""What a stage of reinforcement learning starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm5.chat import Tokenizer
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.loop import StageIO


@dataclass(frozen=True)
class StageStart:
    """The inputs of a stage. All are the same when an interrupted stage starts again.

    policy      the model with the stage's starting weights; copy it (`clone`) before changing anything. With several
                ranks it is deferred: `policy.clone().materialise()` loads a model to compute with
    io          `io.folder` is the stage's own folder, `io.metrics` the run's metrics, `io.name` the stage's name
    checkpoint  a function that returns the folder of a teacher's checkpoint. The argument is the name of an earlier
                stage, "start" or a path. Raises ConfigError for a checkpoint with another tokenizer than the run
    """

    policy: GLM5ForCausalLM
    tokenizer: Tokenizer
    io: StageIO
    checkpoint: Callable[[str], Path]
