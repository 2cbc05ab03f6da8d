"""Optimizer and schedule of a stage, as a recipe has them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from glm5.config.schema import Frozen


class OptimConfig(Frozen):
    """Optimizer and schedule of a stage. Rates are per step; `clip` bounds the gradient norm."""

    steps: int = Field(ge=0)
    lr: float = Field(gt=0)
    final_lr: float = Field(0.0, ge=0)
    warmup: int = Field(0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    kind: Literal["muon", "adamw"] = "muon"
    muon_split: bool = True
    momentum: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, gt=0)
    ns_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of Newton-Schulz; the published recipes use bf16."""
    save_every: int = Field(25, ge=0)
    """Steps between resumable states; 0 writes none."""
    monitor_every: int = Field(10, ge=0)
    """Steps between checks of attention logits, expert loads and prediction accuracy; 0 never checks."""
    evaluate_every: int = Field(0, ge=0)
    """Steps between evaluations on held-out text within the stage; 0 evaluates only at its end."""
    stall_seconds: float = Field(1800.0, ge=0)
    """A step that takes longer ends the process and prints the stack of every thread; 0 waits for ever."""
