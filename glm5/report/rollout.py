"""One rollout token by token: which tokens were trained on, and how the update moved their probabilities."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from markupsafe import Markup

from glm5.report.artifacts import Rollout, RolloutToken
from glm5.report.sections import Cell, TableData
from glm5.report.wording import number, safe, signed, visible

MOST_TOKENS = 3000
"""Maximum tokens shown."""
MOST_ROWS = 400
"""Maximum tokens in the table of numbers."""
LEVELS = 4
"""Number of shades per colour."""
MOST_LOG = 60.0
"""Ratios are coloured up to e^60."""
CONTEXT = 1500
"""Maximum characters shown of one stretch of context."""


@dataclass(frozen=True)
class RolloutSection:
    """`html` is the text; `scale` are the ratios at the ends of the colour scale (None: all ratios are 1)."""

    stage: str
    facts: list[tuple[str, str]]
    html: Markup
    scale: tuple[str, str] | None
    table: TableData
    masked: int
    clipped: int
    left_out: int


def rollout_section(stage: str, rollout: Rollout) -> RolloutSection | None:
    """None for a record without a token that was trained on."""
    shown = rollout.tokens[:MOST_TOKENS]
    trained = [token for token in rollout.tokens if token.loss]
    if not trained:
        return None
    most = max(abs(_log(token.ratio)) for token in trained)
    facts = [("problem", rollout.problem), ("domain", rollout.domain), ("update", number(rollout.step))]
    facts += [("outcome", rollout.outcome), ("reward", number(rollout.reward)), ("taught by", rollout.teacher)]
    return RolloutSection(
        stage=stage,
        facts=[(name, value) for name, value in facts if value],
        html=_text(shown, most),
        scale=(f"{number(math.exp(-most))}", f"{number(math.exp(most))}") if most > 0 else None,
        table=_table([(i, token) for i, token in enumerate(shown) if token.loss][:MOST_ROWS]),
        masked=sum(token.masked for token in trained),
        clipped=sum(token.clipped for token in trained),
        left_out=len(rollout.tokens) - len(shown),
    )


def _text(tokens: list[RolloutToken], most: float) -> Markup:
    """Context in one piece, each trained token as its own element."""
    parts: list[Markup] = []
    for loss, some in itertools.groupby(tokens, lambda token: token.loss):
        if loss:
            parts += [_span(token, most) for token in some]
        else:
            text = "".join(token.text for token in some)
            parts.append(Markup('<span class="context">{}</span>').format(visible(text, CONTEXT)))
    return Markup("").join(parts)


def _span(token: RolloutToken, most: float) -> Markup:
    names = ["tok", _shade(token.ratio, most), *(n for n in ("masked", "clipped") if getattr(token, n))]
    # A line break alone would show no colour; other text is shown as it is.
    text = safe(token.text.replace("\n", "↵\n")) if token.text else Markup("∅")
    return Markup('<span class="{}" title="{}">{}</span>').format(" ".join(filter(None, names)), _said(token), text)


def _shade(ratio: float | None, most: float) -> str:
    """`up4` for the largest rise, `down4` for a fall as large; empty about 1."""
    level = round(LEVELS * _log(ratio) / most) if most > 0 else 0
    return f"up{level}" if level > 0 else f"down{-level}" if level < 0 else ""


def _said(token: RolloutToken) -> str:
    flags = "".join(f", {name}" for name in ("masked", "clipped") if getattr(token, name))
    advantage = "–" if token.advantage is None else signed(token.advantage, 3)
    return f"ratio {_number(token.ratio)}, rho {_number(token.rho)}, advantage {advantage}{flags}"


def _table(tokens: list[tuple[int, RolloutToken]]) -> TableData:
    rows = []
    for place, token in tokens:
        flags = " ".join(name for name in ("masked", "clipped") if getattr(token, name))
        advantage = "–" if token.advantage is None else signed(token.advantage, 3)
        version = "–" if token.version is None else f"{token.version:,}"
        cells = [repr(token.text), _number(token.ratio), _number(token.rho), advantage, version, flags or "–"]
        rows.append((f"{place:,}", [Cell(cell) for cell in cells]))
    return TableData(["place", "token", "ratio", "rho", "advantage", "weights", "left out"], rows)


def _number(value: float | None) -> str:
    return number(value, 4)


def _log(ratio: float | None) -> float:
    return max(-MOST_LOG, min(MOST_LOG, math.log(ratio))) if ratio is not None and ratio > 0 else 0.0
