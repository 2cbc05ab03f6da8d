"""The table of what trains every parameter, and the update sizes it shows."""

from __future__ import annotations

import pytest
import torch

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.optim import GroupRow, Muon, describe, muon_groups, table


def stepped(*, split: bool = True, steps: int = 1, lr: float = 1e-2) -> tuple[GLM5ForCausalLM, Muon]:
    model = GLM5ForCausalLM(GLM5Config.preset("nano", num_hidden_layers=3))
    optimizer = Muon(muon_groups(model, split=split), lr=lr, weight_decay=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.watch_updates = step == steps - 1
        optimizer.step()
    return model, optimizer


def by_kind(rows: list[GroupRow]) -> dict[tuple[str, tuple[int, int]], GroupRow]:
    found = {(row.kind, row.block): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_rows_count_parameters_matrices_and_blocks() -> None:
    """nano with 3 layers, the first dense, 4 heads and 8 experts; the MTP block is a kind of its own."""
    model, optimizer = stepped()
    rows = optimizer.update_table()
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())
    found = by_kind(rows)
    attention = "model.layers.*.self_attn."
    keys, values = (found[f"{attention}kv_b_proj.weight", (height, 32)] for height in (24, 32))
    assert (keys.rule, keys.matrices, keys.blocks, keys.parameters) == ("muon split", 3, 12, 12 * 24 * 32)
    assert (values.rule, values.matrices, values.blocks, values.parameters) == ("muon split", 3, 12, 12 * 32 * 32)
    whole = found[f"{attention}o_proj.weight", (128, 128)]
    assert (whole.rule, whole.matrices, whole.blocks) == ("muon", 3, 3)
    experts = found["model.layers.*.mlp.experts.gate_up_proj", (64, 128)]
    assert (experts.rule, experts.matrices, experts.blocks) == ("muon split", 16, 32)
    assert found["mtp.block.mlp.experts.gate_up_proj", (64, 128)].matrices == 8
    embedding, norm = found["model.embed_tokens.weight", (0, 0)], found["model.norm.weight", (0, 0)]
    assert (embedding.rule, embedding.weight_decay, norm.weight_decay) == ("adamw", 0.1, 0.0)
    assert all(row.lr == 1e-2 for row in rows)


def test_whole_matrices_are_a_rule_of_their_own() -> None:
    _, optimizer = stepped(split=False)
    assert {row.rule for row in describe(optimizer)} == {"muon", "adamw"}


@pytest.mark.parametrize("steps", [1, 3])
def test_update_rms_is_what_the_step_changed(steps: int) -> None:
    """Measured on the weights themselves: (decayed before - after) / lr."""
    model, optimizer = stepped(steps=steps)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9))
    optimizer.watch_updates = True
    optimizer.step()
    found = by_kind(optimizer.update_table())
    after = {name: p.detach().double() for name, p in model.named_parameters()}
    kinds = {"model.norm.weight": (0, 0), "lm_head.weight": (0, 0), "model.layers.0.mlp.down_proj.weight": (128, 320)}
    for name, block in kinds.items():
        decay = 1 - 1e-2 * (0.1 if before[name].ndim > 1 else 0.0)
        moved = (before[name] * decay - after[name]) / 1e-2
        row = found[name.replace(".0.", ".*."), block]
        assert row.update_rms == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-3), name
    names = [f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(3)]
    moved = torch.stack([before[name] * (1 - 1e-3) - after[name] for name in names]) / 1e-2
    per_head = moved.unflatten(1, (4, 24 + 32))
    for block, part in {(24, 32): per_head[:, :, :24], (32, 32): per_head[:, :, 24:]}.items():
        row = found["model.layers.*.self_attn.kv_b_proj.weight", block]
        assert row.update_rms == pytest.approx(float(part.square().mean().sqrt()), rel=1e-3)


def test_first_update_sizes() -> None:
    """Muon's is about AdamW's usual 0.2 for every block shape; AdamW's own first step is the sign of the gradient."""
    _, optimizer = stepped()
    for row in optimizer.update_table():
        assert row.update_rms is not None
        if row.rule == "adamw":
            assert row.update_rms == pytest.approx(1.0, abs=1e-3), row
        else:
            assert 0.13 < row.update_rms < 0.25, row


def test_watching_is_for_one_step_and_changes_nothing() -> None:
    model, optimizer = stepped()
    assert optimizer.watch_updates is False
    quiet, other = stepped()
    other.watch_updates = False
    for (name, a), b in zip(model.named_parameters(), quiet.parameters()):
        assert torch.equal(a, b), name
    first = optimizer.update_table()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.update_table() == first


def test_parameters_without_gradient_show_no_update() -> None:
    moved, kept = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    moved.grad = torch.eye(4)
    groups = [{"params": [moved, kept], "names": ["moved", "kept"], "kind": "muon", "split": False}]
    optimizer = Muon(groups, lr=0.1)
    assert [row.update_rms for row in describe(optimizer)] == [None, None]
    optimizer.watch_updates = True
    optimizer.step()
    rows = optimizer.update_table()
    assert rows[0].update_rms is not None and rows[1].update_rms is None


def test_text_has_one_aligned_line_per_row() -> None:
    rows = [
        GroupRow("muon split", "layers.*.q_b_proj.weight", (64, 128), 229376, 7, 28, 0.19876, 0.1, 2e-4),
        GroupRow("adamw", "norm.weight", (0, 0), 256, 1, 1, None, 0.0, 2e-4),
    ]
    assert table(rows).splitlines() == [
        "rule        parameters of             block   elements  matrices  blocks  update rms  decay      lr",
        "muon split  layers.*.q_b_proj.weight  64x128   229,376         7      28       0.199    0.1  0.0002",
        "adamw       norm.weight               -            256         1       -           -      0  0.0002",
    ]
