"""Does a policy learn to search? SFT, then RL on search questions, on a slice that a laptop can train.

    python benchmarks/search_learning.py [--seeds 1 2 3] [--updates 80] [--quick]

The slice: a web of about 40,000 pages of places and elements (`glm5 task build search`), with questions of two links
from a named thing over a hidden one to the answer. A search shows three results with 20 characters of text each, a page
360 characters with numbers for links and its facts in another order for every question; `find` shows one of its lines.
An episode has eight messages. No search with a question of RL or of the evaluation, its name or its clauses shows the
answer. Answers of demonstrations, of RL and of the evaluation are three sets without a common title of a page; what
else of a question is new varies: forms, named and hidden things may be known.

Per seed:

1. A short SFT on sessions of the oracle, from a base that the seeds share: of each form of question equally many, as
   far as there are enough. The base knows walks: sessions from all over the web whose prompt names the page to look for
   and, in lower case, the lines to follow, so it has learned to copy names and to find a line by a word for it. Of
   questions it has only read some of the oracle's sessions as text. SFT is short so that RL has something to learn.
2. RL (`agentic`, in one process) on the questions. Reward: whether the answer is right.
3. Baselines: SFT goes on from the same start in about the time of step 2; and guessers without a model, which look for
   the name, open the first result, and answer what they saw most often of the type that is asked for: on that page
   ("first page"), or also on the first page that it links to ("first link"). "fixed numbers" goes the same way for the
   same type, by numbers of links, the best such way on the questions of RL: it reads nothing. "fixed labels" goes the
   best way that the pages have, by labels of lines: it reads pages, but of a question only the name and the type.
   "oracle" is the share that the oracle solves with the same view and messages, without looking behind a page's cut.
4. Every policy plays the same held-out questions once, at temperature 1.

The last line is JSON: solved shares, of all questions and of those that "fixed labels" does not solve ("beyond
labels"), and gains over the start with their 95 % interval (paired questions; those with the same answer may go
together). Deciding: a gain of at least 15 points with a lower bound above 5, from a start between 15 and 60 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
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
from glm5.tasks.search.browser import Browser
from glm5.tasks.search.build import build
from glm5.tasks.search.checks import Checker, Question
from glm5.tasks.search.family import SearchFamily, SearchProblem, split_of_answer, split_of_name
from glm5.tasks.search.query import Evaluator, Link, Node, Query
from glm5.tasks.search.questions import Rules, read_questions, read_rules

SOURCES = ("geonames", "airports", "iso-codes", "elements")
TYPES = ("subdivision", "city", "currency", "element")
RESULTS, SNIPPET, PAGE, TURNS, PER_ANSWER = 3, 20, 360, 8, 20
MOST_ANSWERS, MOST_PER_ANSWER, MOST_TRIES, MOST_PER_WALK = 5, 20, 60, 40
MAX_TOKENS, MAX_CONTEXT = 64, 1024
FITTED = 400
PROMPTS = (
    "From {name}: {first}, {second}",
    "{kind} {name}: {first} / {second}",
    "{first}, then {second}, from the {kind} {name}.",
    "Which {second} has the {first} of {name}?",
    "Open {name}. Follow {first}. Answer with {second}.",
    "{name} is a {kind}. Its {first} has a {second}: which?",
    "Which page is the {second} of a page? That page is the {first} of the {kind} {name}.",
    "Name the {second}. It is on a page that the {kind} {name} has as its {first}.",
)
LINK = re.compile(r" \[(\d+)\]")
RL = """
[[stages]]
name = "rl"
kind = "agentic"
prompts = 16
group = 8
concurrency = 128
max_tokens = 64
max_turns = 8
max_context = 1024
max_staleness = 1
reset_optimizer = false
optim = { steps = UPDATES, lr = 1e-3, schedule = "constant" }
[[stages.families]]
name = "search"
render_tools = false
"""


def options_of(web: Path, shuffled: bool) -> dict[str, Any]:
    """Options of the family."""
    return {
        "folder": str(web.absolute()), "tools": ["search", "click", "find"], "numbered": True, "shuffled": shuffled,
        "results": RESULTS, "snippet": SNIPPET, "page": PAGE, "max_turns": TURNS, "thinking": False,
    }  # fmt: skip


def by_number(page: str) -> dict[Any, int]:
    """The links that a page shows, known by their numbers."""
    return {number: number for number in map(int, LINK.findall(page))}


def by_label(page: str) -> dict[Any, int]:
    """The links that a page shows, known by the label of their line and their place there."""
    lines = (line.partition(": ") for line in page.splitlines()[1:])
    return {(label, place): int(n) for label, _, rest in lines for place, n in enumerate(LINK.findall(rest))}


class Session:
    """What somebody does with the tools of a problem, as messages. Queries begin with a space, so that the tokens of a
    name in it are those of the name in a question."""

    def __init__(self, prompt: str, browser: Browser) -> None:
        self.browser = browser
        self.messages = [Message("user", prompt)]

    def call(self, name: str, **arguments: str | int) -> str:
        call = ToolCall(name, arguments)
        text, _ = self.browser.call(call)
        self.messages += [Message("assistant", tool_calls=(call,)), Message("tool", text)]
        return text

    def search(self, words: str) -> str:
        return self.call("search", query=f" {words}")

    def click(self, number: int) -> str:
        return self.call("click", link_id=number)

    def find(self, number: int) -> None:
        """Look for the line of the page just opened that has this link, by its label."""
        for (label, _), link in by_label(self.messages[-1].content).items():
            if link == number:
                self.call("find", pattern=f"{label}:")
                return

    def answer(self, number: int) -> list[Message]:
        """The messages with a link as the answer."""
        return [*self.messages, Message("assistant", f"[{number}]")]


def session_of(problem: SearchProblem) -> Session:
    return Session(problem.prompt, problem.browser())


def name_in(problem: SearchProblem) -> str:
    """The name that the question has."""
    return next(iter(problem.question.constants.values()))


def calls_of(problem: SearchProblem) -> list[ToolCall] | None:
    """The oracle's calls, or None if with this view and number of messages it does not get there."""
    try:
        shown = problem.demonstration(0)
    except DataError:
        return None
    calls = [call for message in shown for call in message.tool_calls]
    return calls if 2 * len(calls) - 2 <= problem.max_turns else None  # with `find` before every link


