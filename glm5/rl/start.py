"""What a stage of reinforcement learning starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5.chat import Tokenizer
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.logs import get_logger
from glm5.train.loop import StageIO

_log = get_logger(__name__)


@dataclass(frozen=True)
class StageStart:
    """The inputs of a stage. All are the same when an interrupted stage starts again.

    policy      the model with the stage's starting weights; copy it (`clone`) before changing anything. With several
                ranks it is deferred: `policy.clone().materialise()` loads a model to compute with
    io          `io.folder` is the stage's own folder, `io.metrics` the run's metrics, `io.name` the stage's name
    checkpoint  a function that returns the folder of a teacher's checkpoint. The argument is the name of an earlier
                stage, "start" or a path. Raises ConfigError for a checkpoint with another tokenizer than the run
    judge_checkpoint  the same for a judge, which may have another tokenizer: it reads text
    """

    policy: GLM5ForCausalLM
    tokenizer: Tokenizer
    io: StageIO
    checkpoint: Callable[[str], Path]
    judge_checkpoint: Callable[[str], Path] = Path


def as_begun(io: StageIO, name: str, sources: Sequence[str | Path], write: Callable[[Path], None]) -> Path:
    """The file `name` in the stage's folder, which `write` makes from `sources` when the stage begins. A stage that
    resumes goes on with it, and a warning says if a source has changed since: otherwise the rest of the stage would
    learn from other rewards than its beginning."""
    copy = io.folder / name
    if not copy.exists():
        write(copy)
        return copy
    written = copy.stat().st_mtime
    changed = [str(path) for path in map(Path, sources) if path.exists() and path.stat().st_mtime > written]
    if changed:
        _log.warning("%s: %s has changed since the stage began, which goes on with %s; delete %s to begin it again.",
                     io.name, ", ".join(changed), copy, io.folder)  # fmt: skip
    return copy
