"""Chooses the problem of each group of rollouts from a mixture of families; filters by difficulty, tags teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5.chat import Tokenizer
from glm5.config.families import family_labels
from glm5.config.recipe import DistillStage, PolicyStage
from glm5.errors import ConfigError, DataError, RolloutError
from glm5.obs.logs import get_logger
from glm5.records import Completer, SamplingParams
from glm5.seeds import derive_seed
from glm5.tasks import DistinctProblems, Episode, Mixture, make_family
from glm5.tasks.contract import Problem
from glm5.tasks.difficulty import (
    DifficultySampler,
    PassCount,
    family_key,
    measure_pass_rates,
    read_pass_counts,
    write_pass_counts,
)
from glm5.tasks.env_threads import EnvThreadPool
from glm5.tasks.episode import open_episode

SPLIT = "rl"
"""Split of rollouts and difficulty measurements; demonstrations and evaluations use no problem of this split."""

SPAN = 100_000
"""Distance between the first problem indices of consecutive seeds."""

EPISODES = 256
"""Episodes per measured batch; the counts of a batch are saved before the next one begins."""

PASS_RATES = "pass_rates.jsonl"
"""File in a stage's folder with the pass rates of the policy that it started from."""

_log = get_logger(__name__)


class PromptStream:
    """Maps a group number to a problem of the rollout split; depends only on group number, stage and seed.

    For every n, the number of groups of each family among the first n groups differs by at most one from the family's
    exact share. So batches keep the ratios as closely as whole numbers allow. No problem of a family repeats before all
    were used. Entries with the same family and options divide its problems among themselves. Families with a
    `difficulty` need `measure` first.
    """

    def __init__(self, stage: PolicyStage, seed: int) -> None:
        """Raises ConfigError for an unknown family or option, and for weights that do not form a mixture."""
        self.stage, self._seed = stage, seed
        self._families = [make_family(f.name, **f.options) for f in stage.families]
        self._mixture = Mixture([f.weight for f in stage.families])
        self._keys = [family_key(f.name, f.options, f.render_tools) for f in stage.families]
        sources = [(family_key(f.name, f.options), f.difficulty) for f in stage.families]
        self._copies = [sources.count(source) for source in sources]
        self._places = [sources[:i].count(source) for i, source in enumerate(sources)]
        first = seed % 1000 * SPAN
        shared = {key: DistinctProblems(f, SPLIT, first) for (key, _), f in zip(sources, self._families, strict=True)}
        self._problems = [shared[key] for key, _ in sources]
        self._labels = family_labels(stage.families)
        tries: dict[str, int] = {}
        for key, config in zip(self._keys, stage.families, strict=True):
            if config.difficulty and tries.setdefault(key, config.difficulty.tries) != config.difficulty.tries:
                raise ConfigError(
                    f"{stage.name}: the entries of {config.name} have different `difficulty.tries`; use one number."
                )
        self._samplers: dict[int, DifficultySampler] = {}
        self._repeating: set[int] = set()
        self.numbers: dict[str, float] = {}
        """Metrics of `measure`: `pass_rate/NAME` and `kept_share/NAME` of every family with a `difficulty`."""

    def label(self, group: int) -> str:
        """The name of the group's family in metrics."""
        return self._labels[self._mixture.domain(group)]

    def episode(self, group: int, tokenizer: Tokenizer, threads: EnvThreadPool) -> Episode:
        """A new episode of the problem of group `group`; its environment starts in `threads`."""
        problem, options = self.problem(self._mixture.domain(group), self._mixture.occurrence(group))
        return open_episode(problem, tokenizer, threads, group=group, **options)

    def problem(self, entry: int, occurrence: int) -> tuple[Problem, dict[str, Any]]:
        """Problem number `occurrence` of the stage's family `entry`, and the options of its episodes."""
        config = self.stage.families[entry]
        teacher = self.stage.teacher_of(config) if isinstance(self.stage, DistillStage) else None
        options: dict[str, Any] = {
            "max_turns": self.stage.max_turns,
            "max_context": self.stage.max_context,
            "render_tools": config.render_tools,
            "teacher": teacher or "",
        }
        return self._families[entry].problem(SPLIT, self._index(entry, occurrence)), options

    def _index(self, entry: int, occurrence: int) -> int:
        place, problems, again = occurrence * self._copies[entry] + self._places[entry], self._problems[entry], 0
        if (difficulty := self.stage.families[entry].difficulty) is not None:
            if entry not in self._samplers:
                raise ConfigError(f"{self.stage.name}: the difficulty of {self._labels[entry]} was not measured.")
            place = self._samplers[entry].index(place)
            again = difficulty.problems  # the first problem that was not measured
        if entry not in self._repeating and problems.count(place + 1) <= place:
            self._repeating.add(entry)
            _log.warning(
                "%s: %s has only %d distinct problems for rollouts; from here on they repeat.",
                self.stage.name, self._labels[entry], problems.count(place),
            )  # fmt: skip
        return problems.index(place, again)

    def measure(self, completer: Completer | None, tokenizer: Tokenizer, path: Path, policy: str) -> None:
        """Measure the pass rates that `difficulty` needs, unless the file `path` has them for this `policy` (an id of
        its weights); then filter the problems by pass rate. Without a `completer` the file must have them. Raises
        DataError if no problem is left, RolloutError if no episode could be played."""
        for entry, config in enumerate(self.stage.families):
            if config.difficulty is None:
                continue
            label = self._labels[entry]
            counts = self._counts(entry, completer, tokenizer, path, policy)
            unseen = config.difficulty.problems
            if config.difficulty.unseen and self._problems[entry].count(unseen + 1) <= unseen:
                raise DataError(
                    f"{self.stage.name}: {label} has only {self._problems[entry].count(unseen)} distinct problems for "
                    "rollouts, and all are used to measure the difficulty, so no unseen problem is left; lower "
                    "`difficulty.problems`, or set `difficulty.unseen` to 0."
                )
            sampler = DifficultySampler(counts, config.difficulty, unseen, self._seed, f"{self.stage.name}: {label}")
            self._samplers[entry] = sampler
            rate = sum(count.rate for count in counts.values()) / len(counts)
            self.numbers |= {f"pass_rate/{label}": rate, f"kept_share/{label}": len(sampler.kept) / len(counts)}
            _log.info(
                "%s: %d of %d measured problems of %s are kept; the mean pass rate of all measured ones is %.3f.",
                self.stage.name, len(sampler.kept), len(counts), label, rate,
            )  # fmt: skip

    def _counts(
        self, entry: int, completer: Completer | None, tokenizer: Tokenizer, path: Path, policy: str
    ) -> dict[int, PassCount]:
        """Pass counts of a family's first distinct problems, by problem number."""
        stage, config, key = self.stage, self.stage.families[entry], self._keys[entry]
        assert config.difficulty is not None
        wanted = self._problems[entry].indices(config.difficulty.problems)
        if len(wanted) < config.difficulty.problems:
            _log.warning(
                "%s: %s has only %d distinct problems for rollouts; all are measured, instead of %d.",
                stage.name, self._labels[entry], len(wanted), config.difficulty.problems,
            )  # fmt: skip
        known = read_pass_counts(path, policy, key) if path.exists() else {}
        missing = [index for index in wanted if index not in known]
        size = max(1, EPISODES // config.difficulty.tries)
        if missing and completer is None:
            raise RolloutError(f"{stage.name}: {path} lacks measured pass rates of {self._labels[entry]}.")
        for part in (missing[at : at + size] for at in range(0, len(missing), size)):
            assert completer is not None
            found = measure_pass_rates(
                completer,
                tokenizer,
                self._families[entry],
                part,
                config.difficulty.tries,
                SamplingParams(
                    max_tokens=stage.max_tokens,
                    temperature=stage.temperature,
                    seed=derive_seed(self._seed, "difficulty", key, part[0]),
                ),
                max_turns=stage.max_turns,
                max_context=stage.max_context,
                render_tools=config.render_tools,
                split=SPLIT,
                env_seconds=stage.env_seconds,
            )
            # A problem without a valid episode is saved with 0 tries, so a resumed stage does not measure it again.
            found = {index: found.get(index, PassCount(0, 0)) for index in part}
            write_pass_counts(path, policy, key, found)
            known |= found
        counts = {place: known[index] for place, index in enumerate(wanted) if known[index].tries}
        if not counts:
            raise RolloutError(
                f"{stage.name}: the environment failed in every episode that measured the difficulty of "
                f"{self._labels[entry]}, so no problem has a pass rate."
            )
        return counts
