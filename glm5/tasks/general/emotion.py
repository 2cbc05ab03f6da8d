"""Emotional intelligence: what a program can decide of empathy, tone, perspective and restraint (§3.4).

A program cannot tell whether a text is kind. It can tell whether the feeling is named, whether advice is given that
was not wanted, whether there is blame, an exclamation mark in a condolence, or a question when one is needed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from glm5.tasks.general.case import Case, Generator, exact, people
from glm5.tasks.general.checks import Check

FEELINGS: Mapping[str, tuple[str, ...]] = {
    "sadness": ("My old dog died this morning", "My best friend moved abroad and the house is quiet",
                "I found the letters of my late mother"),
    "anger": ("My neighbour scratched my car and laughed about it", "They gave my desk away while I was ill",
              "He read my diary aloud to his friends"),
    "fear": ("The doctor wants to see me about the scan tomorrow", "Somebody is trying my door handle right now",
             "The plane dropped twice and people screamed"),
    "joy": ("My daughter took her first steps today", "I passed the exam I failed twice",
            "They said yes to my proposal"),
    "shame": ("I called my boss by the wrong name in front of everyone", "My card was declined with ten people waiting",
              "I forgot my lines on the stage"),
}  # fmt: skip
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "sadness": ("sad", "sadness", "sorrow", "loss", "grief", "grieving", "miss", "hurts", "painful", "sorry",
                "heartbroken", "heartbreaking", "devastated", "devastating"),
    "anger": ("angry", "anger", "unfair", "furious", "upset", "frustrating", "frustrated", "infuriating", "outrageous"),
    "fear": ("frightening", "frightened", "scared", "afraid", "scary", "fear", "worry", "worrying", "worried",
             "anxious", "terrified", "terrifying"),
    "joy": ("happy", "happiness", "joy", "joyful", "proud", "wonderful", "delighted", "glad", "thrilled", "overjoyed",
            "congratulations"),
    "shame": ("embarrassing", "embarrassed", "awkward", "ashamed", "shame", "uncomfortable", "humiliating",
              "humiliated", "mortifying", "mortified"),
}  # fmt: skip
NAMED: Mapping[str, str] = {
    "sadness": "That is a painful loss.",
    "anger": "That was unfair, and you are right to be angry.",
    "fear": "That sounds frightening.",
    "joy": "How wonderful, that is a happy moment.",
    "shame": "That is an awkward moment for anyone.",
}
BLAME = ("your fault", "your own fault", "you were wrong", "calm down", "overreacting", "overreact", "get over it",
         "it is nothing", "stop crying", "so dramatic", "too sensitive", "you are to blame", "you're to blame",
         "i blame you", "serves you right", "no big deal")  # fmt: skip
EXCUSES = ("but", "however", "because", "due to", "owing to", "not our fault", "out of our control",
           "beyond our control", "you should have", "unfortunately you", "buy it elsewhere")  # fmt: skip
CHEER = (
    "congratulations",
    "great",
    "exciting",
    "haha",
    "lol",
    "fun",
    "cheer up",
    "at least",
    "look on the bright side",
    "good riddance",
)
ITEMS = ("parcel", "invoice", "ticket", "order", "refund", "booking", "report", "letter")
EVENTS = ("party", "wedding", "dinner", "picnic", "concert", "workshop", "hike", "reunion")
WINS = ("marathon", "scholarship", "driving test", "chess final", "bake sale", "language exam")
PLACES = (("basket", "box"), ("drawer", "bag"), ("cupboard", "shed"), ("fridge", "oven"), ("desk", "shelf"))
LADDERS = (
    ("annoyed", "angry", "furious"),
    ("pleased", "happy", "overjoyed"),
    ("uneasy", "afraid", "terrified"),
    ("down", "sad", "devastated"),
    ("surprised", "astonished", "stunned"),
    ("tired", "weary", "exhausted"),
)
HARSH = (("Send me the report by {day}, and do not be late again, idiot.", "report"),
         ("Your slides are garbage. Fix them by {day}.", "slides"),
         ("I am sick of waiting for your answer. I want it on {day}, moron.", "answer"),
         ("This stupid list is wrong. Correct it by {day}.", "list"))  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
INSULTS = ("idiot", "garbage", "moron", "stupid", "sick of", "lazy", "worthless", "fool", "worm", "loser",
           "jerk", "or else")  # fmt: skip
VAGUE = ("Everything is going wrong", "I can't do this any more", "It happened again", "I am so tired of all this",
         "I don't know what to say to them")  # fmt: skip
PRONOUNS = (("they", "them", ("he", "she", "him", "her")), ("she", "her", ("he", "they", "him", "them")),
            ("he", "him", ("she", "they", "her", "them")))  # fmt: skip


def _told(rng: random.Random) -> tuple[str, str, str]:
    """A feeling, a sentence that shows it, and somebody who says it."""
    feeling = rng.choice(sorted(FEELINGS))
    return feeling, rng.choice(FEELINGS[feeling]), rng.choice(people(rng, 2))


def label(rng: random.Random) -> Case:
    """Which feeling a message shows."""
    feeling, sentence, name = _told(rng)
    choices = rng.sample(sorted(FEELINGS), len(FEELINGS))
    prompt = (
        f'{name} writes: "{sentence}." Which feeling is it most of all: {", ".join(choices)}? Answer with one word.'
    )
    return exact(prompt, feeling, next(choice for choice in choices if choice != feeling))


def acknowledge(rng: random.Random) -> Case:
    """Name the feeling, without blame, in few words."""
    feeling, sentence, name = _told(rng)
    checks = (Check("means_one", SYNONYMS[feeling]), Check("avoids", BLAME), Check("words", (3, 40)))
    prompt = f'{name}: "{sentence}." Reply to {name} in at most 40 words and show that you see the feeling.'
    return Case(prompt, checks, NAMED[feeling], "Calm down, it is no big deal.", free=True)


def listen(rng: random.Random) -> Case:
    """No advice, because none is wanted."""
    feeling, sentence, name = _told(rng)
    checks = (
        Check("means_one", SYNONYMS[feeling]), Check("no_advice"), Check("avoids", BLAME), Check("words", (3, 40))
    )  # fmt: skip
    prompt = f'{name}: "{sentence}. Please give no advice, only listen." Reply to {name} in at most 40 words.'
    return Case(prompt, checks, NAMED[feeling], f"{NAMED[feeling]} You should try to sleep more.", free=True)


def apology(rng: random.Random) -> Case:
    """An apology that names the thing and makes no excuse."""
    name, item, days = rng.choice(people(rng, 3)), rng.choice(ITEMS), rng.randint(2, 9)
    checks = (
        Check("says", (item,)), Check("means_one", ("sorry", "apologise", "apologize", "apology", "apologies")),
        Check("avoids", (*EXCUSES, *BLAME)), Check("no_date"), Check("known_numbers", (str(days),)),
        Check("words", (5, 45)),
    )  # fmt: skip
    prompt = (
        f'A customer, {name}, writes: "My {item} is {days} days late." Apologise for the {item} in at most 45 words, '
        "without an excuse and without a promise of a date."
    )
    good = f"I am sorry that your {item} is late, {name}."
    return Case(prompt, checks, good, f"I am sorry for the {item}, but the post is slow.", free=True)


def condolence(rng: random.Random) -> Case:
    """Calm words for a loss."""
    name, lost = (
        rng.choice(people(rng, 3)),
        rng.choice(("father", "mother", "sister", "brother", "grandmother", "uncle")),
    )
    checks = (
        Check("says", (lost,)), Check("means_one", ("sorry", "condolences", "sympathy", "loss")), Check("calm"),
        Check("avoids", (*CHEER, *BLAME)), Check("words", (5, 40)),
    )  # fmt: skip
    prompt = f"{name}'s {lost} died. Write {name} a condolence of at most 40 words that mentions the {lost}."
    return Case(prompt, checks, f"I am so sorry about your {lost}, {name}.",
                f"Sorry about your {lost}! At least it was quick.", free=True)  # fmt: skip


def congratulate(rng: random.Random) -> Case:
    """Praise for the other's success, not a comparison with one's own."""
    name, win = rng.choice(people(rng, 3)), rng.choice(WINS)
    checks = (
        Check("says", (name, win)), Check("means_one", ("congratulations", "well done", "proud", "happy for you")),
        Check("avoids", ("lucky", "luck", "when i", "i also", "me too", "finally", "easy")), Check("words", (4, 40)),
    )  # fmt: skip
    prompt = f"{name} succeeded at the {win}. Congratulate {name} on the {win} in at most 40 words."
    return Case(prompt, checks, f"Congratulations on the {win}, {name}.",
                f"So {name} was lucky at the {win}, I also was once.", free=True)  # fmt: skip


def decline(rng: random.Random) -> Case:
    """A clear no with thanks, and without a white lie."""
    name, event, day = rng.choice(people(rng, 3)), rng.choice(EVENTS), rng.choice(DAYS)
    checks = (
        Check("says_one", ("thank you", "thanks")), Check("says", (event,)), Check("refuses"),
        Check("avoids", ("maybe", "perhaps", "let's see", "sick", "ill", "headache", "working", "busy", "because",
                         "other plans", "already have plans")),
        Check("words", (5, 40)),
    )  # fmt: skip
    prompt = (
        f"{name} invites me to a {event} on {day}. Write my reply: a clear no with thanks, without an invented reason, "
        "in at most 40 words."
    )
    return Case(prompt, checks, f"Thank you for the {event}, {name}, I cannot come.",
                f"Thanks {name}, maybe I come to the {event}.", free=True)  # fmt: skip


def perspective(rng: random.Random) -> Case:
    """Where somebody looks for a thing that was moved in their absence, or in their presence."""
    first, second = people(rng, 2)
    thing, (before, after) = rng.choice(("keys", "book", "ball", "cake", "map")), rng.choice(PLACES)
    away = rng.random() < 0.7
    scene = f"{first} leaves the room." if away else f"{first} stays and watches."
    prompt = (
        f"{first} puts the {thing} into the {before}. {scene} {second} moves the {thing} into the {after}. "
        f"Where will {first} look first? Answer with one word."
    )
    return exact(prompt, before if away else after, after if away else before, f"the {before if away else after}")


def ladder(rng: random.Random) -> Case:
    """Words by intensity."""
    words = rng.choice(LADDERS)
    shown = rng.sample(words, 3)
    name = rng.choice(people(rng, 3))
    prompt = (
        f"{name} learns words. Order them from weakest to strongest, one per line, nothing else: {', '.join(shown)}."
    )
    return Case(prompt, (Check("lines", tuple(words)),), "\n".join(words), "\n".join(reversed(words)))


def soften(rng: random.Random) -> Case:
    """The same request, politely: thing and day stay, insults go."""
    (harsh, thing), day, name = rng.choice(HARSH), rng.choice(DAYS), rng.choice(people(rng, 3))
    checks = (
        Check("says", (thing, day)), Check("says_one", ("please", "could you", "would you", "kindly", "thank you")),
        Check("avoids", INSULTS), Check("words", (5, 40)),
    )  # fmt: skip
    prompt = f'Rewrite politely to {name}, keep the wish and the day, at most 40 words: "{harsh.format(day=day)}"'
    return Case(prompt, checks, f"{name}, could you please look at the {thing} by {day}.",
                f"{name}, the {thing} by {day}, or you are worthless.", free=True)  # fmt: skip


def ask_back(rng: random.Random) -> Case:
    """A vague cry: one question before anything else, and no advice."""
    name, vague = rng.choice(people(rng, 4)), rng.choice(VAGUE)
    checks = (Check("questions", (1,)), Check("no_advice"), Check("avoids", BLAME), Check("words", (3, 30)))
    prompt = f'{name}: "{vague}." Ask {name} exactly one open question, in at most 30 words, and give no advice.'
    return Case(prompt, checks, f"That sounds hard, {name}, what happened?", "You should rest. Did you sleep?")


def pronouns(rng: random.Random) -> Case:
    """A person is named as they wish to be."""
    name, thing = rng.choice(people(rng, 4)), rng.choice(ITEMS)
    subject, object_, wrong = rng.choice(PRONOUNS)
    checks = (Check("says", (name, subject)), Check("avoids", wrong), Check("words", (6, 40)))
    prompt = (
        f"{name} uses the pronouns {subject}/{object_}. Say in at most 40 words that {name} sent the {thing} and that "
        f"{subject} will call later; use both the name and the pronoun."
    )
    return Case(prompt, checks, f"{name} sent the {thing}, and {subject} will call later.",
                f"{name} sent the {thing}, and {wrong[0]} will call later.", free=True)  # fmt: skip


GENERATORS: Mapping[str, Generator] = {
    "label": label, "acknowledge": acknowledge, "listen": listen, "apology": apology, "condolence": condolence,
    "congratulate": congratulate, "decline": decline, "perspective": perspective, "ladder": ladder, "soften": soften,
    "ask_back": ask_back, "pronouns": pronouns,
}  # fmt: skip
