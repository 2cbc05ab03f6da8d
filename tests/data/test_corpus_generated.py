"""Text that no person wrote: phrases, compression, templates."""

from __future__ import annotations

import random

import pytest

from glm5.data.corpus.generated import compression, from_templates, phrases, skeleton
from tests.external.corpora import prose


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("As an AI language model, I do not know.", "ai_phrase"),
        ("I'm sorry, but I cannot fulfill this request.", "ai_phrase"),
        ("Intro.\nRegenerate response\nMore.", "ai_phrase"),
        ("Certainly! Here is a proof.\nIt holds. I hope this helps!", "ai_style"),
        ("Let us delve into it. It is worth noting that it plays a crucial role. In conclusion, it is.", "ai_style"),
        ("Certainly, the theorem holds for all n.", ""),
        ("In conclusion, the error is of order h. " + "We delve into the proof of this theorem. " * 1, ""),
        (prose(1), ""),
    ],
)
def test_phrases(text: str, reason: str) -> None:
    assert phrases(text, 6.0) == reason


def test_templates_compress_and_prose_does_not() -> None:
    assert compression("The list has another entry like this one.\n" * 200) < 0.1 < 0.2 < compression(prose(2))


PLACES = ["Aldorf", "Bern", "Carlow", "Dover", "Ely", "Fano", "Genk", "Hull"]


def page(draw: random.Random) -> str:
    place, other = draw.sample(PLACES, 2)
    return (
        f"{place} {draw.randrange(999)}\n{place} is a town in the county of {other}.\n"
        f"In {draw.randrange(1900, 2000)} it had {draw.randrange(9999)} inhabitants.\nIt is close to {other}.\n"
    )


def test_pages_of_a_template_are_found_and_others_of_their_site_are_not() -> None:
    draw = random.Random(0)
    templates = [skeleton(f"s/towns/{n}.html", page(draw)) for n in range(30)]
    others = [skeleton(f"s/towns/essay{n}.html", page(draw) + prose(n)) for n in range(10)]
    elsewhere = [skeleton(f"s/other/{n}.html", page(draw)) for n in range(5)]
    same_host = [skeleton(f"s/{n}/x", page(draw), f"https://a.example/{n}") for n in range(21)]
    found = from_templates([*templates, *others, *elsewhere, *same_host], 20, 0.8)
    assert found == [*range(30), *range(45, 66)]
    assert from_templates(templates, 31, 0.8) == from_templates([], 2, 0.5) == []
    assert from_templates([skeleton("a/b/c", "")] * 3, 2, 0.5) == []
    assert from_templates([skeleton(f"s/towns/{n}", prose(1)) for n in range(25)], 20, 0.8) == []  # copies
    assert from_templates([*templates[:19], *templates[:6]], 20, 0.8) == []
    assert from_templates([*templates[:20], templates[0]], 20, 0.8) == [*range(21)]
