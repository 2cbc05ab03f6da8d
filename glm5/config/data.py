"""How a stage's rows are made from its shards: packing, fill-in-the-middle, mixture weights, long-context documents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from glm5.config.schema import Frozen


class DataOptions(Frozen):
    """Content of rows (§2.2, §2.3). Every share lies in [0, 1]; the defaults are one plain stream of the shards' text.

    The four shares of rows (`needle_share`, `recall_share`, `interleave_share`, `negatives_share`) are taken from the
    corpus, and `weights` divides the rest. Every step has its share of each, to within less than one row. The report
    gives no mixture ratio, so there is no default ratio.
    """

    packing: Literal["truncate", "best_fit"] = "truncate"
    """`truncate` cuts one stream of documents into rows (pre-training in the report); `best_fit` keeps every document
    that fits into a row whole and pads the rest (mid-training)."""
    weights: dict[str, float] = {}
    """Share of the corpus rows by shard name, in any unit; 0 leaves a shard out. Empty: by number of tokens."""
    fim_rate: float = Field(0.0, ge=0, le=1)
    """Share of the documents in fill-in-the-middle form; the GLM reports use it for all source code."""
    fim_shards: list[str] = []
    """Names of the shards to which `fim_rate` applies, those of source code. Empty: all."""
    spm_share: float = Field(0.5, ge=0, le=1)
    """Share of these with the suffix before the prefix; in the others the prefix comes first."""
    needle_share: float = Field(0.0, ge=0, le=1)
    """Share of rows with retrieval documents: lines `name = value`, then every name again, asking for its value."""
    recall_share: float = Field(0.0, ge=0, le=1)
    """Share of rows with multi-turn recall in several variants; the report's 200K stage adds a small one."""
    interleave_share: float = Field(0.0, ge=0, le=1)
    """Share of rows in which highly similar documents are interleaved, against "lost in the middle"."""
    negatives_share: float = Field(0.0, ge=0, le=1)
    """Share of rows that stretch one document with similar text of others between its parts (as in NExtLong)."""

    @model_validator(mode="after")
    def _shares_fit(self) -> DataOptions:
        total = self.needle_share + self.recall_share + self.interleave_share + self.negatives_share
        if total > 1 + 1e-9:
            raise ValueError(
                f"needle_share + recall_share + interleave_share + negatives_share is {total:g}; it must be at most 1"
            )
        return self
