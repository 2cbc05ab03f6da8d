"""General RL: rules, an outcome reward model and a judge, mixed by class of prompt (§3.4). The loss is Eq. 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from glm5.chat import Tokenizer, parse_message
from glm5.config.recipe import GIVE_PAIRS, GeneralStage
from glm5.config.reward_model import RewardMix
from glm5.errors import ConfigError, GradingError, nearest
from glm5.obs.logs import get_logger
from glm5.parallel.ranks import Ranks
from glm5.preferences.rows import read_anchors, write_anchors
from glm5.records import TrainSample, Trajectory
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.disagreement import RewardWatch
from glm5.rl.judge import AnswerGroup, Judge, judge_groups, stage_judge
from glm5.rl.reward_mix import Parts, combine, mix_of
from glm5.rl.reward_models import RewardModel, checked_scores, stage_reward_model
from glm5.rl.start import StageStart, as_begun
from glm5.tasks import Family, make_family

_log = get_logger(__name__)
ANCHORS = "anchors.jsonl"
"""Human answers in the stage's folder, as they were when the stage began."""


class GeneralRL(ReasoningRL):
    """The reward of an answer is that of `rl.reward_mix`: by default the rules' verdict (0 or 1) times the mean of what
    the stage's models say.

    The reward model scores only the families that it knows (`RewardModel.domains`); the judge those, "general" and
    "assistant", and of their answers only those that pass the gate. Other families keep the reward of their graders.
    An answer that the judge failed on is left out; a group of which no more than half is left is dropped, as for failed
    environments. With several ranks, rank 0 alone has the models. The three rewards are compared in every update
    (`rl.disagreement`).
    """

    takes = GeneralStage
    tokenizer: Tokenizer
    stage: GeneralStage

    def __init__(self, stage: GeneralStage, reward_model: RewardModel | None, judge: Judge | None = None) -> None:
        super().__init__(stage)
        self.reward_model, self.judge, self.ranks = reward_model, judge, Ranks()
        self.watch = RewardWatch()
        self._anchors: Mapping[str, Sequence[str]] = {}
        judged = judge is not None or stage.judge is not None
        models = {"orm": float(reward_model is not None), "grm": float(judged)}
        self._default = RewardMix(**models) if any(models.values()) else RewardMix(rules=1.0)
        self._domains = {*(reward_model.domains if reward_model is not None else ()), *(GIVE_PAIRS if judged else ())}

    @classmethod
    def of(cls, stage: Any) -> Self:
        model = None if stage.reward_model is None else stage_reward_model(stage)
        made = cls(stage, model, **stage.algorithm_options)
        made._check_classes()
        return made

    def check(self, folder: Path) -> None:
        """Read people's votes and answers: raises ConfigError or DataError for what cannot be used."""
        judge = self.stage.judge
        if judge is not None and judge.anchors and not (folder / ANCHORS).exists():
            read_anchors(judge.anchors)
        if self.reward_model is not None:
            self.reward_model.check(self._families(), folder)

    def prepare(self, start: StageStart) -> dict[str, float]:
        """Train or load the reward model, open the judge. Returns the reward model's metrics, with names prefixed by
        `reward_model_`."""
        self.tokenizer, self.ranks = start.tokenizer, start.io.ranks
        numbers: dict[str, float] = {}
        if self.reward_model is not None:
            model = self.reward_model
            numbers = self.ranks.on_main(lambda: model.prepare(start, self._families()))
        config = self.stage.judge
        if config is not None and self.judge is None and self.ranks.rank == 0:
            if config.anchors:
                self._anchors = read_anchors(
                    [as_begun(start.io, ANCHORS, config.anchors, lambda copy: write_anchors(config.anchors, copy))]
                )
            self.judge = stage_judge(config, start)
        return {f"reward_model_{name}": n for name, n in numbers.items()}

    @property
    def state(self) -> dict[str, Any]:
        return self.watch.state

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.watch.restore(state)

    def samples(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TrainSample], dict[str, float]]:
        parts, numbers = self._parts(groups)
        kept: list[list[Trajectory]] = []
        left: list[list[Parts]] = []
        for group, own in zip(groups, parts, strict=True):
            mix = self._mix(group[0])
            rewards = combine(own, mix, self.stage.scale)
            pairs = [
                (dataclasses.replace(t, reward=reward), part)
                for t, part, reward in zip(group, own, rewards, strict=True)
                if reward is not None
            ]
            if 2 * len(pairs) > len(group) or len(pairs) == len(group):
                kept.append([t for t, _ in pairs])
                left.append([part for _, part in pairs])
        if not kept:
            raise GradingError(
                f"{self.stage.name}: the judge gave no verdict for any prompt of an update, so there is no reward; the "
                "log has its failures."
            )
        rows, more = super().samples(kept)
        advantages = [self.credit([t.reward for t in group]) for group in kept]
        mixes = [self._mix(group[0]) for group in kept]
        watched, alarms = self.watch.add(left, advantages, mixes)
        for alarm in alarms:
            _log.warning("%s: %s", self.stage.name, alarm)
        combined = [t.reward for group in kept for t in group]
        numbers |= {"combined_reward": sum(combined) / len(combined)} | more | watched
        if len(kept) < len(groups):
            numbers["judge/dropped_groups"] = float(len(groups) - len(kept))
        return rows, numbers

    def _parts(self, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[list[Parts]], dict[str, float]]:
        """What each reward says about every answer, and metrics of the models."""
        numbers: dict[str, float] = {}
        flat = [t for group in groups for t in group]
        texts = {id(t): self._pair(t) for t in flat if t.turns and self._known(t)}
        orm: dict[int, float] = {}
        if self.reward_model is not None and texts:
            model = self.reward_model
            pairs = {id(t): texts[id(t)] for t in flat if id(t) in texts and t.domain in model.domains}
            scores = self.ranks.on_main(lambda: checked_scores(model, list(pairs.values()))) if pairs else []
            orm = dict(zip(pairs, scores, strict=True))
            passed = [orm[id(t)] for t in flat if id(t) in orm and t.reward > 0]
            if passed:
                numbers["orm_score"] = sum(passed) / len(passed)
        grm: dict[int, float | None] = {}
        if self.stage.judge is not None or self.judge is not None:
            judged = self.ranks.on_main(lambda: self._judge(groups, texts))
            grm = {id(flat[i]): value for i, value in judged[0].items()}
            numbers |= judged[1]
        found = [
            [Parts(t.reward, orm.get(id(t)), grm.get(id(t)), id(t) in grm and grm[id(t)] is None) for t in group]
            for group in groups
        ]
        return found, numbers

    def _judge(
        self, groups: Sequence[Sequence[Trajectory]], texts: Mapping[int, tuple[str, str]]
    ) -> tuple[dict[int, float | None], dict[str, float]]:
        """The judge's scores by the number of the trajectory, and metrics. Rank 0 only."""
        assert self.judge is not None
        number = {id(t): i for i, t in enumerate(t for group in groups for t in group)}
        asked: list[list[Trajectory]] = []
        for group in groups:
            mix = self._mix(group[0])
            wanted = [t for t in group if id(t) in texts and (t.reward > 0 or not mix.gate)] if mix.grm else []
            asked.append(wanted)
        questions = [
            AnswerGroup(
                texts[id(own[0])][0],
                [texts[id(t)][1] for t in own],
                self._anchors.get(texts[id(own[0])][0], ()),
                _class_of(own[0]),
            )
            for own in asked
            if own
        ]
        answers = iter(judge_groups(self.judge, questions))
        scores: dict[int, float | None] = {}
        for own in asked:
            if own:
                found = next(answers)
                # A single answer that passed has nothing to be compared with: it is neither good nor bad.
                lonely = len(own) == 1 and not self._anchors.get(texts[id(own[0])][0])
                scores |= {number[id(t)]: 0.5 if lonely else s for t, s in zip(own, found, strict=True)}
        known = [score for score in scores.values() if score is not None]
        mean = {"grm_score": sum(known) / len(known)} if known else {}
        return scores, mean | self.judge.take_counts()

    def _families(self) -> list[Family]:
        return [make_family(family.name, **family.options) for family in self.stage.families]

    def _check_classes(self) -> None:
        """Raise ConfigError for a name in `mix` or `judge.rubrics` that no prompt of the stage's families has, and for
        a judge that is never asked."""
        stage = self.stage
        prompts = [(str(name), f.domain) for f in self._families() for name in getattr(f, "classes", ()) or ("",)]
        classes = {name for prompt_class, _ in prompts for name in (prompt_class, prompt_class.partition("/")[0])}
        named: list[tuple[str, Collection[str], set[str]]] = [
            ("mix", stage.mix, classes | {domain for _, domain in prompts} | {"default"})
        ]
        if stage.judge is not None:
            named.append(("judge.rubrics", stage.judge.rubrics, classes))
            mixes = [mix_of(stage.mix, *prompt, self._default) for prompt in prompts if prompt[1] in self._domains]
            if not any(mix.grm for mix in mixes):
                raise ConfigError(
                    f"{stage.name}: the judge is never asked. No prompt of the stage is of a domain that it scores "
                    f"({', '.join(sorted(self._domains))}) and has a weight `grm`; add a family or a weight, or remove "
                    "`judge`."
                )
        for key, names, known in named:
            for name in names:
                if name not in known - {""}:
                    raise ConfigError(
                        f'{stage.name}: no prompt of this stage has the class "{name}" of {key}{nearest(name, known)}.'
                    )

    def _mix(self, trajectory: Trajectory) -> RewardMix:
        return mix_of(self.stage.mix, _class_of(trajectory), trajectory.domain, self._default)

    def _known(self, trajectory: Trajectory) -> bool:
        """Whether a model scores this episode."""
        return trajectory.domain in self._domains

    def _pair(self, trajectory: Trajectory) -> tuple[str, str]:
        """The last user message and the last answer as text, without thinking, as a user sees them."""
        tokenizer, turn = self.tokenizer, trajectory.turns[-1]
        ids, special = turn.context_ids, tokenizer.special
        start = len(ids) - ids[::-1].index(special["<|user|>"])
        prompt = tokenizer.decode(ids[start : ids.index(special["<|assistant|>"], start)])
        thinking = ids[-1] == special["<think>"]  # with thinking, the prompt ends inside the think block
        message, _ = parse_message(tokenizer.decode(turn.output_ids), thinking=thinking)
        return prompt, message.content


def _class_of(trajectory: Trajectory) -> str:
    """The class of a trajectory's prompt, if its environment told one."""
    found = trajectory.detail.get("class", "")
    return found if isinstance(found, str) else ""
