"""Give a dense MLA checkpoint sparse attention (§2.1.1): indexer warm-up, then sparse training, as `glm5 adapt` does.

    python examples/adapt_a_dense_checkpoint.py DIR SHARDS OUT [STEPS]

DIR is a dense checkpoint with a tokenizer, SHARDS what `glm5 data build --tokenizer DIR` wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

from glm5 import GLM5Config
from glm5.launch.adapt import Options, run


def main(directory: str, shards: str, out: str, steps: int = 200) -> None:
    run(Path(directory), Path(shards), Path(out), Options(steps=steps))
    adapted = GLM5Config.load(out)
    print(
        f"{out} attends to {adapted.index_topk} keys per query; {out}-adapt/report.html compares it with the dense one"
    )


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:5]))
