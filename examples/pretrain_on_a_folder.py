"""Pre-train a small model from scratch on the text files of a folder, then let it continue a text.

python examples/pretrain_on_a_folder.py FOLDER [STEPS]
"""

from __future__ import annotations

import sys

from glm5 import Engine, SamplingParams
from glm5.config.optim import OptimConfig
from glm5.config.recipe import PretrainStage, RunRecipe, TokenizerStage
from glm5.launch.pipeline import run_pipeline


def main(folder: str, steps: int = 300) -> None:
    recipe = RunRecipe(
        name="folder",
        preset="nano",
        model={"use_dsa": False},
        stages=[
            TokenizerStage(kind="tokenizer", name="tokenizer", sources=[folder], vocab_size=400),
            PretrainStage(
                kind="pretrain", name="pretrain", rows=16, row_length=128, bias_rate=0.02,
                optim=OptimConfig(steps=steps, lr=1.5e-2, final_lr=1e-3, warmup=8),
            ),
        ],
    )  # fmt: skip
    run = run_pipeline(recipe)
    engine = Engine.from_pretrained(run / "final")
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("import ")
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=40, temperature=0.7, seed=0))
    print(engine.tokenizer.decode([*prompt, *done.token_ids]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:3]))
