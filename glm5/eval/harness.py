"""The evaluation after every stage: text, skills, retrieval by length, and MTP acceptance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from glm5.chat import Tokenizer
from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig, family_labels
from glm5.data.packing import Batch
from glm5.data.shards import Shard
from glm5.engine.engine import Engine
from glm5.engine.measure_acceptance import generate_speculative
from glm5.errors import ConfigError
from glm5.eval.passk import pass_scores
from glm5.eval.text import bits_per_byte
from glm5.model.context import packed_context
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import Outcome, SamplingParams, Trajectory
from glm5.seeds import derive_seed
from glm5.stats import wilson
from glm5.tasks import make_family, needle_text, open_episodes, play
from glm5.tasks.contract import held_out_problems
from glm5.tasks.judged import is_judged
from glm5.train.losses import target_logprobs

SAMPLES_SHOWN = 2
MTP_PROMPT = 48
"""Tokens of held-out text that speculative decoding continues."""


def evaluate(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, config: EvalConfig, shard: Shard | None, seed: int = 0
) -> dict[str, Any]:
    """Results of all configured suites as plain data (the layout of `results.json`).

    Problems are held out and distinct; `n` counts them. If a family has fewer than `config.problems`, `asked` is the
    configured number. A family that is listed several times gets numbered names (see `family_labels`).

    Each skill has a greedy score. Its `solved` is one "1" or "0" per problem, in order, for paired comparisons of
    stages. With `config.samples` it also has "pass@k" (see `passk`) and `passed`, the number of right samples per
    problem. Failed environments count as not solved; `errors` counts them. Suites that need held-out text are skipped
    for a corpus that is too small to have any.
    """
    model.eval()
    found: dict[str, Any] = {}
    if shard is not None and len(shard) and config.text_bytes:
        end = tokenizer.special["<|endoftext|>"]
        found["text"] = bits_per_byte(model, shard, end, max_bytes=config.text_bytes).plain()
    samples: list[dict[str, Any]] = []
    found["skills"] = {}
    for label, family in zip(family_labels(config.families), config.families, strict=True):
        trajectories = play_skill(model, tokenizer, family, config)
        found["skills"][label] = skill_score(trajectories)
        if len(trajectories) < config.problems:
            found["skills"][label]["asked"] = config.problems
        if config.samples:
            drawn = play_skill(model, tokenizer, family, config, derive_seed(seed, "pass@k", label))
            found["skills"][label] |= sampled_score(drawn, config)
        samples += [_sample(t, label, tokenizer) for t in trajectories[:SAMPLES_SHOWN]]
    found["samples"] = samples
    found["needle"] = {
        str(length): needle_score(model, tokenizer, length, config.needle_problems, seed)
        for length in config.needle_bytes
    }
    if shard is not None and len(shard.tokens) >= MTP_PROMPT and model.mtp is not None and config.mtp_prompts:
        found["mtp"] = mtp_acceptance(model, shard, config)
    return found


def score(successes: int, n: int) -> dict[str, float]:
    """A proportion with its 95 % Wilson interval."""
    return wilson(successes, n).plain()


def skill_score(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Share of problems that were solved, one trajectory per problem, and which ones."""
    solved = [t.outcome is Outcome.SOLVED for t in trajectories]
    entry: dict[str, Any] = score(sum(solved), len(solved))
    entry["solved"] = "".join(str(int(right)) for right in solved)
    if errors := sum(t.outcome is Outcome.ENV_ERROR for t in trajectories):
        entry["errors"] = errors
    return entry


def sampled_score(trajectories: Sequence[Trajectory], config: EvalConfig) -> dict[str, Any]:
    """pass@k of the trajectories that `play_skill` samples."""
    passed = [0] * (len(trajectories) // config.samples)
    for trajectory in trajectories:
        passed[trajectory.group] += trajectory.outcome is Outcome.SOLVED
    entry: dict[str, Any] = {"pass@k": pass_scores(passed, config.samples, config.ks), "samples": config.samples}
    entry["passed"] = " ".join(map(str, passed))
    if errors := sum(t.outcome is Outcome.ENV_ERROR for t in trajectories):
        entry["sample_errors"] = errors
    return entry


def play_skill(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, family: FamilyConfig, config: EvalConfig, seed: int | None = None
) -> list[Trajectory]:
    """Greedy episodes of the family's first distinct held-out problems: `config.problems`, or all if it has fewer. With
    a seed, `config.samples` sampled episodes per problem instead: all problems once, then all again, so a larger
    `config.samples` keeps the first samples. `group` is the problem number. Raises DataError for a family without
    problems."""
    source = make_family(family.name, **family.options)
    problems = list(enumerate(held_out_problems(source, config.problems, family.name)))
    if any(is_judged(problem) for _, problem in problems):
        raise ConfigError(f'{family.name}: a stage has no judge; use `glm5 eval --judge` for the grader "judge".')
    context = min(config.max_context, model.config.max_position_embeddings)  # an episode that reaches it is cut off
    episodes = open_episodes(
        problems * (1 if seed is None else config.samples),
        tokenizer,
        max_turns=config.max_turns,
        max_context=context,
        render_tools=family.render_tools,
    )
    engine = Engine(
        model,
        tokenizer,
        max_batch=min(64, len(episodes)),
        max_length=context + 1,
        exact=config.rollouts == "exact",
    )
    temperature = 0.0 if seed is None else config.temperature
    return play(episodes, engine, SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=seed))