def demonstration(problem: SearchProblem, calls: Sequence[ToolCall]) -> Conversation:
    """The oracle's way, which looks for each line before it follows it; the link that the oracle would open last is the
    answer."""
    session, (*calls, last) = session_of(problem), calls
    for step, call in enumerate(calls):
        [argument] = call.arguments.values()
        if step > 1:
            session.find(argument)
        _ = session.search(argument) if call.name == "search" else session.click(argument)
    session.find(last.arguments["link_id"])
    return Conversation(session.answer(last.arguments["link_id"]))


def guess(problem: SearchProblem, opened: int) -> bool:
    """A baseline without a model: whether the answer is what the named thing's page and, if `opened`, the first page it
    links to name most often, of the type asked for; the first of equal ones."""
    session, question = session_of(problem), problem.question
    session.search(name_in(problem))
    seen = list[str]()
    for _ in range(opened + 1):
        seen += [session.browser.address(number) or "" for number in by_number(session.click(0))]
    kind = f"{question.query.root.type}/"
    fitting = Counter(url for url in seen if url.startswith(kind) and url not in question.constants)
    page_of = problem.web.page(fitting.most_common(1)[0][0]) if fitting else None
    return page_of is not None and right(page_of.title, question.names)


def fixed_ways(problem: SearchProblem, known: Callable[[str], dict[Any, int]]) -> dict[tuple[Any, Any], bool]:
    """The ways (A, B) that a problem has: search the name, open result 0 and its link A, answer with link B there; and
    whether each solves it."""
    session = session_of(problem)
    session.search(name_in(problem))
    links = {mark: session.browser.address(number) for mark, number in known(session.click(0)).items()}
    return {
        (first, last): right(session.browser.title(number), problem.question.names)
        for first, url in links.items()
        for last, number in known(session.browser.open(url or "")[0]).items()
    }


def follow_fixed_ways(
    family: SearchFamily, asked: Sequence[SearchProblem], known: Callable[[str], dict[Any, int]]
) -> list[bool]:
    """Whether these are solved by the way that solves most of RL's questions with the same type of answer; of those
    that a problem has."""
    solved: dict[str, Counter[tuple[Any, Any]]] = {}
    for index in range(FITTED):
        problem = family.problem("rl", index)
        ways = (way for way, solves in fixed_ways(problem, known).items() if solves)
        solved.setdefault(problem.question.query.root.type, Counter()).update(ways)

    def follow(problem: SearchProblem) -> bool:
        ways = fixed_ways(problem, known)
        best = (way for way, _ in solved.get(problem.question.query.root.type, Counter()).most_common() if way in ways)
        return ways.get(next(best, (None, None)), False)

    return [follow(problem) for problem in asked]


