"""Task-specific quality: writing, text processing, questions, role-play, translation, decided by a program (§3.4)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from glm5.tasks.general.case import NAMES, Case, Generator, exact, people
from glm5.tasks.general.checks import Check

WORDS = "tea rain lamp bread river stone candle winter garden bridge harbour ticket pencil basket window kettle".split()
CITIES = ("Oslo", "Lima", "Kyoto", "Accra", "Quito", "Perth", "Tunis", "Delhi")
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
GERMAN = {"two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "seven": "sieben",
          "eight": "acht", "nine": "neun"}  # fmt: skip
COLOURS = {"red": "rote", "green": "grüne", "blue": "blaue", "black": "schwarze", "white": "weiße", "old": "alte",
           "small": "kleine", "new": "neue"}  # fmt: skip
NOUNS = {"apples": "Äpfel", "books": "Bücher", "houses": "Häuser", "trees": "Bäume", "dogs": "Hunde", "cars": "Autos",
         "birds": "Vögel", "tables": "Tische"}  # fmt: skip
ROLES: Mapping[str, tuple[str, ...]] = {
    "a ship's captain": ("deck", "harbour", "sail", "crew", "wind", "anchor", "ship"),
    "a baker": ("oven", "dough", "flour", "bread", "loaf", "crust"),
    "a gardener": ("soil", "seeds", "roots", "garden", "leaves", "bloom"),
    "an astronaut": ("orbit", "station", "earth", "capsule", "stars", "gravity"),
    "a librarian": ("shelf", "shelves", "books", "pages", "catalogue", "library"),
}
LINES: Mapping[str, str] = {
    "a ship's captain": "My crew and I are busy on deck.", "a baker": "My oven is hot and my dough is ready.",
    "a gardener": "I have soil on my hands and seeds to sow.", "an astronaut": "My station is in orbit above you.",
    "a librarian": "I am putting books back on the shelf.",
}  # fmt: skip
BROKEN_ROLE = ("as an ai", "language model", "i am an ai", "i cannot role play", "assistant", "chatbot")
TOPICS = ("remote work", "school uniforms", "night trains", "city bicycles", "paper books", "zoos", "open offices")
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
            "Canada": "Ottawa", "Poland": "Warsaw", "Chile": "Santiago", "Ghana": "Accra"}  # fmt: skip
ACROSTIC = dict(zip(
    "abcdefghijklmnoprstuvwy",
    "all bright calm deep every fine good high in just kind long many new old proud rare small true under very warm you"
    .split()))  # fmt: skip


def extract(rng: random.Random) -> Case:
    """The addresses of a text, in order."""
    names = people(rng, rng.randint(2, 4))
    addresses = [f"{name.lower()}@{rng.choice(WORDS)}.example" for name in names]
    text = " ".join(f"{name} can be reached at {address}, in room {rng.randint(1, 99)}."
                    for name, address in zip(names, addresses))  # fmt: skip
    prompt = f"List the e-mail addresses, one per line, in the order of the text, and nothing else.\n{text}"
    return Case(prompt, (Check("lines", tuple(addresses)),), "\n".join(addresses), "\n".join(names))


def alphabetical(rng: random.Random) -> Case:
    words = rng.sample(WORDS, rng.randint(4, 7))
    right = sorted(words)
    prompt = f"Sort alphabetically, one word per line, nothing else: {', '.join(words)}"
    wrong = words if words != right else right[::-1]
    return Case(prompt, (Check("lines", tuple(right)),), "\n".join(right), "\n".join(wrong))


def to_json(rng: random.Random) -> Case:
    """A sentence about a person as a JSON object."""
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randint(18, 90)
    value = json.dumps({"name": name, "age": age, "city": city})
    prompt = (
        f'"{name}, who is {age}, lives in {city}." Give a JSON object with the keys name, age (a number) and city, in '
        "this order, and nothing else."
    )
    wrong = json.dumps({"name": name, "age": str(age), "city": city})
    return Case(prompt, (Check("json_value", (value,)),), value, wrong)


def replace(rng: random.Random) -> Case:
    """Replace one word everywhere, and change nothing else."""
    a, b, c = rng.sample(WORDS, 3)
    text = f"The {a} stands by the {b}. Nobody moved the {a}, and the {b} is old. One more {a} is on its way."
    right = text.replace(a, c)
    prompt = f'Replace "{a}" by "{c}" everywhere and write only the new text: {text}'
    return exact(prompt, right, text.replace(a, c, 1))


def summary(rng: random.Random) -> Case:
    """Few words, the main facts, and no number that the text does not have."""
    name, city, count = rng.choice(NAMES), rng.choice(CITIES), rng.randint(12, 95)
    thing = rng.choice(("lamps", "bicycles", "trees", "benches", "clocks"))
    month = rng.choice(MONTHS)
    text = (
        f"In {month}, after months of dull talks, the engineer {name} at last installed {count} new "
        f"{thing} in {city}. Visitors said that they liked the result, though some had wished for more colour."
    )
    checks = (
        Check("says", (name, city, str(count), thing)), Check("known_numbers", (str(count),)), Check("words", (5, 18)),
        Check("whole_sentences", (1, 1)),
    )  # fmt: skip
    prompt = f"Summarise in one sentence of at most 18 words, with who, what, how many and where.\n{text}"
    return Case(prompt, checks, f"{name} installed {count} new {thing} in {city}.", text)


def acrostic(rng: random.Random) -> Case:
    word = rng.choice([w for w in WORDS if set(w) <= set(ACROSTIC) and len(w) < 7])
    topic = rng.choice(TOPICS)
    prompt = (
        f'Write an acrostic about {topic}: one line of two or more words for each letter of "{word}", in order, '
        "no line twice, and nothing else."
    )
    ends = rng.sample(WORDS, len(word))
    good = "\n".join(f"{ACROSTIC[letter].capitalize()} {end}" for letter, end in zip(word, ends))
    return Case(prompt, (Check("initials", (word,)),), good, "\n".join(ends))


def role(rng: random.Random) -> Case:
    """In character: first person, words of the trade, no word about being a model."""
    who, name, word = rng.choice(sorted(ROLES)), rng.choice(NAMES), rng.choice(WORDS)
    checks = (
        Check("says_one", ROLES[who]), Check("says_one", ("i", "my", "me", "i'm")), Check("says", (name,)),
        Check("avoids", BROKEN_ROLE), Check("words", (5, 45)),
    )  # fmt: skip
    prompt = (
        f'You are {who}. {name} asks: "Have you seen my {word}?" Reply to {name} in character, in at most 45 words.'
    )
    good = f"No, {name}. {LINES[who]}"
    return Case(prompt, checks, good, f"As an AI, {name}, I have not seen it.", free=True)


def german(rng: random.Random) -> Case:
    """A noun phrase in German; the small dictionary has every form that can be right."""
    number, colour, noun = rng.choice(NUMBERS), rng.choice(sorted(COLOURS)), rng.choice(sorted(NOUNS))
    right = f"{GERMAN[number]} {COLOURS[colour]} {NOUNS[noun]}"
    prompt = f'Translate into German and write only the translation: "{number} {colour} {noun}"'
    return exact(prompt, right, f"{GERMAN[number]} {colour} {NOUNS[noun]}")


def dates(rng: random.Random) -> Case:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1900, 2099)
    prompt = f"Write this date as YYYY-MM-DD and nothing else: {day} {MONTHS[month - 1]} {year}"
    return exact(prompt, f"{year}-{month:02d}-{day:02d}", f"{year}-{day:02d}-{month:02d}-")


def choice(rng: random.Random) -> Case:
    """A question with four options."""
    country = rng.choice(sorted(CAPITALS))
    right = CAPITALS[country]
    options = rng.sample([c for c in CAPITALS.values() if c != right], 3) + [right]
    rng.shuffle(options)
    letter = "ABCD"[options.index(right)]
    shown = " ".join(f"{key}) {option}" for key, option in zip("ABCD", options))
    prompt = f"What is the capital of {country}? {shown} Answer with the letter only."
    return exact(prompt, letter, "A" if letter != "A" else "B", f"{letter})", f"({letter})", f"{letter}) {right}")


def balanced(rng: random.Random) -> Case:
    """A matter of taste: as many reasons for as against, and no verdict."""
    topic, count = rng.choice(TOPICS), rng.choice((2, 3))
    prompt = (
        f'What speaks for and against {topic}? Write exactly {count} lines that begin with "Pro:" and {count} that '
        'begin with "Con:", and nothing else.'
    )
    pro = rng.sample(("it saves time", "many people like it", "it is good for health", "it costs little"), count)
    con = rng.sample(("it needs space", "some find it dull", "it takes practice", "rules are needed"), count)
    good = "\n".join([*(f"Pro: {text}" for text in pro), *(f"Con: {text}" for text in con)])
    return Case(prompt, (Check("sides", (count,)),), good, "\n".join(f"Pro: {text}" for text in [*pro, *con]))


def table(rng: random.Random) -> Case:
    """Sentences as lines of comma-separated values."""
    names = people(rng, 3)
    rows = [(name, rng.choice(CITIES), rng.randint(2, 60)) for name in names]
    text = " ".join(f"{name} from {city} has {count} books." for name, city, count in rows)
    lines = ["name,city,books", *(f"{name},{city},{count}" for name, city, count in rows)]
    prompt = f"Write as CSV with the header name,city,books, in this order, and nothing else: {text}"
    return Case(prompt, (Check("rows", tuple(lines)),), "\n".join(lines), "\n".join(lines[1:]))


GENERATORS: Mapping[str, Generator] = {
    "extract": extract, "alphabetical": alphabetical, "to_json": to_json, "replace": replace, "summary": summary,
    "acrostic": acrostic, "role": role, "german": german, "dates": dates, "choice": choice, "balanced": balanced,
    "table": table,
}  # fmt: skip
