"""Muon, Muon Split and the AdamW part against hand-written float64 references."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import declare_split, remember_splits, restore_splits
from glm5.optim import Muon, muon_groups
from glm5.optim.blocks import block_views
from glm5.optim.muon import newton_schulz
from glm5.optim.newton_schulz import chunks

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def orthogonalise(u: Tensor) -> Tensor:
    """The five Newton-Schulz steps of one matrix, written through its singular values: x -> a x + b x^3 + c x^5."""
    left, s, right = torch.linalg.svd(u / (u.norm() + 1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return left @ s.diag() @ right


def muon_reference(
    weight: Tensor, gradients: list[Tensor], heights: list[int], lr: float, decay: float, momentum: float
) -> Tensor:
    """Muon of one matrix in float64, every row block an optimiser of its own."""
    blocks = []
    for index, block in enumerate(weight.split(heights)):
        buffer = torch.zeros_like(block)
        for gradient in gradients:
            g = gradient.split(heights)[index]
            buffer = momentum * buffer + g
            update = orthogonalise(g + momentum * buffer)
            block = block * (1 - lr * decay) - lr * 0.2 * max(block.shape) ** 0.5 * update
        blocks.append(block)
    return torch.cat(blocks)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 12), (64, 64)], ids=str)
def test_newton_schulz_singular_values(shape: tuple[int, int]) -> None:
    blocks = torch.stack([randn(*shape, seed=i) * 10.0**i for i in range(-3, 4)])
    found = newton_schulz(blocks, F64)
    for block, result in zip(blocks, found):
        torch.testing.assert_close(result, orthogonalise(block), rtol=0, atol=1e-9)
        left, s, right = torch.linalg.svd(block, full_matrices=False)
        # Directions that hold at least 2 % of the norm end near one, and stay the same directions.
        strong = s > 0.02 * block.norm()
        assert strong.sum() >= 1
        ended = (left.T @ result @ right.T).diagonal()[strong]
        assert float(ended.min()) > 0.6 and float(ended.max()) < 1.3
    assert newton_schulz(blocks.float()).dtype == torch.float32
    torch.testing.assert_close(newton_schulz(blocks, torch.float32), found, rtol=0, atol=1e-4)


def test_newton_schulz_of_nothing_is_nothing() -> None:
    assert not newton_schulz(torch.zeros(2, 3, 4)).any()


def optimise(parameter: nn.Parameter, gradients: list[Tensor], *, split: bool, **options: Any) -> Tensor:
    optimizer = Muon([{"params": [parameter], "kind": "muon", "split": split}], ns_dtype=F64, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


OPTIONS = {"lr": 0.03, "weight_decay": 0.2, "momentum": 0.9}
HEIGHTS = {
    "heads": (5, 5, 5),
    "keys and values alternate": (3, 4, 3, 4, 3, 4),
    "gate and up": (6, 6),
    "no pattern": (2, 7, 3),
    "one block": (12,),
}


@pytest.mark.parametrize("name", HEIGHTS)
def test_muon_split_is_muon_on_every_block(name: str) -> None:
    heights = HEIGHTS[name]
    weight = randn(sum(heights), 9)
    # Heads of very different gradient scale: whole-matrix Muon would drown the small ones.
    scales = torch.cat([torch.full((h, 1), 10.0 ** (i % 3), dtype=F64) for i, h in enumerate(heights)])
    gradients = [randn(sum(heights), 9, seed=i) * scales for i in (1, 2, 3)]
    expected = muon_reference(weight, gradients, list(heights), 0.03, 0.2, 0.9)
    parameter = nn.Parameter(weight.clone())
    declare_split(parameter, heights)
    torch.testing.assert_close(optimise(parameter, gradients, split=True, **OPTIONS), expected, rtol=0, atol=1e-8)
    whole = nn.Parameter(weight.clone())
    declare_split(whole, heights)
    found = optimise(whole, gradients, split=False, **OPTIONS)
    expected = muon_reference(weight, gradients, [sum(heights)], 0.03, 0.2, 0.9)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    if len(heights) > 1:
        assert (found - parameter.detach()).abs().max() > 1e-3


def test_stacked_experts_are_independent_matrices() -> None:
    weight, gradients = randn(3, 8, 5), [randn(3, 8, 5, seed=i) for i in (1, 2)]
    parameter = nn.Parameter(weight.clone())
    declare_split(parameter, (4, 4))
    found = optimise(parameter, gradients, split=True, **OPTIONS)
    for expert in range(3):
        expected = muon_reference(weight[expert], [g[expert] for g in gradients], [4, 4], 0.03, 0.2, 0.9)
        torch.testing.assert_close(found[expert], expected, rtol=0, atol=1e-8)


def test_matrices_of_equal_shape_share_a_batch_and_nothing_else() -> None:
    weights = [randn(6, 5, seed=i) for i in range(2)] + [randn(5, 6, seed=2)]
    gradients = [randn(*w.shape, seed=9 + i) for i, w in enumerate(weights)]
    parameters = [nn.Parameter(w.clone()) for w in weights]
    optimizer = Muon([{"params": parameters, "kind": "muon", "split": False}], ns_dtype=F64, **OPTIONS)
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    optimizer.step()
    for weight, gradient, parameter in zip(weights, gradients, parameters):
        expected = muon_reference(weight, [gradient], [weight.shape[0]], 0.03, 0.2, 0.9)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-8)


def test_batches_smaller_than_a_stack_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parameters of one shape, cut into batches whose borders fall inside them."""
    weights = [randn(5, 6, 4, seed=i) for i in range(2)] + [randn(6, 4, seed=2)]
    gradients = [randn(*w.shape, seed=9 + i) for i, w in enumerate(weights)]
    results = []
    for length in (1, 2, 3, 100):
        monkeypatch.setattr("glm5.optim.muon.chunk_length", lambda rows, columns, device, length=length: length)
        parameters = [nn.Parameter(w.clone()) for w in weights]
        for parameter, gradient in zip(parameters, gradients):
            declare_split(parameter, (3, 3))
            parameter.grad = gradient.clone()
        Muon([{"params": parameters, "kind": "muon", "split": True}], ns_dtype=F64, **OPTIONS).step()
        results.append(parameters)
    for weight, gradient, *found in zip(weights, gradients, *results):
        matrices = list(zip(weight.view(-1, 6, 4), gradient.view(-1, 6, 4)))
        expected = torch.cat([muon_reference(w, [g], [3, 3], 0.03, 0.2, 0.9) for w, g in matrices])
        for parameter in found:
            torch.testing.assert_close(parameter.detach().view(-1, 4), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sizes", [[], [0, 3], [1, 1, 1], [5], [2, 7, 1]], ids=str)
@pytest.mark.parametrize("limit", [1, 2, 3, 20])
def test_chunks_hold_every_unit_once_in_order(sizes: list[int], limit: int) -> None:
    batches = list(chunks(((size, index) for index, size in enumerate(sizes)), limit))
    units = [(index, i) for batch in batches for index, start, stop in batch for i in range(start, stop)]
    assert units == [(index, i) for index, size in enumerate(sizes) for i in range(size)]
    lengths = [sum(stop - start for _, start, stop in batch) for batch in batches]
    assert all(length == limit for length in lengths[:-1]) and all(0 < length <= limit for length in lengths)


def test_gradients_and_weights_in_other_dtypes() -> None:
    """A bf16 model in a bf16 iteration follows the float64 reference as far as its digits go."""
    weight, gradient = randn(24, 16), randn(24, 16, seed=3)
    parameter = nn.Parameter(weight.bfloat16())
    declare_split(parameter, (8, 8, 8))
    parameter.grad = gradient.bfloat16()
    Muon([{"params": [parameter], "kind": "muon"}], ns_dtype=torch.bfloat16, lr=1.0, weight_decay=0.0).step()
    expected = muon_reference(weight, [gradient], [8, 8, 8], 1.0, 0.0, 0.95) - weight
    moved = parameter.detach().double() - weight
    assert parameter.dtype == torch.bfloat16
    assert float((moved - expected).norm() / expected.norm()) < 0.05


def test_a_gradient_that_is_not_contiguous() -> None:
    weight, gradient = randn(6, 4), randn(4, 6, seed=1)
    parameter = nn.Parameter(weight.clone())
    declare_split(parameter, (3, 3))
    optimizer = Muon([{"params": [parameter], "kind": "muon"}], ns_dtype=F64, **OPTIONS)
    parameter.grad = gradient.T
    optimizer.step()
    expected = muon_reference(weight, [gradient.T], [3, 3], 0.03, 0.2, 0.9)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-9)