def renamed(node: Node, entity: str) -> Node:
    """The chain from another named thing."""
    if node.entity:
        return replace(node, entity=entity)
    [link] = node.constraints
    assert isinstance(link, Link)
    return replace(node, constraints=(replace(link, child=renamed(link.child, entity)),))


def last_link(node: Node) -> Link:
    """The link of a chain to its named thing."""
    [link] = node.constraints
    assert isinstance(link, Link)
    return link if link.child.entity else last_link(link.child)


def problems(family: SearchFamily, web: Path) -> Iterator[SearchProblem]:
    """Questions of the forms of the training questions, from other named things to answers of the training split. A few
    have several answers; no name answers more than MOST_PER_ANSWER, for answers are to be copied, not remembered. Ends
    when the forms are used up."""
    forms = [question.query for question in read_questions(web) if split_of_answer(question) == "train"]
    graph = family.web.graph()
    checker, choice = Checker(family.web, graph, Evaluator(graph)), random.Random("careful")
    seen, often, any_problem = set[str](), Counter[str](), family.problem("train", 0)

    @functools.cache
    def ends_of(relation: str, reverse: bool) -> list[str]:
        return sorted(map(str, (graph.objects if reverse else graph.subjects)[relation]))

    def draw(form: Query) -> Question | None:
        end = last_link(form.root)
        entity = choice.choice(ends_of(end.relation, end.reverse))
        query = replace(form, root=renamed(form.root, entity))
        answers = sorted(checker.evaluator.answers(query))
        if not 1 <= len(answers) <= MOST_ANSWERS or not graph.only_one_named(entity):
            return None
        answer = choice.choice(answers)
        name = graph.entities[answer].name
        if often[name] >= MOST_PER_ANSWER or split_of_name(name) != "train":
            return None
        question = checker.question(query, answer, "tree")
        return None if question.id in seen or checker.gives_away(question) else question

    while forms:
        place = choice.randrange(len(forms))
        question = next(filter(None, (draw(forms[place]) for _ in range(MOST_TRIES))), None)
        if question is None:
            forms.pop(place)
            continue
        seen.add(question.id)
        often[question.names[0]] += 1
        yield replace(any_problem, question=question)


def walks(family: SearchFamily, count: int) -> Iterator[Conversation]:
    """Sessions that are told where to go: a search for a page, its click, and the first links of two lines that the
    prompt names, in one of many ways of saying it. No name is the end of many, and every order is new, so they teach to
    copy and to read."""
    web, choice, view = family.web, random.Random("walks"), family.problem("train", 0).view
    often = Counter[str]()
    while count:
        page = web.page(choice.choice(web.index.urls))
        if page is None or split_of_name(page.title) != "train":
            continue
        session, way = Session("", Browser(web, view=view, order=f"walk {count}")), list[str]()
        session.search(page.title)
        number = session.browser.number(page.url)
        while number is not None and len(way) < 2:
            lines = (line for line in session.click(number).splitlines(keepends=True) if ", in the lists " not in line)
            found = [(label, n) for (label, place), n in by_label("".join(lines)).items() if place == 0]
            number = None
            if found:
                label, number = choice.choice(found)
                session.find(number)
                way.append(label)
        if number is None or split_of_name(end := session.browser.title(number)) != "train":
            continue
        if often[end] < MOST_PER_WALK:
            often[end] += 1
            count -= 1
            kind, _, _ = page.url.partition("/")
            first, second = (label.lower() for label in way)  # words to find a line by, not the line's own
            prompt = choice.choice(PROMPTS).format(name=page.title, kind=kind, first=first, second=second)
            yield Conversation([Message("user", prompt), *session.answer(number)[1:]])


def demonstrations(source: Iterator[SearchProblem]) -> list[Conversation]:
    """The oracle's sessions, those of all forms of questions in turn: the first ones have each form equally often."""
    forms: dict[str, list[Conversation]] = {}
    for problem in source:
        if (calls := calls_of(problem)) is not None:
            form = problem.prompt.replace(name_in(problem), "")
            forms.setdefault(form, []).append(demonstration(problem, calls))
    return [one for turn in zip_longest(*forms.values()) for one in turn if one is not None]


def baselines(family: SearchFamily, held_out: Sequence[SearchProblem]) -> dict[str, list[bool]]:
    """What is solved without a model."""
    return {
        "fixed numbers": follow_fixed_ways(family, held_out, by_number),
        "fixed labels": follow_fixed_ways(family, held_out, by_label),
        "first page": [guess(one, 0) for one in held_out],
        "first link": [guess(one, 1) for one in held_out],
        "oracle": [calls_of(one) is not None for one in held_out],
    }


