"""Retrieval documents of any length, to measure long context (RULER-like suites). `data.recall` has training documents.

A document is plain text: lines `name = value` with random short names and numbers, and a last line that asks for one of
them again. Only attention to the right line gives the answer.
"""

from __future__ import annotations

import random

from glm5.data.recall import SPLITS, assignment, split_of
from glm5.errors import ConfigError

SMALLEST = 32


def needle_text(seed: int, index: int, target_bytes: int, depth: float, *, split: str = "train") -> tuple[str, str]:
    """`(prompt, answer)`. The prompt has at most `target_bytes` bytes and ends in `name = `. The answer is the value
    and a newline (`417\\n`). `depth` in [0, 1] places the asked line from first to last.

    A hash assigns the asked (name, value) pair to `split`: training and evaluation never ask for the same pair. Raises
    ConfigError for an argument out of range.
    """
    if target_bytes < SMALLEST or not 0.0 <= depth <= 1.0 or split not in SPLITS:
        raise ConfigError(
            f"needle: target_bytes={target_bytes} (at least {SMALLEST}), depth={depth} (0 to 1), split={split!r} "
            f"(one of {', '.join(SPLITS)})."
        )
    rng = random.Random(f"needle/{split}-{seed}-{index}")
    name, value = assignment(rng)
    while split_of(f"needle {name}={value}") != split:
        name, value = assignment(rng)
    asked, query = f"{name} = {value}\n", f"{name} = "
    left = target_bytes - len(asked) - len(query)
    lines, used = [], {name}
    while True:
        other, number = assignment(rng)
        if other in used:
            continue
        line = f"{other} = {number}\n"
        left -= len(line)
        if left < 0:
            break
        used.add(other)
        lines.append(line)
    lines.insert(round(depth * len(lines)), asked)
    return "".join(lines) + query, f"{value}\n"
