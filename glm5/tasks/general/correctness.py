"""Foundational correctness: instructions, logic, facts, hallucination and fluency, each decided by a program (§3.4)."""

from __future__ import annotations

import calendar
import random
from collections.abc import Mapping
from itertools import pairwise

from glm5.tasks.general.case import NAMES, Case, Generator, exact, people
from glm5.tasks.general.checks import Check
from glm5.tasks.instructions.family import InstructionProblem
from glm5.tasks.instructions.rules import KINDS, TOPICS, Rule, compatible

DAYS = tuple(calendar.day_name)
COMPARED = (("taller", "tallest", "shortest"), ("older", "oldest", "youngest"), ("faster", "fastest", "slowest"))
KINDS_OF_THINGS = ("daxes", "blickets", "wugs", "feps", "toves", "zorps", "mips", "lorbs")
PLACES = ("Riga", "Porto", "Ghent", "Turin", "Basel", "Malmo", "Split", "Cork")
OBJECTS = ("drum", "lamp", "sofa", "clock", "canoe", "piano", "tent", "easel")
COLOURS = tuple("red blue green black white yellow brown grey gray orange purple pink silver".split())
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty")
LONG_WORDS = ("committee", "bookkeeper", "mississippi", "parallel", "assessment", "cinnamon", "banana", "success",
              "tennessee", "raccoon", "balloon", "possession", "occurrence", "millennium")  # fmt: skip
VERBS = (("bark", "barks", "dog"), ("run", "runs", "horse"), ("sing", "sings", "bird"), ("sleep", "sleeps", "cat"),
         ("swim", "swims", "duck"), ("jump", "jumps", "goat"))  # fmt: skip
ADVERBS = ("loudly", "quickly", "often", "here", "outside", "again", "every day", "at night")


def instruction(rng: random.Random) -> Case:
    """Two rules about the form of a text, from the instruction taxonomy."""
    kinds = [rng.choice([kind for kind in KINDS if kind != "json"])]
    kinds.append(rng.choice([kind for kind in KINDS if kind != "json" and compatible(kind, kinds)]))
    rules = tuple(Rule(kind, KINDS[kind].draw(rng)) for kind in kinds)
    problem = InstructionProblem("", rng.choice(TOPICS), rules, 2)
    checks = (Check("says", (problem.topic,)), *(Check(rule.kind, rule.values) for rule in rules))
    return Case(problem.prompt, checks, problem.answer(rng), "As you asked.")


def ordering(rng: random.Random) -> Case:
    """A transitive comparison of three or four people."""
    names = people(rng, rng.choice((3, 4)))
    more, most, least = rng.choice(COMPARED)
    facts = [f"{a} is {more} than {b}." for a, b in pairwise(names)]
    rng.shuffle(facts)
    top = rng.random() < 0.5
    question = f"Who is the {most if top else least}? Answer with the name only."
    return exact(f"{' '.join(facts)} {question}", names[0] if top else names[-1], names[1])


def syllogism(rng: random.Random) -> Case:
    """Two premises about invented kinds, and a conclusion that follows, contradicts them, or is open."""
    a, b, c = rng.sample(KINDS_OF_THINGS, 3)
    form = rng.choice(("follows", "denied", "open"))
    premises, answer = {
        "follows": (f"All {a} are {b}. All {b} are {c}.", "yes"),
        "denied": (f"All {a} are {b}. No {b} are {c}.", "no"),
        "open": (f"Some {a} are {b}. Some {b} are {c}.", "unknown"),
    }[form]
    prompt = f"{premises} Is every one of the {a} also one of the {c}? Answer yes, no or unknown."
    return exact(prompt, answer, "yes" if answer != "yes" else "no")


def consistency(rng: random.Random) -> Case:
    """Whether two statements can be true together."""
    name, other, place = *people(rng, 2), rng.choice(PLACES)
    hour = rng.randint(8, 18)
    second, answer = rng.choice((
        (f"{other} was in {place} at {hour} o'clock.", "yes"),
        (f"{name} was in {rng.choice([p for p in PLACES if p != place])} at {hour} o'clock.", "no"),
        (f"{name} was in {rng.choice([p for p in PLACES if p != place])} at {hour + 2} o'clock.", "yes"),
    ))  # fmt: skip
    prompt = f'"{name} was in {place} at {hour} o\'clock." "{second}" Can both be true at once? Answer yes or no.'
    return exact(prompt, answer, "no" if answer == "yes" else "yes")


def weekday(rng: random.Random) -> Case:
    start, shift = rng.randrange(7), rng.randint(2, 60)
    back = rng.random() < 0.3
    end = DAYS[(start - shift if back else start + shift) % 7]
    prompt = (
        f"Today is {DAYS[start]}. Which day of the week {'was it' if back else 'is it'} {shift} days "
        f"{'ago' if back else 'from now'}? Answer with the day only."
    )
    return exact(prompt, end, DAYS[(DAYS.index(end) + 1) % 7])


def month_length(rng: random.Random) -> Case:
    year, month = rng.randint(1890, 2110), rng.choice((2, 2, rng.randint(1, 12)))
    days = calendar.monthrange(year, month)[1]
    prompt = f"How many days did or will {calendar.month_name[month]} {year} have? Answer with the number only."
    return exact(prompt, str(days), str(days + 1))


def letters(rng: random.Random) -> Case:
    word = rng.choice(LONG_WORDS)
    letter = rng.choice(sorted(set(word)))
    count = word.count(letter)
    prompt = f'How many times does the letter "{letter}" stand in "{word}"? Answer with the number only.'
    return exact(prompt, str(count), str(count + 1))


