"""Does a policy learn to search? SFT, then RL on search questions, on a slice that a laptop can train.

    python benchmarks/search_learning.py [--seeds 1 2 3] [--updates 40] [--quick]

The slice: a web of 35,000 pages about places and elements (`glm5 task build search`), with questions of two links from
a named thing to the answer over one that is not named. Searches show three results with 20 characters of text, pages
are cut at 420 characters, and an episode has six messages. No search with the question, its name or one of its
clauses shows the answer. Answers of demonstrations, prompts of RL and evaluation are three sets without a common name.
Per seed:

1. SFT from a base that the seeds share, which was trained on sessions that search for the name, click its page, open
   the pages on the way and answer. The demonstrations of this step are of mixed quality: some answer a page too early,
   some follow the first link of a page, some search for what is asked instead of what is named.
2. RL (`agentic`, in one process) on the questions. Reward: whether the answer is right.
3. Baselines: SFT goes on from the same start in the time of step 2; and guessers without a model, which look for the
   name, open the first result, and answer what they saw most often of the type that is asked for: on that page ("first
   page"), or also on as many of the pages that it links to as the messages allow ("first links"). "oracle" is the share
   that the oracle solves with the same view and messages: the most there is.
4. Every policy plays the same held-out questions once, at temperature 1.

The last line is JSON: solved shares, and gains over the start with their 95 % interval (paired questions). Deciding: a
gain of at least 15 points with a lower bound above 5, from a start between 15 and 60 %.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _learning import add_arguments, evaluate, policies, rates, write_texts

from glm5.config.evaluation import EvalConfig
from glm5.config.families import FamilyConfig
from glm5.data.sft import Conversation, write_conversations
from glm5.errors import DataError
from glm5.records import Message, ToolCall
from glm5.tasks.contract import held_out_problems
from glm5.tasks.search.answers import right
from glm5.tasks.search.build import build
from glm5.tasks.search.checks import Checker
from glm5.tasks.search.family import SearchFamily, SearchProblem, split_of_answer
from glm5.tasks.search.query import Evaluator, Link, Node
from glm5.tasks.search.questions import Rules, read_questions

SOURCES = ("geonames", "airports", "iso-codes", "elements")
TYPES = ("subdivision", "city", "currency", "element")
RESULTS, SNIPPET, PAGE, TURNS, PER_ANSWER = 3, 20, 420, 6, 4
MAX_TOKENS, MAX_CONTEXT = 64, 640
MIXED = {"careful": 0.45, "too early": 0.25, "first link": 0.15, "wrong words": 0.15}
LINK = re.compile(r"(?:^|, |: )([^<>\n:]+?) <([^<>\s]+)>", re.MULTILINE)
RL = """
[[stages]]
name = "rl"
kind = "agentic"
prompts = 8
group = 8
concurrency = 64
max_tokens = 64
max_turns = 6
max_context = 640
max_staleness = 1
optim = { steps = UPDATES, lr = 1e-3, schedule = "constant" }
[[stages.families]]
name = "search"
render_tools = false
"""


def options_of(web: Path) -> dict[str, Any]:
    """Options of the family."""
    return {
        "folder": str(web.absolute()), "tools": ["search", "click", "open"], "results": RESULTS, "snippet": SNIPPET,
        "page": PAGE, "max_turns": TURNS, "thinking": False,
    }  # fmt: skip


class Session:
    """What somebody does with the tools of a problem, as messages."""

    def __init__(self, problem: SearchProblem) -> None:
        self._browser = problem.browser()
        self.messages = [Message("user", problem.prompt)]

    def call(self, name: str, **arguments: str | int) -> str:
        call = ToolCall(name, arguments)
        text, _ = self._browser.call(call)
        self.messages += [Message("assistant", tool_calls=(call,)), Message("tool", text)]
        return text


def name_in(problem: SearchProblem) -> str:
    """The name that the question has."""
    return next(iter(problem.question.constants.values()))


def title(page: str) -> str:
    return page.partition(" <")[0]


def careful(problem: SearchProblem) -> list[Message]:
    """The oracle's way, without opening the answer's own page: its name stands in the link."""
    shown = problem.demonstration(0)
    return [*shown[:-3], shown[-1]]


def too_early(problem: SearchProblem) -> list[Message]:
    """The careful way without its last page, whose title is the answer."""
    shown = careful(problem)
    return [*shown[:-3], Message("assistant", title(shown[-2].content))]


def first_link(problem: SearchProblem) -> list[Message] | None:
    """Opens the first link of the named thing's page, and answers with the first link there."""
    session = Session(problem)
    session.call("search", query=name_in(problem))
    first = LINK.search(session.call("click", link_id=0))
    then = LINK.search(session.call("open", url=first[2])) if first else None
    return [*session.messages, Message("assistant", then[1])] if then else None


def wrong_words(problem: SearchProblem) -> list[Message]:
    """Searches for what is asked, and answers with the title of the first result."""
    session = Session(problem)
    session.call("search", query=problem.prompt.partition("?")[0].removeprefix("Which "))
    return [*session.messages, Message("assistant", title(session.call("click", link_id=0)))]


WAYS = {"careful": careful, "too early": too_early, "first link": first_link, "wrong words": wrong_words}


