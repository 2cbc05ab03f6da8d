"""Made-up words and people, which no model knows by heart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from string import ascii_lowercase

_ONSETS = "b br c ch d dr f fl g gr h j k l m n p pl qu r s st t tr v w z".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = "b d g l m n p r s t x nd rk st".split()
_ADJECTIVES = (
    "amber ancient autumn bitter brave bright broad calm careful cheerful clever cold copper crooked curious daring "
    "deep distant dusty eager early elegant faint famous fierce foggy gentle golden grand hasty hidden hollow "
    "humble icy jolly keen lively lonely lucky mellow mighty misty modest narrow noble odd pale patient plain "
    "polite proud quick quiet rapid rare restless rough rusty scarlet secret shallow silent silver simple sleepy "
    "slender smooth solemn steady stern still stormy strange sturdy sudden tame tender tidy tiny velvet vivid "
    "wandering warm weary wild windy wise"
).split()
_NOUNS = (
    "acorn anchor apple arrow badger barrel basket beacon bell bridge bucket button cabin candle canyon carpet "
    "castle cellar chimney clock cloud comet compass copper cottage cradle crane creek curtain desert donkey drum "
    "eagle engine falcon feather ferry fiddle forest fountain garden glacier goblet hammer harbour hedge heron "
    "island jacket kettle ladder lantern lemon lighthouse magnet maple meadow mirror mountain needle oak orchard "
    "otter oven palace parrot pebble pepper piano pigeon pillow planet pocket quarry rabbit raven ribbon river "
    "rocket saddle sail scarf shovel spider station temple thimble tiger tower train tunnel turnip umbrella valley "
    "violin wagon walnut whistle window"
).split()


def distinct(draw: Callable[[int], str]) -> Iterator[str]:
    """Endless words of `draw`, which is told how many there are already, each once."""
    seen: set[str] = set()
    while True:
        word = draw(len(seen))
        if word not in seen:
            seen.add(word)
            yield word


def keys(rng: random.Random) -> Iterator[str]:
    """Names such as "quiet-harbour"; after many with two adjectives."""

    def name(seen: int) -> str:
        return "-".join([*rng.choices(_ADJECTIVES, k=1 if seen < 4000 else 2), rng.choice(_NOUNS)])

    return distinct(name)


def invented(rng: random.Random, syllables: int = 2) -> Iterator[str]:
    """Lower-case words; after many they are longer."""

    def word(seen: int) -> str:
        parts = syllables + (seen > 20_000)
        return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(parts)) + rng.choice(_CODAS)

    return distinct(word)


def numbers(rng: random.Random) -> Iterator[str]:
    """Numbers of seven digits."""
    return distinct(lambda seen: str(rng.randrange(1_000_000, 10_000_000)))


def uuids(rng: random.Random) -> Iterator[str]:
    """Identifiers in the form of a UUID."""

    def identifier(seen: int) -> str:
        digits = f"{rng.getrandbits(128):032x}"
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    return distinct(identifier)


def letters(rng: random.Random, length: int, alphabet: str = ascii_lowercase) -> Iterator[str]:
    """Random strings."""
    return distinct(lambda seen: "".join(rng.choices(alphabet, k=length)))
