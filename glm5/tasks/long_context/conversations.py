"""Conversations with the same request several times, of which the n-th answer is to be given again, as in MRCR
(Vodrahalli et al., arXiv:2409.12640). Its data are on a hub; these are made up, so scores are not comparable with
published ones.

The reply must begin with a random prefix; then its likeness to the answer counts (`difflib`'s ratio), else 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice

from glm5.records import Message
from glm5.tasks.long_context import words
from glm5.tasks.long_context.haystack import sentences

FORMS = ("poem", "memo", "riddle", "letter", "speech", "recipe", "report", "diary entry", "news item", "short story")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class Conversation:
    """`messages(size)` is the conversation with `size` other requests; the last message asks for `answer`."""

    messages: Callable[[int], list[Message]]
    answer: str
    prefix: str
    depths: tuple[float]

    def score(self, reply: str) -> float:
        """From 0 to 1."""
        if not reply.startswith(self.prefix):
            return 0.0
        said = reply.removeprefix(self.prefix).strip()
        start = said[: 4 * len(self.answer)]  # the ratio takes quadratic time; what follows counts as different
        ratio = SequenceMatcher(None, start, self.answer).ratio()
        return ratio * (len(start) + len(self.answer)) / (len(said) + len(self.answer))

    @property
    def needles(self) -> tuple[str, ...]:
        """The answer to repeat."""
        return (self.answer,)

    @property
    def reply(self) -> str:
        """One that scores 1."""
        return f"{self.prefix} {self.answer}"


def conversation(rng: random.Random, needles: int) -> Conversation:
    """One whose question is on one of `needles` equal requests."""
    form, topic, asked = rng.choice(FORMS), next(words.keys(rng)), rng.randrange(needles)
    prefix = "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", k=10))
    bodies = [_body(rng, form, topic) for _ in range(needles)]
    depths = sorted(rng.random() for _ in bodies)
    seed = rng.getrandbits(64)

    def messages(size: int) -> list[Message]:
        other = random.Random(seed)
        topics = [topic, *islice((t for t in words.keys(other) if t != topic), 30)]
        turns: list[tuple[str, str, str]] = []
        while len(turns) < size:  # the same form or the same topic, but not both
            wanted = other.choice(FORMS), other.choice(topics)
            if wanted != (form, topic):
                turns.append((*wanted, _body(other, *wanted)))
        for place, (body, depth) in enumerate(zip(bodies, depths, strict=True)):
            turns.insert(place + round(depth * size), (form, topic, body))
        found = []
        for kind, about, body in turns:
            found += [Message("user", f"Write a {kind} about the {about}."), Message("assistant", body, train=False)]
        question = (
            f"Write {prefix} and then, word for word, the {ORDINALS[asked]} {form} about the {topic} from above. "
            "Add nothing else."
        )
        return [*found, Message("user", question)]

    return Conversation(messages, bodies[asked], prefix, (depths[asked],))


def _body(rng: random.Random, form: str, topic: str) -> str:
    said = rng.sample(sentences(), 3)
    return f"The {topic}: a {form}. " + " ".join(said)
