"""Problems in training text: against sets of words, through a suite, and from a run's shards."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from glm5.chat import Tokenizer
from glm5.data.build import build
from glm5.data.corpus.contaminated import RUN, SHORTEST
from glm5.data.dedup import plain_words
from glm5.errors import DataError
from glm5.eval.contamination import Overlap, trained_texts
from glm5.eval.players import Played
from glm5.eval.suite import find_suite, run_suite
from glm5.records import Outcome


def by_sets(problem: str, documents: list[str]) -> float | None:
    """The share of words in runs that some document has, without hashes."""
    words = plain_words(problem)
    size = min(RUN, len(words))
    if size < SHORTEST:
        return None
    runs = {tuple(d[i : i + size]) for text in documents for d in [plain_words(text)] for i in range(len(d))}
    covered: set[int] = set()
    for i in range(len(words) - size + 1):
        if tuple(words[i : i + size]) in runs:
            covered |= set(range(i, i + size))
    return len(covered) / len(words)


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_sets(seed: int) -> None:
    """Texts over three words, with pieces of problems between them, so that runs overlap and repeat."""
    rng = random.Random(seed)

    def text(count: int) -> str:
        return " ".join(rng.choice(("a", "B", "c,")) for _ in range(count))

    problems = {str(i): text(rng.randrange(2, 40)) for i in range(40)}
    documents = [text(rng.randrange(0, 300)) for _ in range(4)]
    for problem in rng.sample(list(problems.values()), 25):
        words = problem.split()
        at = rng.randrange(3)
        documents.append(f"{text(5)} {' '.join(words[at : at + rng.randrange(9, 30)]).upper()}\n{text(3)}")
    overlap = Overlap(problems)
    overlap.read(iter(documents))
    assert overlap.shares() == {name: by_sets(problem, documents) for name, problem in problems.items()}
    assert overlap.documents == len(documents) and len(set(overlap.shares().values())) > 3


def test_a_suite_tells_new_problems_from_seen_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    questions = [" ".join(f"word{rng.randrange(10**6)}" for _ in range(20)) for _ in range(6)] + ["Who is it?"]
    rows = [json.dumps({"question": q, "answer": "x"}) for q in questions]
    (tmp_path / "q.jsonl").write_text("\n".join(rows))
    folder = tmp_path / "00-tokenizer"
    (tmp_path / "texts").mkdir()
    for i, question in enumerate(questions[:2]):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"Once: {question.upper()}! The end.")
    build([str(tmp_path / "texts")], tokenizer, folder / "data", workers=1, dedup=False)
    tokenizer.save(folder / "tokenizer")

    class Knows:
        """Right where the question was in the training text."""

        def play(self, problems, suite, part, seed):  # type: ignore[no-untyped-def]
            for place, problem in problems:
                knew = any(question in problem.prompt for question in questions[:2])
                yield place, Played(float(knew), Outcome.SOLVED if knew else Outcome.FAILED)

    suite = find_suite("aime", {"file": str(tmp_path / "q.jsonl")}, repeats=1)
    found = run_suite(suite, Knows(), trained_on=trained_texts(folder))["contamination"]
    assert (found["documents"], found["too_short"]) == (2, 1)
    assert (found["seen"]["score"], found["seen"]["n"]) == (1.0, 2)
    assert (found["new"]["score"], found["new"]["n"]) == (0.0, 4)
    assert run_suite(suite, Knows(), trained_on=[])["contamination"]["seen"] == {"n": 0}
    with pytest.raises(DataError, match="no data and tokenizer"):
        trained_texts(tmp_path)
