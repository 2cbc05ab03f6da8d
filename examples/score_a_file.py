"""Score a text file: bits per byte, and the tokens that surprise the model most.

python examples/score_a_file.py DIR FILE
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from glm5 import Engine


def main(directory: str, file: str) -> None:
    engine = Engine.from_pretrained(directory)
    assert engine.tokenizer is not None
    text = Path(file).read_text(encoding="utf-8")
    ids = engine.tokenizer.encode(text)[: engine.max_length]
    (logprobs,) = engine.score([ids])
    size = len(engine.tokenizer.decode_bytes(ids[1:]))
    print(f"{-sum(logprobs) / math.log(2) / size:.3f} bits per byte over {size} bytes")
    for place in sorted(range(len(logprobs)), key=lambda i: logprobs[i])[:5]:
        before = engine.tokenizer.decode(ids[max(0, place - 8) : place + 1])
        print(f"{logprobs[place]:8.2f}  {engine.tokenizer.decode([ids[place + 1]])!r:12} after {before!r}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
