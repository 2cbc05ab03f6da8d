"""Who learns from what: backbone, indexer, router bias, MTP; and what a model is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.errors import ConfigError
from glm5.model.context import AllKeys, ForwardContext, packed_context
from glm5.model.dsa import Indexer, IndexerState
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.layers import declare_split
from glm5.model.moe import MoE, Router

Build = Callable[..., GLM5ForCausalLM]
Tokens = Callable[..., Tensor]
DENSE = {"use_dsa": False, "index_topk": None}


class Recorder:
    """An observer that turns what it sees into KL(attention || indexer), summed over layers and queries."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.loss = torch.zeros(())
        self.index: dict[str, Tensor | None] = {}  # of the last layer with an indexer, as its scores
        self.scores: Tensor | None = None

    def dense(self, layer: int, keys: AllKeys) -> None:
        if keys.index_q is not None:
            self.index = {"index_q": keys.index_q, "index_k": keys.index_k, "index_w": keys.index_w}
        keys = replace(keys, **self.index)
        assert keys.index_q is not None and keys.index_k is not None and keys.index_w is not None
        slots = torch.arange(keys.k.shape[2])
        valid = (slots >= keys.start.unsqueeze(-1)) & (slots < keys.end.unsqueeze(-1))
        dots = torch.einsum("btjd,bsd->btjs", keys.index_q, keys.index_k) * keys.index_q.shape[-1] ** -0.5
        logits = torch.matmul(keys.q, keys.k.transpose(-1, -2)) * keys.scale
        target = logits.masked_fill(~valid.unsqueeze(1), float("-inf")).softmax(-1).sum(1)
        self.selected(layer, torch.einsum("btj,btjs->bts", keys.index_w, dots.relu()), target, valid)

    def noop(self) -> Recorder:
        return Recorder()

    def selected(self, layer: int, scores: Tensor | None, target: Tensor, valid: Tensor) -> None:
        self.scores = scores = self.scores if scores is None else scores
        assert scores is not None and not target.requires_grad
        assert (scores.shape == target.shape) and bool((target[~valid] == 0).all())
        # Every head's probabilities add up to one, so the head sums add up to the number of heads.
        torch.testing.assert_close(target.sum(-1), torch.full(target.shape[:-1], 3.0))
        self.layers.append(layer)
        logq = scores.masked_fill(~valid, -1e30).log_softmax(-1)
        self.loss = self.loss - (target / 3 * logq)[valid].sum()


def observed(model: GLM5ForCausalLM, ids: Tensor, *, dense: bool) -> tuple[Tensor, Recorder]:
    ctx = packed_context(torch.zeros_like(ids))
    ctx.observer, ctx.attend_dense = (recorder := Recorder()), dense
    hidden = model.model(ids, ctx)
    hidden = hidden + model.mtp_hidden(ids, hidden, ctx)
    logits = ctx.rows(model.lm_head(hidden))
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), recorder


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "warm-up"])
def test_indexer_and_backbone_learn_from_different_losses(build: Build, tokens: Tokens, dense: bool) -> None:
    model = build(1, indexer_types=("full", "shared", "full"))
    loss, recorder = observed(model, tokens(2, 40), dense=dense)
    assert recorder.layers == [0, 1, 2, 3]  # layer 1 shares; layer 3 is MTP
    names = dict(model.named_parameters())
    from_loss = dict(zip(names, torch.autograd.grad(loss, list(names.values()), retain_graph=True, allow_unused=True)))
    from_kl = dict(zip(names, torch.autograd.grad(recorder.loss, list(names.values()), allow_unused=True)))
    for name in names:
        learns, ignores = (from_kl, from_loss) if ".indexer." in name else (from_loss, from_kl)
        assert ignores[name] is None, name
        assert learns[name] is not None and learns[name].abs().sum() > 0, name


@pytest.mark.parametrize("watched", [False, True])
def test_the_indexer_builds_a_graph_only_for_an_observer(
    build: Build, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    seen: list[bool] = []
    select = Indexer.select

    def spy(self: Indexer, state: IndexerState, ctx: ForwardContext) -> Tensor:
        seen.extend(t.requires_grad for t in (state.q, state.k, state.w))
        return select(self, state, ctx)

    monkeypatch.setattr(Indexer, "select", spy)
    model, ids = build(1), tokens(1, 20)
    ctx = packed_context(torch.zeros_like(ids))
    ctx.observer = Recorder() if watched else None
    model.lm_head(model.model(ids, ctx)).sum().backward()
    assert seen == [watched] * 9
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".indexer." in name or name.startswith("mtp.")), name


def test_observing_changes_no_output(build: Build, tokens: Tokens) -> None:
    model = build(1)
    ids = tokens(1, 40)
    ctx = packed_context(torch.zeros_like(ids))
    plain = model.model(ids, ctx)
    ctx.observer = Recorder()
    assert torch.equal(model.model(ids, ctx), plain)


