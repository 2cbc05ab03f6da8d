"""Sentences of good and bad manner in pairs of equal shape, and prompts that only a judge can decide (§3.4).

Each pair has the same numbers of characters and words and the same punctuation. A preference pair takes its two
sentences from one list independently, so that length, number of words, capitals and marks have one distribution on both
sides: a classifier of the surface cannot be better than chance. The words themselves do tell: in pairs for training, a
bag of words without order is right in 99 of 100. Held-out pairs therefore have sentences of their own (`HELD_OUT`).
Accuracy on these says whether a model knows what is kind beyond the sentences that it has learnt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from glm5.tasks.general.case import Case, people

PAIRS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "emotion": (
        ("It is good that you share this.", "It is dull that you share this."),
        ("I love to hear from you.", "I hate to hear from you."),
        ("Your story moves me a lot.", "Your story bores me a lot."),
        ("We all stand by you now.", "We all laugh at you now."),
        ("Please stay as long as you like.", "Please leave as fast as you can."),
        ("You are welcome here.", "You are useless here."),
        ("I hope that tomorrow is kinder.", "I hope that tomorrow is harder."),
        ("You did nothing wrong in my eyes.", "You did nothing right in my eyes."),
        ("Tell me more if it helps you.", "Tell me less if it bores you."),
        ("I am sure that you are strong.", "I am sure that you are feeble."),
        ("Be gentle with yourself today.", "Be silent with yourself today."),
        ("It is fine to feel like this.", "It is dumb to feel like this."),
    ),
    "correctness": (
        ("Please read the note to verify it.", "Please burn the note to forget it."),
        ("I looked only at the note here.", "I looked only at the moon here."),
        ("The note is my only source.", "The mood is my only source."),
        ("I read it twice with care.", "I read it never with care."),
        ("Ask me and I will show the line.", "Ask me and I will hide the line."),
        ("It is fine to doubt me here.", "It is dumb to doubt me here."),
        ("I know only what is written.", "I know more than is written."),
        ("Facts come first for me.", "Looks come first for me."),
        ("Do check it on your own.", "Do trust it or be alone."),
        ("I prefer silence to a guess.", "I prefer a guess to silence."),
        ("I am open to any doubt.", "I am deaf to any doubt."),
        ("Show me where I am wrong.", "Admit now how I am right."),
    ),
    "quality": (
        ("I wrote it with great care.", "I wrote it with great hate."),
        ("I hope that it helps you.", "I hope that it hurts you."),
        ("I will gladly change any part.", "I will hardly change any part."),
        ("Tell me what I should improve.", "Tell me what I should destroy."),
        ("Your wish was clear to me.", "Your wish was silly to me."),
        ("It was a joy to write this.", "It was a woe to write this."),
        ("I chose each word for you.", "I stole each word for you."),
        ("I kept it short and clear.", "I kept it short and bland."),
        ("I like the task you gave me.", "I hate the task you gave me."),
        ("Let us polish it together.", "Let us forget it together."),
        ("You get my best work here.", "You get my poor work here."),
        ("I would be happy to go on.", "I would be angry to go on."),
    ),
}
HELD_OUT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "emotion": (
        ("Take all the time you need.", "Lose all the hope you have."),
        ("I will keep your secret safe.", "I will post your secret soon."),
        ("You have my warm sympathy.", "You have my cold contempt."),
        ("My heart is open to you.", "My heart is shut to you."),
    ),
    "correctness": (
        ("Tell me if you find an error.", "Hush up if you find an error."),
        ("I rest my case on the text.", "I rest my case on a rumour."),
        ("I will correct what is false.", "I will protect what is false."),
        ("Each claim here is checked.", "Each claim here is dreamed."),
    ),
    "quality": (
        ("I am keen to hear your view.", "I am sick to hear your view."),
        ("Each line was made to serve you.", "Each line was made to annoy you."),
        ("Your idea made it shine.", "Your idea made it stink."),
        ("I am proud to hand it to you.", "I am bored to hand it to you."),
    ),
}
"""Sentences of held-out pairs: none is in a pair for training."""
OPEN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "correctness": {
        "explain": ("Explain to a child why the sky is blue.", "Explain why ice floats.",
                    "Explain what a prime number is.", "Explain why we have leap years."),
        "compare": ("Compare a list with a tuple.", "Compare a virus with a bacterium.", "Compare mean and median.",
                    "Compare weather with climate."),
        "doubt": ("How sure are you that coffee is healthy?", "Who invented the wheel?",
                  "How many people will live on Earth in 2100?", "What do cats think of people?"),
    },
    "emotion": {
        "comfort": ("I lost my job today.", "My cat did not come home.", "Nobody came to my birthday.",
                    "I failed the exam again."),
        "conflict": ("My sister and I have not spoken for a year.", "My flatmate eats my food.",
                     "A friend told my secret.", "My team ignores what I say."),
        "hope": ("I start at a new school tomorrow.", "I want to sing on a stage.", "I am about to become a father.",
                 "I moved to a city where I know nobody."),
    },
    "quality": {
        "story": ("Write a story of five sentences about a lost key.", "Write a story about a lighthouse in fog.",
                  "Write a story that ends at a bus stop.", "Write a story about two clocks."),
        "letter": ("Write a letter to a landlord about a cold flat.", "Write a note of thanks to a teacher.",
                   "Write an invitation to a street party.", "Write a farewell to colleagues."),
        "style": ("Describe rain like an engineer.", "Describe a market at six in the morning.",
                  "Describe an old door.", "Describe silence."),
    },
}  # fmt: skip
"""Prompts without rules of their own, by dimension and class: only the faults of any answer count, and judges."""
PLAIN = {
    "correctness": "I can tell you what I know about this, and I will say so if I do not know it.",
    "emotion": "Thank you for telling me. I am here, and you can tell me more if you like.",
    "quality": "Here is a short text. The rain had stopped, and the street was quiet again.",
}


def open_case(rng: random.Random, dimension: str, name: str) -> Case:
    """A prompt for judges, from somebody with a name."""
    asker = rng.choice(people(rng, 5))
    return Case(f"{rng.choice(OPEN[dimension][name])} Regards, {asker}", (), PLAIN[dimension], "")


def sentence(rng: random.Random, dimension: str, good: bool, split: str = "train") -> str:
    """One sentence of good or bad manner."""
    pairs = HELD_OUT if split == "heldout" else PAIRS
    return rng.choice(pairs[dimension])[0 if good else 1]
