"""Activation offload on a device that this machine does not have (see `offload_worker.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("offload_worker.py")
MODES = ("False", "True", "selective")


@pytest.fixture(scope="module")
def found(forks: Any) -> dict[str, Any]:
    return json.loads(forks.run(WORKER))  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", MODES)
def test_gradients_are_those_without_offload(found: dict[str, Any], recompute: str) -> None:
    assert found[recompute]["equal"] and not found["without waits"]["equal"]


def test_only_inputs_leave_if_layers_are_recomputed(found: dict[str, Any]) -> None:
    assert found["True"]["bytes"] == found["selective"]["bytes"] < found["False"]["bytes"] / 5


def test_a_layer_comes_back_before_it_is_asked_for(found: dict[str, Any]) -> None:
    """All but the tensors that are asked for first, one of each forward pass of the trunk and of MTP."""
    for mode in MODES:
        early, copies = found[mode]["fetched before use"], found[mode]["copies"]
        assert 1 - 2 / copies < early < 1


def test_only_copies_leave_the_device(found: dict[str, Any]) -> None:
    assert found["walk"] == dict.fromkeys(MODES, "")
