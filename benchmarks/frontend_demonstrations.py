"""Sessions of the scripted judge of frontends, as conversations on which a small model learns to be a judge.

    python benchmarks/frontend_demonstrations.py DIR [--numbers 16] [--copies 4] [--workers 2]

Every page of the tasks is judged once, in a browser. Its sessions are then told again under made-up names, because the
few names of the seeds could be learned by heart: a model must read them. Half of the sessions are of items that fail.

DIR/train.jsonl has the sessions; DIR/short.jsonl the same without instructions and tools, which are alike in all, and
first turns of further tasks, in which the judge plans; DIR/texts.jsonl text for the tokenizer and pre-training. Judges
are measured on tasks number 0 (frontend_judge.py): no statement of these is among them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.agents.endpoint import Model, Reply
from glm5.data.sft import Conversation, write_conversations
from glm5.eval.cc_bench.judge import FAIL, PASS, TOOLS, FrontendJudge, asked
from glm5.eval.cc_bench.scripted_judge import ScriptedItem
from glm5.records import Message
from glm5.tasks.cc_bench import page_seeds, page_seeds_data, page_seeds_show  # noqa: F401 - they register the seeds
from glm5.tasks.cc_bench.checks import PAGES, FrontendTask, frontend_task
from glm5.tasks.cc_bench.project import Project

FIRST, FIRST_PLANNED = 1000, 2000
"""Numbers of the first tasks that are played, and of those that are only planned; the suite's come before."""
PLANNED, PLANNED_SHARE = 400, 0.3
"""Tasks of each seed that are planned, and the share of their items."""
KNOWN_NAMES = {"shapes"}
"""Seeds whose words have a meaning for the browser: colours."""
UNCHANGED = 0.15
"""Share of the copies that keep their names."""
MOST_TEXTS = 3500
STARTS = "b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl sk sl st tr".split()
MIDDLES, ENDS = "a e i o u ai ea oo".split(), [*"n r l s t m d k x nd rk st".split(), *[""] * 8]


class Renaming(random.Random):
    """Draws what a seed draws, under made-up names except for `kept`. `given` has the new name of each old one."""

    def __init__(self, seed: str, names: str, kept: Set[str] = frozenset()) -> None:
        super().__init__(seed)
        self.given: dict[str, str] = {}
        self._names, self._kept = random.Random(names), kept

    def choice(self, seq: Any) -> Any:
        return self._renamed(super().choice(seq))

    def sample(self, population: Any, k: int, **others: Any) -> list[Any]:
        """New names have the old ones' order in the alphabet, by which a page may have sorted them."""
        found = super().sample(population, k, **others)
        if isinstance(found[0], str):
            new = {self._name(name) for name in found}
            while len(new) < k:
                new.add(self._name(found[0]))
            for name, other in zip(sorted(found), sorted(new), strict=True):
                self.given |= {name: other, name.lower(): other.lower()}
        return [self.given.get(one, one) if isinstance(one, str) else one for one in found]

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._renamed, value))
        if isinstance(value, str) and value not in self._kept and not re.search(r"[\d#]", value):
            return self.given.setdefault(value, self._name(value))
        return value

    def _name(self, like: str) -> str:
        return re.sub("[A-Za-z]+", lambda found: self._word(found[0][0].isupper()), like)

    def _word(self, capital: bool) -> str:
        draw, syllables = self._names.choice, self._names.choice((1, 2, 2))
        word = "".join(draw(STARTS) + draw(MIDDLES) + draw(ENDS) for _ in range(syllables))
        return word.capitalize() if capital else word


@dataclass
class Recorded:
    """Keeps the conversation of a judge."""

    model: Model
    messages: list[Message] = field(default_factory=list)

    def complete(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: Any = None) -> Reply:
        reply = self.model.complete(messages, tools, on_delta)
        self.messages = [*messages, reply.message]
        return reply


@dataclass(frozen=True)
class Page:
    """A page to be judged: of task `number` of a seed, the reference ("") or a mutant."""

    seed: str
    number: int
    mutant: str

    def sessions(self, items: Sequence[int]) -> list[tuple[Page, int, Conversation]]:
        """The scripted judge's sessions on these items, those in which it was right."""
        if not items:  # no browser for nothing
            return []
        task = frontend_task(self.seed, self.number)
        heard = {item: Recorded(ScriptedItem(task.items[item])) for item in items}
        left, others = iter(heard.values()), {str(i + 1): PASS for i in range(len(task.items)) if i not in heard}
        judge = FrontendJudge(lambda task, item: next(left))
        found = judge.verdicts(task, Project.of_html(task.mutated(self.mutant).html("Project")), others)
        truth = task.truth(self.mutant)
        right = [item for item in items if found[str(item + 1)].verdict == (PASS if truth[item] else FAIL)]
        return [(self, item, Conversation(heard[item].messages, TOOLS, thinking=True)) for item in right]