def experiment(
    seed: int,
    options: argparse.Namespace,
    chosen: dict[str, Any],
    held_out: Sequence[SearchProblem],
    known: dict[str, list[bool]],
) -> dict[str, Any]:
    """Train and play with this seed. `known` is what baselines solve."""
    stage = RL + "".join(f"options.{key} = {json.dumps(value)}\n" for key, value in chosen.items())
    trained, seconds = policies(seed, options, stage)
    family = FamilyConfig(name="search", options=chosen, render_tools=False)
    config = EvalConfig(
        problems=options.held_out, max_tokens=MAX_TOKENS, max_turns=TURNS, max_context=MAX_CONTEXT, samples=1, ks=[1]
    )
    played = {name: evaluate(policy, family, config) for name, policy in trained.items()}
    solved = {name: wins for name, (wins, _) in played.items()}
    seconds["episode"] = played["rl"][1]
    hard = [place for place, solves in enumerate(known["fixed labels"]) if not solves]
    beyond = {name: fmean(wins[place] for place in hard) for name, wins in solved.items()} if hard else {}
    found = rates(seed, solved | known, seconds, [one.question.names[0] for one in held_out])
    return found | {"beyond labels": {"n": len(hard), **beyond}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, updates=80, text_steps=300, base_steps=1500, sft_steps=40, sft_rate="2e-3")
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--questions", type=int, default=3000)
    parser.add_argument("--draw", type=int, default=0, help="seed of the questions: to tune, take other ones")
    parser.add_argument(
        "--demonstrations", type=int, nargs=3, default=[30_000, 2_000, 300],
        help="walks, sessions of the oracle that the base reads as text, and those for SFT",
    )  # fmt: skip
    parser.add_argument(
        "--in-order",
        action="store_true",
        help="pages with their facts in one order, in a folder of its own: the best fixed numbers solve 76 %%",
    )
    parser.add_argument("--quick", action="store_true", help="everything once and small, in a folder of its own")
    parser.add_argument("--out", type=Path, default=Path("runs/search-learning"))
    options = parser.parse_args()
    if options.in_order:
        options.out = options.out.with_name(f"{options.out.name}-in-order")
    sources: tuple[str, ...] = SOURCES
    if options.quick:
        options.seeds, options.updates, options.text_steps, options.base_steps, options.sft_steps = [0], 1, 4, 4, 2
        options.held_out, options.questions, options.demonstrations, sources = 8, 80, [300, 50, 50], SOURCES[:2]
        options.out = options.out.with_name(f"{options.out.name}-quick")
    torch.set_num_threads(options.threads)
    web = options.out / "web"
    rules = Rules(
        options.questions, options.draw, depths=(2,), types=TYPES, filters=0, per_shape=options.questions,
        kinds=("tree",), results=RESULTS, snippet=SNIPPET, per_answer=PER_ANSWER,
    )  # fmt: skip
    if (web / "manifest.json").exists():
        made = read_rules(web)
        if other := [key for key, value in rules.plain().items() if made.get(key) != value]:
            raise SystemExit(f"{web} was made with other {' and '.join(other)}; take another --out.")
    else:
        build(web, rules, only=sources, download=True, jobs=options.threads, told=print)
    chosen = options_of(web, not options.in_order)
    family, (walked, read, few) = SearchFamily(**chosen), options.demonstrations
    held_out = [one for one in held_out_problems(family, options.held_out, "search") if isinstance(one, SearchProblem)]
    if len(held_out) < options.held_out:
        raise SystemExit(f"{web} has only {len(held_out)} held-out questions; raise --questions, or lower --held-out.")
    counts = options.out / "demonstrations.json"
    if counts.exists() and json.loads(counts.read_text(encoding="utf-8")) != options.demonstrations:
        raise SystemExit(f"{options.out} was made with other --demonstrations; take another --out.")
    if not counts.exists():
        shown, walking = demonstrations(problems(family, web)), list(walks(family, walked))
        write_texts([*shown[:read], *walking], options.out / "texts.txt")
        write_conversations(options.out / "base.jsonl", walking)
        write_conversations(options.out / "sft.jsonl", shown[:few])
        counts.write_text(json.dumps(options.demonstrations), encoding="utf-8")
        print(f"{walked} walks; the first {read} and {few} of {len(shown)} sessions of the oracle")
    found, known = [], baselines(family, held_out)
    for seed in options.seeds:
        found.append(experiment(seed, options, chosen, held_out, known))
        print(json.dumps(found[-1]), flush=True)
    answers = len({problem.question.answer for problem in held_out})
    told = {"questions": options.held_out, "answers": answers, "updates": options.updates, "runs": found}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
