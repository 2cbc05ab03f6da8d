"""`glm5 data long`: EntropyLong keeps what makes a model surer, NExtLong puts other documents' text between the parts,
natural rows are plausible and distinct; parts are kept, and training reads the rows like any shard."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from glm5.chat import Tokenizer
from glm5.cli import app
from glm5.config.data import DataOptions
from glm5.config.load import load_recipe
from glm5.config.long_rows import EntropyRows, LongRecipe
from glm5.data.chunk_index import ChunkIndex, Place
from glm5.data.documents import Document
from glm5.data.entropy_long import COUNTS, TokenScores, uncertain
from glm5.data.long_context import stretch
from glm5.data.long_rows import make_long_rows
from glm5.data.mixture import make_loader
from glm5.data.shards import Shard, build_shards, open_shard
from glm5.errors import ConfigError, DataError

NAMES = ("quagga", "zymurgy", "xylophone", "jackdaw", "kumquat", "wyvern")


def texts() -> list[str]:
    """For each name a note that tells all about it, a letter that mentions it, and one text about nothing of it."""
    plain = "and then the people of the town went on to do the same as on the day before, as people do. "
    return [
        text
        for name in NAMES
        for text in (
            f"{name} " * 8,
            f"{plain}{plain}In the end we saw a {name} there. {plain}",
            f"{plain * 3}{len(name)}",
        )
    ]


def shards_of(folder: Path, tokenizer: Tokenizer, found: Sequence[str]) -> Path:
    build_shards([Document(f"d{i}", text) for i, text in enumerate(found)], tokenizer, folder, ["test"])
    return folder


class Copying:
    """A scorer that is surer of capital-free words it has seen: the entropy of a byte is 6 in a name's first byte, 1
    elsewhere, and a tenth of that if the name stood before in the sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.calls, self.stop_at = tokenizer, 0, 10**9

    def __call__(self, sequences: Sequence[np.ndarray], last: int | None = None) -> list[TokenScores]:
        self.calls += 1
        if self.calls > self.stop_at:
            raise KeyboardInterrupt
        found = []
        for sequence in sequences:
            text = self.tokenizer.decode(sequence.astype(int).tolist())
            entropy = np.ones(len(sequence))
            for name in NAMES:
                first = text.find(name[0] + name[1])
                at = text.find(name)
                while at >= 0:
                    entropy[at] = 6.0 if at == first else 0.6
                    at = text.find(name, at + 1)
                if len(text) and text[-1] == name[0]:  # the end of a prefix that is being verified
                    entropy[-1] = 0.6 if name in text[:-1] else 6.0
            kept = slice(1, None) if last is None else slice(len(sequence) - last, None)
            found.append(TokenScores(-entropy[kept], entropy[kept]))
        return found


def recipe(folder: Path, **values: Any) -> LongRecipe:
    return LongRecipe.model_validate(
        {"name": "long", "shards": [str(folder)], "checkpoint": "model", "length": 700, "tasks": 4, **values}
    )


ENTROPY = {"chunk_tokens": 80, "candidates": 3, "positions": 4}


