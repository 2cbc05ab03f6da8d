"""Recall texts, which ask again for something far above: used by long-context training and its suites.

Every text is a list of pieces, each with whether it is an answer. Its content is random, so only attention to the right
position gives the answer. A hash assigns what is asked to a split: training and evaluation never ask the same.
"""

from __future__ import annotations

import hashlib
import random
import string

from glm5.errors import ConfigError

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 5  # one in five is held out
FORMS = ("note", "list", "song", "memo", "plan", "poem", "rule", "tale")
VARIANTS = ("ordinal", "key", "reversed", "last")
NEEDLES = (2, 4, 8)
PAIRS = 3  # (name, number) pairs in a reply
PREFIX = 5  # letters at the start of an answer
LONGEST_NAME = 5

Pieces = list[tuple[str, bool]]


def split_of(key: str) -> str:
    """The split that a content belongs to."""
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_SHARE == 0 else "train"


def assignment(rng: random.Random) -> tuple[str, str]:
    """A name of two to five letters and a number of three digits. Values have one length, so a short value cannot be
    likelier."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, LONGEST_NAME)))
    return letters, str(rng.randint(100, 999))


def recall_text(seed: int, index: int, target_bytes: int) -> Pieces:
    """A training document of about `target_bytes` bytes that asks for every line again. First come the lines
    `name = value`, then all of them again in another order, as answers.

    Names are answers too. Their first letters cannot be known, but the later ones follow from the line above: they
    teach to find it. With values alone small models learn to take any value that they have seen, and stay there.
    The (name, value) pairs belong to the training split of `tasks.needle.needle_text`.
    """
    rng = random.Random(f"recall-{seed}-{index}")
    pairs: dict[str, str] = {}
    left = target_bytes
    while not pairs or left > 0:
        name, value = assignment(rng)
        if name not in pairs and split_of(f"needle {name}={value}") == "train":
            pairs[name] = value
            left -= 2 * len(f"{name} = {value}\n")
    asked = list(pairs.items())
    rng.shuffle(asked)
    pieces = [("".join(f"{name} = {value}\n" for name, value in pairs.items()), False)]
    for name, value in asked:
        pieces += [(f"{name} = ", True), (f"{value}\n", True)]
    return pieces


def turns_bytes(needles: int, questions: int) -> int:
    """Maximum bytes of a `turns_text` with this many needles and questions and no other turns."""
    request = max(map(len, FORMS)) + len(" on ") + LONGEST_NAME
    reply = len("100: ") + PAIRS * (LONGEST_NAME + len(" 100 ")) - 1
    question = len("? , number 2 from the end, after \n") + request + PREFIX
    return needles * (len("> \n\n") + request + reply) + questions * (question + PREFIX + len(" \n") + reply)


def turns_text(
    seed: int,
    index: int,
    target_bytes: int,
    *,
    needles: int = 2,
    variant: str = "ordinal",
    questions: int = 1,
    split: str = "train",
) -> Pieces:
    """Multi-turn recall like MRCR (§2.3): a dialogue of requests (`> note on qed`) and random replies. One request
    comes `needles` times, each time with another reply; the questions ask for one of these replies.

    An answer is a prefix that the question names, then the reply word for word. `variant` says how a question
    identifies the reply: by `ordinal`, by the `key` that opens it, `reversed` (counted from the end), or as the `last`
    one. The text has at most `target_bytes` bytes and as many other turns as fit.

    Raises:
        ConfigError: an unknown variant or split, more questions than needles, or too few bytes for them.
    """
    if variant not in VARIANTS or split not in SPLITS or not 0 < questions <= needles:
        raise ConfigError(
            f"turns_text: variant={variant!r} (one of {', '.join(VARIANTS)}), split={split!r} (one of "
            f"{', '.join(SPLITS)}), questions={questions} (1 to needles={needles})."
        )
    rng = random.Random(f"turns/{split}-{seed}-{index}")
    request = _request(rng)
    while split_of(f"turns {request}") != split:
        request = _request(rng)
    replies = _replies(rng, needles)
    chosen = [needles - 1] * questions if variant == "last" else rng.sample(range(needles), questions)
    asked: Pieces = []
    for reply in chosen:
        prefix = "".join(rng.choices(string.ascii_lowercase, k=PREFIX))
        asked += [(f"? {request}, {_pointer(variant, reply, replies)}, after {prefix}\n", False)]
        asked += [(f"{prefix} {replies[reply]}\n", True)]
    turns = [f"> {request}\n{reply}\n" for reply in replies]
    left = target_bytes - sum(map(len, turns)) - sum(len(text) for text, _ in asked)
    if left < 0:
        raise ConfigError(
            f"turns_text: {target_bytes} bytes are too few for {needles} needles and {questions} questions; give "
            f"{-left} more."
        )
    others: list[str] = []
    while True:
        # Half of the other requests differ only in the form, which makes them easy to confuse.
        other = f"{rng.choice(FORMS)} on {request.split(' on ')[1]}" if rng.random() < 0.5 else _request(rng)
        if other == request:
            continue
        turn = f"> {other}\n{_replies(rng, 1)[0]}\n"
        left -= len(turn)
        if left < 0:
            break
        others.append(turn)
    for place, turn in zip(sorted(rng.sample(range(len(others) + needles), needles)), turns, strict=True):
        others.insert(place, turn)
    return [("".join(others), False), *asked]


def _request(rng: random.Random) -> str:
    return f"{rng.choice(FORMS)} on {assignment(rng)[0]}"


def _replies(rng: random.Random, count: int) -> list[str]:
    """Replies with different keys: a number, then names with numbers."""
    keys = rng.sample(range(100, 1000), count)
    return [f"{key}: " + " ".join(" ".join(assignment(rng)) for _ in range(PAIRS)) for key in keys]


def _pointer(variant: str, reply: int, replies: list[str]) -> str:
    if variant == "key":
        return f"key {replies[reply].split(':')[0]}"
    if variant == "last":
        return "the last"
    if variant == "reversed":
        return f"number {len(replies) - reply} from the end"
    return f"number {reply + 1}"
