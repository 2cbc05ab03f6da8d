"""Does managing the context pay on long searches (§4.2.4)? A policy that tries candidates one by one, in three modes.

    python benchmarks/search_context.py --base DIR [--seeds 1 2 3] [--quick]

The web and the base are those of `search_learning.py --in-order`, whose folder `--out` is. A question gives a place and
the height of an airport there: "Which city has the airport of Hokkaido at 721 feet?" The policy was taught one way:
search the place, open the page that lists its airports, open one of them, find the height there, and either answer with
the number of a link, or search the place again and open another. Candidates are 4 to 13, in a drawn order; no other
candidate has the same height or the same answer.

Each seed is SFT from the base on such sessions, as the policy would see them under any of the modes, so that omitted
results and restarts are nothing new to it. Rows are equally many by mode; as long sessions do not fit into "none", more
of the rows of hierarchical train an answer. Then it plays the held-out questions, whose airports it was never asked
for, at temperature 1, through `glm5 serve` and the player of evaluations: everything in the prompt (none); only the
latest three results (keep-recent); the same, and from the question again above 768 tokens (hierarchical). The model has
1,024 positions. A session that fills them, or has 90 replies, has failed.

The last line is JSON: the shares of right answers and the differences between modes over all seeds, with 95 % intervals
that count a question once; before it, the share that one try solves, and per mode the share of sessions that fit into
the context if no candidate is tried twice. Deciding: none < keep-recent < hierarchical, both lower bounds above 0.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _learning import RECIPE, run, sft
from search_learning import MAX_CONTEXT, MAX_TOKENS, Session, options_of

from glm5.agents.context import OMITTED, ContextPolicy, Mode, fold
from glm5.agents.endpoint import Endpoint
from glm5.agents.models import Measure, exact_measure, served
from glm5.chat import Tokenizer
from glm5.config.suite import Suite, SuitePart
from glm5.data.sft import Conversation, write_conversations
from glm5.eval.players import Played
from glm5.eval.remote_player import RemotePlayer
from glm5.records import Message, Outcome
from glm5.stats import clustered_share, paired_rewards
from glm5.tasks.search.browser import Browser
from glm5.tasks.search.checks import Question
from glm5.tasks.search.family import SearchFamily, SearchProblem, split_of_name
from glm5.tasks.search.query import Node, Query

TYPES = ("timezone", "country", "subdivision", "city")
KINDS = {"City": "city", "Subdivision": "subdivision", "Time zone": "time zone", "Country": "country"}
TOOLS = ("search", "click", "find")
KEEP, RESTART, REPLIES, FEWEST = 3, 768, 90, 4
MODES: tuple[Mode, ...] = ("none", "keep-recent", "hierarchical")
LINK = re.compile(r" \[(\d+)\]")
HEIGHT = re.compile(r"^Elevation: (.*) feet$", re.MULTILINE)
FACT = re.compile(rf"^({'|'.join(KINDS)}): (.*) \[(\d+)\]$", re.MULTILINE)


@dataclass(frozen=True)
class Airport:
    """What its page shows: height, and for each of KINDS the name and the number of the link."""

    height: str
    facts: Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class Place:
    """A page that lists airports: `way` are the numbers to click after a search for `name`, `airports` the number of
    each airport there, by address."""

    name: str
    way: tuple[int, ...]
    airports: Mapping[str, int]


def look(browser: Browser) -> tuple[list[Place], dict[str, Airport]]:
    """Places whose airports the view shows, and all airports by address."""
    found, airports = list[Place](), dict[str, Airport]()
    for url in browser.web.index.urls:
        if url.startswith("airport/"):
            text, _ = browser.open(url)
            if height := HEIGHT.search(text):
                airports[url] = Airport(height[1], {kind: (name, int(n)) for kind, name, n in FACT.findall(text)})

    def links(url: str) -> dict[str, int]:
        text, _ = browser.open(url)
        shown = ((browser.address(number), number) for number in map(int, LINK.findall(text)))
        return {address: number for address, number in shown if address is not None}

    for url in browser.web.index.urls:
        page = browser.web.page(url) if url.count("/") == 1 and url.partition("/")[0] in TYPES else None
        if page is None:
            continue
        browser.search(f" {page.title}", browser.view.results)
        first = browser.number(url)
        if first is None:
            continue
        shown, way = links(url), [first]
        if lists := [address for address in shown if "/airport_" in address]:
            way.append(shown[lists[0]])
            shown = links(lists[0])
        there = {address: number for address, number in shown.items() if address in airports}
        if len(there) >= FEWEST:
            found.append(Place(page.title, tuple(way), there))
    return found, airports


@dataclass(frozen=True)
class Task:
    """A question, its place, the height that it asks for, and the number of the link that answers it there."""

    problem: SearchProblem
    place: Place
    height: str
    link: int


def tasks(family: SearchFamily, split: str, any_answer: bool = False) -> Iterator[Task]:
    """Questions for airports of the split; with `any_answer` also such that other candidates have the same answer."""
    first = family.problem("train", 0)
    any_problem = replace(first, tools=first.view.tools(TOOLS), max_turns=REPLIES)
    found, airports = look(any_problem.browser())
    for place in found:
        there = {url: airports[url] for url in place.airports}
        heights = Counter(airport.height for airport in there.values())
        for url, airport in there.items():
            page = family.web.page(url)
            if page is None or split_of_name(page.title) != split or heights[airport.height] > 1:
                continue
            for kind, (name, link) in airport.facts.items():
                same = sum(other.facts.get(kind, ("",))[0] == name for other in there.values())
                if same == 1 or any_answer:
                    text = f"Which {KINDS[kind]} has the airport of {place.name} at {airport.height} feet?"
                    query = Query(Node("airport", entity=url))
                    question = Question(query, text, url, (name,), len(place.way) + 1, "tree")
                    yield Task(replace(any_problem, question=question), place, airport.height, link)
                    if not any_answer:
                        break


def session(task: Task, order: random.Random) -> list[Message]:
    """One candidate after another in a drawn order, until the height is the one asked for."""
    played, left = Session(task.problem.prompt, task.problem.browser()), list(task.place.airports.values())
    order.shuffle(left)
    for number in left:
        played.search(task.place.name)
        for step in (*task.place.way, number):
            played.click(step)
        if played.call("find", pattern=f"Elevation: {task.height} feet") != "not found":
            break
    return played.answer(task.link)


def prompt(messages: Sequence[Message], at: int, mode: Mode, measure: Measure) -> list[Message] | None:
    """What a mode shows before the reply `at`, or None if that and the reply are longer than the context."""
    policy = ContextPolicy(mode, KEEP, RESTART)
    found = fold(messages[:at], policy, measure.count, measure.overhead)
    return found.messages if found.plan.tokens + measure.count(messages[at]) < MAX_CONTEXT else None


def replies(messages: Sequence[Message]) -> list[int]:
    return [at for at, message in enumerate(messages) if message.role == "assistant"]


def fits(messages: Sequence[Message], mode: Mode, measure: Measure) -> bool:
    """Whether a session ends within the context."""
    return all(prompt(messages, at, mode, measure) is not None for at in replies(messages))


def folded(messages: Sequence[Message], mode: Mode, measure: Measure, choice: random.Random) -> Conversation | None:
    """The session up to a drawn reply as a mode shows it, or None if it is longer than the context. Replies to results
    that are omitted now are not trained."""
    *_, last = places = replies(messages)
    at = last if choice.random() < 0.3 else choice.choice(places)
    shown = prompt(messages, at, mode, measure)
    if shown is None:
        return None
    row = [*shown, messages[at]]
    return Conversation([
        replace(one, train=before is None or before.content != OMITTED) if one.role == "assistant" else one
        for before, one in zip([None, *row], row)
    ])  # fmt: skip


def play(policy: Path, chosen: Sequence[SearchProblem], mode: str) -> list[Played]:
    """The answers of a policy to every question under a mode."""
    suite = Suite.model_validate({
        "title": mode, "temperature": 1.0, "max_tokens": MAX_TOKENS, "max_turns": REPLIES, "context": mode,
        "keep": KEEP, "discard_above": RESTART, "render_tools": False,
        "parts": [{"name": "long", "family": "search"}],
    })  # fmt: skip
    key = secrets.token_urlsafe(24)
    with served(policy, key) as url:
        player = RemotePlayer(Endpoint(url, key=key, max_tokens=MAX_TOKENS), tokenizer=Tokenizer.load(policy))
        found = dict(player.play(list(enumerate(chosen)), suite, SuitePart(name="long", family="search"), seed=0))
    if failed := [one.detail for one in found.values() if one.outcome is Outcome.ENV_ERROR]:
        raise SystemExit(f"{mode}: {len(failed)} sessions failed, such as {failed[0]}")
    return [found[place] for place in range(len(chosen))]


def sessions(shown: Sequence[Task], measure: Measure, count: int) -> Iterator[Conversation]:
    """What the policy is trained on: each question several times, in other orders, in every mode equally often."""
    choice = random.Random("sessions")
    for number in range(count):
        row = None
        while row is None:
            row = folded(session(choice.choice(shown), choice), MODES[number % len(MODES)], measure, choice)
        yield row


def train(seed: int, data: Path, options: argparse.Namespace) -> Path:
    """SFT on the sessions."""
    out = options.out.absolute() / f"context-{seed}"
    out.mkdir(parents=True, exist_ok=True)
    start = options.base.absolute()
    head = RECIPE.replace("SEED", str(seed)).replace("RUNS", str(out / "runs")).replace("START", f'start = "{start}"')
    return run(head + sft(data, options.sft_steps, "5e-3"), out, "sft")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--base", type=Path, required=True, help="a base that search_learning.py has trained")
    parser.add_argument("--sessions", type=int, default=8_000)
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=100, help="questions, at most one per place")
    parser.add_argument("--split", default="heldout", help="whose questions are played: to tune, take those of rl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed, small")
    parser.add_argument("--out", type=Path, default=Path("runs/search-learning-in-order"))
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.sessions, options.sft_steps, options.held_out = options.seeds[:1], 200, 4, 8
    torch.set_num_threads(options.threads)
    family = SearchFamily(**options_of(options.out / "web", shuffled=False))
    measure = exact_measure(Tokenizer.load(options.base))
    shown, asked = list(tasks(family, "train", any_answer=True)), list(tasks(family, options.split))
    random.Random("held out").shuffle(asked)
    asked = list({task.place.name: task for task in asked}.values())[: options.held_out]
    chosen = [task.problem for task in asked]
    orders = random.Random("orders")
    most = {mode: sum(fits(session(t, orders), mode, measure) for t in asked) / len(asked) for mode in MODES}
    guess = sum(1 / len(task.place.airports) for task in asked) / len(asked)
    print(f"{len(shown)} questions for training, {len(asked)} of {options.split}, of which one try solves {guess:.3f}")
    print(f"most that a session without a repetition can solve: {most}")
    data = options.out.absolute() / f"sessions-{options.sessions}.jsonl"
    if not data.exists():
        write_conversations(data, sessions(shown, measure, options.sessions))
    right: dict[Mode, list[int]] = {mode: [0] * len(chosen) for mode in MODES}
    for seed in options.seeds:
        policy = train(seed, data, options)
        for mode in MODES:
            played = play(policy, chosen, mode)
            right[mode] = [n + (one.outcome is Outcome.SOLVED) for n, one in zip(right[mode], played, strict=True)]
            mean = sum(len(replies(one.messages)) for one in played) / len(played)
            told = Counter(one.outcome.value for one in played)
            print(json.dumps({"seed": seed, "mode": mode, "replies": round(mean, 1), **told}), flush=True)
    seeds = len(options.seeds)
    result: dict[str, object] = {
        mode: clustered_share(wins, [seeds] * len(wins)).plain() for mode, wins in right.items()
    }
    for less, more in (MODES[:2], MODES[1:]):
        gain = paired_rewards([(b - a) / seeds for a, b in zip(right[less], right[more], strict=True)])
        result[f"{more} - {less}"] = {"value": gain.value, "low": gain.low, "high": gain.high}
    print(json.dumps({"questions": len(chosen), **result}))


if __name__ == "__main__":
    main()
