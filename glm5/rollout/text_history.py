"""Training rows made the way trainers without token ids make them; only to compare with token-in/token-out (§4.1).

Such a trainer gets an agent's conversation as text: it renders every answer again and tokenises it. The new ids differ
from the sampled ones if the policy sampled another division into tokens, or text that parsing and rendering change
(white space, the form of a call's arguments, a broken call). A log-probability of the rollout is used at the tokens
that both have, in order; the other new tokens stay in the context and are masked out of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from glm5.chat.template import render_chat
from glm5.chat.tokenizer import Tokenizer
from glm5.records import Message, Trajectory, Turn
from glm5.rollout.history import Node, in_order
from glm5.rollout.samples import trajectory_of
from glm5.rollout.store_reader import ResultRow

COUNTS = ("sampled", "mismatched", "rendered", "masked")
"""What `detail["history"]` counts: sampled tokens, those that are in no row, tokens of the answers as rendered again,
and those that are masked."""
_ASKED = Message("user", "")


def text_trajectory_of(
    result: ResultRow, nodes: Sequence[Node], finish: Mapping[Node, str], tokenizer: Tokenizer
) -> Trajectory:
    """As `samples.trajectory_of`, with every answer rendered and tokenised again. A turn becomes one `Turn` per run of
    tokens that agree, so a trajectory may have more turns than the session, or none. `tokenizer` has one of our
    templates."""
    turns: list[Turn] = []
    counts = dict.fromkeys(COUNTS, 0)
    taken = set[Node]()
    for path in in_order(nodes):
        ids: list[int] = []
        for node in path:
            opening, again = _rendered_again(node, tokenizer)
            ids += node.given[: len(node.given) - len(opening)]
            runs, at = ([], 0) if node in taken else (_matches([*opening, *node.output], again, len(opening)), 0)
            for begin, there, size in runs:
                ids += again[at:there]
                part, at = slice(begin, begin + size), there + size
                output, scores, versions = node.output[part], node.logprobs[part], node.versions[part]
                turns.append(Turn(tuple(ids), tuple(output), tuple(scores), tuple(versions), finish[node]))
                ids += output
            ids += again[at:]
            if node not in taken:
                taken.add(node)
                kept, rendered = sum(size for _, _, size in runs), len(again) - _agreeing(opening, again)
                for name, count in zip(
                    COUNTS, (len(node.output), len(node.output) - kept, rendered, rendered - kept), strict=True
                ):
                    counts[name] += count
    found = trajectory_of(result, [], {})
    detail = {"session": found.detail["session"], "history": counts} | dict(found.detail)
    return replace(found, turns=turns, detail=detail)


def mismatch(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of an update: `history/mismatch` (share of sampled tokens that are lost) and `history/masked` (share of
    the answers' tokens that are masked). A trajectory that fills up its group counts once. Empty without counts."""
    found = {str(t.detail["session"]): t.detail["history"] for t in trajectories if "history" in t.detail}
    total = {name: sum(counts[name] for counts in found.values()) for name in COUNTS}
    if not total["sampled"] or not total["rendered"]:
        return {}
    return {
        "history/mismatch": total["mismatched"] / total["sampled"],
        "history/masked": total["masked"] / total["rendered"],
    }


def _rendered_again(node: Node, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of a turn's generation prompt, which end `given`; and of the whole answer, tokenised again from its
    message, with that prompt and the token that ended it."""
    version, begin = tokenizer.template_version, tokenizer.special["<|assistant|>"]
    given = list(node.given)
    opening = given[len(given) - 1 - given[::-1].index(begin) :] if begin in given else []
    thinking = tokenizer.special["<think>"] in opening
    options: Any = {"tokenizer": tokenizer, "version": version, "enable_thinking": thinking, "clear_thinking": False}
    before = len(render_chat([_ASKED], add_generation_prompt=False, **options).ids)
    rendered = render_chat([_ASKED, node.reply], add_generation_prompt=False, **options).ids[before:]
    again = tokenizer.encode(tokenizer.decode(rendered), allow_special=True)
    end = [token for token in node.output[-1:] if token in tokenizer.stop_token_ids and again[-1:] != [token]]
    return opening, again + end


def _matches(sampled: Sequence[int], again: Sequence[int], first: int) -> list[tuple[int, int, int]]:
    """Runs of equal tokens, in order: (position among `sampled` from `first` on, position in `again`, size)."""
    found = []
    for i, j, size in _blocks(sampled, again):
        skip = max(0, first - i)
        if size > skip:
            found.append((i + skip - first, j + skip, size - skip))
    return found


def _agreeing(opening: Sequence[int], again: Sequence[int]) -> int:
    """Length of the part of `again` that is the generation prompt."""
    most = min(len(opening), len(again))
    return next((i for i in range(most) if opening[i] != again[i]), most)


def _blocks(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs (i, j, size) with a[i:i+size] == b[j:j+size], in order; the common beginning and end always count."""
    most = min(len(a), len(b))
    head = next((i for i in range(most) if a[i] != b[i]), most)
    tail = next((i for i in range(most - head) if a[-1 - i] != b[-1 - i]), most - head)
    if head:
        yield 0, 0, head
    middle = SequenceMatcher(None, a[head : len(a) - tail], b[head : len(b) - tail], autojunk=False)
    for i, j, size in middle.get_matching_blocks():
        if size:
            yield head + i, head + j, size
    if tail:
        yield len(a) - tail, len(b) - tail, tail
