"""Grammars that clients write, in the notation of Lark or in GBNF: kept, or refused before they cost anything."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable

import numpy as np
import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.engine.given_grammars import MAX_GRAMMAR, checked
from glm5.engine.grammar import Grammars
from glm5.errors import EngineError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import GrammarSpec, SamplingParams

pytest.importorskip("llguidance")
BYTES = Tokenizer.byte_level()
GRAMMARS = Grammars(BYTES)
SUMS = 'root ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" root ")"\n'


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        ('start: "yes" | "no"', "yes|no"),
        ('root ::= "yes" | "no"', "yes|no"),
        ('start: WORD ("-" WORD)~2\nWORD: /[a-c]{2}/', "[a-c]{2}(-[a-c]{2}){2}"),
        ('root ::= item+ "."\nitem ::= [a-c] | "<" # (((', "[a-c<]+[.]"),
        (SUMS, r"[0-9+()]+"),
        ('# it\'s 5" wide\nstart: "yes" // 5/6 of "them\n', "yes"),
    ],
)
@pytest.mark.parametrize("drafts", [0, 2])
def test_answers_fit(small: Callable[..., GLM5ForCausalLM], grammar: str, form: str, drafts: int) -> None:
    model = small(vocab_size=BYTES.vocab_size, eos_token_id=BYTES.stop_token_ids)
    engine = Engine(model, BYTES, speculative=drafts)
    params = SamplingParams(max_tokens=60, n=3, seed=1, grammar=GrammarSpec("grammar", grammar))
    for done in engine.generate([BYTES.encode("x")], params):
        text = BYTES.decode(i for i in done.token_ids if i not in BYTES.stop_token_ids)
        assert done.finish_reason == "length" or re.fullmatch(form, text), text


def chain(count: int, rule: str, last: str) -> str:
    return "\n".join([rule.format(i, i + 1) for i in range(count)] + [f"{last}: 'y'".replace("'", '"')])


HOSTILE = {
    "empty": ("", "enforced"),
    "no start": ('foo: "a"', "no start"),
    "not closed": ("root ::= (", "GBNF"),
    "endless": ("start: start", "enforced"),
    "special token": ("start: <|user|>", "only rules"),
    "ids": ("start: <[5]>", "only rules"),
    "inline schema": ('start: %json {"type": "object"}', "only rules"),
    "options": ('%llguidance {"no_forcing": true}\nstart: "a"', "only rules"),
    "import": ("%import common.INT\nstart: INT", "only rules"),
    "other grammar": ("start: @other", "only rules"),
    "chain of rules": (chain(3000, 'a{}: "x" a{}', "a3000"), "more than 300"),
    "chain of terminals": ("start: A0\n" + chain(3000, 'A{}: "x" A{}', "A3000"), "more than 300"),
    "brackets": ("start: " + "(" * 20_000, "more than 300"),
    "brackets, GBNF": ("root ::= " + "(" * 20_000, "GBNF"),
    "conjunctions": ("start: T\nT: " + " & ".join(f"/.*{i}.*/" for i in range(200)), "more than 16"),
    "repetitions": ("start: " + "a? " * 20_000, "more than 1500"),
    "hidden brackets": ("start: /" + "[(]" * 600 + "/", "more than 1000"),
    "one expression": ("start: /" + "a" * 5000 + "/", "2000"),
    "long": ("start: " + '"a" | ' * 20_000 + '"b"', "65,536"),
    "many rules, GBNF": ("root ::= a\n" * 400, "rules"),
    "long chain, GBNF": ("root ::= a0\n" + chain(200, "a{} ::= " + '"x" ' * 50 + "a{}", "a200"), "rules times"),
    "open text": ('start: "a', 'a " that is not closed'),
    "open expression": ("start: /a\nb/", "a / that is not closed"),
    "open quotes": ('start: "a" ' + '"\\' * 30_000, 'a " that is not closed'),
    "half a character": ('start: "\ud800"', "surrogate"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_in_a_sentence(name: str) -> None:
    grammar, word = HOSTILE[name]
    with pytest.raises(EngineError, match=word):
        GRAMMARS.compile(GrammarSpec("grammar", grammar))


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        ('start: "a"', "\n"),
        ("", " "),
        ("", "root "),
        ("start: ", "/\\"),
        ("start: ", '"\\'),
        ("start: ", '"'),
        ("start: ", "/a"),
        ("start: a", "<"),
        ('root ::= "a"', "\n"),
        ('root ::= "a"\n', "#\n"),
        ("root ::= ", '"a" | '),
        ("root ::= ", "("),
    ],
)
def test_checks_take_time_in_proportion_to_the_text(start: str, unit: str) -> None:
    def seconds(length: int) -> float:
        text, began = start + unit * ((length - len(start)) // len(unit)), time.process_time()
        with contextlib.suppress(EngineError):
            checked(text)
        return time.process_time() - began

    seconds(2048)
    assert seconds(MAX_GRAMMAR) < 64 * max(seconds(2048), 1e-2)


def test_quoted_marks_are_no_rules() -> None:
    state = GRAMMARS.compile(GrammarSpec("grammar", 'start: "<%@" /[&]/ // %json <[5]>')).state()
    mask = np.zeros(-(-GRAMMARS.words.size // 32), dtype=np.int32)
    state.fill(mask)
    assert [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))] == BYTES.encode("<")
