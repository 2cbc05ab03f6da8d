"""The chunked projection and loss: equal to the whole, and without its peak of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PEAK = """
import sys, torch
from pathlib import Path
from glm5.ops.cross_entropy import token_logprobs

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

def chunked(hidden, weight, targets):
    return -token_logprobs(hidden, weight, targets)[0].mean()

def whole(hidden, weight, targets):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, targets)

torch.manual_seed(0)
hidden = torch.randn(4096, 64, requires_grad=True)
weight = torch.randn(8192, 64, requires_grad=True)
targets = torch.randint(0, 8192, (4096,))
loss = chunked if sys.argv[1] == "chunked" else whole
loss(hidden[:32], weight, targets[:32]).backward()  # libraries and threads
hidden.grad = weight.grad = None
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
value = loss(hidden, weight, targets)
value.backward()
print(memory("VmHWM") - before, float(value.detach()), float(hidden.grad.norm()), float(weight.grad.norm()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through /proc")
def test_the_chunked_loss_is_equal_and_needs_less_memory(forks: Any) -> None:
    found = {how: [float(number) for number in forks.run(PEAK, how).split()] for how in ("chunked", "whole")}
    assert found["chunked"][1:] == pytest.approx(found["whole"][1:], rel=1e-5)
    logits = 4096 * 8192 * 4
    assert found["whole"][0] > 2 * logits  # the logits and their gradient
    assert found["chunked"][0] < logits / 2, found