def test_updates_have_the_size_of_adamw() -> None:
    parameter = nn.Parameter(torch.zeros(64, 128, dtype=F64))
    found = optimise(parameter, [randn(64, 128)], split=False, lr=1.0, weight_decay=0.0)
    assert float(found.pow(2).mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_row_blocks_of_kv_b_proj_alternate_keys_and_values() -> None:
    """Row r belongs to head r // (nope + v); its first nope rows are keys, the rest values."""
    heads, nope, value = 3, 2, 4
    rows = heads * (nope + value)
    matrix = torch.arange(float(rows)).unsqueeze(1).expand(rows, 5).contiguous()
    keys, values = block_views(matrix, (nope, value) * heads)
    assert keys[:, :, 0].tolist() == [[0, 1], [6, 7], [12, 13]]
    assert values[:, :, 0].tolist() == [[2, 3, 4, 5], [8, 9, 10, 11], [14, 15, 16, 17]]
    keys.fill_(-1.0)  # a view, not a copy
    assert (matrix[:, 0] < 0).nonzero().flatten().tolist() == [0, 1, 6, 7, 12, 13]


@pytest.mark.parametrize("heights", [(6,), (2, 2, 2), (1, 2, 1, 2), (1, 3, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("stack", [(), (3,)], ids=["matrix", "stack"])
def test_row_blocks_cover_every_element_once_and_in_place(heights: tuple[int, ...], stack: tuple[int, ...]) -> None:
    tensor = torch.arange(6 * 4 * math.prod(stack)).view(*stack, 6, 4)
    expected = sorted(block.tolist() for matrix in tensor.view(-1, 6, 4) for block in matrix.split(heights))
    views = block_views(tensor, heights)
    assert sorted(block.tolist() for view in views for block in view) == expected
    for view in views:
        view.zero_()
    assert not tensor.any()


@pytest.mark.parametrize("steps", [1, 4])
def test_adamw_part_is_torch_adamw(steps: int) -> None:
    shapes = {"embedding": (7, 5), "norm": (5,)}
    ours = [nn.Parameter(randn(*shape, seed=i)) for i, shape in enumerate(shapes.values())]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6}
    mine = Muon([{"params": ours, "kind": "adamw"}], weight_decay=0.3, **settings)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}], **settings
    )
    for step in range(steps):
        for i, (a, b) in enumerate(zip(ours, theirs)):
            a.grad = randn(*a.shape, seed=10 * step + i)
            b.grad = a.grad.clone()
        versions = [p._version for p in ours]
        mine.step()
        assert all(p._version > version for p, version in zip(ours, versions))  # copies of weights go by it
        reference.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_parameters_without_gradient_stay() -> None:
    moved, kept = (nn.Parameter(randn(4, 4, seed=i)) for i in range(2))
    before = kept.detach().clone()
    moved.grad = randn(4, 4, seed=5)
    Muon([{"params": [moved, kept], "kind": "muon", "split": False}], lr=0.1).step()
    assert torch.equal(kept, before)
    with pytest.raises(ValueError, match="no closure"):
        Muon([{"params": [moved], "kind": "muon"}]).step(lambda: 0.0)


