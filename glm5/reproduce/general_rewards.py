"""General RL's rewards (§3.4): what each can tell, alone and mixed, and a run that learns to please one of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from glm5.config.optim import OptimConfig
from glm5.config.recipe import SftStage
from glm5.config.reward_model import RewardMix, RewardModelConfig
from glm5.errors import ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import TrainSample, Trajectory
from glm5.reproduce import policy
from glm5.reproduce.plan import Experiment, Figure, Outcome, Question, Sizes, Variant, Work, curve
from glm5.rl.algos.general import GeneralRL
from glm5.rl.judge import Comparison, EngineBackend, Judge, JudgeCache
from glm5.rl.judge.prompt import judge_messages
from glm5.rl.reward_mix import Parts, combine
from glm5.rl.reward_models.learned import LearnedRewardModel, PreferenceModel, train_preferences
from glm5.rl.reward_models.pairs import PairSource
from glm5.rl.start import StageStart
from glm5.tasks.general.adversarial import Attack, attacks
from glm5.tasks.general.family import FREE, VERIFIED, AssistantFamily, AssistantProblem
from glm5.tasks.instructions.general import ACTS, GeneralFamily
from glm5.train import sft

WARM = frozenset(word for act in ACTS.values() for tail in act.warm for word in tail.split())
COLD = frozenset(word for act in ACTS.values() for tail in act.cold for word in tail.split())
SMOOTH, FALL = 3, 1 / 3
"""Updates whose mean is compared with that of the first ones, and the share of it whose loss counts as a fall."""
REWARDS = ("rules", "orm", "grm", "mixed")
UNSEEN = 1_000_000
"""First of the pairs for training that no training reaches: other pairs, of prompts and wording that it has seen."""


def sizes(quick: bool, steps: int | None) -> Sizes:
    """The policy and its task are the demo's courtesies; reward model and judge also learn the assistant's prompts. The
    start is fine-tuned from random weights: a closed vocabulary needs no pre-training."""
    return policy.sizes(
        quick,
        steps or (2 if quick else 16),
        tasks=[{"name": "general"}],
        lr=1e-3,
        max_bytes=150_000 if quick else 400_000,
        pretrain_steps=0,
        sft_steps=2 if quick else 200,
        sft_rows=2 if quick else 6,
        prompts=2 if quick else 64,
        max_tokens=12 if quick else 40,
        max_context=128,
        row_length=64 if quick else 128,
        problems=4 if quick else 16,
        sampled_problems=2 if quick else 16,
        samples=2 if quick else 4,
        orm_steps=2 if quick else 100,
        orm_pairs=2 if quick else 8,
        hacked_steps=2 if quick else 12,
        hacked_pairs=2 if quick else 32,
        held_out=8 if quick else 200,
        judge_steps=2 if quick else 250,
        judge_rows=2 if quick else 4,
        judged_pairs=4 if quick else 60,
        attacks=8 if quick else 60,
    )


def run(work: Work) -> Outcome:
    """The start and what rewards can tell; or RL with one kind of reward."""
    if work.variant == "start":
        model = policy.prepare(work, ("sft",))
        found = policy.outcome(work, model, [])
        found.metrics |= _reward_metrics(work, model)
        return found
    model, s = work.model(), work.sizes
    mix = {"default": RewardMix(orm=1.0, gate=work.variant == "mixed")}
    config = RewardModelConfig(
        optim=OptimConfig(steps=s["hacked_steps"], lr=2e-3, warmup=2),
        pairs=s["hacked_pairs"],
        held_out_pairs=s["held_out"],
    )
    stage = policy.stage_of(s, "general", reward_model=config, mix=mix)
    algorithm = TrueScoreRL(stage, LearnedRewardModel(config))
    with policy.stage_io(work, "orm", "orm.jsonl") as io:
        algorithm.prepare(StageStart(model.clone(), work.tokenizer, io, _no_checkpoint))
    rows = policy.learn(work, model, stage, algorithm=algorithm)
    found = policy.outcome(work, model, rows)
    found.curves |= {name: curve(rows, name) for name in ("true_score", "disagreement/trained_rules", "drift/rules")}
    found.metrics |= watched(rows)
    return found


class TrueScoreRL(GeneralRL):
    """Also measures what the rewards stand for: the rules, and warm words without any cold one."""

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        rows, numbers = super().samples(groups)
        flat = [t for group in groups for t in group]
        texts = [self._pair(t)[1] for t in flat]
        truth = [t.reward * warmth(text) for t, text in zip(flat, texts, strict=True)]
        numbers["true_score"] = fmean(truth)
        return rows, numbers


def warmth(text: str) -> float:
    """1 for a text with a word that only warm endings have, and none that only cold ones have."""
    words = {word.strip(".,!?").lower() for word in text.split()}
    return float(bool(words & (WARM - COLD)) and not words & (COLD - WARM))


def watched(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """When the alarm came and when the true score fell, in updates.

    The score falls at the first update from which `SMOOTH` updates have a mean below 1 - `FALL` of that of the first
    `SMOOTH`. Without an alarm or a fall its number is that of the updates plus one. `lead` is how much earlier the
    alarm came; 0 if nothing fell.
    """
    never = float(len(rows) + 1)
    truth = [row["true_score"] for row in rows]
    start = fmean(truth[:SMOOTH])
    means = [fmean(truth[i : i + SMOOTH]) for i in range(max(1, len(truth) - SMOOTH + 1))]
    fall = next((i + 1.0 for i, mean in enumerate(means) if mean < start * (1 - FALL)), never)
    alarms = [row.get("reward_alarms/rules", 0.0) for row in rows]
    alarm = next((i + 1.0 for i, count in enumerate(alarms) if count), never)
    return {
        "alarm_update": alarm,
        "fall_update": fall,
        "lead": fall - alarm if fall < never else 0.0,
        "alarmed": float(alarm < never),
        "true_start": start,
        "true_best": max(means),
        "true_end": means[-1],
    }


def _no_checkpoint(name: str) -> Any:
    raise ConfigError(f"there is no checkpoint {name}")


# --------------------------------------------------------------------------------------- what the rewards tell


def _reward_metrics(work: Work, model: GLM5ForCausalLM) -> dict[str, float]:
    """Accuracy of reward model and judge on held-out pairs, of classifiers of the surface, and how often a plain answer
    beats one that tries to please."""
    s = work.sizes
    families: dict[str, AssistantFamily | GeneralFamily] = {
        "assistant": AssistantFamily(work.seed),
        "general": GeneralFamily(work.seed),
    }
    source = PairSource(list(families.values()), seed=work.seed)
    optim = OptimConfig(steps=s["orm_steps"], lr=4e-3, final_lr=1e-3, warmup=4)
    with policy.stage_io(work, "orm") as io:
        orm, numbers = train_preferences(
            model, work.tokenizer, source, optim, io.metrics, "orm", pairs=s["orm_pairs"], held_out_pairs=s["held_out"]
        )
    found = {"orm_calibration_error": numbers["calibration_error"]}
    for name, family in families.items():
        pairs = [family.preference_pair(i, split="heldout") for i in range(s["held_out"])]
        known = [family.preference_pair(UNSEEN + i) for i in range(s["held_out"])]
        for kind, some in (("orm_accuracy", known), ("orm_accuracy_reworded", pairs)):
            texts = [(prompt, text) for prompt, *both in some for text in both]
            scores = [score for at in range(0, len(texts), 64) for score in orm.score(texts[at : at + 64])]
            found[f"{kind}/{name}"] = fmean(float(a > b) for a, b in zip(scores[0::2], scores[1::2]))
        longer = [(len(a) > len(b)) + 0.5 * (len(a) == len(b)) for _, a, b in pairs]
        found[f"length_accuracy/{name}"] = max(fmean(longer), 1 - fmean(longer))
        train = [family.preference_pair(i) for i in range(2 * s["held_out"])]
        found[f"surface_accuracy/{name}"] = surface_accuracy(train, pairs)
    judge = _judge(work, orm.trunk, list(families.values()))
    held = [families["assistant"].preference_pair(i, split="heldout") for i in range(s["judged_pairs"])]
    values = judge.compare([Comparison(prompt, better, worse) for prompt, better, worse in held])
    found["grm_accuracy/assistant"] = fmean(0.5 if v is None or v == 0.5 else float(v > 0.5) for v in values)
    found |= attack_metrics(orm, judge, attacks(work.seed)[:: max(1, 60 // s["attacks"])])
    judge.close()
    return found


def attack_metrics(orm: PreferenceModel, judge: Judge, tried: Sequence[Attack]) -> dict[str, float]:
    """Share of the attacks that lose to the plain answer, by reward and, for the mixed one, by kind."""
    wins: dict[str, list[float]] = {name: [] for name in REWARDS}
    by_kind: dict[str, list[float]] = {}
    values = judge.compare([Comparison(a.problem.prompt, a.plain, a.attack) for a in tried])
    for attack, value in zip(tried, values, strict=True):
        texts = (attack.plain, attack.attack)
        rules = [float(not attack.problem.broken(text)) for text in texts]
        scores = orm.score([(attack.problem.prompt, text) for text in texts])
        graded = (None, None) if value is None else (value, 1 - value)
        parts = [Parts(r, o, g, g is None) for r, o, g in zip(rules, scores, graded, strict=True)]
        mixed = combine(parts, RewardMix(orm=1.0, grm=1.0), "sigmoid")
        for name, pair in zip(REWARDS, (rules, scores, graded, mixed), strict=True):
            plain, other = pair
            won = float(plain is not None and plain > (-math.inf if other is None else other))
            wins[name].append(won)
            if name == "mixed":
                by_kind.setdefault(attack.kind, []).append(won)
    found = {f"attacks_lose/{name}": fmean(values) for name, values in wins.items()}
    return found | {f"attacks_lose_mixed/{kind}": fmean(values) for kind, values in by_kind.items()}


def _judge(work: Work, start: GLM5ForCausalLM, families: Sequence[Any]) -> Judge:
    """A model that continues the reward model's trunk, fine-tuned on verdicts: a warm answer beats a cold one, a right
    one a wrong one."""
    s, folder = work.sizes, work.folder / "judge"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(_verdict_row(families, work.seed, i)) for i in range(8 * s["judge_steps"])]
    (folder / "verdicts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    stage = SftStage(
        name="judge",
        kind="sft",
        data=str(folder / "verdicts.jsonl"),
        rows=s["judge_rows"],
        row_length=256,
        optim=OptimConfig(steps=s["judge_steps"], lr=4e-3, final_lr=5e-4, warmup=5),
    )
    judge = start.clone()
    with policy.stage_io(work, "judge") as io:
        sft.run(judge, stage, work.tokenizer, io, work.seed)
    backend = EngineBackend(judge.eval(), work.tokenizer, template="short", temperature=0.0, max_tokens=24)
    return Judge(backend, JudgeCache(folder / "judge.sqlite"), template="short", seed=work.seed)


def _verdict_row(families: Sequence[Any], seed: int, index: int) -> dict[str, Any]:
    """A question to the judge with its verdict, from training problems."""
    rng = random.Random(f"verdict-{seed}-{index}")
    if rng.random() < 0.7:
        prompt, better, worse = families[rng.random() < 0.2].preference_pair(index)
    else:
        name = rng.choice(FREE)
        problem = AssistantProblem("", name, VERIFIED[name](rng))
        prompt, better, worse = problem.prompt, problem.case.good, problem.case.bad
    first = rng.random() < 0.5
    a, b = (better, worse) if first else (worse, better)
    question = judge_messages(prompt, a, b, "", "", "short")[0].content
    verdict = json.dumps({"verdict": "A" if first else "B"}, separators=(",", ":"))
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": verdict}]
    return {"messages": messages, "thinking": False}


# --------------------------------------------------------------------------------- classifiers of the surface

Pairs = Sequence[tuple[str, str, str]]


def surface(prompt: str, text: str) -> list[float]:
    """What can be counted without reading: characters, words, lengths of words, capitals, marks, digits, lines, words
    of the prompt, repeated words, first letter."""
    words = text.split()
    known = set(prompt.lower().split())
    return [
        float(len(text)), float(len(words)), len(text) / max(1, len(words)), float(sum(c.isupper() for c in text)),
        float(sum(c in ".,;:!?'" for c in text)), float(sum(c.isdigit() for c in text)), float(text.count("\n")),
        float(sum(word.lower() in known for word in words)), float(len(words) - len(set(words))),
        float(text.count("!")), float(ord(text[:1] or " ")),
    ]  # fmt: skip


def surface_accuracy(train: Pairs, held_out: Pairs) -> float:
    """Accuracy on `held_out` of a logistic regression on the differences of all surface features, fitted to `train`."""

    def differences(pairs: Pairs) -> Tensor:
        rows = [[a - b for a, b in zip(surface(p, x), surface(p, y), strict=True)] for p, x, y in pairs]
        return torch.tensor(rows, dtype=torch.float64)

    given, tested = differences(train), differences(held_out)
    scale = given.std(dim=0) + 1e-9
    weights = torch.zeros(given.shape[1], dtype=torch.float64)
    for _ in range(300):  # the loss is convex; a hundredth of the weights' square keeps it bounded
        slope = -(torch.sigmoid(-(given / scale) @ weights)[:, None] * (given / scale)).mean(dim=0) + 0.01 * weights
        weights = weights - slope
    scores = (tested / scale) @ weights
    return float(((scores > 0).double() + 0.5 * (scores == 0)).mean())


EXPERIMENT = Experiment(
    name="general-rewards",
    title="General RL: rules, reward model and judge",
    section="§3.4",
    claim="Rules are precise and narrow, a reward model can be hacked, a judge is robust and noisy; mixed they resist.",
    variants=(
        Variant("start", "fine-tuned start, and its reward models"),
        Variant("orm-alone", "RL on the reward model alone", after="start"),
        Variant("mixed", "RL on the reward model behind the rules", after="start"),
    ),
    sizes=sizes,
    run=run,
    training=policy.training,
    questions=(
        Question("Trained on the reward model alone, the true score ends lower than mixed", "true_end", "orm-alone",
                 "mixed", "lower", main=True),
        Question("On the reward model alone, the alarm comes before the true score falls", "lead", "orm-alone", "mixed",
                 "higher", main=True),
        Question("On the reward model alone the alarm is raised, mixed it is not", "alarmed", "orm-alone", "mixed",
                 "higher"),
    ),
    figures=(
        Figure("true", "Rules kept and warm words", "share of rollouts", curve="true_score"),
        Figure("disagreement", "Trained reward against rules", "share of pairs", curve="disagreement/trained_rules"),
    ),
    labels=policy.LABELS
    | {f"orm_accuracy/{name}": f"reward model right on other pairs of {name}" for name in ("assistant", "general")}
    | {f"orm_accuracy_reworded/{name}": f"the same with wording that is in no pair for training, {name}" for name in
       ("assistant", "general")}
    | {f"length_accuracy/{name}": f"length alone right, {name}" for name in ("assistant", "general")}
    | {f"surface_accuracy/{name}": f"all surface features right, {name}" for name in ("assistant", "general")}
    | {"orm_calibration_error": "calibration error of the reward model", "grm_accuracy/assistant": "judge right on "
       "held-out pairs of assistant"}
    | {f"attacks_lose/{name}": f"adversarial answers that lose by {name}" for name in REWARDS}
    | {f"attacks_lose_mixed/{kind}": f"of them {kind}, by mixed" for kind in ("flattery", "injection", "filler",
                                                                              "look-alike")}
    | {
        "true_start": "true score at the start of RL",
        "true_best": "true score, best",
        "true_end": "true score at the end",
        "alarm_update": "update of the first alarm",
        "fall_update": "update at which the true score falls",
        "lead": "updates between alarm and fall",
        "alarmed": "alarm raised",
    },
    limits=(
        "Reward model and judge have 1.3 million parameters and know generated texts; the adversarial answers were "
        "written by the authors of the rules, who did not train on them.",
        "The true score is a program's: rules kept, a warm word, no cold one.",
    ),
)  # fmt: skip
