"""Our RULER tasks measure what those of lm-eval measure: a scripted reader that sees only the last part of the context
gets the same scores in both, whatever that part, each side made and scored by its own code.

lm-eval's other seven tasks need downloads: essays, SQuAD and HotpotQA.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.records import Message
from glm5.stats import Interval, bounded_mean
from glm5.tasks import make_family
from glm5.tasks.long_context.haystack import sentences
from glm5.tasks.long_context.ruler import TASKS
from tests.external.environments import interpreter
from tests.external.ruler_reader import read

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
FWE = range(1024, 3072, 8)
"""Lengths of the samples of "fwe" on both sides."""
ROWS = {
    "niah_single_1": ("niah_single_1", 2048),
    "niah_multikey_2": ("niah_multikey_2", 2048),
    "niah_multikey_3": ("niah_multikey_3", 2048),
    "vt": ("ruler_vt", 2048),
    "cwe": ("ruler_cwe", 2048),
    "cwe-4096": ("ruler_cwe", 4096),
    "fwe": ("ruler_fwe", FWE.start),
}
"""lm-eval's name and the length in tokens. From 4,096 on, the frequencies of "cwe" are others."""
SAMPLES = 300
"""Of ours per row; lm-eval always makes 500."""
CONFIDENCE = 1 - 0.05 / (len(ROWS) * len(SHARES))
"""Bonferroni: a chance of at most 5 % that any of the comparisons is off if both sides are alike."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small BPE tokenizer, which glm5 and transformers load."""
    family = make_family("ruler", length=4096)
    path = tmp_path_factory.mktemp("ruler") / "tokenizer"
    Tokenizer.train([*sentences(), *(family.problem("train", i).prompt for i in range(26))], 4096).save(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    python = interpreter("lm-eval", f"torch=={torch.__version__.partition('+')[0]}", ours=True)
    request, out = folder.parent / "request.json", folder.parent / "scores.json"
    request.write_text(json.dumps({"tokenizer": str(folder), "shares": SHARES, "rows": ROWS, "fwe": list(FWE)}))
    # Only rank 0 downloads punkt_tab, which splits essays; these tasks have none.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LOCAL_RANK": "1"}
    environment = os.environ | offline | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(HERE / "lm_eval_ruler.py"), str(request), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Any]:
    found = {}
    for row, (_, length) in ROWS.items():
        task, asked = row.partition("-")[0], FWE if row == "fwe" else [length] * SAMPLES
        options = {"tasks": [task], "tokenizer": str(folder)}
        families = {tokens: make_family("ruler", length=tokens, **options) for tokens in set(asked)}
        scores: dict[str, list[float]] = {str(share): [] for share in SHARES}
        lengths = []
        for index, tokens in enumerate(asked):
            problem = families[tokens].problem("heldout", index)
            for share in SHARES:
                env = problem.env()
                (message,), _, _ = env.start()
                result = env.step(Message("assistant", read(message.content, share)))
                scores[str(share)].append(result.reward)
            lengths.append(result.detail["tokens"] + TASKS[task].tokens)
        found[row] = {"lengths": lengths, "scores": scores, "asked": list(asked)}
    return found


def difference(ours: list[float], theirs: list[float]) -> Interval:
    """Newcombe's interval for the difference of two means."""
    a, b = (bounded_mean(values, confidence=CONFIDENCE) for values in (ours, theirs))
    low, high = math.hypot(a.value - a.low, b.high - b.value), math.hypot(a.high - a.value, b.value - b.low)
    return Interval(a.value - b.value, a.value - b.value - low, a.value - b.value + high, a.n + b.n)


def test_a_reader_of_a_part_scores_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    print(f"\n| task | seen | ours | lm-eval | difference, {100 * CONFIDENCE:.2f} % interval |\n|---|---|---|---|---|")
    unlike = []
    for row in ROWS:
        for share in SHARES:
            pair = [side[row]["scores"][str(share)] for side in (ours, theirs)]
            found = difference(*pair)
            means = [100 * sum(values) / len(values) for values in pair]
            print(
                f"| {row} | {share:g} | {means[0]:.1f} | {means[1]:.1f} | "
                f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f}) |"
            )
            if not found.low <= 0.0 <= found.high:
                unlike.append((row, share))
            assert min(map(len, pair)) >= 200
            if share in (0.0, 1.0):
                assert {*pair[0], *pair[1]} == {share}, (row, share)
    assert not unlike


def test_lengths(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Ours are within 1 % of what was asked for, or one step short of it: a line of two identifiers, a few coded words.
    lm-eval's, printed, are shorter by steps of its haystack."""
    steps = {"niah_multikey_3": 70, "fwe": 30}
    for row in ROWS:
        print(row, *(f"{min(side[row]['lengths'])} to {max(side[row]['lengths'])}" for side in (ours, theirs)))
        for tokens, asked in zip(ours[row]["lengths"], ours[row]["asked"], strict=True):
            assert asked - max(0.01 * asked, steps.get(row, 0)) <= tokens <= asked, row
