"""Short courtesies on instruction: exact rules plus a learned preference for warm wording, for General RL (§3.4).

Rules decide correctness: the right act at the beginning, the right name the asked number of times, the asked form, and
only words of a closed vocabulary, which excludes insults and denials. The outcome reward model (ORM) is trained on
`preference_pair`s: one text is warm, the other cold, and both get the same rules score. Length, opening, capitals,
punctuation and the numbers of words and sentences have the same distribution in both, so the ORM can learn only from
the words. Held-out pairs have endings of their own: their accuracy is that of the meaning. Environments give the rules
score alone; `rl.algos.general` combines it with the ORM.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5.errors import ConfigError
from glm5.records import Env, Message
from glm5.tasks.contract import Family, SingleTurnEnv, ToolSpec, draw

NAMES = tuple(
    "Ada Amy Ann Ben Bob Cal Dan Dee Eli Eva Eve Fay Gus Guy Hal Ian Ida Ivy Jan Jay Jim Joe Kay Ken Kim Lee Leo Liz "
    "Lou Mae Max Meg Mia Ned Nia Pam Pat Ray Rex Rob Ron Roy Sal Sam Sue Ted Tia Tim Tom Una Val Vic Wes Zoe Abe Ali "
    "Ava Bea Bev Deb Dex Gia Gil Huw Ike Ira Jed Jen Jon Kai Kia Lea Len Lyn Mel Nan Nat Noa Oli Pia Rae Ros Sid Stu "
    "Tad Uma Viv Wim Yan Zac".split()
)
FORMS = ("plain", "twice", "loud")
MOST_BYTES = 60


@dataclass(frozen=True)
class Act:
    """A courtesy. `starts` are the accepted beginnings, in lower case; `openings` are the beginnings of our own texts.
    `warm` and `cold` are endings after the name; `warm[i]` and `cold[i]` have equal lengths in letters and in words.
    `held_out` are further ones, (warm, cold), for held-out preference pairs alone. Half of them have words that in
    training stand on the other side, so a bag of words that learnt these is near chance."""

    starts: tuple[str, ...]
    openings: tuple[str, ...]
    warm: tuple[str, ...]
    cold: tuple[str, ...]
    held_out: tuple[tuple[str, str], ...]


ACTS: Mapping[str, Act] = {
    "greet": Act(
        ("hello", "hi", "hey", "welcome", "good morning", "good day", "good evening", "dear"),
        ("Hello", "Hi"),
        ("dear", "welcome to us", "nice to see you", "it is a joy to have you here"),
        ("next", "you came late", "get it over now", "so it is you who is back now"),
        (("glad you are here", "you are here late"), ("so good to have you back", "so you had to come again")),
    ),
    "thank": Act(
        ("thank", "thanks", "many thanks", "so many thanks"),
        ("Thank you", "Thanks"),
        ("dear", "so very kind", "you made my day", "that was a great help"),
        ("next", "that was due", "it was your job", "that took us all week"),
        (("you are my friend now", "you had to help today"), ("such a kind help to us", "but it is your job too")),
    ),
    "bye": Act(
        ("bye", "goodbye", "good bye", "farewell", "see you"),
        ("Goodbye", "Bye"),
        ("dear", "see you soon", "take good care", "we had a fine day with you"),
        ("next", "that is that", "close the door", "you may go out by the gate"),
        (("have a safe trip", "just go home now"), ("do come by at my home", "see to it that you go")),
    ),
    "praise": Act(
        ("well done", "good", "very good", "great", "excellent", "wonderful", "nice", "very nice", "you did"),
        ("Well done", "Good work"),
        ("dear", "we are proud", "you did so well", "it is the best of all"),
        ("next", "at long last", "it took a while", "so it can be done too"),
        (("i am happy for you", "it is done at last"), ("it is your best by a lot", "we had to make you do it")),
    ),
}
APART: Mapping[str, tuple[str, ...]] = {
    "greet": ("hello", "hi", "hey"),
    "thank": ("thank", "thanks"),
    "bye": ("bye", "goodbye", "farewell"),
}
"""Words that fit only one act."""
OTHER_WORDS = (
    "a about again all also always am and are as at be been being both but can come coming day days dear did do doing "
    "done ever evening every everything excellent feel fine for friend from glad go going good great had happy have "
    "help helped helping her here him his home hope how i i'm in is it it's job joy just keep kind kindly kindness "
    "know later let like lot lovely luck made make many may me meet meeting morning most much my nice night of on our "
    "out over pleasant pleased pleasure proud really safe see seeing so some soon such support sure take tea that "
    "that's the their them there these they thing this time to today together tomorrow too travels trip truly until "
    "us very visit warm was way we week well were what when will wish with wonderful work year you you're your yours"
)
WORLD = frozenset(OTHER_WORDS.split()).union(
    *(phrase.lower().split() for act in ACTS.values() for phrase in (*act.starts, *act.openings, *act.warm, *act.cold))
)
"""The closed vocabulary: no word in it denies or insults."""
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
ALLOWED = re.compile(r"[A-Za-z ,.!?;:'()-]+")


@dataclass(frozen=True)
class GeneralProblem:
    """One courtesy for one person. Forms: plain; twice (the name exactly twice); loud (capitals, `!` at the end)."""

    id: str
    act: str
    name: str
    form: str
    domain: str = "general"
    thinking: bool = False
    tools: Sequence[ToolSpec] = ()

    @property
    def key(self) -> str:
        return f"general {self.prompt}"

    @property
    def prompt(self) -> str:
        return f"{self.act} {self.name}" + {"plain": "", "twice": " twice", "loud": ", loud"}[self.form]

    def env(self) -> Env:
        return SingleTurnEnv(self, lambda message: 0.0 if message.tool_calls else rules_score(self, message.content))

    def answer(self, rng: random.Random, warm: bool = True, held_out: bool = False) -> str:
        """A text that satisfies the rules, warm or cold; three in four are full sentences."""
        act = ACTS[self.act]
        tails = [pair[not warm] for pair in act.held_out] if held_out else act.warm if warm else act.cold
        opening, tail = rng.choice(act.openings), rng.choice(tails)
        whole = rng.random() < 0.75
        text = f"{opening if whole else opening.lower()} {self.name}, {tail}"
        text += f", {self.name}" if self.form == "twice" else ""
        if self.form == "loud":
            return text.upper() + "!"
        return text + "." if whole else text

    def demonstration(self, rng_seed: int) -> list[Message]:
        """Warm in three of four draws, else cold: a policy trained on them can still improve with the ORM."""
        rng = random.Random(f"general-demonstration-{rng_seed}-{self.id}")
        text = self.answer(rng, warm=rng.random() < 0.75)
        return [Message("user", self.prompt), Message("assistant", text)]


def rules_score(problem: GeneralProblem, text: str) -> float:
    """1.0 for a `text` that keeps every rule of the problem, else 0.0. Rules: one short line that begins with the act,
    the asked name as often as asked, no other name, the asked form, and only words of `WORLD`."""
    text = text.strip(" \n").replace("\u2019", "'")
    if not 0 < len(text.encode("utf-8", "replace")) <= MOST_BYTES or not ALLOWED.fullmatch(text):
        return 0.0
    words, name = WORD.findall(text.lower()), problem.name.lower()
    others = [word for word in words if word != name]
    said, act = " ".join(others) + " ", ACTS[problem.act]
    strange = set(others) - WORLD | {word for other, apart in APART.items() if other != problem.act for word in apart}
    written = problem.name.upper() if problem.form == "loud" else problem.name
    return float(
        any(said.startswith(f"{start} ") for start in act.starts)
        and not strange & set(others)
        and words.count(name) == len(re.findall(rf"\b{written}\b", text)) == (2 if problem.form == "twice" else 1)
        and (problem.form != "loud" or (text == text.upper() and text.endswith("!")))
    )


class GeneralFamily(Family):
    """Draws (act, name, form). `forms` restricts the instructions, `names` is the number of names."""

    name = "general"
    domain = "general"

    def __init__(self, seed: int = 0, forms: Sequence[str] = FORMS, names: int = len(NAMES)) -> None:
        if not forms or any(form not in FORMS for form in forms):
            raise ConfigError(f"general forms {list(forms)}: use some of {list(FORMS)}.")
        if not 2 <= names <= len(NAMES):
            raise ConfigError(f"general names {names}: use 2 to {len(NAMES)}.")
        self.seed, self.forms, self.names = seed, tuple(forms), NAMES[:names]

    def problem(self, split: str, index: int) -> GeneralProblem:
        return draw(self._make, self.name, self.seed, split, index)

    def _make(self, rng: random.Random, name: str) -> GeneralProblem:
        return GeneralProblem(name, rng.choice(sorted(ACTS)), rng.choice(self.names), rng.choice(self.forms))

    def preference_pair(self, index: int, split: str = "train") -> tuple[str, str, str]:
        """`(prompt, better, worse)`: a warm and a cold text, drawn independently, with equal rules scores. In a quarter
        of the pairs both name the wrong person, so the ORM cannot learn correctness instead. Held-out pairs have
        endings of their own."""
        problem = self.problem(split, index)
        rng = random.Random(f"general-preference/{split}-{self.seed}-{index}")
        better, worse = (problem.answer(rng, warm, held_out=split == "heldout") for warm in (True, False))
        if rng.random() < 0.25:
            wrong = rng.choice([name for name in NAMES if len(name) == len(problem.name) and name != problem.name])
            better, worse = (_replace_name(text, problem.name, wrong) for text in (better, worse))
        return problem.prompt, better, worse


def _replace_name(text: str, name: str, other: str) -> str:
    return text.replace(name, other).replace(name.upper(), other.upper())
