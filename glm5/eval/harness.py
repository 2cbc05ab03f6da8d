"""What is measured after every stage: text, skills, retrieval by length, and MTP acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from glm5.chat import Tokenizer
from glm5.config.recipe import EvalConfig, FamilyConfig
from glm5.data.shards import Shard
from glm5.engine.engine import Engine
from glm5.engine.speculative import generate_speculative
from glm5.eval.text import bits_per_byte
from glm5.model.context import ForwardContext
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import SamplingParams, Trajectory
from glm5.stats import wilson
from glm5.tasks import Episode, make_family, needle_text, play

SAMPLES_SHOWN = 2


def evaluate(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, config: EvalConfig, shard: Shard | None, seed: int = 0
) -> dict[str, Any]:
    """All suites of a configuration as plain data (the layout of `results.json`). Greedy; problems are held out."""
    model.eval()
    found: dict[str, Any] = {}
    if shard is not None and config.text_bytes:
        end = tokenizer.special["<|endoftext|>"]
        found["text"] = bits_per_byte(model, shard, end, max_bytes=config.text_bytes).plain()
    samples: list[dict[str, Any]] = []
    found["skills"] = {}
    for family in config.families:
        trajectories = play_skill(model, tokenizer, family, config)
        solved = sum(t.reward == 1.0 for t in trajectories)
        found["skills"][family.name] = score(solved, len(trajectories))
        samples += [_sample(t, family.name, tokenizer) for t in trajectories[:SAMPLES_SHOWN]]
    found["samples"] = samples
    found["needle"] = {
        str(length): needle_score(model, tokenizer, length, config.needle_problems, seed)
        for length in config.needle_bytes
    }
    if shard is not None and model.mtp is not None and config.mtp_prompts:
        found["mtp"] = mtp_acceptance(model, shard, config)
    return found


def score(successes: int, n: int) -> dict[str, float]:
    """A proportion with its 95 % Wilson interval."""
    interval = wilson(successes, n)
    return {"score": interval.value, "low": interval.low, "high": interval.high, "n": n}


def play_skill(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, family: FamilyConfig, config: EvalConfig
) -> list[Trajectory]:
    """Greedy episodes of the family's held-out problems."""
    source = make_family(family.name, **family.options)
    episodes = [
        Episode(
            source.problem("heldout", index).env(),
            tokenizer,
            max_turns=config.max_turns,
            max_context=config.max_context,
            group=index,
            render_tools=family.render_tools,
        )
        for index in range(config.problems)
    ]
    engine = Engine(model, tokenizer, max_batch=min(64, config.problems), max_length=config.max_context + 1)
    return play(episodes, engine, SamplingParams(max_tokens=config.max_tokens, temperature=0.0))


def _sample(trajectory: Trajectory, family: str, tokenizer: Tokenizer) -> dict[str, Any]:
    first = trajectory.turns[0]
    text = trajectory.detail["text"]
    prompt = tokenizer.decode(first.context_ids)
    return {"family": family, "prompt": prompt, "output": text.removeprefix(prompt), "reward": trajectory.reward}


@torch.no_grad()
def needle_score(
    model: GLM5ForCausalLM, tokenizer: Tokenizer, length: int, problems: int, seed: int, batch: int = 8
) -> dict[str, float]:
    """Share of held-out retrieval documents of `length` bytes whose answer is the greedy continuation, depths spread."""
    solved = 0
    for start in range(0, problems, batch):
        rows, answers = [], []
        for index in range(start, min(problems, start + batch)):
            depth = index / max(1, problems - 1)
            prompt, answer = needle_text(seed, index, length, depth, split="heldout")
            rows.append(tokenizer.encode(prompt))
            answers.append(tokenizer.encode(answer))
        solved += sum(_greedy_matches(model, rows, answers))
    return score(solved, problems)


def _greedy_matches(model: GLM5ForCausalLM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[bool]:
    """Whether each answer is what greedy decoding would write: every answer token is the argmax given those before it."""
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    ctx = ForwardContext(positions=positions)
    hidden = ctx.rows(model.model(ids, ctx))
    found = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        found.append(model.lm_head(hidden[i, span]).argmax(-1).tolist() == answer)
    return found


def mtp_acceptance(model: GLM5ForCausalLM, shard: Shard, config: EvalConfig, prompt_length: int = 48) -> dict[str, Any]:
    """Accept length of greedy speculative decoding with 3 drafts on held-out text, and acceptance per draft position."""
    stride = max(1, (len(shard.tokens) - prompt_length) // config.mtp_prompts)
    prompts = [shard.tokens[i * stride :][:prompt_length].astype(int).tolist() for i in range(config.mtp_prompts)]
    result = generate_speculative(model, prompts, max_tokens=config.mtp_tokens)
    return {
        "accept_length": result.accept_length,
        "per_position": [count / max(1, result.rounds) for count in result.accepted],
        "n": result.rounds,
    }


def suite(model: GLM5ForCausalLM, tokenizer: Tokenizer, family: FamilyConfig, config: EvalConfig) -> dict[str, Any]:
    """One skill by name, for `glm5 eval`."""
    trajectories = play_skill(model, tokenizer, family, config)
    return asdict(wilson(sum(t.reward == 1.0 for t in trajectories), len(trajectories)))
