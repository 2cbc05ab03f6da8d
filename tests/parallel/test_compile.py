"""Compiled layers inside of FSDP units."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_two_ranks_compile_and_compute_what_eager_layers_do(job: Any, start: str) -> None:
    def task(**options: Any) -> dict[str, Any]:
        return {"kind": "gradients", "start": start, "options": options}

    bf16 = {"dtype": "bfloat16"}
    names = "eager", "compiled", "recomputed", "eager bf16", "compiled bf16"
    tasks = [task(), task(compile=True), task(compile=True, recompute=True), task(**bf16), task(compile=True, **bf16)]
    found = dict(zip(names, job(2, *tasks, timeout=1500), strict=True))
    vectors = {
        name: torch.cat([torch.tensor(values).flatten() for values in result["gradients"].values()])
        for name, result in found.items()
    }
    exact = vectors["eager"]
    for name in ("compiled", "recomputed"):
        assert found[name]["graphs"] == [3, 3]  # dense, MoE, MTP
        assert 0 < float((vectors[name] - exact).norm()) < 1e-5 * float(exact.norm())
    distance = {name: float((vectors[name] - exact).norm()) for name in names if "bf16" in name}
    assert 0 < distance["compiled bf16"] < 2 * distance["eager bf16"]
