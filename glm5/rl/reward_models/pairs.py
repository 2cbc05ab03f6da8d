"""The preference pairs that train a reward model: of task families, of people, or of both (§3.4)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from glm5.data import recall
from glm5.errors import DataError
from glm5.preferences.rows import Preferred
from glm5.seeds import derive_seed


@dataclass(frozen=True)
class TrainingPair:
    """`better` is preferred to `worse` with a `strength` in (0, 1]; `weight` is its share in the loss."""

    prompt: str
    better: str
    worse: str
    strength: float = 1.0
    weight: float = 1.0


@runtime_checkable
class GivesPairs(Protocol):
    """A task family that makes preference pairs; one whose options may leave it without any has a bool `gives_pairs`
    (see `families_with_pairs`)."""

    def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
        """`(prompt, better, worse)`, a function of index and split."""
        ...


def families_with_pairs(families: Iterable[object]) -> list[GivesPairs]:
    """The families that make preference pairs with the options they have."""
    return [family for family in families if isinstance(family, GivesPairs) and getattr(family, "gives_pairs", True)]


class PairSource:
    """An endless supply of pairs: people's with the probability `share`, the others of the families in turn.

    People's pairs are held out by a hash of the prompt, so that no prompt is in both splits. With `length_debias` the
    weights of those for training are such that pairs whose better answer is the longer one have half of all weight: a
    classifier of length then learns nothing. Pairs of equal length keep their weight. If all lean one way, the weights
    stay 1, because nothing can be balanced; `balanced` then says so.

    Raises DataError without any pair for training.
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
        if not self._families and not self._people["train"]:
            raise DataError("there are no preference pairs to train a reward model on; vote on more prompts.")
        self.balanced = True
        if length_debias:
            self._people["train"], self.balanced = balance_length(self._people["train"])

    def pair(self, index: int, split: str = "train") -> TrainingPair:
        """Pair `index` of a split; a function of the seed, the split and the index. Without people's pairs in the
        split, all are of the families."""
        rng = random.Random(derive_seed(self._seed, "preference-pair", split, index))
        people = self._people[split] or ([] if self._families else self._people["train"])
        if people and rng.random() < self._share:
            return rng.choice(people)
        family = self._families[index % len(self._families)]
        return TrainingPair(*family.preference_pair(index, split=split))


def balance_length(pairs: Sequence[TrainingPair]) -> tuple[list[TrainingPair], bool]:
    """Pairs with weights of mean 1 in which the longer answer is the better one in half of the weight of all pairs of
    unequal length; and whether that was possible."""
    longer = [len(p.better) > len(p.worse) for p in pairs]
    shorter = [len(p.better) < len(p.worse) for p in pairs]
    ups, downs = sum(longer), sum(shorter)
    if not ups or not downs:
        return list(pairs), not (ups or downs)
    half = (ups + downs) / 2
    weights = [half / ups if up else half / downs if down else 1.0 for up, down in zip(longer, shorter, strict=True)]
    return [TrainingPair(p.prompt, p.better, p.worse, p.strength, w) for p, w in zip(pairs, weights, strict=True)], True
