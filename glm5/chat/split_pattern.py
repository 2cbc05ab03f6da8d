"""Checks the regular expression with which a tokenizer.json splits text.

A checkpoint's file is untrusted, and with a pattern that backtracks a short prompt could hang the process.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from typing import Any

MAX_PATTERN_CHARS = 1000
CPU_SECONDS = 8
"""For the texts on which an unknown pattern is tried; a linear one takes about one."""

# The split of the Llama-3 / cl100k family: contractions, words with one leading mark, up to three digits, punctuation
# runs, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Long runs of each kind of character, alone, in pairs, and before another kind: quadratic time shows as minutes.
_TRIAL = """
import json, resource, sys
seconds = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from tokenizers import Regex, pre_tokenizers
split = pre_tokenizers.Split(Regex(json.load(sys.stdin)), "isolated")
kinds, length = " \\n\\ta1!'A\\u4e2d\\u0301", 20_000
for kind in kinds:
    for end in ("", "x", "!", "\\n"):
        split.pre_tokenize_str(kind * length + end)
    for other in " \\na1!":
        split.pre_tokenize_str((kind + other) * (length // 2))
print("linear")
"""


def check_split(step: dict[str, Any]) -> None:
    """Raise ValueError for a Split of a pre-tokenizer that loses text or may be hostile: with a repeated group, which
    can take exponential time, or with a pattern that takes more than linear time for a run of some character."""
    pattern = step["pattern"].get("Regex")
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", str(pattern)))  # without escapes and classes
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS or re.search(r"\)[*+{]", bare):
        raise ValueError("its pattern for splitting text is too complicated")
    if step["behavior"] != "Isolated":
        raise ValueError(f"its pre-tokenizer Split with the behaviour {step['behavior']} would lose text")
    if pattern != SPLIT and not _is_linear(pattern):
        raise ValueError("its pattern for splitting text takes too long for repeated characters")


@functools.lru_cache(maxsize=64)
def _is_linear(pattern: str) -> bool:
    """Try the pattern in a process of its own, for the library cannot be interrupted."""
    command = [sys.executable, "-c", _TRIAL, str(CPU_SECONDS)]
    done = subprocess.run(command, input=json.dumps(pattern).encode(), capture_output=True)
    return done.stdout.strip() == b"linear"