def guess(problem: SearchProblem, opened: int) -> bool:
    """A baseline without a model: whether the answer is what the named thing's page and the first `opened` pages it
    links to name most often, of the type asked for; the first of equal ones."""
    session, question = Session(problem), problem.question
    session.call("search", query=name_in(problem))
    seen = LINK.findall(session.call("click", link_id=0))
    for _, url in seen[:opened]:
        seen = seen + LINK.findall(session.call("open", url=url))
    kind = f"{question.query.root.type}/"
    fitting = Counter(name for name, url in seen if url.startswith(kind) and url not in question.constants)
    return bool(fitting) and right(fitting.most_common(1)[0][0], question.names)


def reaches(problem: SearchProblem) -> bool:
    """Whether the oracle solves a problem with the same view and number of messages."""
    try:
        return len(careful(problem)) // 2 <= problem.max_turns
    except DataError:
        return False


def renamed(node: Node, entity: str) -> Node:
    """The chain from another named thing."""
    if node.entity:
        return replace(node, entity=entity)
    [link] = node.constraints
    assert isinstance(link, Link)
    return replace(node, constraints=(replace(link, child=renamed(link.child, entity)),))


def last(node: Node) -> Node:
    """The named thing of a chain."""
    while not node.entity:
        [link] = node.constraints
        assert isinstance(link, Link)
        node = link.child
    return node


def problems(family: SearchFamily, web: Path) -> Iterator[SearchProblem]:
    """Questions of the forms of the training questions, from other named things to answers of the training split."""
    train = [question for question in read_questions(web) if split_of_answer(question) == "train"]
    graph = family.web.graph()
    checker, choice = Checker(family.web, graph, Evaluator(graph)), random.Random("demonstrations")
    seen, any_problem = set[str](), family.problem("train", 0)
    while True:
        form = choice.choice(train).query
        entity = choice.choice(graph.of_type[last(form.root).type])
        query = replace(form, root=renamed(form.root, entity))
        answers = checker.evaluator.answers(query)
        if len(answers) != 1 or not all(map(graph.only_one_named, (entity, *answers))):
            continue
        question = checker.question(query, next(iter(answers)), "tree")
        if question.id not in seen and split_of_answer(question) == "train" and not checker.gives_away(question):
            seen.add(question.id)
            yield replace(any_problem, question=question)


def demonstrations(source: Iterator[SearchProblem], count: int, mixed: bool) -> Iterator[Conversation]:
    choice = random.Random("demonstrators")
    while count:
        problem = next(source)
        if reaches(problem):
            way = choice.choices(list(MIXED), list(MIXED.values()))[0] if mixed else "careful"
            shown = WAYS[way](problem)
            if shown is not None:
                count -= 1
                yield Conversation(shown)


def experiment(seed: int, options: argparse.Namespace, web: Path) -> dict[str, Any]:
    chosen = options_of(web)
    stage = RL + "".join(f"options.{key} = {json.dumps(value)}\n" for key, value in chosen.items())
    trained, seconds = policies(seed, options, stage)
    family = FamilyConfig(name="search", options=chosen, render_tools=False)
    config = EvalConfig(
        problems=options.held_out, max_tokens=MAX_TOKENS, max_turns=TURNS, max_context=MAX_CONTEXT, samples=1, ks=[1]
    )
    played = {name: evaluate(policy, family, config) for name, policy in trained.items()}
    solved = {name: wins for name, (wins, _) in played.items()}
    seconds["episode"] = played["rl"][1]
    held_out = held_out_problems(SearchFamily(**chosen), options.held_out, "search")
    solved |= {f"first {name}": [guess(one, n) for one in held_out] for name, n in (("page", 0), ("links", TURNS - 3))}
    solved["oracle"] = [reaches(one) for one in held_out]
    return rates(seed, solved, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, updates=40, text_steps=300, base_steps=1000)
    parser.add_argument("--held-out", type=int, default=250)
    parser.add_argument("--questions", type=int, default=1300)
    parser.add_argument("--demonstrations", type=int, nargs=2, default=[10_000, 3_000], help="careful and mixed ones")
    parser.add_argument("--quick", action="store_true", help="everything once and small, in a folder of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/search-learning"))
    options = parser.parse_args()
    sources = SOURCES
    if options.quick:
        options.seeds, options.updates, options.text_steps, options.base_steps, options.sft_steps = [0], 1, 4, 4, 2
        options.held_out, options.questions, options.demonstrations, sources = 16, 80, [200, 100], SOURCES[:2]
        options.out = options.out.with_name(f"{options.out.name}-quick")
    torch.set_num_threads(options.threads)
    web = options.out / "web"
    if not (web / "manifest.json").exists():
        rules = Rules(
            options.questions, depths=(2,), types=TYPES, filters=0, per_shape=options.questions, kinds=("tree",),
            results=RESULTS, snippet=SNIPPET, per_answer=PER_ANSWER,
        )  # fmt: skip
        build(web, rules, only=sources, download=True, jobs=options.threads, told=print)
    if not (options.out / "mixed.jsonl").exists():
        source = problems(SearchFamily(**options_of(web)), web)
        shown = list(demonstrations(source, options.demonstrations[0], mixed=False))
        write_texts(shown, options.out / "texts.txt")
        write_conversations(options.out / "careful.jsonl", shown)
        write_conversations(options.out / "mixed.jsonl", demonstrations(source, options.demonstrations[1], mixed=True))
    found = []
    for seed in options.seeds:
        found.append(experiment(seed, options, web))
        print(json.dumps(found[-1]), flush=True)
    print(json.dumps({"questions": options.held_out, "updates": options.updates, "runs": found}))


if __name__ == "__main__":
    main()
