"""The preference pairs that train a reward model: of task families, of people, or of both (§3.4)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from glm5.data import recall
from glm5.errors import DataError
from glm5.preferences.rows import Preferred
from glm5.seeds import derive_seed


@dataclass(frozen=True)
class TrainingPair:
    """`better` is preferred to `worse` with a `strength` in (0, 1]."""

    prompt: str
    better: str
    worse: str
    strength: float = 1.0


@runtime_checkable
class GivesPairs(Protocol):
    """A task family that makes preference pairs; one whose options may leave it without any has a bool `gives_pairs`
    (see `families_with_pairs`)."""

    def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
        """`(prompt, better, worse)`, a function of index and split."""
        ...


def families_with_pairs(families: Iterable[Any]) -> list[GivesPairs]:
    """The task families that give preference pairs with their options. `gives_pairs = False` says that one does not."""
    return [f for f in families if isinstance(f, GivesPairs) and getattr(f, "gives_pairs", True)]


class PairSource:
    """Pairs for training without end, and distinct held-out pairs: people's are the share `share`, the others come
    from the families in turn.

    People's pairs are held out by a hash of the prompt, so that no prompt is in both splits. With `length_debias` those
    for training are drawn so that the longer answer is the better one in half of the draws: a classifier of length then
    learns nothing. (A weight in the loss would not do: clipping and the optimizer undo it if a step has few pairs.)
    Pairs of equal length are drawn as often as without. If all lean one way, nothing can be balanced, and `balanced`
    is False.

    Raises DataError if there is no pair for training or no held-out pair.
    """

    def __init__(
        self,
        families: Sequence[GivesPairs],
        people: Sequence[Preferred] = (),
        share: float = 0.5,
        length_debias: bool = True,
        seed: int = 0,
    ) -> None:
        self._families, self._seed = list(families), seed
        self._share = 0.0 if not people else share if families else 1.0
        parts: dict[str, list[Preferred]] = {"train": [], "heldout": []}
        for pair in people:
            parts["heldout" if recall.split_of(f"preference {pair.prompt}") == "heldout" else "train"].append(pair)
        self._people = {
            split: [TrainingPair(p.prompt, p.better, p.worse, p.strength) for p in found]
            for split, found in parts.items()
        }
        if not self._families and not all(self._people.values()):
            raise DataError(
                "there are no preference pairs to train a reward model on and others to measure it: no family gives "
                f"any, and people only {len(people):,}; vote on more prompts."
            )
        train = self._people["train"]
        weights, self.balanced = length_weights(train) if length_debias else ([1.0] * len(train), True)
        self._cumulated = list(itertools.accumulate(weights))

    def pair(self, index: int) -> TrainingPair:
        """Pair `index` of training; a function of the seed and the index."""
        rng = random.Random(derive_seed(self._seed, "preference-pair", "train", index))
        people = self._people["train"]
        if people and rng.random() < self._share:
            return rng.choices(people, cum_weights=self._cumulated)[0]
        return self._of_families(index, "train")

    def held_out(self, count: int) -> list[TrainingPair]:
        """Distinct held-out pairs, people's first: `count`, or fewer if there are not as many."""
        rng = random.Random(derive_seed(self._seed, "preference-pair", "heldout"))
        people = list(dict.fromkeys(self._people["heldout"]))
        most = round(self._share * count) if self._families else count
        found = dict.fromkeys(rng.sample(people, min(most, len(people))))
        if self._families:
            for index in range(4 * count):  # a family may have fewer distinct pairs than that
                if len(found) == count:
                    break
                found[self._of_families(index, "heldout")] = None
        return list(found)

    def _of_families(self, index: int, split: str) -> TrainingPair:
        family = self._families[index % len(self._families)]
        return TrainingPair(*family.preference_pair(index, split=split))


def length_weights(pairs: Sequence[TrainingPair]) -> tuple[list[float], bool]:
    """Weights of mean 1 by which the longer answer is the better one in half of the weight of all pairs of unequal
    length; and whether that is possible."""
    longer = [len(p.better) > len(p.worse) for p in pairs]
    shorter = [len(p.better) < len(p.worse) for p in pairs]
    ups, downs = sum(longer), sum(shorter)
    if not ups or not downs:
        return [1.0] * len(pairs), not (ups or downs)
    half = (ups + downs) / 2
    return [half / ups if up else half / downs if down else 1.0 for up, down in zip(longer, shorter, strict=True)], True