def retold(row: Conversation, task: FrontendTask, item: int, given: Mapping[str, str]) -> Conversation | None:
    """A session on the same page under the names of another `task`: results of tools get the new names, the judge's
    words are its own. None if it would judge otherwise."""
    judge = ScriptedItem(task.items[item])
    history = asked(task, task.items[item])
    for message in row.messages:
        if message.role == "tool":
            history += [judge.complete(history, []).message, Message("tool", _replaced(message.content, given))]
    history.append(judge.complete(history, []).message)
    old, new = (messages[-1].tool_calls[0] for messages in (row.messages, history))
    same = new.name == old.name and new.arguments["passed"] == old.arguments["passed"]
    return Conversation(history, TOOLS, thinking=True) if same else None


def _replaced(text: str, given: Mapping[str, str]) -> str:
    names = "|".join(map(re.escape, sorted(given, key=len, reverse=True)))
    return re.sub(rf"(?<!\w)(?:{names})(?!\w)", lambda found: given[found[0]], text) if given else text


def renamed(seed: str, number: int, item: int, names: str) -> tuple[FrontendTask, Mapping[str, str]]:
    """A task under made-up names, and these by the old ones. What neither statement nor item tells keeps its name: a
    judge is free to choose it, and there is nothing to read."""
    kept: set[str] = set()
    while True:
        drawn = Renaming(f"cc-bench frontend/{seed}/{number}", names, kept)
        task = PAGES[seed](drawn)
        told = f"{task.statement} {task.items[item].text}".lower()
        untold = {old for old, new in drawn.given.items() if new.lower() not in told}
        if untold <= kept:
            return task, drawn.given
        kept |= untold


def demonstrate(folder: Path, numbers: int, copies: int, workers: int) -> None:
    choice, measured = random.Random(0), {frontend_task(seed, 0).statement for seed in PAGES}
    shown: list[Page] = []
    sides: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for number in range(FIRST, FIRST + numbers):
        for seed in sorted(PAGES):
            task = frontend_task(seed, number)
            for mutant in ("", *sorted(task.mutants)) if task.statement not in measured else ():
                for item, works in enumerate(task.truth(mutant)):
                    sides[works].append((len(shown), item))
                shown.append(Page(seed, number, mutant))
    least = min(map(len, sides.values()))
    chosen = {one for side in sides.values() for one in choice.sample(side, least)}
    wanted = [[item for at, item in sorted(chosen) if at == page] for page in range(len(shown))]
    with ProcessPoolExecutor(workers) as pool:
        played = [one for found in pool.map(Page.sessions, shown, wanted) for one in found]
    rows = list(_copies(played, copies, choice))
    choice.shuffle(rows)
    short = [Conversation(row.messages[1:], thinking=True) for row in rows] + list(_plans(measured, choice))
    choice.shuffle(short)
    texts = [{"text": _text(row, with_tools=number % 10 == 0)} for number, row in enumerate(rows[:MOST_TEXTS])]
    folder.mkdir(parents=True, exist_ok=True)
    write_conversations(folder / "train.jsonl", rows)
    write_conversations(folder / "short.jsonl", short)
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    print(f"{len(played)} sessions, {len(rows)} with copies, {len(short) - len(rows)} plans: {folder}")


def _copies(
    played: Sequence[tuple[Page, int, Conversation]], copies: int, choice: random.Random
) -> Iterator[Conversation]:
    for at, (page, item, row) in enumerate(played):
        if page.seed in KNOWN_NAMES:
            yield row
            continue
        for copy in range(copies):
            if choice.random() < UNCHANGED:
                yield row
                continue
            task, given = renamed(page.seed, page.number, item, f"{at}/{copy}")
            if again := retold(row, task, item, given):
                yield again


def _plans(measured: Set[str], choice: random.Random) -> Iterator[Conversation]:
    """First turns: they need no browser. All of bar charts, whose plans need sums and products."""
    for number in range(FIRST_PLANNED, FIRST_PLANNED + PLANNED):
        for seed in sorted(PAGES):
            task = frontend_task(seed, number)
            for at in range(len(task.items)) if task.statement not in measured else ():
                if seed == "bars" or choice.random() < PLANNED_SHARE:
                    told = task if seed in KNOWN_NAMES else renamed(seed, number, at, f"plan {number}")[0]
                    _, question = asked(told, told.items[at])
                    plan = ScriptedItem(told.items[at]).complete([question], []).message
                    yield Conversation([question, plan], thinking=True)


def _text(row: Conversation, with_tools: bool) -> str:
    """What a session says, for the tokenizer and pre-training. The tools' texts are long and always the same."""
    parts = [json.dumps(tool, ensure_ascii=False) for tool in row.tools if with_tools]
    for message in row.messages:
        calls = [f"{call.name} {json.dumps(dict(call.arguments))}" for call in message.tool_calls]
        parts += [message.reasoning or "", message.content, *calls]
    return "\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numbers", type=int, default=16)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    demonstrate(options.folder, options.numbers, options.copies, options.workers)


if __name__ == "__main__":
    main()
