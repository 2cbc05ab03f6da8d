"""Run by test_ruler_lm_eval.py with the package lm_eval: the reader's scores in lm-eval's offline RULER tasks.

    lm_eval_ruler.py REQUEST OUT

REQUEST is JSON: the tokenizer's directory, the shares that the reader sees, per row the task and its length, and the
lengths of the row "fwe". OUT gets per row the lengths of the samples in tokens, and per share their scores.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.tasks import TaskManager
from lm_eval.tasks.ruler.common_utils import get_tokenizer
from lm_eval.tasks.ruler.fwe_utils import sys_kwext

from tests.external.ruler_reader import read


def main(request: str, out: str) -> None:
    asked: dict[str, Any] = json.loads(Path(request).read_text("utf-8"))
    lengths = {length for _, length in asked["rows"].values()}
    managers = {
        length: TaskManager(metadata={"tokenizer": asked["tokenizer"], "max_seq_lengths": [length]})
        for length in lengths
    }
    rows = {}
    for row, (name, length) in asked["rows"].items():
        random.seed(0)
        np.random.seed(0)
        task = managers[length].load([name])["tasks"][name]
        docs = list(task.test_docs())
        if row == "fwe":
            # It shuffles all texts of one length alike: the samples of one length would count as one.
            tokenizer = get_tokenizer(asked["tokenizer"])
            docs = [doc for tokens in asked["fwe"] for doc in sys_kwext(tokenizer, tokens, num_samples=1)]
        scores: dict[float, list[float]] = {share: [] for share in asked["shares"]}
        for doc in docs:
            prompt = task.doc_to_text(doc)
            for share in scores:
                result = task.process_results(doc, [read(prompt, share)])
                scores[share].append(result[str(doc["max_length"])])
        rows[row] = {"lengths": [doc["length"] for doc in docs], "scores": scores}
        print(row, flush=True)
    Path(out).write_text(json.dumps(rows), encoding="utf-8")


main(*sys.argv[1:])