def test_sparse_targets_are_the_renormalised_attention(build: Build, tokens: Tokens) -> None:
    """With top-k over the whole row both forms hand over the same distribution and the same scores (§2.1.1)."""
    model = build(2, index_topk=40)
    ids = tokens(1, 40)
    _, sparse = observed(model, ids, dense=False)
    _, dense = observed(model, ids, dense=True)
    torch.testing.assert_close(sparse.loss, dense.loss, rtol=1e-5, atol=0)


def reference_moe(moe: MoE, x: Tensor) -> Tensor:
    """One token at a time, in float64."""
    x = x.double()
    gate, bias = moe.gate.weight.double(), moe.gate.e_score_correction_bias.double()

    def mlp(gate_up: Tensor, down: Tensor, v: Tensor) -> Tensor:
        g, u = (gate_up.double() @ v).chunk(2)
        return down.double() @ (torch.nn.functional.silu(g) * u)

    out = []
    for v in x:
        scores = (gate @ v).sigmoid()
        chosen = sorted(range(len(scores)), key=lambda e: -float(scores[e] + bias[e]))[: moe.gate.top_k]
        total = sum(float(scores[e]) for e in chosen)
        y = mlp(moe.shared_experts.gate_up_proj.weight, moe.shared_experts.down_proj.weight, v)
        for e in chosen:
            weight = moe.gate.scaling * float(scores[e]) / total
            y = y + weight * mlp(moe.experts.gate_up_proj[e], moe.experts.down_proj[e], v)
        out.append(y)
    return torch.stack(out)


def first_moe(model: GLM5ForCausalLM) -> MoE:
    return next(m for m in model.modules() if isinstance(m, MoE))


def test_moe_matches_a_loop(build: Build) -> None:
    moe = first_moe(build(3))
    ctx = packed_context(torch.zeros(2, 13, dtype=torch.long))
    ctx.router_stats = []
    x = ctx.flat(torch.randn(2, 13, 40, generator=torch.Generator().manual_seed(3)))
    with torch.no_grad():
        torch.testing.assert_close(moe(x, ctx).double(), reference_moe(moe, x), rtol=0, atol=1e-5)
    (stats,) = ctx.router_stats
    assert stats.layer == 1 and stats.experts.shape == (26, 3) and stats.scores.shape == (26, 7)


def test_router_bias_moves_the_choice_but_not_the_weights(build: Build) -> None:
    router = first_moe(build(4)).gate
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(4))
    router.e_score_correction_bias.zero_()
    before_weights, before, scores = router(x)
    router.e_score_correction_bias[:3] = 5.0  # larger than any score: these three win everywhere
    weights, experts, again = router(x)
    assert torch.equal(scores, again)
    assert experts.tolist() == [[0, 1, 2]] * 16 and not torch.equal(before, experts)
    expected = scores[:, :3] / scores[:, :3].sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(before_weights.sum(-1), torch.full((16,), 2.5))
    router.e_score_correction_bias.fill_(0.7)  # the same bias everywhere changes nothing at all
    assert torch.equal(router(x)[0], before_weights) and torch.equal(router(x)[1], before)


def test_router_bias_is_no_parameter_and_gets_no_gradient(build: Build, tokens: Tokens) -> None:
    model = build(4)
    assert not [name for name, _ in model.named_parameters() if "e_score" in name]
    model(tokens(1, 20)).logits.sum().backward()
    for _, router in model.routers():
        assert not router.e_score_correction_bias.requires_grad and router.e_score_correction_bias.grad is None
    assert [layer for layer, _ in model.routers()] == [1, 2, 3]


def test_the_router_decides_in_fp32(build: Build) -> None:
    router = first_moe(build(4).cast(torch.bfloat16)).gate
    assert router.weight.dtype == torch.bfloat16 and router.e_score_correction_bias.dtype == torch.float32
    assert router(torch.randn(16, 40).bfloat16())[2].dtype == torch.float32


def test_mtp_is_the_formula_with_the_carried_state_after_the_norm(build: Build, tokens: Tokens) -> None:
    model = build(5, **DENSE)
    mtp = model.mtp
    assert mtp is not None
    ids = tokens(1, 16, seed=5)
    ctx = packed_context(torch.zeros_like(ids))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    with torch.no_grad():
        hidden = model.model(ids, ctx)
        for depth in (1, 2):
            following = ids.roll(-depth, 1)
            embedded = model.model.embed_tokens.weight[following[0]]
            joined = torch.cat((norm(embedded, mtp.enorm.weight), norm(hidden, mtp.hnorm.weight)), dim=-1)
            inside, _ = mtp.block(joined @ mtp.eh_proj.weight.T, ctx, None)
            expected = norm(inside, mtp.shared_head.norm.weight)
            hidden = model.mtp_hidden(following, hidden, ctx)
            torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