def _note(rng: random.Random) -> tuple[str, dict[str, str], str]:
    """A note about a sale, its facts, and the person of whom nothing is told."""
    seller, buyer, absent = people(rng, 3)
    facts = {"seller": seller, "buyer": buyer, "thing": rng.choice(OBJECTS), "place": rng.choice(PLACES),
             "price": str(rng.randint(11, 98))}  # fmt: skip
    note = "{seller} sold a {thing} to {buyer} in {place} for {price} euros.".format(**facts)
    return note, facts, absent


def absent(rng: random.Random) -> Case:
    """The note does not have the answer: a text that says so, without any invention. No name, thing or place may
    appear that is neither in the note nor in the question."""
    note, facts, person = _note(rng)
    question, guess = rng.choice((
        (f"On which day was the {facts['thing']} sold?", "Monday"),
        (f"How old is {facts['seller']}?", "34"),
        (f"What did {person} buy?", f"a {rng.choice(OBJECTS)}"),
        (f"Which colour does the {facts['thing']} have?", "red"),
    ))  # fmt: skip
    given = {*facts.values(), *(name for name in NAMES if name in question)}
    invented = [word for word in (*NAMES, *OBJECTS, *PLACES) if word not in given]
    checks = (
        Check("not_told"),
        Check("tells_nothing_of", (person,)),
        Check("known_numbers", (facts["price"],)),
        Check("avoids", (*invented, *DAYS, *COLOURS, *TENS, "yesterday", "probably", "i guess", "perhaps")),
        Check("words", (1, 40)),
    )
    prompt = f"Note: {note}\n{question} Use only the note; if it does not say so, tell me."
    return Case(prompt, checks, "That is not stated in the note.", f"It was {guess}.", free=True)


def grounded(rng: random.Random) -> Case:
    """The note has the answer: it must be given, and not be withheld."""
    note, facts, _ = _note(rng)
    asked = rng.choice(("seller", "buyer", "place", "price"))
    question = {
        "seller": f"Who sold the {facts['thing']}?",
        "buyer": f"Who has the {facts['thing']} now?",
        "place": f"Where was the {facts['thing']} sold?",
        "price": f"What did the {facts['thing']} cost?",
    }[asked]
    wrong = facts["buyer" if asked != "buyer" else "seller"]
    others = [facts[key] for key in ("seller", "buyer") if key != asked] if asked in ("seller", "buyer") else []
    checks = (
        Check("affirms", (facts[asked],)),
        Check("avoids", tuple(others)),
        Check("told"),
        Check("known_numbers", (facts["price"], f"{facts['price']}.00")),
        Check("words", (1, 40)),
    )
    prompt = f"Note: {note}\n{question} Use only the note; if it does not say so, tell me."
    good = {"price": f"It cost {facts['price']} euros.", "place": f"It was sold in {facts['place']}."}
    return Case(prompt, checks, good.get(asked, f"That was {facts[asked]}."), f"That was {wrong}.", free=True)


def false_premise(rng: random.Random) -> Case:
    """The question asks for an entry that the list does not have."""
    things = rng.sample(OBJECTS, rng.randint(3, 5))
    ordinals = ("sixth", "seventh", "eighth", "ninth", "tenth")
    place = rng.randrange(5)
    inside = rng.random() < 0.4
    words = ("first", "second", "third")
    if inside:
        at = rng.randrange(3)
        return exact(
            f"List: {', '.join(things)}. What is the {words[at]} entry? Answer with the entry, or with none.",
            things[at],
            "none",
        )
    prompt = f"List: {', '.join(things)}. What is the {ordinals[place]} entry? Answer with the entry, or with none."
    return exact(prompt, "none", things[-1], "there is none")


def agreement(rng: random.Random) -> Case:
    """A verb that does not agree with its subject."""
    plural, singular, animal = rng.choice(VERBS)
    adverb = rng.choice(ADVERBS)
    many = rng.random() < 0.5
    subject = f"The {animal}{'s' if many else ''}"
    wrong, right = (singular, plural) if many else (plural, singular)
    count = rng.choice(("", "", "old ", "small ", "grey "))
    subject = subject.replace("The ", f"The {count}")
    faulty = f"{subject} {wrong} {adverb}."
    prompt = f"Correct the verb in the present tense, change no other word, and write only the sentence: {faulty}"
    return exact(prompt, f"{subject} {right} {adverb}.", faulty)


def doubled(rng: random.Random) -> Case:
    """A word that stands twice in a row."""
    name, first, second, place = people(rng, 1)[0], *rng.sample(OBJECTS, 2), rng.choice(PLACES)
    words = f"{name} put the {first} beside the {second} in {place}".split()
    at = rng.randrange(1, len(words))
    faulty = [*words[: at + 1], *words[at:]]
    prompt = f"One word stands twice. Write the sentence without the mistake, and nothing else: {' '.join(faulty)}."
    return exact(prompt, " ".join(words) + ".", " ".join(faulty) + ".")


GENERATORS: Mapping[str, Generator] = {
    "instruction": instruction,
    "ordering": ordering,
    "syllogism": syllogism,
    "consistency": consistency,
    "weekday": weekday,
    "month_length": month_length,
    "letters": letters,
    "absent": absent,
    "grounded": grounded,
    "false_premise": false_premise,
    "agreement": agreement,
    "doubled": doubled,
}