def _sample(trajectory: Trajectory, family: str, tokenizer: Tokenizer) -> dict[str, Any]:
    text = trajectory.detail["text"]
    # If the prompt alone fills the context, there is no turn.
    prompt = tokenizer.decode(trajectory.turns[0].context_ids) if trajectory.turns else text
    return {"family": family, "prompt": prompt, "output": text.removeprefix(prompt), "reward": trajectory.reward}


@torch.no_grad()
def needle_score(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, length: int, problems: int, seed: int
) -> dict[str, float]:
    """Retrieval score on held-out documents of `length` bytes, with depths spread from the first to the last line. A
    document is solved if the asked value is the likeliest of four values of the document, all of equal length. `chance`
    is the score of guessing."""
    solved, chance = 0, 0.0
    for index in range(problems):
        prompt, answer = needle_text(seed, index, length, index / max(1, problems - 1), split="heldout")
        choices = _choices(prompt, answer)
        likelihood = continuation_logprobs(model, tokenizer.encode(prompt), [tokenizer.encode(c) for c in choices])
        solved += likelihood[0] > max(likelihood[1:], default=float("-inf"))  # ties and nan are not knowledge
        chance += 1 / len(choices) / problems
    return score(solved, problems) | {"chance": chance}


def _choices(prompt: str, answer: str, most: int = 4) -> list[str]:
    """The right value first, then up to `most` - 1 other values of the document."""
    values = [f"{line.rpartition(' = ')[2]}\n" for line in prompt.splitlines()[:-1]]
    others = sorted({v for v in values if v != answer}, key=_order)
    return [answer, *others[: most - 1]]


def _order(text: str) -> str:
    """A stable sort key that is unrelated to the text's meaning."""
    return hashlib.sha256(text.encode()).hexdigest()


def continuation_logprobs(
    model: GLM5ForCausalLM, prompt: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[float]:
    """Total log-probability of each continuation of one prompt, in nats."""
    rows = [([*prompt, *c], [False] * len(prompt) + [True] * len(c)) for c in continuations]
    ids = torch.zeros(len(rows), max(len(row) for row, _ in rows), dtype=torch.long)
    documents, mask = torch.full_like(ids, -1), torch.zeros_like(ids, dtype=torch.bool)
    for i, (row, wanted) in enumerate(rows):
        ids[i, : len(row)], documents[i, : len(row)] = torch.tensor(row), 0
        mask[i, : len(row)] = torch.tensor(wanted)
    batch = Batch(ids, documents, mask)
    targets, wanted_targets = batch.targets()
    batch = batch.to(model.device)
    hidden = model.model(batch.ids, packed_context(batch.documents))
    logprobs, _ = target_logprobs(model, hidden, targets, wanted_targets)
    return [float(part.sum()) for part in logprobs.split([len(c) for c in continuations])]


def mtp_acceptance(
    model: GLM5ForCausalLM, shard: Shard, config: EvalConfig, prompt_length: int = MTP_PROMPT
) -> dict[str, Any]:
    """Greedy speculative decoding with 3 drafts on held-out text: accept length and acceptance per draft position."""
    spare = len(shard.tokens) - prompt_length
    stride = max(1, spare // config.mtp_prompts)
    count = min(config.mtp_prompts, spare + 1)
    prompts = [shard.tokens[i * stride :][:prompt_length].astype(int).tolist() for i in range(count)]
    result = generate_speculative(model, prompts, max_tokens=config.mtp_tokens)
    return {
        "accept_length": result.accept_length,
        "per_position": [count / max(1, result.rounds) for count in result.accepted],
        "n": result.rounds,
    }
