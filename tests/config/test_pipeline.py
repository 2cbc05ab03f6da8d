"""Division of a model into pipeline stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.model import GLM5Config
from glm5.config.pipeline import Span, divide, unit_work
from glm5.errors import ConfigError


def counts(spans: list[Span]) -> list[int]:
    return [len(span.layers) for span in spans]


@pytest.mark.parametrize("stages", [16, 32])
def test_dividing_glm5_by_work_gives_the_placement_of_the_paper(stages: int) -> None:
    """MTP's block on the stage before the last, and the last stage nothing but the shared output head (§2.4)."""
    spans = divide(GLM5Config.preset("glm5"), stages)
    assert spans[-1] == Span(stages - 1, range(78, 78), embeds=False, norm=False, mtp=False, head=True)
    assert spans[-2].mtp and spans[-2].norm and not any(span.mtp for span in spans[:-2])
    assert sum(counts(spans)) == 78


@given(st.integers(1, 7), st.integers(2, 5), st.integers(0, 1), st.sampled_from([64, 4096, 60_000]))
def test_no_division_has_less_work_on_its_busiest_stage(layers: int, stages: int, mtp: int, vocabulary: int) -> None:
    config = GLM5Config.preset("nano", num_hidden_layers=layers, num_nextn_predict_layers=mtp, vocab_size=vocabulary)
    work = unit_work(config)
    if len(work) < stages:
        with pytest.raises(ConfigError, match="cannot be divided into"):
            divide(config, stages)
        return
    cuts = ([0, *inner, len(work)] for inner in combinations(range(1, len(work)), stages - 1))
    best = min(max(sum(work[a:b]) for a, b in pairwise(cut)) for cut in cuts)
    spans = divide(config, stages)
    own = [
        sum(work[i] for i in span.layers) + (work[layers] if span.mtp else 0) + (work[-1] if span.head else 0)
        for span in spans
    ]
    assert max(own) == best and all(own)
    assert [i for span in spans for i in span.layers] == list(range(layers))
    assert sum(span.norm for span in spans) == sum(span.head for span in spans) == 1
    assert [span.mtp for span in spans] == ([span.norm for span in spans] if mtp else [False] * stages)


def test_layers_of_the_layout_win() -> None:
    config = GLM5Config.preset("nano")
    assert counts(divide(config, 2, (4, 0))) == [4, 0] and divide(config, 2, (4, 0))[0].mtp
    assert divide(config, 2, (3, 1))[1].mtp
    apart = divide(config, 3, (4, 0, 0))
    assert [(span.norm, span.mtp, span.head) for span in apart] == [
        (False,) * 3,
        (True, True, False),
        (False, False, True),
    ]


@pytest.mark.parametrize("layers", [(4,), (2, 3), (5, -1), (0, 4)])
def test_layers_that_do_not_fit_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp_layers"):
        divide(GLM5Config.preset("nano"), 2, layers)


def test_a_model_without_mtp_has_no_stage_of_its_own_for_it() -> None:
    plain = GLM5Config.preset("nano", num_nextn_predict_layers=0)
    assert [span.norm for span in divide(plain, 3, (3, 1, 0))] == [False, False, True]
    with pytest.raises(ConfigError, match="without anything to compute"):
        divide(plain, 3, (4, 0, 0))


def test_indices_travel_where_a_stage_begins_with_a_layer_that_shares_them() -> None:
    types = ["full", "shared", "full", "shared"]
    config = GLM5Config.preset("nano", indexer_types=types)
    spans = divide(config, 4, (1, 2, 1, 0))
    assert [(span.takes_indices, span.gives_indices) for span in spans] == [
        (False, True), (True, True), (True, False), (False, False),
    ]  # fmt: skip
    dense = divide(config.replace(indexer_adapted=False), 4, (1, 2, 1, 0))
    assert not any(span.takes_indices or span.gives_indices for span in dense)
