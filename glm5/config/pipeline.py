"""Which part of the model each pipeline stage computes: layers divided by work, and the place of the MTP layer (§2.4).

Stages are in the order of the model: embedding, layers, final norm, MTP layer, output head. The MTP layer reads the
trunk's hidden state after the final norm, so it cannot be on a stage before the last layer's; and if data is to move
forward only, the stage with the MTP layer has the final norm, and the stages after it have no layers. That is the
paper's placement: embedding and block of MTP on the stage before the last, and on the last stage nothing but the output
head, which the main model and MTP share. The stage with MTP sends 1 + depths hidden states. The head computes as many
logits per token, which for GLM-5 (vocabulary of 154,880, 3 depths) is the work of about seven MoE layers: a stage of
its own. With a small vocabulary, dividing by work may put MTP beside the head instead.

The token embedding that MTP reads is a copy, unless one process has both stages. The gradients of both are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from glm5.config.arithmetic import component_counts
from glm5.config.model import GLM5Config
from glm5.errors import ConfigError

DEPTHS = 3
"""MTP depths for which stages are balanced: the paper's."""


@dataclass(frozen=True)
class Span:
    """What stage number `stage` computes: trunk layers `layers`, and before and after them what is set.

    `takes_indices`: its first layer attends to the keys that a layer of an earlier stage selected (IndexShare);
    `gives_indices`: the next stage's does.
    """

    stage: int
    layers: range
    embeds: bool
    norm: bool
    mtp: bool
    head: bool
    takes_indices: bool = False
    gives_indices: bool = False


def divide(config: GLM5Config, stages: int, layers: Sequence[int] = ()) -> list[Span]:
    """The spans of `stages` stages, with these numbers of layers or (empty) such that the stage with the most work has
    as little as possible. Raises ConfigError for a division that leaves a stage nothing to compute."""
    counts, mtp = _given(config, stages, layers) if layers else _balanced(config, stages)
    bounds = [0, *accumulate(counts)]
    norm = mtp if mtp is not None else stages - 1
    found = []
    for stage, (first, last) in enumerate(pairwise(bounds)):
        takes, gives = (
            config.selects_keys and 0 < at < config.num_hidden_layers and not config.computes_topk(at)
            for at in (first, last)
        )
        ends = stage == stages - 1
        found.append(Span(stage, range(first, last), stage == 0, stage == norm, stage == mtp, ends, takes, gives))
    return found


def _given(config: GLM5Config, stages: int, layers: Sequence[int]) -> tuple[list[int], int | None]:
    """(layers per stage, stage of the MTP layer) as the layout says."""
    mtp = bool(config.num_nextn_predict_layers)
    listed = f"parallel.pp_layers = {list(layers)}"
    if len(layers) != stages or sum(layers) != config.num_hidden_layers or min(layers) < 0:
        raise ConfigError(
            f"{listed} must be {stages} numbers (pp x pp_stages_per_rank) that add up to the "
            f"{config.num_hidden_layers} layers of the model."
        )
    last = max(stage for stage, count in enumerate(layers) if count)
    if 0 in layers[:last] or stages - 1 - last > 1 + mtp:
        raise ConfigError(
            f"{listed} leaves a stage without anything to compute; 0 is for the last stage (output head)"
            + (" and the one before it (MTP layer)." if mtp else ".")
        )
    return list(layers), (stages - 1 if last == stages - 1 else stages - 2) if mtp else None


def _balanced(config: GLM5Config, stages: int) -> tuple[list[int], int | None]:
    """(layers per stage, stage of the MTP layer) with the least work on the busiest stage, and of those divisions
    the most even one."""
    work = unit_work(config)
    if len(work) < stages:
        raise ConfigError(
            f"The model's {config.num_hidden_layers} layers, MTP layer and output head cannot be divided into {stages} "
            "pipeline stages; lower parallel.pp or parallel.pp_stages_per_rank."
        )
    total = [0, *accumulate(work)]
    size = len(work)

    def best(limit: float) -> list[int] | None:
        """Where stages end, with at most `limit` work each and the least sum of squares."""
        rows: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
        for stage in range(stages):
            row: dict[int, tuple[float, list[int]]] = {}
            for start, (cost, ends) in rows[-1].items():
                for end in range(start + 1, size - (stages - stage - 1) + 1):
                    own = total[end] - total[start]
                    if own > limit:
                        break
                    if end not in row or cost + own * own < row[end][0]:
                        row[end] = cost + own * own, [*ends, end]
            rows.append(row)
        return rows[-1][size][1] if size in rows[-1] else None

    def stages_for(limit: int) -> int:
        """The fewest stages with at most `limit` work each."""
        found, left = 1, limit
        for one in work:
            if one > left:
                found, left = found + 1, limit
            left -= one
        return found

    low, high = max(work), total[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stages_for(middle) <= stages else (middle + 1, high)
    ends = best(low)
    assert ends is not None
    starts = [0, *ends[:-1]]
    counts = [max(0, min(end, config.num_hidden_layers) - start) for start, end in zip(starts, ends)]
    mtp = next(stage for stage, end in enumerate(ends) if end > config.num_hidden_layers)
    return counts, mtp if config.num_nextn_predict_layers else None


def unit_work(config: GLM5Config) -> list[int]:
    """Multiply-adds per token with the weights of each layer, of the MTP layer at all depths (if there is one), and of
    the output head for all depths."""
    c, parts = config, component_counts(config)
    moe = parts["router"] + (c.num_experts_per_tok + c.n_shared_experts) * parts["expert"]

    def layer(index: int) -> int:
        full = index == c.num_hidden_layers or c.attention_kind(index) == "full"
        own = parts["attention"] if full else parts["efficient_attention"]
        own += parts["indexer"] if c.use_dsa and c.computes_topk(index) else 0
        return own + (parts["dense_ffn"] if c.is_dense_layer(index) else moe)

    depths = DEPTHS if c.num_nextn_predict_layers else 0
    mtp = [depths * (layer(c.num_hidden_layers) + parts["mtp_extra"])] if depths else []
    return [*map(layer, range(c.num_hidden_layers)), *mtp, (1 + depths) * parts["embedding"]]
