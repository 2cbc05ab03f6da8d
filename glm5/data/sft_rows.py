"""Conversations as training rows (§3.1): every assistant turn is trained once, after exactly the prompt of inference.

One renderer writes both, so the only decision is which turns share a row. A turn's prompt depends on whether its
request asked for thinking and, unless reasoning is preserved, on the position of the last user message before it. Turns
that agree in both share a row. If one row is a prefix of another, the two are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from glm5.chat import RULES, Tokenizer, appends_only, render_chat
from glm5.chat.template import TemplateRules
from glm5.data.sft import Conversation, Span, TurnMarks
from glm5.errors import DataError
from glm5.records import Message

Thinking = Literal["preserved", "interleaved", "turn"]
"""What a turn sees of its earlier thinking, and whether it is asked to think (§3.1).

In all three a turn sees the reasoning of the turns since the last user message: thinking before every response and tool
call. "interleaved": no other reasoning, the default of inference (`clear_thinking=True`). "preserved": all reasoning,
as coding agents request (`clear_thinking=False`). "turn": all reasoning. If the data does not say whether a turn was
asked to think, "turn" assumes so only for a turn with reasoning; the other two always assume so.
"""


class SftRow(NamedTuple):
    """Ids and the loss mask of one row, numpy arrays [length]."""

    ids: np.ndarray
    mask: np.ndarray


@dataclass
class RowCounts:
    """Counts of a file: conversations read, rows made of them, and the content of the kept rows.

    `too_long` rows were longer than a training row and were left out or cut, at a cost of `lost_targets`. Conversations
    without a trained turn (`untrained`) give no row.
    """

    conversations: int = 0
    bad_lines: int = 0
    rows: int = 0
    too_long: int = 0
    lost_targets: int = 0
    untrained: int = 0
    tokens: int = 0
    targets: int = 0

    def add(self, other: RowCounts) -> None:
        """Add the counts of another file."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def conversation_rows(
    conversation: Conversation,
    tokenizer: Tokenizer,
    thinking: Thinking = "preserved",
    length: int | None = None,
    counts: RowCounts | None = None,
) -> list[SftRow]:
    """The rows of one conversation, each with at least one trained token; empty without a trained turn.

    With a `length`, rows with all their targets beyond it are not made, except the first; `counts` has them as too
    long, unmerged. Otherwise a conversation of n user messages could give n long rows.

    Raises:
        DataError: a trained turn has reasoning although its request asked for none, or something cannot be rendered.
    """
    version = tokenizer.template_version
    rules, turns = RULES[version], list(conversation.messages)
    keep = thinking != "interleaved"
    groups: dict[tuple[bool, int], list[int]] = {}
    last_user = -1
    for i, turn in enumerate(turns):
        if turn.role == "user":
            last_user = i
        if turn.role != "assistant" or not turn.train:
            continue
        mode = _asked(conversation, i, turn, rules, thinking)
        alike = keep and appends_only(version, enable_thinking=mode, clear_thinking=False)
        groups.setdefault((mode, -1 if alike else last_user), []).append(i)
    rows: list[SftRow] = []
    left_out, ended = RowCounts(), set[bool]()
    for (mode, user), places in groups.items():
        if mode in ended:  # what precedes the user message only grows, so the targets are beyond `length` too
            lost = int(_render(conversation, places, tokenizer, mode, keep, start=user).mask.sum())
            left_out.too_long += lost > 0
            left_out.lost_targets += lost
            continue
        row = _render(conversation, places, tokenizer, mode, keep)
        if length is not None and user >= 0 and _begins(row, tokenizer) >= length:
            ended.add(mode)
        if row.mask.any():
            rows = _merge(rows, row)
    if counts is not None:
        counts.add(left_out)
    return rows


def _begins(row: SftRow, tokenizer: Tokenizer) -> int:
    """Position of the last user message before the first target, or, without a target, of the last one."""
    first = row.mask.argmax() if row.mask.any() else len(row.ids)
    return int(np.flatnonzero(row.ids[:first] == tokenizer.special["<|user|>"])[-1])


def cut_row(row: SftRow, length: int, tokenizer: Tokenizer) -> SftRow | None:
    """The row up to the last trained token of the whole turns within `length`; None without a trained token."""
    markers = [tokenizer.special[f"<|{role}|>"] for role in ("system", "user", "assistant", "observation")]
    ends = np.flatnonzero(np.isin(row.ids[:length], markers)) + 1
    trained = np.flatnonzero(row.mask[: ends[-1]]) if len(ends) else ends
    return SftRow(row.ids[: trained[-1] + 1], row.mask[: trained[-1] + 1]) if len(trained) else None