def test_state_survives_saving_and_loading() -> None:
    def fresh() -> tuple[nn.Parameter, nn.Parameter, Muon]:
        matrix, norm = nn.Parameter(randn(6, 4)), nn.Parameter(randn(4, seed=1))
        groups = [{"params": [matrix], "kind": "muon", "split": False}, {"params": [norm], "kind": "adamw"}]
        return matrix, norm, Muon(groups, lr=0.05)

    def step(parameters: tuple[nn.Parameter, nn.Parameter], optimizer: Muon, seed: int) -> None:
        for i, p in enumerate(parameters):
            p.grad = randn(*p.shape, seed=seed + i)
        optimizer.step()

    matrix, norm, optimizer = fresh()
    step((matrix, norm), optimizer, 20)
    state = copy.deepcopy(optimizer.state_dict())
    other_matrix, other_norm, other = fresh()
    other.load_state_dict(state)
    with torch.no_grad():
        other_matrix.copy_(matrix)
        other_norm.copy_(norm)
    step((matrix, norm), optimizer, 30)
    step((other_matrix, other_norm), other, 30)
    assert torch.equal(matrix, other_matrix) and torch.equal(norm, other_norm)


def nano() -> GLM5ForCausalLM:
    return GLM5ForCausalLM(GLM5Config.preset("nano", num_hidden_layers=2))


