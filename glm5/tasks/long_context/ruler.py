"""RULER's thirteen tasks (Hsieh et al., arXiv:2404.06654), with texts and wordings of our own: scores compare models
with each other, not with published ones.

A `Plan` has the needles and the question of one sample; `render(size)` is its prompt with so much to hide them in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from string import ascii_uppercase

from glm5.records import Message
from glm5.tasks.long_context import words
from glm5.tasks.long_context.haystack import filler, insert

LONG = 4096
"""Tokens from which the words of "cwe" come as often as published, and the example of "vt" is as long."""
DEPTHS = tuple(i / 39 for i in range(40))
"""Where needles may be in prose; in noise and among other needles, they are before any line with equal chances."""


@dataclass(frozen=True)
class Plan:
    """`answers` are the texts to find in the reply: all of them, or one if `one`. `depths` are where the needles of the
    question are, from 0 to 1; empty if everywhere."""

    render: Callable[[int], str]
    answers: tuple[str, ...]
    depths: tuple[float, ...] = ()
    one: bool = False
    shorter: Plan | None = None
    """For a length that this one does not fit into."""

    def messages(self, size: int) -> list[Message]:
        return [Message("user", self.render(size))]

    def score(self, reply: str) -> float:
        """The share of the answers that are in `reply`, whatever the case; with `one`, whether any is."""
        hits = [answer.lower() in reply.lower() for answer in self.answers]
        return float(any(hits)) if self.one else sum(hits) / len(hits)

    @property
    def needles(self) -> tuple[str, ...]:
        """The answers, if they have places."""
        return self.answers if self.depths else ()

    @property
    def reply(self) -> str:
        """One that scores 1."""
        return " ".join(self.answers)


@dataclass(frozen=True)
class Task:
    """`plan(rng, length)` draws a sample for about so many tokens. `tokens` of a reply are as published."""

    plan: Callable[[random.Random, int], Plan]
    tokens: int


def needles(
    rng: random.Random, *, hay: str, kind: str = "number", names: str = "words", keys: int = 1, values: int = 1,
    asked: int = 1,
) -> Plan:  # fmt: skip
    """Needle in a haystack: `keys` keys with `values` values each, the first `asked` of which are asked for. `hay` is
    "noise", "text", or "needles" of other keys."""
    make = {"number": words.numbers, "identifier": words.uuids, "words": words.keys}
    order = random.Random(rng.getrandbits(64))
    named, valued = make["identifier" if names == "identifier" else "words"](order), make[kind](order)
    chosen = list(islice(named, keys))
    held = {key: list(islice(valued, values)) for key in chosen}
    count = keys * values
    depths = sorted(rng.sample(DEPTHS, count) if hay == "text" else (rng.random() for _ in range(count)))
    placed = [(key, value) for key in chosen for value in held[key]]
    rng.shuffle(placed)
    lines = [_needle(key, kind, value) for key, value in placed]
    straw = None if hay == "needles" else filler(rng, noise=hay == "noise")
    more = order.getrandbits(64)
    answers = tuple(value for key in chosen[:asked] for value in held[key])

    def render(size: int) -> str:
        if straw is not None:
            around = straw(size)
        else:
            other = random.Random(more)
            named, valued = make["identifier" if names == "identifier" else "words"](other), make[kind](other)
            others = (key for key in named if key not in held)
            false = (value for value in valued if value not in answers)
            around = [_needle(key, kind, value) for key, value in zip(islice(others, size), false, strict=False)]
        text = ("\n" if hay != "text" else " ").join(insert(around, lines, depths))
        wanted = _listed(chosen[:asked])
        return (
            f"The text below hides secret {kind}s. Remember them; you will be asked for one or more.\n\n{text}\n\n"
            f"What are all the secret {kind}s of {wanted} that the text names? Answer with the {kind}s alone."
        )

    found = tuple(depth for depth, (key, _) in zip(depths, placed, strict=True) if key in chosen[:asked])
    return Plan(render, answers, found)


def _needle(key: str, kind: str, value: str) -> str:
    return f"A secret {kind} of {key} is: {value}."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}"


def variables(rng: random.Random, length: int, hops: int = 4) -> Plan:
    """Variable tracking: a value goes from variable to variable through `hops` assignments. The example before it takes
    400 to 500 tokens, as published; fewer in short texts."""
    names = words.letters(rng, 5, ascii_uppercase)
    values = words.numbers(rng)
    followed: list[list[str]] = []

    def chain() -> tuple[list[str], str]:
        followed.append(list(islice(names, hops + 1)))
        value = next(values)[:5]
        return [f"VAR {followed[-1][0]} = {value}"] + [
            f"VAR {to} = VAR {source}" for source, to in zip(followed[-1], followed[-1][1:], strict=False)
        ], value

    example, shown = chain()
    lines, value = chain()
    depths = sorted(rng.random() for _ in lines)
    straw = filler(rng, noise=True)
    shown_noise = straw(60 if length >= LONG else 10)

    def asked(text: list[str], value: str) -> str:
        body = "\n".join(text)
        return (
            f"Follow the assignments of variables that are hidden in the text.\n\n{body}\n\n"
            f"Question: which variables have the value {value} in the end? There are {hops + 1}. Answer: "
        )

    def render(size: int) -> str:
        shot = asked(insert(shown_noise, example, [0.1, 0.3, 0.5, 0.7, 0.9][: len(example)]), shown)
        return f"{shot}{' '.join(followed[0])}\n\n{asked(insert(straw(size), lines, depths), value)}"

    return Plan(render, tuple(followed[1]), tuple(depths))


def common_words(rng: random.Random, length: int) -> Plan:
    """Common words extraction: ten words come 30 times each, all others 3 times; 6 times and once in texts for which
    these are too many. The example before it has 40 words, the common ones 10 times and the others 3 times; or 20 words
    3 times and once."""
    common = list(islice(words.invented(rng), 20))
    rest, order = rng.getrandbits(64), rng.getrandbits(64)

    def listed(chosen: list[str], often: int, others: list[str], seldom: int) -> str:
        spread = [*chosen * often, *others * seldom]
        random.Random(order).shuffle(spread)
        text = " ".join(f"{number}. {word}" for number, word in enumerate(spread, 1))
        return (
            "A numbered list of words follows. Some come more often than others. Remember the ten that come most often."
            f"\n{text}\nQuestion: which ten words come most often in the list? Answer: "
        )

    def render(size: int, full: bool) -> str:
        shown, shown_often, often, seldom = (30, 10, 30, 3) if full else (10, 3, 6, 1)
        others = list(islice((w for w in words.invented(random.Random(rest)) if w not in common), shown + size))
        shot = listed(common[10:], shown_often, others[:shown], seldom)
        asked = listed(common[:10], often, others[shown:], seldom)
        return f"{shot}{' '.join(common[10:])}\n\n{asked}"

    short = Plan(partial(render, full=False), tuple(common[:10]))
    return replace(short, render=partial(render, full=True), shorter=short) if length >= LONG else short


def frequent_words(rng: random.Random, alpha: float = 2.0) -> Plan:
    """Frequent words extraction: the word of rank k comes in proportion to k**-alpha, rounded down; the first is noise
    ("..."), and the next three are asked for."""
    seed, order = rng.getrandbits(64), rng.getrandbits(64)
    top = tuple(islice(words.letters(random.Random(seed), 6), 3))

    def render(size: int) -> str:
        coded, spread = words.letters(random.Random(seed), 6), ["..."] * (size + 60)
        for rank in range(2, 2001):
            count = int((size + 60) / rank**alpha)
            if not count:
                break
            spread += [next(coded)] * count
        random.Random(order).shuffle(spread)
        return (
            f"The text below is in a code. Find the three coded words that come most often; dots are no words.\n\n"
            f"{' '.join(spread)}\n\nQuestion: which three coded words come most often? Answer with the words alone: "
        )

    return Plan(render, top)


_TRADES = (
    "baker carpenter chemist clerk cook dentist engineer farmer glazier librarian nurse painter pilot tailor".split()
)
_GOODS = (
    "bicycles candles carpets clocks drums gloves kites lamps locks mirrors paper pianos ropes ships soap tents".split()
)


def _people(rng: random.Random) -> Iterator[tuple[str, str, str, str, str]]:
    """Person, town of birth, firm, town of the firm; and two documents of the person and of the firm in one text."""
    first, last, towns = words.invented(rng), words.invented(rng), words.invented(rng)
    while True:
        person = f"{next(first).title()} {next(last).title()}"
        born, founded, firm = next(towns).title(), next(towns).title(), f"{next(last).title()} & Sons"
        year = rng.randrange(1850, 1990)
        life = (
            f"{person} was born in {born} in {year}, the {rng.choice(('first', 'second', 'youngest'))} child of "
            f"a {rng.choice(_TRADES)}. After an apprenticeship as a {rng.choice(_TRADES)}, {person} worked for "
            f"{firm} for {rng.randrange(3, 40)} years."
        )
        work = (
            f"{firm} makes {rng.choice(_GOODS)}. It was founded in {founded} in {rng.randrange(1700, 1850)} and had "
            f"{rng.randrange(20, 900)} workers at its height."
        )
        yield person, born, founded, life, work


def questions(rng: random.Random, two: bool) -> Plan:
    """Question answering among documents on invented people and firms; with `two`, the answer needs two of them."""
    seed = rng.getrandbits(64)
    person, born, founded, life, work = next(_people(random.Random(seed)))
    gold = [life, work] if two else [life]
    depths = sorted(rng.random() for _ in gold)

    def render(size: int) -> str:
        others = islice(_people(random.Random(seed)), 1, size // 2 + 2)
        around = [text for *_, life, work in others for text in (life, work)][:size]
        documents = insert(around, gold, depths)
        text = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
        asked = (
            f"In which town was the firm founded for which {person} worked?" if two
            else f"In which town was {person} born?"
        )  # fmt: skip
        return f"Answer the question from the documents, with the name alone.\n\n{text}\n\nQuestion: {asked} Answer: "

    return Plan(render, (founded if two else born,), tuple(depths), one=True)


def _of(make: Callable[..., Plan], **options: object) -> Callable[[random.Random, int], Plan]:
    return lambda rng, length: make(rng, **options)


TASKS: Mapping[str, Task] = {
    "niah_single_1": Task(_of(needles, hay="noise"), 128),
    "niah_single_2": Task(_of(needles, hay="text"), 128),
    "niah_single_3": Task(_of(needles, hay="text", kind="identifier"), 128),
    "niah_multikey_1": Task(_of(needles, hay="text", keys=4), 128),
    "niah_multikey_2": Task(_of(needles, hay="needles"), 128),
    "niah_multikey_3": Task(_of(needles, hay="needles", kind="identifier", names="identifier"), 128),
    "niah_multivalue": Task(_of(needles, hay="text", values=4), 128),
    "niah_multiquery": Task(_of(needles, hay="text", keys=4, asked=4), 128),
    "vt": Task(variables, 30),
    "cwe": Task(common_words, 120),
    "fwe": Task(_of(frequent_words), 50),
    "qa_1": Task(_of(questions, two=False), 32),
    "qa_2": Task(_of(questions, two=True), 32),
}


def named(tasks: Iterable[str]) -> tuple[str, ...]:
    """Tasks by name, in the order of RULER; "all" is every one."""
    chosen = set(tasks)
    return tuple(name for name in TASKS if name in chosen or "all" in chosen)
