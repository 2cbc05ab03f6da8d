"""Small models: random ones whose sparse attention drops most keys, and one that has learned to repeat a line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm5.chat import Tokenizer
from glm5.config.optim import OptimConfig
from glm5.data.packing import Batch
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.train.loop import build_optimizer
from glm5.train.losses import language_loss

LINE = "abcdefghijklmnopqrstuvwxyz0123456789. "


@pytest.fixture(scope="session")
def parrot(small: Callable[..., GLM5ForCausalLM], tokenizer: Tokenizer) -> GLM5ForCausalLM:
    """A model that goes on with `LINE` for ever, trained with its MTP layer for a second."""
    model = small(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.stop_token_ids,
        index_topk=8,
        initializer_range=0.05,
    )
    optimizer = build_optimizer(model, OptimConfig(steps=30, lr=2e-2))
    ids = torch.tensor(tokenizer.encode(LINE * 6))
    for step in range(30):
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 * min(1.0, (30 - step) / 15)
        rows = torch.stack([ids[(7 * step + 11 * i) % len(LINE) :][:128] for i in range(2)])
        batch = Batch(rows, torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool))
        optimizer.zero_grad(set_to_none=True)
        language_loss(model, batch, model.context(rows), mtp_weight=0.5, mtp_depths=2)[0].backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="session")
def line() -> str:
    return LINE