def test_mtp_depths_share_one_set_of_parameters(build: Build, tokens: Tokens) -> None:
    model = build(6)
    ids = tokens(1, 24, seed=6)
    ctx = packed_context(torch.zeros_like(ids))
    names = [name for name, _ in model.named_parameters() if name.startswith("mtp.") and ".indexer." not in name]

    def gradients(depths: list[int]) -> list[Tensor]:
        model.zero_grad()
        hidden, loss = model.model(ids, ctx), torch.zeros(())
        for depth in (1, 2, 3):
            hidden = model.mtp_hidden(ids.roll(-depth, 1), hidden, ctx)
            logits = ctx.rows(model.lm_head(hidden))[0, : 24 - depth - 1]
            if depth in depths:
                loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, depth + 1 :])
        loss.backward()
        found = dict(model.named_parameters())
        return [found[name].grad.clone() for name in names]  # type: ignore[union-attr]

    single = [gradients([depth]) for depth in (1, 2, 3)]
    for together, parts in zip(gradients([1, 2, 3]), zip(*single)):
        torch.testing.assert_close(together, sum(parts), rtol=0, atol=1e-5 * float(together.abs().max()))
        assert all(float(part.abs().max()) > 0 for part in parts)


def test_mtp_parameters_are_one_layer_and_optional(build: Build, tokens: Tokens) -> None:
    model, trunk = build(7), build(7, num_nextn_predict_layers=0)
    layer = sum(p.numel() for p in model.model.layers[-1].parameters())
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in trunk.parameters())
    assert extra == layer + 2 * 40 * 40 + 3 * 40
    with pytest.raises(ConfigError, match="no MTP layer"):
        trunk.mtp_hidden(tokens(1, 4), torch.zeros(16, 40), trunk.context(tokens(1, 4)))


def test_clone_keeps_weights_and_declarations_but_shares_nothing(build: Build) -> None:
    model = build(8)
    twin = model.clone()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr(), name
        assert getattr(mine, "muon_split", None) == getattr(theirs, "muon_split", None), name
    assert any(len(p.muon_split) > 1 for p in twin.parameters() if hasattr(p, "muon_split"))
    for (_, mine), (_, theirs) in zip(model.routers(), twin.routers()):
        assert torch.equal(mine.e_score_correction_bias, theirs.e_score_correction_bias)
        theirs.e_score_correction_bias += 1
        assert not torch.equal(mine.e_score_correction_bias, theirs.e_score_correction_bias)


def test_clone_of_a_bf16_model_keeps_router_biases_in_fp32(build: Build) -> None:
    model = build(8).cast(torch.bfloat16)
    twin = model.clone()
    assert twin.dtype == torch.bfloat16
    for (_, mine), (_, theirs) in zip(model.routers(), twin.routers()):
        assert mine.e_score_correction_bias.bfloat16().float().ne(mine.e_score_correction_bias).any()
        assert torch.equal(mine.e_score_correction_bias, theirs.e_score_correction_bias)


def test_clone_adds_indexers_when_dsa_is_switched_on(build: Build) -> None:
    dense = build(9, **DENSE)
    sparse = dense.clone(dense.config.replace(use_dsa=True, index_topk=8), seed=4)
    fresh = GLM5ForCausalLM(sparse.config, seed=4).state_dict()
    old = dense.state_dict()
    for name, tensor in sparse.state_dict().items():
        assert torch.equal(tensor, old[name] if name in old else fresh[name]), name
        assert (name in old) != (".indexer." in name)


def test_initialisation_is_a_function_of_seed_and_name(small: Callable[..., GLM5Config]) -> None:
    torch.manual_seed(1)
    first = GLM5ForCausalLM(small(), seed=5)
    torch.manual_seed(2)
    second = GLM5ForCausalLM(small(), seed=5)
    other = GLM5ForCausalLM(small(), seed=6)
    deeper = dict(GLM5ForCausalLM(small(num_hidden_layers=4), seed=5).named_parameters())
    seen: list[Tensor] = []
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        assert torch.equal(parameter, deeper[name]), name
        if parameter.ndim < 2:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name
            continue
        assert not torch.equal(parameter, other.get_parameter(name)), name
        assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.2), name
        assert not any(parameter.shape == s.shape and torch.equal(parameter, s) for s in seen), f"{name} is a copy"
        seen.append(parameter)


def test_a_split_must_cover_the_matrix() -> None:
    with pytest.raises(ValueError, match="do not add up to 6 rows"):
        declare_split(torch.nn.Parameter(torch.zeros(6, 2)), (2, 2))


def test_every_matrix_declares_its_blocks(build: Build) -> None:
    model = build(10)
    split = {name: getattr(p, "muon_split", None) for name, p in model.named_parameters() if p.ndim >= 2}
    undeclared = sorted(name for name, blocks in split.items() if blocks is None)
    assert undeclared == ["lm_head.weight", "model.embed_tokens.weight"]
    attention = "model.layers.0.self_attn."
    assert split[f"{attention}q_b_proj.weight"] == (20, 20, 20)
    assert split[f"{attention}kv_b_proj.weight"] == (14, 18) * 3
    assert split[f"{attention}o_proj.weight"] == (40,)
    assert split["model.layers.0.mlp.gate_up_proj.weight"] == (56, 56)
    assert split["model.layers.1.mlp.experts.gate_up_proj"] == (24, 24)
    assert isinstance(model.routers()[0][1], Router)