def test_groups_of_a_model() -> None:
    model = nano()
    muon, adamw = muon_groups(model)
    assert (muon["kind"], adamw["kind"], muon["split"]) == ("muon", "adamw", True)
    assert muon_groups(model, split=False)[0]["split"] is False
    names = {name for name, _ in model.named_parameters()}
    assert set(muon["names"]) | set(adamw["names"]) == names
    assert len(muon["params"]) + len(adamw["params"]) == len(names)
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    assert set(muon["names"]) == matrices - {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any("e_score_correction_bias" in name for name in names)


def test_groups_freeze_what_is_not_trainable() -> None:
    model = nano()
    groups = muon_groups(model, trainable=lambda name: ".indexer." in name)
    trained = {name for group in groups for name in group["names"]}
    assert trained == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert all(p.requires_grad == (name in trained) for name, p in model.named_parameters())
    assert [g["kind"] for g in muon_groups(model, trainable=lambda name: name.endswith("norm.weight"))] == ["adamw"]


def test_an_undeclared_matrix_is_an_error() -> None:
    model = nano()
    model.extra = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"extra\.weight is a matrix without declared Muon Split blocks"):
        muon_groups(model)
    declare_split(model.extra.weight, (3,))
    assert "extra.weight" in muon_groups(model)[0]["names"]


def test_a_declaration_that_does_not_fit_is_an_error() -> None:
    model = nano()
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.muon_split = (5, 5)
    with pytest.raises(
        ConfigError, match=r"mlp\.down_proj\.weight declares Muon Split blocks of 10 rows in all, but has"
    ):
        muon_groups(model)
    weight.muon_split = (-1, weight.shape[0] + 1)
    with pytest.raises(ConfigError, match="declares Muon Split blocks"):
        muon_groups(model)
    with pytest.raises(ConfigError, match="matrix 0 of the group declares"):
        weight.grad = torch.zeros_like(weight)
        Muon([{"params": [weight], "kind": "muon", "split": True}]).step()


@pytest.mark.parametrize("name", ["q_b_proj", "kv_b_proj"])
def test_mla_refuses_to_be_declared_whole(name: str) -> None:
    model = nano()
    weight = getattr(model.model.layers[1].self_attn, name).weight
    declare_split(weight, (weight.shape[0],))
    with pytest.raises(ConfigError, match=rf"layers\.1\.self_attn\.{name}\.weight declares 1 Muon Split block"):
        muon_groups(model)
    assert muon_groups(model, trainable=lambda parameter: name not in parameter)


def test_a_required_matrix_that_is_gone_is_an_error() -> None:
    model = nano()
    attention = model.model.layers[0].self_attn
    attention.q_b_proj = nn.Sequential(attention.q_b_proj)
    with pytest.raises(ConfigError, match=r"MLA needs Muon Split on q_b_proj\.weight, which it does not have"):
        muon_groups(model)


def test_a_copy_loses_declarations_loudly_and_gets_them_back() -> None:
    model = nano()
    splits = remember_splits(model)
    twin = copy.deepcopy(model)
    with pytest.raises(ConfigError, match="without declared Muon Split blocks"):
        muon_groups(twin)
    restore_splits(twin, splits)
    assert remember_splits(twin) == splits
    assert [group["names"] for group in muon_groups(twin)] == [group["names"] for group in muon_groups(model)]
    with pytest.raises(ValueError, match="do not add up"):
        restore_splits(twin, {"lm_head.weight": (3,)})


def test_one_step_of_a_whole_model_moves_everything_that_has_a_gradient() -> None:
    model = nano()
    optimizer = Muon(muon_groups(model), lr=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.arange(40).unsqueeze(0)).logits.square().mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter.grad is None), name
        assert parameter.isfinite().all(), name
