"""IcePop (§3.2, Eq. 1): with and without pop, with and without KL; the engine computes with other weights."""

from __future__ import annotations

import torch

from glm5.model.glm5 import GLM5ForCausalLM
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Question, Sizes, Variant, Work
from glm5.rl.drivers.logical import LogicalDriver

VARIANTS = {"pop": ("icepop", False), "pop-kl": ("icepop", True), "plain": ("grpo", False), "plain-kl": ("grpo", True)}
MANTISSA = 1
"""Bits of mantissa of the engine's matrices, beside the leading one; FP8 has two or three."""


def sizes(quick: bool, steps: int | None) -> Sizes:
    """`kl_weight` is GRPO's. A fast rate and many updates leave room for a collapse."""
    return policy.sizes(quick, steps or (2 if quick else 48), kl_weight=0.04, lr=5e-4, **policy.until_it_passes(quick))


class MismatchedDriver(LogicalDriver):
    """Gives the engine the learner's matrices with few bits of mantissa, as in a coarse engine."""

    def weights(self) -> GLM5ForCausalLM:
        return rounded(super().weights())


def rounded(model: GLM5ForCausalLM, bits: int = MANTISSA) -> GLM5ForCausalLM:
    """A copy with matrices rounded to `bits` of mantissa; router biases and norms are unchanged."""
    copy, levels = model.clone(), 2.0 ** (bits + 1)
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.ndim >= 2:
                mantissa, exponent = torch.frexp(weight)
                weight.copy_(torch.ldexp((mantissa * levels).round() / levels, exponent))
    return copy


def run(work: Work) -> Outcome:
    """The start, or one variant that continues it."""
    if work.variant == "start":
        return policy.outcome(work, policy.prepare(work, ("pretrain", "sft")), [])
    loss, penalised = VARIANTS[work.variant]
    stage = policy.stage_of(work.sizes, "reasoning", loss=loss, kl_weight=work.sizes["kl_weight"] if penalised else 0.0)
    model = work.model()
    return policy.outcome(work, model, policy.learn(work, model, stage, driver=MismatchedDriver))


EXPERIMENT = Experiment(
    name="icepop",
    title="IcePop under a mismatch of engine and learner",
    section="§3.2, Eq. 1",
    claim=(
        "Leaving out tokens whose probabilities differ too much between engine and learner makes learning stable "
        "where the engine computes otherwise than the learner; a KL term is not needed and slows improvement down."
    ),
    variants=(
        Variant("start", "start"),
        Variant("pop", "pop, no KL (Eq. 1)", after="start"),
        Variant("pop-kl", "pop and KL", after="start"),
        Variant("plain", "no pop, no KL", after="start"),
        Variant("plain-kl", "no pop, KL", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question("Pop solves more than no pop", "sampled", "pop", "plain", "higher", least=0.03, main=True),
        Question("With KL, pop solves more than no pop", "sampled", "pop-kl", "plain-kl", "higher", least=0.03),
        Question("With pop, KL costs", "sampled", "pop-kl", "pop", "lower", least=0.03, main=True),
        Question("Pop keeps the mismatch smaller", "end_mismatch_kl", "pop", "plain", "lower"),
        Question("Eq. 1 learns at all under this mismatch", "sampled", "pop", "start", "higher"),
    ),
    figures=(
        policy.SOLVED,
        policy.MISMATCH,
        policy.ENTROPY,
        Figure("masked", "Tokens that pop leaves out", "share", curve="masked_share"),
    ),
    labels=policy.LABELS,
    limits=(
        "The mismatch is injected: the engine's matrices have one bit of mantissa. Real mismatches are smaller per "
        "token and act over thousands of times as many tokens.",
        "Held-out scores are those of the learner's weights, not of the rounded ones.",
    ),
)
