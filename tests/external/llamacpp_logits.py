"""Run by test_gguf.py if llama.cpp is installed: what it computes from a GGUF file.

    llamacpp_logits.py FILE JOB OUT

JOB is a JSON file with `ids`, lists of one length, and `texts`. OUT, a .npy file, gets logits [rows, length, V], and
OUT.json the ids of the texts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _llamacpp import Session


def main(file: str, job: str, out: str) -> None:
    wanted = json.loads(Path(job).read_text())
    rows = []
    for ids in wanted["ids"]:
        session = Session(Path(file), 1, len(ids), exact=True)
        session.forward(ids, range(len(ids)), [0] * len(ids), list(range(len(ids))))
        rows.append(np.stack([session.logits(index).copy() for index in range(len(ids))]))
    np.save(out, np.stack(rows))
    Path(f"{out}.json").write_text(json.dumps([session.tokenize(text) for text in wanted["texts"]]))


main(*sys.argv[1:])
