"""The model on an accelerator, on a machine without one: nothing waits for the device, how much is launched, how large
tensors are, and that the numbers are those of the CPU (see `device_worker.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("device_worker.py")
PARTS = (
    "pretraining and Muon",
    "sparse stage, recomputed",
    "warm-up",
    "dense MLA",
    "GQA",
    "Gated DeltaNet",
    "SimpleGDN",
    "scoring",
    "decoding",
    "decoding, one of two ranks",
)
MOST_FORWARD, MOST_BACKWARD, MOST_DECODING = 40, 90, 13


@pytest.fixture(scope="module", params=["bfloat16", "float32"], ids=["torch forms, bf16", "operators, fp32"])
def walked(request: pytest.FixtureRequest, forks: Any) -> dict[str, str]:
    return json.loads(forks.run(WORKER, "walk", request.param))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_nothing_waits_for_the_device_or_leaves_it(walked: dict[str, str], part: str) -> None:
    assert walked[part] == ""


@pytest.mark.long
def test_the_walk_notices_a_wait_and_another_device(walked: dict[str, str]) -> None:
    assert walked.keys() == {*PARTS, "a wait", "another device"}
    assert walked["a wait"].startswith("DataDependentOutputException")
    assert "on cpu" in walked["another device"]


def test_launches_of_a_layer(forks: Any) -> None:
    found = json.loads(forks.run(WORKER, "launches", "bfloat16"))
    forward, backward = found["plain"]["forward"], found["plain"]["backward"]
    assert forward["glm5.attend"] == backward["glm5.attend_backward"] == 1
    assert forward["glm5.grouped_rows"] == backward["glm5.grouped_rows"] == backward["glm5.grouped_weights"] == 2
    assert sum(forward.values()) <= MOST_FORWARD
    assert sum(backward.values()) <= MOST_BACKWARD
    assert found["sparse"]["forward"]["glm5.selected"] == 1
    decoding = found["decoding"]  # the attention of a layer without gradient: seven products, and six launches
    assert decoding["glm5.mla_latents"] == decoding["glm5.mla_absorb"] == 1 and decoding["aten.mm"] == 7
    assert sum(decoding.values()) <= MOST_DECODING


@pytest.mark.parametrize("apart", ["whole", pytest.param("apart", marks=pytest.mark.slow)])
def test_no_tensor_of_a_long_row_is_quadratic(forks: Any, apart: str) -> None:
    """With 202,752 tokens no tensor is larger than the inputs of the experts, and none has two dimensions that grow
    with the length; "apart" looks inside of our operators."""
    found = json.loads(forks.run(WORKER, "sizes", apart, timeout=1200))
    assert found.pop("mask") and len(found) == (5 if apart == "apart" else 4)
    assert not any(found.values()), found


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-4)])
def test_the_numbers_are_those_of_the_cpu(forks: Any, dtype: str, tolerance: float) -> None:
    """Logits and gradients, with ragged documents, padding, and experts without tokens. The distance of a gradient
    counts in proportion to the norm of all. A step of the optimizer is compared in fp64 only: it divides rounding
    errors of gradients near zero by themselves. Its bias correction and Newton-Schulz are fp32."""
    found = json.loads(forks.run(WORKER, "equal", dtype))
    assert len(found) == 4
    for part, distances in found.items():
        assert distances.pop("loads") == 1.0, part
        norm = distances.pop("norm")
        assert norm > 0.5 and len(distances) > 75
        updated = {name: distances.pop(name) for name in [*distances] if name.startswith("weight ")}
        assert max(distances.values()) < tolerance * max(1.0, norm), (part, max(distances, key=distances.__getitem__))
        assert dtype == "float32" or max(updated.values()) < 1e-5, (part, max(updated, key=updated.__getitem__))