@pytest.fixture
def made(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return shards_of(tmp_path / "notes", tokenizer, texts())


def rows_of(folder: Path, tokenizer: Tokenizer) -> list[str]:
    shard = open_shard(folder, "train", tokenizer)
    return [tokenizer.decode(shard.document(i)[:-1].astype(int).tolist()) for i in range(len(shard))]


def test_entropy_rows_have_a_context_that_explains_the_document(
    made: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    out = tmp_path / "out"
    account = make_long_rows(recipe(made, entropy=ENTROPY), out, tokenizer, Copying(tokenizer))
    counts, rows = account["sections"]["entropy"], rows_of(out / "entropy", tokenizer)
    original = open_shard(made, "train", tokenizer)
    letters = {f"d{i}": text for i, text in enumerate(texts())}
    shard = open_shard(out / "entropy", "train", tokenizer)
    known = [json.loads(line) for line in (out / "entropy" / "train.documents").read_text().splitlines()]
    assert len(rows) == counts["rows"] > 0 and set(original.paths) >= set(shard.paths)
    for row, path, one in zip(rows, shard.paths, known, strict=True):
        root = letters[path]
        assert row.endswith("\n\n" + root) and one["name"] == path and one["sources"][-1] == path
        (name,) = [name for name in NAMES if name in root]
        context = row.removesuffix(root)
        assert name in context and path not in one["sources"][:-1]
        assert len(one["sources"]) - 1 == context.count("\n\n")
    assert counts["documents"] == counts["rows"] + counts["without_context"]
    assert (
        counts["verified"] <= counts["retrieved"] <= 3 * counts["queries"] and counts["queries"] <= counts["positions"]
    )
    assert counts["contexts"] >= counts["rows"]
    assert (shard.lengths() <= 700).all()


def test_a_context_must_lower_the_entropy_by_more_than_the_share(
    made: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    # From 6 to 0.6 is a fall by 90 %.
    for fall, fits in ((0.89, True), (0.91, False)):
        wanted = recipe(made, entropy={**ENTROPY, "fall": fall})
        if fits:
            assert make_long_rows(wanted, tmp_path / "yes", tokenizer, Copying(tokenizer))["sections"]["entropy"][
                "rows"
            ]
        else:
            with pytest.raises(DataError, match="No row came out"):
                make_long_rows(wanted, tmp_path / "no", tokenizer, Copying(tokenizer))
            counts = json.loads((tmp_path / "no" / "long.json").read_text(encoding="utf-8"))["sections"]["entropy"]
            assert counts["verified"] == counts["rows"] == 0 < counts["retrieved"]


@given(st.lists(st.floats(0, 9), min_size=2, max_size=40), st.floats(0, 3), st.integers(1, 5))
def test_uncertain_positions_are_the_highest_above_the_threshold(values: list[float], sigmas: float, most: int) -> None:
    entropy = np.array(values)
    found, above = uncertain(entropy, sigmas, most)
    threshold = entropy.mean() + sigmas * entropy.std()
    assert above == sum(v > threshold for v in values) and len(found) == min(most, above)
    assert (np.diff(found) > 0).all() and all(values[i] > threshold for i in found)
    rest = [v for i, v in enumerate(values) if i not in found and v > threshold]
    assert not rest or max(rest) <= min(values[i] for i in found)


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    made: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    wanted = recipe(made, entropy=ENTROPY, negatives={"chunk_tokens": 40}, natural={"least_tokens": 60})
    whole, cut, scorer = tmp_path / "whole", tmp_path / "cut", Copying(tokenizer)
    account = make_long_rows(wanted, whole, tokenizer, scorer)
    calls = scorer.calls
    cutting = Copying(tokenizer)
    for stop in (7, calls // 2, 10**9):
        cutting.calls, cutting.stop_at = 0, stop
        try:
            again = make_long_rows(wanted, cut, tokenizer, cutting)
        except KeyboardInterrupt:
            assert stop < 10**9
    assert again == account and cutting.calls < calls, "finished parts were made again"
    for section in ("natural", "negatives", "entropy"):
        files = sorted(path.name for path in (whole / section).iterdir())
        assert [(cut / section / f).read_bytes() for f in files] == [(whole / section / f).read_bytes() for f in files]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.lists(st.lists(st.integers(1, 9), max_size=9), min_size=5, max_size=5),
    st.integers(0, 80),
)
def test_stretched_parts_keep_their_order(sizes: list[int], others: list[list[int]], more: int) -> None:
    parts = [np.full(size, i) for i, size in enumerate(sizes)]
    length = sum(sizes) + more
    row = stretch(parts, lambda gap: (np.full(n, 100 + gap) for n in others[gap]), length).tolist()
    assert [t for t in row if t < 100] == [t for part in parts for t in part.tolist()] and len(row) <= length
    for gap in range(len(parts) - 1):
        inside = [t for t in row[row.index(gap) : row.index(gap + 1)] if t >= 100]
        assert set(inside) <= {100 + gap} and len(inside) <= sum(others[gap])


def test_negatives_are_the_most_similar_text_of_the_whole_corpus(tmp_path: Path, tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(0)
    topics = [[f"{name}{i}" for i in range(12)] for name in NAMES]
    found = [" ".join(generator.choice(topics[i % 6], 40)) for i in range(60)]
    shards = [shards_of(tmp_path / name, tokenizer, found[start : start + 30]) for name, start in (("a", 0), ("b", 30))]
    wanted = recipe(shards[0], shards=[str(s) for s in shards], checkpoint=None, negatives={"chunk_tokens": 64})
    account = make_long_rows(wanted, tmp_path / "out", tokenizer)
    rows = rows_of(tmp_path / "out" / "negatives", tokenizer)
    known = [json.loads(line) for line in (tmp_path / "out/negatives/train.documents").read_text().splitlines()]
    train = [i for i in range(30) if not Document(f"d{i}", "").held_out]
    assert len(rows) == 2 * len(train) == account["sections"]["negatives"]["rows"]
    for row in rows:
        topic = Counter(name for name in NAMES for _ in range(row.count(name)))
        assert topic.most_common(1)[0][1] > 0.95 * sum(topic.values()), "distractors are of the document's topic"
        assert len(tokenizer.encode(row)) == 699
    assert all(len(one["sources"]) > 2 and one["sources"][0] == one["name"] for one in known)


def test_a_search_leaves_out_the_document_itself(made: Path, tokenizer: Tokenizer) -> None:
    shard = open_shard(made, "train", tokenizer)
    index = ChunkIndex({"notes": shard}, tokenizer, 50)
    assert sum(len(index.chunk(i)) for i in range(len(index))) == len(shard.tokens) - len(shard)
    best = index.search(["quagga"], 99, Place("notes", 0))
    assert best and all(index.place(chunk).document != 0 for chunk in best)
    assert all("quagga" in tokenizer.decode(index.chunk(chunk).astype(int).tolist()) for chunk in best)
    assert index.search(["nowhere"], 5, Place("notes", 0)) == []
    with pytest.raises(DataError, match="no word"):
        ChunkIndex({"notes": Shard(np.empty(0, np.uint16), np.zeros(1, np.int64), np.empty(0))}, tokenizer, 50)


def test_natural_rows_are_long_plausible_and_distinct(tmp_path: Path, tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(1)
    words = [f"w{i}" for i in range(400)]
    found = [" ".join(generator.choice(words, 60)) for _ in range(20)]
    copies = [found[3] + " end", found[5] + " end"]
    shards = shards_of(tmp_path / "s", tokenizer, [*found, *copies, "short"])

    def score(sequences: Sequence[np.ndarray], last: int | None = None) -> list[TokenScores]:
        return [TokenScores(np.full(len(s) - 1, -float(s[1])), np.zeros(len(s) - 1)) for s in sequences]

    wanted = recipe(shards, natural={"least_tokens": 50, "perplexity": [0.1, 0.9]})
    counts = make_long_rows(wanted, tmp_path / "out", tokenizer, score)["sections"]["natural"]
    rows = rows_of(tmp_path / "out" / "natural", tokenizer)
    bits = sorted(json.loads(line)["bits_per_byte"] for part in sorted((tmp_path / "out/work/natural").glob("*"))
                  for line in (part / "train.documents").read_text().splitlines())  # fmt: skip
    low, high = np.quantile(bits, [0.1, 0.9])
    assert counts["dropped_low_perplexity"] == sum(b < low for b in bits)
    assert counts["dropped_high_perplexity"] == sum(b > high for b in bits)
    assert counts["dropped_near_duplicates"] >= 1 and len(set(rows)) == len(rows) == counts["rows"]
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped"))
    assert counts["documents"] == counts["rows"] + dropped


def test_training_reads_the_rows_like_any_shard(made: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    make_long_rows(recipe(made, entropy=ENTROPY), tmp_path / "out", tokenizer, Copying(tokenizer))
    shard = open_shard(tmp_path / "out" / "entropy", "train", tokenizer)
    size = int(shard.lengths().max())
    loader = make_loader(DataOptions(packing="best_fit"), {"entropy": shard}, tokenizer, rows=1, row_length=size,
                         seed=0, name="mid")  # fmt: skip
    firsts = [loader.batch(step) for step in range(loader.rows_per_epoch)]
    longest = shard.document(int(shard.lengths().argmax())).astype(int).tolist()
    assert longest in [batch.ids[0, batch.documents[0] == 0].tolist() for batch in firsts]


def test_mistakes_are_refused_in_one_sentence(made: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    scorer = Copying(tokenizer)
    with pytest.raises(ValueError, match="at least one section"):
        recipe(made)
    with pytest.raises(ValueError, match="needs `checkpoint`"):
        recipe(made, checkpoint=None, entropy={})
    with pytest.raises(ValueError, match="rises within"):
        recipe(made, natural={"perplexity": [0.9, 0.1]})
    with pytest.raises(ConfigError, match="give the recipe a `checkpoint`"):
        make_long_rows(recipe(made, entropy={}), tmp_path / "a", tokenizer)
    with pytest.raises(DataError, match="no shard folder with a manifest"):
        make_long_rows(recipe(tmp_path / "none", negatives={}), tmp_path / "b", tokenizer)
    with pytest.raises(DataError, match="long enough"):
        make_long_rows(recipe(made, natural={"least_tokens": 9999}), tmp_path / "c", tokenizer, scorer)
    (tmp_path / "model").mkdir()
    for weights in (b"1", b"2"):
        (tmp_path / "model" / "model.safetensors").write_bytes(weights)
        trained = recipe(made, checkpoint=str(tmp_path / "model"), negatives={"chunk_tokens": 40})
        with pytest.raises(ConfigError, match="another recipe") if weights == b"2" else nullcontext():
            make_long_rows(trained, tmp_path / "f", tokenizer, scorer)
    done = recipe(made, negatives={"chunk_tokens": 40})
    make_long_rows(done, tmp_path / "d", tokenizer)
    with pytest.raises(ConfigError, match="another recipe, shards or checkpoint"):
        make_long_rows(done.model_copy(update={"seed": 1}), tmp_path / "d", tokenizer)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "thesis.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match="other content"):
        make_long_rows(done, tmp_path / "e", tokenizer)


def test_the_command_makes_rows_with_a_checkpoint(made: Path, tmp_path: Path, small: Any, tokenizer: Tokenizer) -> None:
    small(vocab_size=tokenizer.vocab_size, use_dsa=False).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    text = f'''name = "l"
shards = ["{made}"]
checkpoint = "{tmp_path / "model"}"
length = 400
tasks = 2
[entropy]
sigmas = 0.5
fall = 1e-6
documents = 4
positions = 2
chunk_tokens = 40
'''
    (tmp_path / "r.toml").write_text(text)
    arguments = ["data", "long", str(tmp_path / "r.toml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)["sections"]["entropy"]
    assert set(COUNTS) <= set(counts) and counts["documents"] == 4 and counts["rows"] >= 1
    too_long = CliRunner().invoke(app, [*arguments[:-4], "--out", str(tmp_path / "o2"), "--set", "length=9999"])
    assert "fewer than the rows' 9,999 tokens" in str(too_long.exception)


def test_options_have_the_published_values() -> None:
    options = EntropyRows()
    assert (options.sigmas, options.window, options.fall) == (2.0, 16, 0.4)


def test_the_recipe_of_the_repository_loads() -> None:
    found = load_recipe(Path(__file__).parents[2] / "recipes" / "long-rows.toml", LongRecipe)
    assert found.natural is not None and found.negatives is not None and found.entropy is not None
