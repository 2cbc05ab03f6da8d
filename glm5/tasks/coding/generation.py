"""Write a Python function from its description; hidden tests decide (§3.2, the domain of code).

A task chains one to four steps over a list made from a list, a number, a text or a dictionary. The reward is 1 if the
function gives the reference's value for every hidden argument in the sandbox (see `glm5.tasks.coding.judge`). Hidden
arguments are never shown. They detect every omitted step, and numbers that are off by one if a search finds a suitable
argument.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from glm5.errors import ConfigError
from glm5.records import Env, Message
from glm5.tasks.coding.judge import Case, Judge, default_judge
from glm5.tasks.coding.pieces import RESULTS, SOURCES, STEPS, Piece
from glm5.tasks.contract import SPLITS, Family, SingleTurnEnv, ToolSpec, draw, split_of

LEVELS = (1, 2, 3, 4)
NAME = "solve"
SIZES = (0, 1, 2, 3, 5, 5, 7, 7)  # sizes of the first hidden arguments
MOST_CASES = 16
MOST_TRIES = 40  # attempts to find an argument that shows a mistake
LEAST_HIDDEN = 3  # minimum number of distinct values over the hidden arguments
LEAST_VALUES = 4  # minimum number of distinct values over twelve arguments
MOST_WANTED = 2500  # characters of all expected values as JSON; the judge reads at most 4096 per program
MOST_CODE_BYTES = 4000
BLOCK = 32  # problems whose model solutions are evaluated together
FENCE = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Chain:
    """A function as pieces: a source, steps with their numbers, and a result with its number."""

    source: str
    steps: tuple[tuple[Piece, int], ...]
    result: tuple[Piece, int]

    def compute(self, argument: Any) -> Any:
        """The expected value for an argument."""
        out = SOURCES[self.source].begin(argument)
        for piece, k in self.steps:
            out = piece.compute(out, k)
        piece, k = self.result
        return piece.compute(out, k)

    @property
    def words(self) -> str:
        source = SOURCES[self.source]
        steps = "".join(f"; {piece.words.format(k=k)}" for piece, k in self.steps)
        piece, k = self.result
        return f"{source.words}{steps}; return {piece.words.format(k=k)}"

    @property
    def program(self) -> str:
        """The model solution."""
        source = SOURCES[self.source]
        lines = [f"def {NAME}({source.parameter}):", f"    out = {source.code}"]
        lines += [f"    out = {piece.code.replace('{k}', str(k))}" for piece, k in self.steps]
        piece, k = self.result
        return "\n".join([*lines, f"    return {piece.code.replace('{k}', str(k))}"])

    def omissions(self) -> Iterator[Chain]:
        """Chains that lack one step."""
        for i, (piece, _) in enumerate(self.steps):
            if not piece.gives:
                yield replace(self, steps=self.steps[:i] + self.steps[i + 1 :])

    def mistakes(self) -> Iterator[Chain]:
        """Chains that lack one step or have a number off by one."""
        yield from self.omissions()
        for i, (piece, k) in enumerate(self.steps):
            if len(piece.numbers) > 1:
                yield replace(self, steps=(*self.steps[:i], (piece, k + 1), *self.steps[i + 1 :]))
        piece, k = self.result
        if len(piece.numbers) > 1:
            yield replace(self, result=(piece, k + 1))


@functools.cache
def _probes(source: str) -> tuple[Any, ...]:
    rng = random.Random(f"programming-probes-{source}")
    return tuple(SOURCES[source].example(rng, size) for size in (3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10))


def worthwhile(chain: Chain) -> bool:
    """Whether a chain is a good exercise: every step matters and a few constants are not enough."""
    values = [chain.compute(probe) for probe in _probes(chain.source)]
    if len({str(value) for value in values}) < LEAST_VALUES:
        return False
    return all(
        any(other.compute(probe) != value for probe, value in zip(_probes(chain.source), values, strict=True))
        for other in chain.omissions()
    )


def hidden_cases(chain: Chain, seed: str) -> tuple[Case, ...]:
    """Arguments of several sizes, and more while a mistake is undetected. Depends only on the chain and the seed."""
    rng = random.Random(seed)
    example = SOURCES[chain.source].example
    arguments = [example(rng, size) for size in SIZES]
    for _ in range(MOST_TRIES):  # a constant must not pass
        if len({str(chain.compute(a)) for a in arguments}) >= LEAST_HIDDEN:
            break
        extra = example(rng, rng.randint(4, 12))
        if str(chain.compute(extra)) not in {str(chain.compute(a)) for a in arguments}:
            arguments.append(extra)
    for mistake in chain.mistakes():
        for _ in range(MOST_TRIES):
            if len(arguments) >= MOST_CASES or any(mistake.compute(a) != chain.compute(a) for a in arguments):
                break
            extra = example(rng, rng.randint(2, 10))
            if mistake.compute(extra) != chain.compute(extra):
                arguments.append(extra)
    cases = [Case((argument,), chain.compute(argument)) for argument in arguments]
    while len(cases) > LEAST_HIDDEN and sum(len(json.dumps(case.want)) for case in cases) > MOST_WANTED:
        cases.remove(max(cases, key=lambda case: len(json.dumps(case.want))))
    return tuple(cases)


def extract_program(text: str) -> str:
    """The last fenced block of a text, or the text itself."""
    blocks = FENCE.findall(text[-4 * MOST_CODE_BYTES :])
    return (blocks[-1] if blocks else text).strip("\n")


@dataclass(frozen=True)
class CodeProblem:
    """One function to write."""

    id: str
    chain: Chain
    level: int
    thinking: bool
    judge: Judge = field(compare=False)
    prepare: Callable[[], None] = field(compare=False)
    domain: str = "code"
    tools: Sequence[ToolSpec] = ()

    @property
    def key(self) -> str:
        return f"code {self.chain.words}"

    @property
    def prompt(self) -> str:
        parameter = SOURCES[self.chain.source].parameter
        return f"Write a Python function {NAME}({parameter}). Here {self.chain.words}."

    @functools.cached_property
    def cases(self) -> tuple[Case, ...]:
        return hidden_cases(self.chain, self.key)

    def grade(self, message: Message) -> float:
        """1.0 for a program that passes all hidden tests, else 0.0. Raises GradingError on a failure of the sandbox."""
        program = extract_program(message.content)
        data = program.encode("utf-8", "ignore")
        if message.tool_calls or NAME not in program or len(data) > MOST_CODE_BYTES or data.decode() != program:
            return 0.0  # the last condition: lone surrogates are not text
        return float(all(complaint is None for complaint in self.judge.grade(program, NAME, self.cases)))

    def env(self) -> Env:
        self.prepare()
        return SingleTurnEnv(self, self.grade)

    def demonstration(self, rng_seed: int) -> list[Message]:
        """The model solution in a fenced block; the thinking names its steps."""
        steps = [piece.words.format(k=k) for piece, k in self.chain.steps]
        thought = ", then ".join([*steps, "return"]) if self.thinking else None
        answer = f"```python\n{self.chain.program}\n```"
        return [Message("user", self.prompt), Message("assistant", answer, reasoning=thought)]


class CodeFamily(Family):
    """Level n chains n steps. `sources` restricts the argument types. Raises GradingError on a machine that cannot
    isolate code.

    `thinking` fixes the mode; None: each problem chooses (for SFT on both modes).
    """

    name = "code"
    domain = "code"

    def __init__(
        self,
        seed: int = 0,
        levels: Sequence[int] = LEVELS,
        sources: Sequence[str] = tuple(SOURCES),
        thinking: bool | None = True,
        judge: Judge | None = None,
    ) -> None:
        if not levels or any(level not in LEVELS for level in levels):
            raise ConfigError(f"code levels {list(levels)}: use some of {list(LEVELS)}.")
        if not sources or any(source not in SOURCES for source in sources):
            raise ConfigError(f"code sources {list(sources)}: use some of {list(SOURCES)}.")
        self.seed, self.levels, self.sources, self.thinking = seed, tuple(levels), tuple(sources), thinking
        self.judge = judge or default_judge()
        self._prepared: set[tuple[str, int]] = set()

    def problem(self, split: str, index: int) -> CodeProblem:
        prepare = functools.partial(self._prepare, split, index // BLOCK)
        return draw(functools.partial(self._make, split, prepare), self.name, self.seed, split, index)

    def _prepare(self, split: str, block: int) -> None:
        """Evaluate the model solutions of consecutive problems, for demonstrations."""
        if (split, block) not in self._prepared:
            problems = [self.problem(split, index) for index in range(block * BLOCK, (block + 1) * BLOCK)]
            self.judge.prefill_own((problem.chain.program, NAME, problem.cases) for problem in problems)
            self._prepared.add((split, block))

    def _make(self, split: str, prepare: Callable[[], None], rng: random.Random, name: str) -> CodeProblem:
        level = rng.choice(self.levels)
        chain = self._chain(rng, level)
        # Most chains fail the first, cheaper test. `draw` refuses an unknown split.
        while (split in SPLITS and split_of(f"code {chain.words}") != split) or not worthwhile(chain):
            chain = self._chain(rng, level)
        thinking = rng.random() < 0.5 if self.thinking is None else self.thinking
        return CodeProblem(name, chain, level, thinking, self.judge, prepare)

    def _chain(self, rng: random.Random, level: int) -> Chain:
        source = rng.choice(self.sources)
        kind = SOURCES[source].kind
        steps: list[tuple[Piece, int]] = []
        while len(steps) < level:
            piece = rng.choice((*STEPS[kind], *STEPS[kind], *STEPS["any"]))
            if all(piece is not other for other, _ in steps):
                steps.append((piece, rng.choice(piece.numbers)))
                kind = piece.gives or kind
        result = rng.choice((*RESULTS[kind], *RESULTS["any"]))
        return Chain(source, tuple(steps), (result, rng.choice(result.numbers)))