def _asked(conversation: Conversation, i: int, turn: Message, rules: TemplateRules, thinking: Thinking) -> bool:
    """Whether the request for message `i` asked for thinking; only relevant if the prompt depends on it."""
    if rules.always_thinks:
        return True
    said = conversation.marks.get(i, TurnMarks()).thinking
    if said is None:
        said = conversation.thinking
    if said is None:
        said = bool(turn.reasoning) if thinking == "turn" else True
    if turn.reasoning and not said:
        raise DataError(f"messages[{i}] has reasoning, but its thinking is off; drop one of them.")
    # In 5.0 the mode appears only at the end of a prompt, and there the turn itself shows it: a turn without reasoning
    # was not asked to think.
    return said or (rules.efforts is None and rules.empty_think == "never")


def _render(
    conversation: Conversation, places: Sequence[int], tokenizer: Tokenizer, mode: bool, keep: bool, start: int = 0
) -> SftRow:
    """The conversation from `start` up to the last of `places`; only the turns in `places` are trained. The tools come
    before all messages."""
    chosen = set(places)
    turns = [replace(conversation.messages[i], train=i in chosen) for i in range(start, places[-1] + 1)]
    rendered = render_chat(
        turns,
        (conversation.tools or None) if start == 0 else None,
        tokenizer=tokenizer,
        enable_thinking=mode,
        clear_thinking=not keep,
        reasoning_effort=conversation.effort,
        add_generation_prompt=False,
        close_last=True,
    )
    marked = {i - start: conversation.marks[i] for i in places if i in conversation.marks}
    if marked:
        _leave_out(rendered.ids, rendered.loss_mask, turns, marked, tokenizer)
    return SftRow(np.array(rendered.ids, dtype=np.int32), np.array(rendered.loss_mask, dtype=np.bool_))


def _merge(rows: Sequence[SftRow], new: SftRow) -> list[SftRow]:
    """The rows plus a new one, which takes over the targets of rows that are a prefix of it."""
    kept = []
    for row in rows:
        if np.array_equal(row.ids, new.ids[: len(row.ids)]):
            new.mask[: len(row.ids)] |= row.mask
        else:
            kept.append(row)
    return [*kept, new]


def _leave_out(
    ids: Sequence[int],
    mask: list[bool],
    turns: Sequence[Message],
    marked: dict[int, TurnMarks],
    tokenizer: Tokenizer,
) -> None:
    """Take erroneous segments of the turns `marked` out of the mask, in place.

    A token is left out if any of its bytes lies in a segment. So is the marker that ends a piece or a turn right after
    such a token, because stopping there was part of the error. A call goes with all of its markers.
    """
    opening = tokenizer.special["<|assistant|>"]
    starts = [at for at, token in enumerate(ids) if token == opening]  # no text becomes a special token
    places = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    strips = RULES[tokenizer.template_version].strips_reasoning
    for at, i in zip(starts, places, strict=True):
        if i not in marked:
            continue
        turn, marks = turns[i], marked[i]
        reasoning, content, calls, end = _pieces(ids, at, tokenizer)
        wrong: set[int] = set()
        if reasoning is not None:
            wrong |= _tokens_in(ids, reasoning, turn.reasoning or "", marks.reasoning, tokenizer, strips)
            wrong |= {reasoning[1]} if reasoning[1] - 1 in wrong else set()
        wrong |= _tokens_in(ids, content, turn.content, marks.content, tokenizer, True)
        wrong.update(k for number in marks.calls for k in range(*calls[number]))
        wrong |= {end} if end - 1 in wrong and end < len(ids) else set()
        for k in wrong:
            mask[k] = False


def _pieces(ids: Sequence[int], at: int, tokenizer: Tokenizer) -> tuple[Span | None, Span, list[Span], int]:
    """Spans of the parts of the assistant turn at `ids[at]`: reasoning, content, calls with their markers, and the
    index of the marker after the turn."""
    special = tokenizer.special
    marks = frozenset(special.values())
    reasoning, at = None, at + 1
    if ids[at] == special["<think>"]:
        reasoning = (at + 1, ids.index(special["</think>"], at))
        at = reasoning[1]
    start = at = at + 1
    while at < len(ids) and ids[at] not in marks:
        at += 1
    content, calls = (start, at), []
    while at < len(ids) and ids[at] == special["<tool_call>"]:
        end = ids.index(special["</tool_call>"], at) + 1
        calls.append((at, end))
        at = end
    return reasoning, content, calls, at


def _tokens_in(
    ids: Sequence[int], piece: Span, text: str, wrong: Sequence[Span], tokenizer: Tokenizer, strips: bool
) -> set[int]:
    """Tokens of a piece that contain bytes of the characters `wrong` of its text (stripped if `strips`)."""
    if not wrong:
        return set()
    shift, shown = 0, text
    if strips:
        shift, shown = len(text) - len(text.lstrip()), text.strip()
    found: set[int] = set()
    ends = np.cumsum([len(tokenizer.decode_bytes([token])) for token in ids[slice(*piece)]])
    for first, last in wrong:
        low, high = (len(shown[: max(0, k - shift)].encode("utf-8", "surrogatepass")) for k in (first, last))
        if low < high:
            begin, stop = np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high, side="left")
            found.update(range(piece[0] + int(begin), piece[0] + int(stop) + 1))
    return found
