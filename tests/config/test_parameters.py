"""Parameters of a configuration beside those of the model that is built from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.model import GLM5Config
from glm5.config.parameters import Parameter, parameters
from glm5.model.glm5 import GLM5ForCausalLM


@pytest.mark.parametrize("preset", ["tiny", "glm5", "glm5.2", "glm4.7-flash", "glm4.5", "glm9b"])
def test_names_and_shapes_are_those_of_the_model(preset: str) -> None:
    config = GLM5Config.preset(preset)
    named = [(name, tuple(p.shape)) for name, p in GLM5ForCausalLM.deferred(config).named_parameters()]
    assert sorted((p.name, p.shape) for p in parameters(config)) == sorted(named)


def test_experts_are_stacks_and_layers_are_numbered() -> None:
    config = GLM5Config.preset("glm5")
    found = parameters(config)
    assert {p.name.rpartition(".")[2] for p in found if p.expert} == {"gate_up_proj", "down_proj"}
    assert sum(p.expert for p in found) == 2 * 76
    assert {p.layer for p in found} == {-1, *range(79)}
    # SPEC: 743.911B without MTP and 753.864B with it; router biases are buffers here
    assert sum(p.size for p in found) + 76 * 256 == pytest.approx(753.864e9, rel=1e-6)


@given(st.integers(1, 300), st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_row_has_a_place(rows: int, groups: int, ep: int, expert: bool) -> None:
    parameter = Parameter("p", (rows * ep, 3), 0, expert)
    ranks = groups * ep
    own = rows if expert else rows * ep
    assert parameter.whole(ranks, ep) >= own * 3
    assert parameter.held(ranks, ep) == 3 * -(-own // (groups if expert else ranks))
