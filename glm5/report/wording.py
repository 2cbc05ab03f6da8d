"""Wording of the report: names of stages and metrics, numbers, verdicts, and text of models made safe."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

from glm5.report.results import Agreement, Score
from glm5.stats import paired_shares


@dataclass(frozen=True)
class Kind:
    """A kind of stage: its work in one sentence, its section of the paper, its most important metrics."""

    title: str
    section: str
    does: str
    keys: tuple[str, ...]


_POLICY = ("reward", "masked_share", "entropy", "length")
KINDS: dict[str, Kind] = {
    "tokenizer": Kind("Tokenizer", "", "Learns which pieces of text become one token.", ()),
    "pretrain": Kind(
        "Pre-training",
        "2.1–2.2",
        "Learns to predict the next token of plain text, and to draft the tokens after it (MTP).",
        ("loss", "mtp1_loss", "mtp2_loss", "mtp3_loss", "load_max"),
    ),
    "midtrain": Kind(
        "Mid-training",
        "2.3",
        "Goes on with longer documents, so that the model reaches further back.",
        ("loss", "mtp1_loss", "mtp2_loss", "mtp3_loss", "load_max"),
    ),
    "dsa_warmup": Kind(
        "DSA warm-up",
        "2.1.1",
        "Attention stays dense; the indexers alone learn which earlier tokens it looks at.",
        ("indexer_kl", "indexer_recall"),
    ),
    "dsa_sparse": Kind(
        "DSA sparse training",
        "2.1.1",
        "Attention reads only the tokens that the indexers pick; the whole model adapts to that.",
        ("loss", "indexer_kl", "indexer_recall", "mtp1_loss"),
    ),
    "sft": Kind("Supervised fine-tuning", "3.1", "Imitates worked conversations.", ("loss", "mtp1_loss")),
    "reasoning": Kind("Reasoning RL", "3.2", "Is rewarded for right answers that it found by thinking.", _POLICY),
    "agentic": Kind(
        "Agentic RL",
        "3.3, 4.1",
        "Works with tools over several turns while the learner keeps updating it.",
        ("reward", "masked_share", "entropy", "staleness_mean", "staleness_max"),
    ),
    "general": Kind(
        "General RL", "3.4", "Follows instructions, judged by exact rules and a learned reward model.", _POLICY
    ),
    "distill": Kind(
        "Distillation",
        "3.5",
        "The models of earlier stages teach the last one what it has lost since.",
        ("reverse_kl", "reward", "entropy", "length"),
    ),
}

METRICS = {
    "loss": "loss",
    "mtp1_loss": "MTP 1 loss",
    "mtp2_loss": "MTP 2 loss",
    "mtp3_loss": "MTP 3 loss",
    "load_max": "busiest expert",
    "indexer_kl": "indexer KL",
    "indexer_recall": "indexer recall",
    "reward": "reward",
    "masked_share": "masked share",
    "entropy": "entropy",
    "length": "length",
    "staleness_mean": "mean staleness",
    "staleness_max": "largest staleness",
    "reverse_kl": "reverse KL",
}

SKILLS = {
    "arithmetic": "sums and differences worked out step by step",
    "toolcall": "one correct function call and its answer",
    "bugfix": "repairing a small function by running its tests and editing it",
    "general": "short polite replies that follow instructions",
}

BPB_NOISE = 0.005
"""Bits per byte come without an interval; a smaller relative change counts as none."""


@dataclass(frozen=True)
class Change:
    """A difference to an earlier stage. `verdict` is "better", "worse" or "same" (within noise). `low` and `high` are
    its 95% interval, or None; `paired` means that it compares problem by problem."""

    verdict: str
    delta: float
    low: float | None = None
    high: float | None = None
    paired: bool = False


def score_change(before: Score, now: Score) -> Change | None:
    """Compare two scores. If both have the outcomes of the same number of problems (an evaluation takes them in one
    order), pair them (`paired_shares`). Otherwise use Newcombe's interval for a difference, from their own intervals;
    it needs a larger change to call it real. None without either."""
    delta = now.score - before.score
    old, new = before.outcomes, now.outcomes
    if old and new and len(old) == len(new):
        found = paired_shares(old, new)
        return Change(_verdict(found.low, found.high), delta, found.low, found.high, True)
    if before.low is None or before.high is None or now.low is None or now.high is None:
        return None
    low = delta - math.hypot(now.score - now.low, before.high - before.score)
    high = delta + math.hypot(now.high - now.score, before.score - before.low)
    return Change(_verdict(low, high), delta, low, high)


def _verdict(low: float, high: float) -> str:
    return "better" if low > 0 else "worse" if high < 0 else "same"


def bpb_change(before: float, now: float) -> Change:
    """Compare bits per byte; fewer are better."""
    delta = now - before
    if abs(delta) <= BPB_NOISE * abs(before):
        return Change("same", delta)
    return Change("better" if delta < 0 else "worse", delta)


def problem_count(score: Score) -> str:
    """How many problems a score averages, and how many were wanted if there are too few distinct ones."""
    if not score.n:
        return ""
    return f"n = {score.n:,}" + (f" distinct problems of {score.asked:,} asked for" if score.asked else "")


def agreement(exact: Agreement | None) -> str:
    """Whether the engine (sampling) and the learner (training) computed the same numbers, in one sentence."""
    if exact is None or not exact.tokens:
        return ""
    wrong = exact.mismatches or 0
    said = f"Engine and learner agreed bit for bit on {exact.tokens - wrong:,} of {exact.tokens:,} sampled tokens"
    if not wrong:
        return f"{said}."
    most = "" if exact.max_abs_diff is None else f", by at most {number(exact.max_abs_diff)} nats"
    return f"{said}; on {wrong:,} their log-probabilities differed{most}."


def number(value: float | None, digits: int = 3) -> str:
    """A readable number: thousands separated, `digits` significant ones below that, a dash for None."""
    if value is None:
        return "–"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
    return f"{value:#.{digits}g}" if abs(value) >= 1e-3 else f"{value:.2g}"


def signed(delta: float, digits: int) -> str:
    """A difference with its sign."""
    return f"{delta:+.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """`6 min 40 s`; a dash for none."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def listing(parts: Iterable[str]) -> str:
    """`a, b and c`."""
    words = list(parts)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def clean(text: str) -> str:
    """Text without active characters: control characters except line break and tab, half surrogates, and those that
    reorder or hide other text. Each is spelled out, e.g. \\x1b."""
    return "".join(_spelled(char) if _acts(char) else char for char in text)


def safe(text: str) -> Markup:
    """Any text as inert HTML. Links are broken: character references replace slashes, so the page has no address."""
    return Markup(str(escape(clean(text))).replace("://", ":&#47;&#47;"))


def visible(text: str, limit: int = 4000) -> Markup:
    """Input or output of a model: as `safe`, with special tokens and control characters marked, cut off after `limit`
    characters."""
    parts = []
    for piece in _SPECIAL.split(text[:limit]):
        if _SPECIAL.fullmatch(piece):
            parts.append(Markup('<span class="special">{}</span>').format(piece))
            continue
        for acting, chars in itertools.groupby(piece, _acts):
            run = safe("".join(chars))
            parts.append(Markup('<span class="control">{}</span>').format(run) if acting else run)
    if len(text) > limit:
        parts.append(Markup('<span class="control">… {:,} more characters</span>').format(len(text) - limit))
    return Markup("").join(parts)


_ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_SPECIAL = re.compile(
    r"(<\|[a-z_]{1,40}\|>|</?(?:think|tool_call|tool_response|arg_key|arg_value)>|<[se]op>|\[[gs]?MASK\]|/nothink)"
)


def _acts(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in _ACTING


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
