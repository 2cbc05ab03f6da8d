"""How text is cut before it is encoded: at special tokens, by regular expressions, and into pieces of bounded length.

A checkpoint's file is untrusted, and the library's engine backtracks: with a pattern made for it, a prompt of some
hundred characters takes hours. Whether a pattern is harmless cannot be tried out, so only those of published tokenizers
are accepted, unless the operator vouches for another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPLIT = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
"""That of the GLM, Llama 3 and cl100k tokenizers: contractions, words with one leading mark, up to three digits,
punctuation, line ends, spaces."""

KNOWN = frozenset(
    {
        SPLIT,
        # GPT-2, in its two spellings
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # cl100k as tiktoken has it
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
        # Qwen 2 and 3, and its later form with marks
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        # o200k, and Tekken
        "|".join([*(part + _CONTRACTIONS + "?" for part in _CASED), r"\p{N}{1,3}", _CASED_REST]),
        "|".join([*_CASED, r"\p{N}", _CASED_REST]),
        # DeepSeek V3, in three steps
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # digits
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\d{1,3}",
        r"\d",
    }
)
TRUST = "GLM5_TRUST_SPLIT_PATTERN"
"""Set to 1, this environment variable accepts any pattern."""


def check_split(step: dict[str, Any]) -> None:
    """Raise ValueError for a Split of a pre-tokenizer that loses text, or whose pattern is not known to be harmless."""
    pattern = step["pattern"].get("Regex")
    if step["behavior"] != "Isolated":
        raise ValueError(f"its pre-tokenizer Split with the behaviour {step['behavior']} would lose text")
    if not isinstance(pattern, str) or (pattern not in KNOWN and os.environ.get(TRUST) != "1"):
        raise ValueError(
            "its pattern for splitting text is not that of a published tokenizer and could make prompts take hours; if "
            f"you trust the file, set {TRUST}=1"
        )


def pieces(text: str, longest: int = 1 << 18) -> Iterator[str]:
    """`text` in pieces of at most `longest` characters that have the ids of the whole text.

    A piece ends after every line end that a letter or a digit follows: all `KNOWN` patterns of whole tokenizers split
    there. A text without such a place is cut anyway, which may change the ids next to the cut.
    """
    start = 0
    while len(text) - start > longest:
        end = text.rfind("\n", start + 1, start + longest)
        while end > 0 and (text[end - 1].isspace() or not text[end + 1].isalnum()):
            end = text.rfind("\n", start + 1, end)
        end = end + 1 if end > 0 else start + longest
        yield text[start:end]
        start = end
    yield text[start:]


def any_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of the words, factored by common beginnings: each place of a text costs at
    most the length of one word, and a choice between different next characters at each of its letters."""
    tails: dict[str, list[str]] = {}
    for word in words:
        tails.setdefault(word[0], []).append(word[1:])
    parts = []
    for head, found in tails.items():
        longer = [tail for tail in found if tail]
        rest = f"(?:{any_of(longer)})" if longer else ""
        parts.append(re.escape(head) + rest + ("?" if len(longer) < len(found) and longer else ""))
    return "|".join(parts)
