"""Agreement of a judge of frontends with the truth: references and mutants whose failing check-items are known.

    python benchmarks/frontend_judge.py [--numbers 1] [--judge URL [--judge-name NAME]] [--workers 2] [--record FILE]
    python benchmarks/frontend_judge.py --demonstrations DIR [--numbers 20] [--workers 2]

Without a URL the scripted judge decides. The table has agreement per check-item with an interval that knows that items
of a page go together, how often a judge passes what is broken and fails what works, and items without a verdict. With
`--demonstrations` nothing is measured: the scripted judge's sessions on other task numbers become conversations in
DIR/train.jsonl with as many failed as passed items, on which `glm5 sft` trains a small model to be a judge.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.agents.endpoint import Endpoint, Model, Reply
from glm5.data.sft import Conversation, write_conversations
from glm5.eval.cc_bench.judge import FAIL, PASS, TOOLS, FrontendJudge
from glm5.eval.cc_bench.scripted_judge import ScriptedItem, scripted_judge
from glm5.records import Message
from glm5.stats import clustered_share, wilson
from glm5.tasks.cc_bench import page_seeds, page_seeds_data, page_seeds_show  # noqa: F401 - they register the seeds
from glm5.tasks.cc_bench.checks import PAGES, FrontendTask, frontend_task
from glm5.tasks.cc_bench.project import Project

FIRST = 1000
"""Number of the first task of demonstrations; tasks of the suite come before."""


def pages(first: int, numbers: int) -> Iterator[tuple[FrontendTask, str, Project]]:
    """Every reference ("") and every mutant."""
    for number in range(first, first + numbers):
        for name in sorted(PAGES):
            task = frontend_task(name, number)
            for mutant in ("", *sorted(task.mutants)):
                html = (task.mutated(mutant) if mutant else task.page).html("Project").encode()
                yield task, mutant, Project({"index.html": html}, {"index.html": html})


def measure(judge: FrontendJudge, numbers: int, workers: int, record: Path | None) -> None:
    agreed, totals, kinds, began = list[int](), list[int](), Counter[str](), time.monotonic()
    shown = list(pages(0, numbers))
    with ThreadPoolExecutor(workers) as pool:
        verdicts = pool.map(lambda page: judge.verdicts(page[0], page[2]), shown)
        for (task, mutant, _), found in zip(shown, verdicts, strict=True):
            truth, right = task.truth(mutant), 0
            for (number, one), wanted in zip(found.items(), truth, strict=True):
                right += one.verdict == ("pass" if wanted else "fail")
                kinds[f"{'works' if wanted else 'broken'}: {one.verdict}"] += 1
                if record is not None:
                    row = {"task": task.name, "mutant": mutant, "item": number, "truth": wanted, **vars(one)}
                    with record.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            agreed.append(right)
            totals.append(len(truth))
    share = clustered_share(agreed, totals)
    print(f"agreement: {share.value:.1%} [{share.low:.1%}, {share.high:.1%}] of {share.n} items, {len(totals)} pages")
    for truth_is, wrong in (("broken", PASS), ("works", FAIL)):
        n = sum(count for kind, count in kinds.items() if kind.startswith(truth_is))
        rate = wilson(kinds[f"{truth_is}: {wrong}"], n)
        print(f"{truth_is}, but judged {wrong}: {rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}] of {n}")
    print(f"no verdict: {sum(count for kind, count in kinds.items() if kind.endswith('error'))}")
    print(f"{(time.monotonic() - began) / sum(totals):.2f} s per item")


@dataclass
class Recorded:
    """Keeps the conversation of a judge."""

    model: Model
    messages: list[Message] = field(default_factory=list)

    def complete(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: Any = None) -> Reply:
        reply = self.model.complete(messages, tools, on_delta)
        self.messages = [*messages, reply.message]
        return reply


def demonstrate(folder: Path, numbers: int, workers: int) -> None:
    shown, choice = list(pages(FIRST, numbers)), random.Random(0)
    sides: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for page, (task, mutant, _) in enumerate(shown):
        for item, works in enumerate(task.truth(mutant)):
            sides[works].append((page, item))
    least = min(map(len, sides.values()))
    chosen = sorted(one for side in sides.values() for one in choice.sample(side, least))
    wanted = [[item for at, item in chosen if at == page] for page in range(len(shown))]
    with ProcessPoolExecutor(workers) as pool:
        rows = [row for found in pool.map(_sessions, shown, wanted) for row in found]
    choice.shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    count = write_conversations(folder / "train.jsonl", rows)
    texts = [{"text": _text(row, with_tools=number % 10 == 0)} for number, row in enumerate(rows)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    print(f"{count} conversations, half of them of items that fail: {folder / 'train.jsonl'}, texts.jsonl")


def _sessions(page: tuple[FrontendTask, str, Project], wanted: Sequence[int]) -> list[Conversation]:
    """The scripted judge's sessions on these items of a page, those in which it was right."""
    if not wanted:  # no browser for nothing
        return []
    task, mutant, project = page
    heard = {item: Recorded(ScriptedItem(task.items[item])) for item in wanted}
    left, others = iter(heard.values()), {str(i + 1): PASS for i in range(len(task.items)) if i not in heard}
    found, truth = FrontendJudge(lambda task, item: next(left)).verdicts(task, project, others), task.truth(mutant)
    right = [item for item in wanted if found[str(item + 1)].verdict == (PASS if truth[item] else FAIL)]
    return [Conversation(heard[item].messages, TOOLS, thinking=True) for item in right]


def _text(row: Conversation, with_tools: bool) -> str:
    """What a session says, for the tokenizer and pre-training. The tools' texts are long and always the same."""
    parts = [json.dumps(tool, ensure_ascii=False) for tool in row.tools if with_tools]
    for message in row.messages:
        calls = [f"{call.name} {json.dumps(dict(call.arguments))}" for call in message.tool_calls]
        parts += [message.reasoning or "", message.content, *calls]
    return "\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1)
    parser.add_argument("--judge", default="")
    parser.add_argument("--judge-name", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--demonstrations", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.demonstrations is not None:
        demonstrate(options.demonstrations, options.numbers, options.workers)
        return
    judge = FrontendJudge.of(Endpoint(options.judge, options.judge_name), 1) if options.judge else scripted_judge()
    measure(judge, options.numbers, options.workers, options.record)


if __name__ == "__main__":
    main()
