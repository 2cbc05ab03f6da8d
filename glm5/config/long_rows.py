"""Recipe of `glm5 data long`: long-context rows made from the shards of a corpus (§2.3)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from glm5.config.schema import Frozen


class NaturalRows(Frozen):
    """Documents that are long by themselves: at least `least_tokens`, of plausible perplexity, no near-duplicates."""

    least_tokens: int | None = Field(None, ge=2)
    """Default: half a row."""
    perplexity: tuple[float, float] = (0.05, 0.95)
    """Quantiles of the model's bits per byte between which a document must lie: below are lists and boilerplate, above
    is noise. Without a checkpoint nothing is scored."""
    scored_tokens: int = Field(1024, ge=2)
    """Tokens from the start of a document that are scored."""
    dedup: float | None = Field(0.8, ge=0.3, le=1)
    """Jaccard similarity from which two documents are near-duplicates; the first stays."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.perplexity
        if not 0 <= low < high <= 1:
            raise ValueError(f"perplexity is a pair of quantiles that rises within [0, 1], not {low:g} and {high:g}")
        return self


class NegativeRows(Frozen):
    """NExtLong (arXiv:2501.12766): a document cut into meta-chunks; each is followed by its hard negatives, the most
    similar chunks of other documents of the whole corpus."""

    documents: int | None = Field(None, ge=1)
    """Documents to stretch at most, drawn by the seed; default: all that are long enough."""
    chunk_tokens: int | None = Field(None, ge=4)
    """Tokens of a meta-chunk; default: a sixteenth of a row, at most the published 2,048."""


class EntropyRows(Frozen):
    """EntropyLong (arXiv:2510.02330): contexts that make the model surer at tokens of a document where it was unsure,
    shuffled, and then the document."""

    documents: int | None = Field(None, ge=1)
    """Documents to try at most, drawn by the seed; default: all that are long enough."""
    sigmas: float = Field(2.0, ge=0)
    """A position is uncertain if its entropy exceeds the document's mean by so many standard deviations."""
    positions: int = Field(8, ge=1)
    """Uncertain positions of a document that are looked up at most: those with the highest entropy."""
    window: int = Field(16, ge=2)
    """Tokens around the position that make the query."""
    candidates: int = Field(4, ge=1)
    """Contexts per query that are tried."""
    fall: float = Field(0.4, gt=0, lt=1)
    """A context is kept if the entropy at the position falls by more than this share with the context in front."""
    chunk_tokens: int | None = Field(None, ge=4)
    """Tokens of a context; default: a sixteenth of a row, at most 2,048."""
    controls: int = Field(1, ge=0)
    """Random contexts per query that are tried too. They are never kept: the account says how many would have been."""


class LongRecipe(Frozen):
    """What `glm5 data long` makes: a shard folder per section, `natural/`, `negatives/` and `entropy/`. Every document
    in them is one row of at most `length` tokens; natural ones may be longer."""

    name: str
    seed: int = 0
    shards: list[str] = Field(min_length=1)
    """Shard folders that `glm5 data run` or `glm5 data build` made; their training split is used."""
    checkpoint: str | None = None
    """The model that scores: needed for `entropy`, and for the perplexity filter of `natural`."""
    tokenizer: str | None = None
    """Tokenizer of the shards; default: the checkpoint's, without one bytes."""
    length: int = Field(ge=64)
    """Tokens of a row."""
    tasks: int = Field(16, ge=1, le=99_999)
    """Parts of the work. A finished part is kept if the command is interrupted."""
    natural: NaturalRows | None = None
    negatives: NegativeRows | None = None
    entropy: EntropyRows | None = None

    @model_validator(mode="after")
    def _makes_something(self) -> Self:
        if self.natural is None and self.negatives is None and self.entropy is None:
            raise ValueError("a recipe of long rows needs at least one section [natural], [negatives] or [entropy]")
        if self.entropy is not None and self.checkpoint is None:
            raise ValueError("the section [entropy] needs `checkpoint`, the model whose entropy decides")
        return self
