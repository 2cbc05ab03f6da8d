"""How plain the prose is: odd words per 1,000 in docstrings, comments, README and docs; lists sentences to begin with.

    .venv/bin/python docs/prose.py [--sentences 10] [PATH ...]

`make lint` prints the rates; they gate nothing. Well-kept code bases of the field have "where" 0.7 to 1.3, "behind" 0
to 0.16 and "if" 3.2 to 5.3 times in 1,000 words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ODD = ("where", "behind", "as far as", "is none", "are none", "hold", "stands", "tell", "told", "whose", "so that")
SHOWN = ("where", "behind", "if")
LONG = 35


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and block of comments, or of every paragraph of Markdown."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        line = 1
        for block in re.split(r"\n\s*\n", source):
            if not block.lstrip().startswith(("```", "|")):
                yield line, block
            line += block.count("\n") + 2
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type|fmt)", token.string):
            yield token.start[0], token.string[1:]


def count(text: str, word: str) -> int:
    return len(re.findall(rf"\b{word}\b", text, re.I))


def sentences(text: str) -> list[str]:
    return [one.strip() for one in re.split(r"(?<=[.;:!?])\s+", re.sub(r"\s+", " ", text)) if one.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "glm5", ROOT / "README.md", ROOT / "docs"])
    parser.add_argument("--sentences", type=int, default=0)
    options = parser.parse_args()
    total, found, worst = 0, dict.fromkeys((*ODD, *SHOWN), 0), list[tuple[float, str]]()
    files = [p for path in options.paths for p in ([path] if path.is_file() else sorted(path.rglob("*.[pm][yd]")))]
    for path in (p for p in files if "results" not in p.parts):
        for line, text in prose(path):
            plain = re.sub(r"`[^`]*`", "x", text)
            total += len(plain.split())
            for word in found:
                found[word] += count(plain, word)
            for sentence in sentences(plain):
                odd = sum(count(sentence, word) for word in ODD)
                score = odd + max(0, len(sentence.split()) - LONG) / 10
                worst.append((score, f"{path}:{line}: {sentence}"))
    rates = {word: 1000 * times / max(1, total) for word, times in found.items()}
    shown = [*SHOWN, *sorted(set(rates) - set(SHOWN), key=lambda word: -rates[word])]
    print(f"prose: {total:,} words; in 1,000: " + ", ".join(f"{word} {rates[word]:.2f}" for word in shown))
    for _, sentence in sorted(worst, reverse=True)[: options.sentences]:
        print(sentence)


if __name__ == "__main__":
    main()
